"""Edits of raw logits that depend on what was generated: bias, repetition, presence and frequency.

All functions write into the row they are given: a copy that the caller owns. Ids at -inf stay there.

* bias: z + b, as in the OpenAI interface.
* repetition (Keskar et al., arXiv 1909.05858, with the sign fix everybody uses): z / r for z > 0, z r otherwise, for
  every token of prompt and answer.
* presence and frequency (OpenAI): z - presence - frequency * count, for every token of the answer; the prompt does
  not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Row = NDArray[np.float32]


@dataclass(frozen=True)
class TokenCounts:
    """The tokens of prompt and answer, and how often each was generated; a value that is never changed.

    Attributes:
        ids: (N,) ascending, each once.
        counts: (N,) int64, how often in the answer; 0 for what only the prompt holds.
    """

    ids: Ids
    counts: Ids

    @classmethod
    def of(cls, prompt: Sequence[int] | Ids, generated: Sequence[int] = ()) -> TokenCounts:
        """Remember ``prompt`` and count ``generated``."""
        ids = np.unique(np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(generated, dtype=np.int64)]))
        places = np.searchsorted(ids, np.asarray(generated, dtype=np.int64))
        return cls(ids, np.bincount(places, minlength=len(ids)))

    def plus(self, token: int) -> TokenCounts:
        """Return the counts after one more ``token``."""
        place = int(self.ids.searchsorted(token))
        if place < len(self.ids) and self.ids[place] == token:
            counts = self.counts.copy()
            counts[place] += 1
            return TokenCounts(self.ids, counts)
        return TokenCounts(_inserted(self.ids, place, token), _inserted(self.counts, place, 1))


def _inserted(values: Ids, place: int, value: int) -> Ids:
    """As ``np.insert`` for one value, which takes ten times as long."""
    result = np.empty(len(values) + 1, dtype=np.int64)
    result[:place] = values[:place]
    result[place] = value
    result[place + 1 :] = values[place:]
    return result


def add_bias(row: Row, ids: Ids, bias: NDArray[np.float32]) -> None:
    """Add ``bias`` to the logits of ``ids``."""
    row[ids] += bias


def penalise_repetition(row: Row, ids: Ids, penalty: float) -> None:
    """Make each of ``ids`` (each once) less likely for ``penalty`` > 1, more likely below 1."""
    logits = row[ids]
    row[ids] = np.where(logits > 0, logits / np.float32(penalty), logits * np.float32(penalty))


def penalise_presence_and_frequency(row: Row, counts: TokenCounts, presence: float, frequency: float) -> None:
    """Take ``presence`` once and ``frequency`` per occurrence off the tokens of the answer."""
    row[counts.ids] -= (presence * (counts.counts > 0) + frequency * counts.counts).astype(np.float32)
