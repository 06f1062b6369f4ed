"""Measures of the p-less benchmark: accuracy with intervals, and what freely written texts are worth.

Axes: Q questions (or openings), S seeds, B bootstrap resamples. Questions are resampled as a whole, with the answers of
all their seeds: two answers to one question are not independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
LEVEL = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean and the ends of its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap_draws(values_QS: Mapping[str, Values], seed: int = 0) -> Values:
    """Return means over the groups' means with the questions of each group drawn anew, with replacement; (B,).

    The same groups with the same numbers of questions get the same resamples, so that the difference of two
    calls' results is that of paired samples.

    Args:
        values_QS: by group (a task), one value per question and seed.
    """
    rng = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for name in sorted(values_QS):
        per_question = np.asarray(values_QS[name], float).mean(axis=1)
        drawn = rng.integers(len(per_question), size=(RESAMPLES, len(per_question)))
        total += per_question[drawn].mean(axis=1)
    return total / len(values_QS)


def estimate(values_QS: Mapping[str, Values]) -> Estimate:
    """Return the mean over the groups' means, and its interval."""
    return _estimate(_mean(values_QS), bootstrap_draws(values_QS))


def difference(left_QS: Mapping[str, Values], right_QS: Mapping[str, Values]) -> Estimate:
    """Return mean(left) - mean(right) over the same questions, and its interval."""
    draws = bootstrap_draws(left_QS) - bootstrap_draws(right_QS)
    return _estimate(_mean(left_QS) - _mean(right_QS), draws)


def _mean(values_QS: Mapping[str, Values]) -> float:
    return float(np.mean([np.mean(values) for values in values_QS.values()]))


def _estimate(mean: float, draws_B: Values) -> Estimate:
    low, high = np.quantile(draws_B, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))


def words(text: str) -> list[str]:
    """Return the words of a text as the measures below count them."""
    return text.lower().split()


def distinct(texts: Sequence[str], n: int = 2) -> float:
    """Return how many of all n-grams of ``texts`` together are different ones: 1 = none twice, 0 = no n-grams."""
    counts = sum((_ngrams(text, n) for text in texts), Counter())
    total = counts.total()
    return len(counts) / total if total else 0.0


def overlap(texts: Sequence[str], n: int = 2) -> float:
    """Return how much of a text the other texts hold already: its n-grams clipped by theirs, averaged over texts.

    The n-gram precision of BLEU with the other texts as references, without its brevity penalty: 1 for copies, 0
    for texts that share nothing. A text without n-grams counts as a copy.
    """
    counts = [_ngrams(text, n) for text in texts]
    shares = []
    for place, own in enumerate(counts):
        others = Counter[tuple[str, ...]]()
        for other in counts[:place] + counts[place + 1 :]:
            others |= other
        shares.append((own & others).total() / own.total() if own else 1.0)
    return float(np.mean(shares))


def repetition(text: str, n: int = 3) -> float:
    """Return the share of a text's n-grams that it wrote before."""
    counts = _ngrams(text, n)
    return 1 - len(counts) / counts.total() if counts else 0.0


def _ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
    tokens = words(text)
    return Counter(zip(*(tokens[shift:] for shift in range(n)), strict=False))
