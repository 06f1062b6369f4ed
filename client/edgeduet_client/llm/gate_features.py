"""What the confusion gate learns from: hidden states of the target and the families it would sample there.

Norm-adjusted self-distillation (Zhang et al., arXiv 2510.17555): the frozen model itself is the teacher. At every
position of an answer, with raw logits z = W h and n_v the norm of row v of W,

    z'_v = z_v / n_v * m,        label_i = 1 iff some token of family i is in top-k and top-p of softmax(z')

with k = 20, p = 0.95 over the whole vocabulary at temperature 1. Rows of large norm get an unearned advantage in z;
z' does not depend on any positive scaling of rows. The paper has m = 1 (``paper``), which also divides the
temperature by the typical norm: for SmolLM2, whose norms are about 3, top-p then keeps everything. The default
(``median``) is m = median of n. ``none`` leaves z as it is: the paper's unadjusted gate.

Differences from the release: only positions of the answer are used (it trains on prompts and padding too), and
the adjustment is on unless switched off (its README command trains without).

Logits are never stored. Hidden states (float16), labels and the family of the true next token are appended to one
file per model and set of rules, a record per text with its own checksum: whoever is killed loses one text.

Axes: N positions, H hidden width, L label rules, V width of the logits.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import RULES_VERSION, Family, FamilyTable
from edgeduet_client.llm.gate import ModelBinding, largest, rank_and_mass_before
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.session import Forward
from edgeduet_shared.atomic_files import write_failure

Norms = Literal["median", "paper", "none"]

_CHUNK = 32  # positions a step, so that 262,144 logits each stay at 34 MB
_FORMAT = 1
_RECORD = struct.Struct("<16sIII")  # key, positions, bytes of the payload, checksum of the payload


class Target(Protocol):
    """What is needed of a model: :class:`~edgeduet_client.llm.session.TargetSession`."""

    def new_cache(self) -> KVCache:
        """Return an empty cache."""
        ...

    def forward(
        self, ids: Sequence[int], cache: KVCache, *, rows: Sequence[int] | None = None, hidden: bool = False
    ) -> Forward:
        """Append ``ids`` and return the rows asked for."""
        ...


@dataclass(frozen=True)
class EncodedText:
    """Token ids of one request and its answer.

    Attributes:
        prompt: ids before the answer.
        response: ids of the answer, its end-of-text token included.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def first_row(self) -> int:
        """The position that predicts the first token of the answer; without a prompt that of the second."""
        return max(len(self.prompt) - 1, 0)

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that positions ``first_row`` onwards predict."""
        return self.response if self.prompt else self.response[1:]

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model reads: all but the last token."""
        return (self.prompt + self.response)[:-1]

    @property
    def key(self) -> bytes:
        """16 bytes that name the content."""
        content = json.dumps([self.prompt, self.response], separators=(",", ":"))
        return hashlib.sha256(content.encode()).digest()[:16]


@dataclass(frozen=True)
class LabelRule:
    """How a position is labelled.

    Attributes:
        name: for messages and the cache key.
        factors: (V,) positive numbers the logits are multiplied with, or ``None`` for the raw logits.
        top_k, top_p: the set whose families are the label.
    """

    name: str
    factors: NDArray[np.float32] | None
    top_k: int = 20
    top_p: float = 0.95

    @classmethod
    def of_norms(
        cls, norms: Norms, head_norms: NDArray[np.floating], *, top_k: int = 20, top_p: float = 0.95
    ) -> LabelRule:
        """Return the rule for the (V,) norms of the rows of the output matrix.

        Raises:
            ModelError: a norm is not finite; rows of norm 0 (padding) are left as they are.
        """
        if norms == "none":
            return cls("none", None, top_k, top_p)
        lengths = np.asarray(head_norms, dtype=np.float64)
        if not np.isfinite(lengths).all() or not (lengths > 0).any():
            raise ModelError("the norms of the output matrix are not finite; import the model again")
        typical = float(np.median(lengths[lengths > 0])) if norms == "median" else 1.0
        factors = np.divide(typical, lengths, out=np.ones_like(lengths), where=lengths > 0)
        return cls(norms, factors.astype(np.float32), top_k, top_p)

    @property
    def fingerprint(self) -> list[object]:
        """What makes two rules the same."""
        factors = None if self.factors is None else hashlib.sha256(self.factors.tobytes()).hexdigest()
        return [self.name, factors, self.top_k, self.top_p]

    def label(self, logits_V: NDArray[np.float32], families: FamilyTable) -> int:
        """Return the label of one position: bit i is set iff family i is in the set."""
        adjusted = logits_V if self.factors is None else logits_V * self.factors[: len(logits_V)]
        top = float(adjusted.max())
        if not np.isfinite(top):
            raise ModelError("the model's logits are not finite; verify the model folder")
        total = float(np.exp(adjusted - top).sum(dtype=np.float64))
        ids, values = largest(adjusted, self.top_k)
        larger, mass_before = rank_and_mass_before(values, top, total)
        inside = ids[(larger < self.top_k) & (mass_before < self.top_p)]
        return int(np.bitwise_or.reduce(1 << families[inside].astype(np.int64)))


@dataclass(frozen=True)
class Features:
    """What is known of the positions of one or many texts.

    Attributes:
        hidden_NH: float16 states after the final norm.
        labels_NL: uint8, bit i of a label = family i; a column per label rule.
        gold_N: uint8, the family of the token that really follows.
    """

    hidden_NH: NDArray[np.float16]
    labels_NL: NDArray[np.uint8]
    gold_N: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.gold_N)

    def targets(self, rule: int = 0) -> NDArray[np.float32]:
        """Return a rule's labels as (N, 4) float32 of zeros and ones."""
        bits = self.labels_NL[:, rule, None] >> np.arange(len(Family), dtype=np.uint8)
        return (bits & 1).astype(np.float32)


