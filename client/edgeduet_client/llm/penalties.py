"""Edits of raw logits that depend on what was generated: bias, repetition, presence and frequency.

All functions write into the row they are given: a copy that the caller owns. Ids at -inf stay there.

* bias: z + b, as in the OpenAI interface.
* repetition (Keskar et al., arXiv 1909.05858, with the sign fix everybody uses): z / r for z > 0, z r otherwise, for
  every token of prompt and answer.
* presence and frequency (OpenAI): z - presence - frequency * count, for every token of the answer; the prompt does
  not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Row = NDArray[np.float32]


@dataclass(frozen=True)
class TokenCounts:
    """How often each token was generated; a value that is never changed.

    Attributes:
        ids: (N,) ascending, each once.
        counts: (N,) how often.
    """

    ids: Ids
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: Iterable[int]) -> TokenCounts:
        """Count ``tokens``."""
        ids, counts = np.unique(np.fromiter(tokens, dtype=np.int64), return_counts=True)
        return cls(ids, counts.astype(np.int64))

    def plus(self, token: int) -> TokenCounts:
        """Return the counts after one more ``token``."""
        place = int(np.searchsorted(self.ids, token))
        if place < len(self.ids) and self.ids[place] == token:
            counts = self.counts.copy()
            counts[place] += 1
            return TokenCounts(self.ids, counts)
        return TokenCounts(np.insert(self.ids, place, token), np.insert(self.counts, place, 1))


NO_TOKENS = TokenCounts.of(())


def add_bias(row: Row, ids: Ids, bias: NDArray[np.float32]) -> None:
    """Add ``bias`` to the logits of ``ids``."""
    row[ids] += bias


def penalise_repetition(row: Row, ids: Ids, penalty: float) -> None:
    """Make each of ``ids`` (each once) less likely for ``penalty`` > 1, more likely below 1."""
    logits = row[ids]
    row[ids] = np.where(logits > 0, logits / np.float32(penalty), logits * np.float32(penalty))


def penalise_presence_and_frequency(row: Row, counts: TokenCounts, presence: float, frequency: float) -> None:
    """Take ``presence`` once and ``frequency`` per occurrence off the tokens counted."""
    row[counts.ids] -= (presence + frequency * counts.counts).astype(np.float32)
