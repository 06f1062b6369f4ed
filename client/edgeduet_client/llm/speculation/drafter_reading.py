"""Let the target write, and keep what it said at every position: the data set of a drafter.

Each prompt is read and continued, half of them greedily, half drawn at temperature 0.7 (from the kept labels).
Positions of the prompt count as well, and further texts are only read: the target has an opinion there too, and it
costs a quarter of a written position's.
Of every position are stored the token, the last hidden state (16 bits) and the 24 most probable next tokens with
their probabilities; at 576 numbers a state that is 1.3 kB.

Every finished text is one record with a checksum in one append-only file per model and settings: whoever is killed
loses the text in work, and the next call goes on with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.gate import ModelBinding, largest
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.session import Forward, prefill_chunks
from edgeduet_client.llm.speculation.drafter_corpus import TrainingPrompt
from edgeduet_client.llm.speculation.drafter_dataset import LABELS, ReadText
from edgeduet_client.llm.tokenizer import Tokenizer
from edgeduet_shared.atomic_files import write_failure

_FORMAT = 1
_RECORD = struct.Struct("<16sIII")  # key, positions, bytes of the payload, checksum of the payload


class ReadingOptions(BaseModel):
    """How the target writes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_tokens: int = Field(96, ge=4, description="tokens of a prompt, at most; longer ones lose their beginning")
    request_tokens: int = Field(48, ge=1, description="tokens of a request the model thinks up itself, at most")
    answer_tokens: int = Field(96, ge=4, description="tokens of an answer, at most")
    temperature: float = Field(0.7, gt=0, description="of the half that is drawn")
    seed: int = Field(0, ge=0, description="of the draws")


@dataclass(frozen=True)
class PromptIds:
    """A prompt as the target reads it.

    Attributes:
        ids: at least one.
        first: the first position to learn from (what every chat begins with is left out).
        greedy: how it is continued.
        write: whether it is continued at all.
        asks: where the target thinks up the request itself, the number of the attempt.
        tail: what then stands between request and answer.
    """

    domain: str
    ids: tuple[int, ...]
    first: int
    greedy: bool
    write: bool = True
    asks: int | None = None
    tail: tuple[int, ...] = ()

    @property
    def key(self) -> bytes:
        """16 bytes that name the content."""
        how: list[int] = [self.greedy] if self.write else []
        how += [] if self.asks is None else [self.asks]
        content = json.dumps([self.domain, self.ids, self.first, *how], separators=(",", ":"))
        return hashlib.sha256(content.encode()).digest()[:16]


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[TrainingPrompt], options: ReadingOptions) -> list[PromptIds]:
    """Return the prompts as ids; requests in the model's chat form, or as plain text where it has none."""
    frame, tail = _chat_frame(tokenizer)
    encoded: list[PromptIds] = []
    known: set[tuple[int, ...]] = set()
    turns: dict[str, int] = {}
    for prompt in prompts:
        if prompt.asks is not None:
            if len(frame):
                turn = turns[prompt.domain] = turns.get(prompt.domain, -1) + 1
                greedy = turn % 2 == 0
                encoded.append(PromptIds(prompt.domain, frame, len(frame) - 1, greedy, asks=prompt.asks, tail=tail))
            continue
        if prompt.chat and tokenizer.template is not None:
            ids = tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            kept = [*frame, *ids[len(frame) :][-options.prompt_tokens :]]
            first = len(frame)
        elif not prompt.write:
            kept, first = tokenizer.encode_prompt(prompt.text)[: options.prompt_tokens + options.answer_tokens], 0
        else:
            # Half a document is given, the other half is for the target to write.
            ids = tokenizer.encode_prompt(f"{prompt.text}\n\n" if prompt.chat else prompt.text)
            kept, first = ids[: options.prompt_tokens], 0
        turn = turns[prompt.domain] = turns.get(prompt.domain, -1) + prompt.write
        if len(kept) > first and tuple(kept) not in known:
            known.add(tuple(kept))
            encoded.append(
                PromptIds(prompt.domain, tuple(kept), first, greedy=prompt.write and turn % 2 == 0, write=prompt.write)
            )
    return encoded