def joined(parts: Sequence[Features]) -> Features:
    """Return the positions of several texts as one."""
    return Features(
        np.concatenate([part.hidden_NH for part in parts]),
        np.concatenate([part.labels_NL for part in parts]),
        np.concatenate([part.gold_N for part in parts]),
    )


def text_features(
    target: Target, cache: KVCache, text: EncodedText, rules: Sequence[LabelRule], families: FamilyTable
) -> Features:
    """Run one text through the model and label the positions of its answer.

    Args:
        cache: of ``target``; emptied first.
        families: (V',) of the ids that are tokens; logits beyond them are padding.
    """
    hidden, labels = [], []
    for _, logits_RV, hidden_RH in response_rows(target, cache, text):
        hidden.append(hidden_RH.astype(np.float16))
        labels += [[rule.label(row[: len(families)], families) for rule in rules] for row in logits_RV]
    states = np.concatenate(hidden)
    if not np.isfinite(states).all():
        raise ModelError("the model's last hidden states do not fit 16 bits; verify the model folder")
    return Features(
        states,
        np.array(labels, dtype=np.uint8).reshape(len(states), len(rules)),
        families[list(text.targets)].astype(np.uint8),
    )


def response_rows(
    target: Target, cache: KVCache, text: EncodedText
) -> Iterator[tuple[int, NDArray[np.float32], NDArray[np.float32]]]:
    """Yield (place of the first in ``text.targets``, logits (R, V), hidden (R, H)) until all targets are predicted.

    The arrays are the session's own and last until the next step.
    """
    cache.crop(0)
    inputs = text.inputs
    for start in range(0, len(inputs), _CHUNK):
        chunk = inputs[start : start + _CHUNK]
        first = max(text.first_row - start, 0)
        outcome = target.forward(chunk, cache, rows=range(first, len(chunk)), hidden=True)
        if first < len(chunk) and outcome.hidden is not None:
            yield start + first - text.first_row, outcome.logits, outcome.hidden


# --- the store -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureStore:
    """An append-only file of features, a record per text.

    Attributes:
        path: the file; its name contains the key of everything the features depend on.
        hidden_width, rules: shapes of a record.
    """

    path: Path
    hidden_width: int
    rules: int

    @classmethod
    def of(cls, folder: Path, binding: ModelBinding, rules: Sequence[LabelRule]) -> FeatureStore:
        """Return the store for a model and label rules below ``folder``."""
        key = [_FORMAT, RULES_VERSION, asdict(binding), [rule.fingerprint for rule in rules]]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return cls(Path(folder) / f"features-{name}.bin", binding.hidden_width, len(rules))

    def read(self) -> dict[bytes, Features]:
        """Return the intact records by the key of their text."""
        if not self.path.exists():
            return {}
        with self.path.open("rb") as stream:
            return {key: features for key, features, _ in self._records(stream)}

    @contextmanager
    def writing(self) -> Iterator[Callable[[bytes, Features], None]]:
        """Yield a function that appends a record; what a killed writer left half written is cut off first.

        Raises:
            ModelError: another process is writing.
            EdgeDuetError: the system refused (disk full, no permission).
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=0), self.path.open("a+b") as stream:
                stream.seek(0)
                stream.truncate(max((end for _, _, end in self._records(stream)), default=0))
                yield lambda key, features: self._append(stream, key, features)
                os.fsync(stream.fileno())
        except Timeout:
            raise ModelError(f"another process is collecting into {self.path}; wait for it") from None
        except OSError as error:
            raise write_failure(self.path, error) from error

    def _append(self, stream: BinaryIO, key: bytes, features: Features) -> None:
        payload = features.hidden_NH.tobytes() + features.labels_NL.tobytes() + features.gold_N.tobytes()
        stream.write(_RECORD.pack(key, len(features), len(payload), zlib.crc32(payload)) + payload)
        stream.flush()

    def _records(self, stream: BinaryIO) -> Iterator[tuple[bytes, Features, int]]:
        """Yield (key, features, end of the record) up to the end or the first record that is not whole."""
        per_position = 2 * self.hidden_width + self.rules + 1
        while len(head := stream.read(_RECORD.size)) == _RECORD.size:
            key, count, size, checksum = _RECORD.unpack(head)
            if size != count * per_position:
                return
            payload = stream.read(size)
            if len(payload) != size or zlib.crc32(payload) != checksum:
                return
            yield key, self._unpacked(payload, count), stream.tell()

    def _unpacked(self, payload: bytes, count: int) -> Features:
        hidden_end = 2 * count * self.hidden_width
        labels_end = hidden_end + count * self.rules
        return Features(
            np.frombuffer(payload[:hidden_end], np.float16).reshape(count, self.hidden_width),
            np.frombuffer(payload[hidden_end:labels_end], np.uint8).reshape(count, self.rules),
            np.frombuffer(payload[labels_end:], np.uint8),
        )


def collect(
    target: Target,
    texts: Sequence[EncodedText],
    rules: Sequence[LabelRule],
    families: FamilyTable,
    store: FeatureStore,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[Features]:
    """Return the features of every text, computing and storing only what the store does not have.

    Args:
        families: (V',) of the ids that are tokens.
        progress: called with (texts done, texts in all) after every text.

    Raises:
        ModelError: another process is writing to the store, or the model's outputs are not finite.
    """
    with store.writing() as append:
        known = store.read()
        cache = target.new_cache()
        for done, text in enumerate(texts, start=1):
            if text.key not in known:
                known[text.key] = text_features(target, cache, text, rules, families)
                append(text.key, known[text.key])
            if progress is not None:
                progress(done, len(texts))
    return [known[text.key] for text in texts]
