"""The bytes every token id stands for, read from ``tokenizer.json``.

A token is bytes, not text: byte-level and byte-fallback tokenizers split characters across tokens, and
decoding one such id alone gives U+FFFD, which says nothing about what was there. Three spellings exist:

========================  ===========================================  ============================
kind                      how a vocabulary entry spells its bytes      recognised by
========================  ===========================================  ============================
byte-level BPE            GPT-2's 256 printable stand-in characters    a ``ByteLevel`` part
(GPT-2, Llama 3, Qwen,
SmolLM)
SentencePiece             UTF-8, with U+2581 for the space             ``Metaspace``, or ``Replace``
(Llama 2, Gemma)                                                       of U+2581 by a space
byte fallback             ``<0x00>`` .. ``<0xFF>`` for single bytes    ``byte_fallback`` or a
(on top of SentencePiece)                                              ``ByteFallback`` decoder
========================  ===========================================  ============================

The bytes are those the ``tokenizers`` library's own decoder yields for the id inside a text (what it does at
the start of a text only, such as dropping a leading space, belongs to no single id).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeduet_client.llm.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


@dataclass(frozen=True)
class TokenBytes:
    """What a tokenizer's ids stand for.

    Attributes:
        pieces: bytes of id ``i`` at position ``i``; ``None`` where no token has that id. A special token's
            bytes are its literal name (``<|im_end|>``), which a text never shows.
        special: ids of the special (control) tokens.
        tokenizer_sha256: hash of the ``tokenizer.json`` it was read from.
    """

    pieces: tuple[bytes | None, ...]
    special: frozenset[int]
    tokenizer_sha256: str

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return len(self.pieces)


def read_token_bytes(tokenizer_json: Path | str) -> TokenBytes:
    """Return the bytes of every id of the tokenizer stored at ``tokenizer_json``.

    Raises:
        ModelError: the file is missing, is no ``tokenizer.json``, or spells its tokens in a way not listed
            in the module's table (WordPiece, word-level, end-of-word suffixes).
    """
    path = Path(tokenizer_json)
    try:
        content = path.read_bytes()
        description = json.loads(content)
        model = description["model"]
        entries = dict(_entries(model))
        added = {int(token["id"]): token for token in description.get("added_tokens") or ()}
    except OSError as error:
        raise ModelError(
            f"cannot read the tokenizer {path}: {error.strerror or error}; import the model again"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is no tokenizer.json ({error}); import the model again") from None
    _refuse_unknown_spelling(model, path)
    entries.update((token_id, token["content"]) for token_id, token in added.items())

    to_bytes = _speller(description)
    pieces: list[bytes | None] = [None] * (max(entries, default=-1) + 1)
    for token_id, piece in entries.items():
        pieces[token_id] = to_bytes(piece)
    return TokenBytes(
        pieces=tuple(pieces),
        special=frozenset(token_id for token_id, token in added.items() if token.get("special")),
        tokenizer_sha256=hashlib.sha256(content).hexdigest(),
    )


def _entries(model: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield (id, piece) of the model's own vocabulary, whichever of its two layouts it has."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        yield from ((int(token_id), piece) for piece, token_id in vocabulary.items())
    else:  # Unigram: [[piece, score], ...], the place is the id
        yield from ((token_id, entry[0]) for token_id, entry in enumerate(vocabulary))


def _refuse_unknown_spelling(model: dict[str, Any], path: Path) -> None:
    kind = model.get("type") or ("BPE" if "merges" in model else "Unigram")
    if kind not in ("BPE", "Unigram"):
        raise ModelError(f"{path}: tokenizers of type {kind} are not supported; supported: BPE, Unigram")
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ModelError(f"{path}: a BPE tokenizer with {option}={model[option]!r} is not supported")


def _speller(description: dict[str, Any]) -> Callable[[str], bytes]:
    """Return the function from a vocabulary entry to its bytes."""
    decoder, splitter = description.get("decoder"), description.get("pre_tokenizer")
    parts = [*_parts(decoder), *_parts(splitter)]
    if any(part.get("type") == "ByteLevel" for part in parts):
        return _byte_level
    marks = tuple(mark for mark in map(_space_mark, [*parts, *_parts(description.get("normalizer"))]) if mark)
    fallback = bool(description["model"].get("byte_fallback")) or any(p.get("type") == "ByteFallback" for p in parts)

    def to_bytes(piece: str) -> bytes:
        if fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for mark in marks:
            piece = piece.replace(mark, " ")
        return piece.encode("utf-8")

    return to_bytes


def _parts(stage: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a pipeline stage's parts, sequences flattened."""
    if not stage:
        return []
    inner = [*(stage.get("pretokenizers") or ()), *(stage.get("decoders") or ()), *(stage.get("normalizers") or ())]
    return [part for nested in inner for part in _parts(nested)] if inner else [stage]


def _space_mark(part: dict[str, Any]) -> str | None:
    """Return the character that stands for a space, if ``part`` is what says so."""
    if part.get("type") == "Metaspace":
        return str(part.get("replacement", _SPACE_MARK))
    if part.get("type") == "Replace" and _SPACE_MARK in (part.get("content"), part.get("pattern", {}).get("String")):
        return _SPACE_MARK
    return None


def _stand_ins() -> dict[str, int]:
    """Return GPT-2's printable stand-in of every byte: itself where printable, else from U+0100 upwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_STAND_IN = _stand_ins()


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a byte-level entry; one with any other character is literal, as in ``tokenizers``."""
    try:
        return bytes(map(_BYTE_OF_STAND_IN.__getitem__, piece))
    except KeyError:
        return piece.encode("utf-8")