def _chat_frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that stand before and behind the request of every chat; none without a chat template."""
    if tokenizer.template is None:
        return (), ()
    one, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("a", "1"))
    same = [left == right for left, right in zip(one, other, strict=False)]
    back = [left == right for left, right in zip(reversed(one), reversed(other), strict=False)]
    return tuple(one[: same.index(False)]), tuple(one[len(one) - back.index(False) :])


def read_text(local: LocalModel, cache: KVCache, prompt: PromptIds, options: ReadingOptions) -> ReadText:
    """Read a prompt, let the target write on, and return what it said.

    Args:
        cache: of the model; emptied first.
    """
    session, used = local.session, local.vocabulary.used
    cache.crop(0)
    rows = _Rows(used)
    for start, chunk in prefill_chunks(prompt.ids):
        wanted = range(max(prompt.first - start, 0), len(chunk))
        forward = session.forward(chunk, cache, rows=wanted, hidden=True)
        if len(wanted):
            rows.add(forward)
    rng = np.random.default_rng([options.seed, *prompt.key])
    tokens = list(prompt.ids)
    if prompt.asks is not None:
        _ask(local, cache, rows, tokens, options, rng)
        forward = session.forward(prompt.tail, cache, rows=range(len(prompt.tail)), hidden=True)
        rows.add(forward)
        tokens += prompt.tail
    room = min(options.answer_tokens, session.cache_shape.limit - len(tokens)) if prompt.write else 0
    for _ in range(room):
        token = rows.next_token(None if prompt.greedy else options.temperature, rng)
        if token in local.manifest.eos_ids:
            break
        tokens.append(token)
        rows.add(session.forward((token,), cache, hidden=True))
    return rows.text(prompt, tokens)


def _ask(
    local: LocalModel,
    cache: KVCache,
    rows: _Rows,
    tokens: list[int],
    options: ReadingOptions,
    rng: np.random.Generator,
) -> None:
    """Let the target write a request at temperature 1: given only the frame, it says what it was trained to be asked.

    (Magpie, Xu et al. 2024, arXiv 2406.08464.)
    """
    for _ in range(options.request_tokens):
        token = rows.next_token(1.0, rng)
        if token in local.manifest.eos_ids:
            return
        tokens.append(token)
        rows.add(local.session.forward((token,), cache, hidden=True))


class _Rows:
    """What the target said so far."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._hidden: list[NDArray[np.float16]] = []
        self._ids: list[NDArray[np.int32]] = []
        self._masses: list[NDArray[np.float16]] = []

    def add(self, forward: Forward) -> None:
        """Take up the rows of a step."""
        assert forward.hidden is not None
        hidden = forward.hidden.astype(np.float16)
        if not np.isfinite(hidden).all():
            raise ModelError("the model's last hidden states do not fit 16 bits; verify the model folder")
        self._hidden.append(hidden)
        for row in forward.logits[:, : self._vocabulary]:
            ids, values = largest(row, LABELS)
            total = np.exp(row - values[0], dtype=np.float32).sum(dtype=np.float64)
            masses = np.zeros(LABELS, np.float16)
            labels = np.full(LABELS, ids[0], np.int32)
            kept = min(LABELS, len(ids))
            labels[:kept] = ids[:kept]
            masses[:kept] = np.exp(values[:kept].astype(np.float64) - values[0]) / total
            self._ids.append(labels)
            self._masses.append(masses)

    def next_token(self, temperature: float | None, rng: np.random.Generator) -> int:
        """Return the best token behind the last row, or one drawn from the kept ones."""
        ids, masses = self._ids[-1], self._masses[-1].astype(np.float64)
        if temperature is None:
            return int(ids[0])
        weights = (masses / masses.max()) ** (1 / temperature)
        return int(rng.choice(ids, p=weights / weights.sum()))

    def text(self, prompt: PromptIds, tokens: Sequence[int]) -> ReadText:
        """Return the whole as one text."""
        return ReadText(
            domain=prompt.domain,
            greedy=prompt.greedy,
            answer=_answer_of(prompt, tokens[prompt.first :]),
            tokens=np.array(tokens[prompt.first :], np.int32),
            hidden=np.concatenate(self._hidden),
            label_ids=np.stack(self._ids),
            label_masses=np.stack(self._masses),
        )


def _answer_of(prompt: PromptIds, tokens: Sequence[int]) -> int:
    """Return the position of the last token before the answer."""
    if prompt.asks is None:
        return len(prompt.ids) - 1 - prompt.first
    tail = list(prompt.tail)
    starts = (at for at in range(len(tokens)) if list(tokens[at : at + len(tail)]) == tail)
    return next(starts) + len(tail) - 1


