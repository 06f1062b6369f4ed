"""Text to token ids and back, exactly as the model was trained, and chat messages to a prompt.

``tokenizers`` does the encoding. Decoding starts from the bytes of each id (:mod:`edgeduet_client.llm.token_bytes`),
so that what is streamed piece by piece is what is decoded at once. Where bytes are no UTF-8 the two differ from
``tokenizers``: its byte-fallback decoder gives up a whole run of byte tokens for one bad byte; ours shows U+FFFD for
the bad byte only.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgeduet_client.llm.chat_template import ChatTemplate
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.text_stream import TextStream
from edgeduet_client.llm.token_bytes import read_token_bytes

# Characters that may stand for special tokens' names inside a message while a template is rendered.
_PRIVATE_USE = ("\U000f0000", "\U000ffffd")

Message = Mapping[str, Any]


class Tokenizer:
    """A model's tokenizer.

    Args:
        tokenizer_json: the file of that name in the model folder.
        template: the model's chat template, or ``None`` for a base model.
        name: of the model, for messages.
        bos_id: the token a text begins with, if the model has one.
        add_bos: whether the model wants it.

    Attributes:
        tokens: the bytes of every id.
        special_ids: ids of control tokens, which no text shows.
        vocab_size: one more than the largest id.

    Raises:
        ModelError: the file or the library is missing, or of a kind that is not supported.
    """

    def __init__(
        self,
        tokenizer_json: Path | str,
        *,
        template: ChatTemplate | None = None,
        name: str = "the model",
        bos_id: int | None = None,
        add_bos: bool = False,
    ) -> None:
        self.path = Path(tokenizer_json)
        self.template = template
        self._name = name
        self._bos = [bos_id] if add_bos and bos_id is not None else []
        self.tokens = read_token_bytes(self.path)
        self.special_ids = self.tokens.special
        self.vocab_size = self.tokens.vocab_size
        self._encoder = _load_encoder(self.path)
        # Whether names of special tokens count is a setting of the encoder, not of a call.
        self._encoding = threading.Lock()
        self._special_names = _SpecialNames([str(self._encoder.id_to_token(token)) for token in self.special_ids])
        self.drops_leading_space = self._drops_leading_space()

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of ``text``, without a beginning-of-text token.

        Args:
            special: whether the names of special tokens (``<|im_end|>``) in the text mean these tokens. Never for
                text that a user wrote: it would let them end their own turn.

        Raises:
            RequestError: the text is not valid Unicode (it holds half of a surrogate pair).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode (character {error.start} is half of a surrogate pair); correct it",
                field="prompt",
            ) from None
        with self._encoding:
            self._encoder.encode_special_tokens = not special
            return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, with the beginning-of-text token where the model wants one."""
        return self._bos + self.encode(text)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a chat as the model's template writes it.

        Names of special tokens inside the messages stay plain text.

        Raises:
            RequestError: see :meth:`render_chat`.
        """
        first = self._free_placeholders(messages)
        masked = [_replaced(message, lambda text: self._special_names.replaced(text, first)) for message in messages]
        rendered = self.render_chat(masked, add_generation_prompt=add_generation_prompt)
        last = first + len(self._special_names.names) - 1
        ids: list[int] = []
        for part in re.split(f"([{chr(first)}-{chr(last)}])" if last >= first else "(?!)", rendered):
            if len(part) == 1 and first <= ord(part) <= last:
                ids += self.encode(self._special_names.names[ord(part) - first])
            elif part:
                ids += self.encode(part, special=True)
        if self._bos and ids[:1] != self._bos:
            ids = self._bos + ids
        return ids

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return a chat as text, as the model's template writes it.

        Raises:
            RequestError: the model has no chat template, or its template refuses these messages.
        """
        return self.require_template().render(messages, add_generation_prompt=add_generation_prompt)

    def require_template(self) -> ChatTemplate:
        """Return the chat template.

        Raises:
            RequestError: the model has none.
        """
        if self.template is None:
            raise RequestError(
                f"{self._name} is a base model without a chat template; use `edgeduet-client llm generate`, "
                "or import an instruction-tuned model",
                field="messages",
            )
        return self.template

    def decode(self, ids: Sequence[int], *, starts_text: bool = True) -> str:
        """Return the text of ``ids``; special tokens have none.

        Args:
            starts_text: whether the ids begin a text (SentencePiece then drops one leading space) or go on in one.
        """
        stream = self.stream(starts_text=starts_text)
        return "".join(stream.push(self.token_bytes(token)).text for token in ids) + stream.finish().text

    def stream(self, stops: Sequence[str] = (), *, starts_text: bool = True) -> TextStream:
        """Return a stream that turns tokens' bytes into what :meth:`decode` returns, piece by piece."""
        return TextStream(stops, drops_leading_space=starts_text and self.drops_leading_space)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token: none for special tokens and for ids that stand for nothing."""
        if token in self.special_ids or not 0 <= token < self.vocab_size:
            return b""
        return self.tokens.pieces[token] or b""

    def token_name(self, token: int) -> str:
        """Return how to show one token: its text, or the name of a special token."""
        piece = self.tokens.pieces[token] if 0 <= token < self.vocab_size else None
        return f"<unused {token}>" if piece is None else piece.decode("utf-8", "replace")

    def _free_placeholders(self, messages: Sequence[Message]) -> int:
        """Return the first of a range of private-use characters, one per special token, none of them in use."""
        count = max(len(self._special_names.names), 1)
        used = {
            ord(character) for character in json.dumps(messages, ensure_ascii=False) if character >= _PRIVATE_USE[0]
        }
        for first in range(ord(_PRIVATE_USE[0]), ord(_PRIVATE_USE[1]) - count + 2, count):
            if used.isdisjoint(range(first, first + count)):
                return first
        raise RequestError("the messages use private-use characters of every range; leave them out", field="messages")

    def _drops_leading_space(self) -> bool:
        """Ask the library's decoder what becomes of a space at the beginning."""
        for token, piece in enumerate(self.tokens.pieces):
            if piece is not None and piece[:1] == b" " and piece[1:2].isalpha() and token not in self.special_ids:
                return not self._encoder.decode([token]).startswith(" ")
        return False


def _load_encoder(path: Path) -> Any:
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise ModelError(f"the local language model needs tokenizers ({error}); pip install 'edgeduet[llm]'") from error
    try:
        encoder = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(
            f"tokenizers {library.__version__} cannot read {path}: {error}; import the model again"
        ) from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


class _SpecialNames:
    """The names of a model's special tokens, and where they are in a text; some models have thousands."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = sorted(names)
        self._place = {name: place for place, name in enumerate(self.names)}
        # Longest first, so that no name hides inside another.
        self._lengths = sorted({len(name) for name in names}, reverse=True)
        self._first = re.compile(f"[{re.escape(''.join(sorted({name[0] for name in names})))}]" if names else "(?!)")

    def replaced(self, text: str, first: int) -> str:
        """Return ``text`` with each name replaced by one character, ``first`` plus its place in ``names``."""
        parts, done = [], 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < done:
                continue
            for length in self._lengths:
                place = self._place.get(text[start : start + length])
                if place is not None:
                    parts += [text[done:start], chr(first + place)]
                    done = start + length
                    break
        return "".join([*parts, text[done:]])


def _replaced(value: Any, replace: Callable[[str], str]) -> Any:
    """Return ``value`` with ``replace`` applied to all its strings, however nested."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {key: _replaced(entry, replace) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(entry, replace) for entry in value]
    return value
