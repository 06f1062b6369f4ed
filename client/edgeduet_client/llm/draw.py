"""Drawing a token: inverse CDF on the support, so that a token of probability 0 cannot come out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.distribution import Distribution

_BLOCK = 1024


def generator(seed: int | None) -> np.random.Generator:
    """Return the random generator of one request; it is never shared between requests.

    Args:
        seed: the request's; ``None`` draws a fresh one from the operating system.
    """
    return np.random.default_rng(seed)


def draw(distribution: Distribution, rng: np.random.Generator) -> int:
    """Return a token of ``distribution``; takes exactly one uniform number from ``rng``, whatever the support."""
    uniform = rng.random()
    probabilities = distribution.probabilities
    if len(probabilities) == 1:
        return int(distribution.ids[0])
    start = 0
    if len(probabilities) > 2 * _BLOCK:
        # Sums of blocks first: a running sum over a whole vocabulary costs ten times as much as a sum.
        running = np.cumsum(np.add.reduceat(probabilities, np.arange(0, len(probabilities), _BLOCK)))
        goal = uniform * running[-1]
        block = _place(running, goal)
        start = block * _BLOCK
        running = np.cumsum(probabilities[start : start + _BLOCK]) + (running[block - 1] if block else 0.0)
    else:
        running = probabilities.cumsum()
        goal = uniform * running[-1]
    return int(distribution.ids[start + _place(running, goal)])


def _place(running: NDArray[np.float64], goal: float) -> int:
    """Return the first place whose running sum is above ``goal``; the last if rounding leaves none."""
    return min(int(running.searchsorted(goal, side="right")), len(running) - 1)