@dataclass(frozen=True)
class TextStore:
    """An append-only file of read texts.

    Attributes:
        path: the file; its name holds the key of everything the records depend on.
        hidden_width: H.
    """

    path: Path
    hidden_width: int

    @classmethod
    def of(cls, folder: Path, binding: ModelBinding, options: ReadingOptions) -> TextStore:
        """Return the store for a model and settings below ``folder``."""
        key = [_FORMAT, LABELS, binding.tokenizer_sha256, binding.weights_sha256, options.model_dump()]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return cls(Path(folder) / f"texts-{name}.bin", binding.hidden_width)

    def read(self, wanted: dict[bytes, PromptIds]) -> dict[bytes, ReadText]:
        """Return the intact records of the prompts asked for."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as stream:
            return {
                key: self._unpacked(wanted[key], payload, count)
                for key, count, payload in self._records(stream)
                if key in wanted
            }

    @contextmanager
    def writing(self) -> Iterator[Callable[[PromptIds, ReadText], None]]:
        """Yield a function that appends a record; what a killed writer left half written is cut off first.

        Raises:
            ModelError: another process is writing.
            EdgeDuetError: the system refused (disk full, no permission).
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0), self.path.open("a+b") as stream:
                stream.seek(0)
                end = 0
                for _ in self._records(stream):
                    end = stream.tell()
                stream.truncate(end)
                yield lambda prompt, text: self._append(stream, prompt, text)
                os.fsync(stream.fileno())
        except Timeout:
            raise ModelError(f"another process is writing to {self.path}; wait for it") from None
        except OSError as error:
            raise write_failure(self.path, error) from error

    def _append(self, stream: BinaryIO, prompt: PromptIds, text: ReadText) -> None:
        payload = b"".join(part.tobytes() for part in (text.tokens, text.hidden, text.label_ids, text.label_masses))
        stream.write(_RECORD.pack(prompt.key, len(text), len(payload), zlib.crc32(payload)) + payload)
        stream.flush()

    @property
    def _per_position(self) -> int:
        return 4 + 2 * self.hidden_width + 6 * LABELS

    def _records(self, stream: BinaryIO) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield (key, positions, payload) up to the end or the first record that is not whole."""
        while len(head := stream.read(_RECORD.size)) == _RECORD.size:
            key, count, size, checksum = _RECORD.unpack(head)
            if size != count * self._per_position:
                return
            payload = stream.read(size)
            if len(payload) != size or zlib.crc32(payload) != checksum:
                return
            yield key, count, payload

    def _unpacked(self, prompt: PromptIds, payload: bytes, count: int) -> ReadText:
        at = 0

        def taken(dtype: type[np.generic], width: int) -> NDArray[np.generic]:
            nonlocal at
            size = np.dtype(dtype).itemsize * count * width
            at += size
            return np.frombuffer(payload[at - size : at], dtype)

        tokens = taken(np.int32, 1)
        return ReadText(
            domain=prompt.domain,
            greedy=prompt.greedy,
            answer=_answer_of(prompt, tokens.tolist()),
            tokens=tokens,  # type: ignore[arg-type]
            hidden=taken(np.float16, self.hidden_width).reshape(count, self.hidden_width),  # type: ignore[arg-type]
            label_ids=taken(np.int32, LABELS).reshape(count, LABELS),  # type: ignore[arg-type]
            label_masses=taken(np.float16, LABELS).reshape(count, LABELS),  # type: ignore[arg-type]
        )


def read_texts(
    local: LocalModel,
    prompts: Sequence[PromptIds],
    store: TextStore,
    options: ReadingOptions,
    *,
    positions: int,
    deadline: float | None = None,
    clock: Callable[[], float],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ReadText]:
    """Return texts of ``positions`` tokens in all, in the order of the prompts; only what is missing is computed.

    Args:
        positions: stop when so many are there; fewer where the prompts do not last.
        deadline: on ``clock``; no text begins after it.
        clock: seconds.
        progress: called with (positions there, positions wanted).
    """
    with store.writing() as append:
        known = store.read({prompt.key: prompt for prompt in prompts})
        cache = local.new_cache()
        texts: list[ReadText] = []
        there = 0
        for prompt in prompts:
            if there >= positions:
                break
            if prompt.key not in known:
                if deadline is not None and clock() >= deadline:
                    break
                known[prompt.key] = read_text(local, cache, prompt, options)
                append(prompt, known[prompt.key])
            texts.append(known[prompt.key])
            there += len(known[prompt.key])
            progress(min(there, positions), positions)
    return texts
