"""Drawing a token: inverse CDF on the support, so that a token of probability 0 cannot come out."""

from __future__ import annotations

import numpy as np

from edgeduet_client.llm.distribution import Distribution


def generator(seed: int | None) -> np.random.Generator:
    """Return the random generator of one request; it is never shared between requests.

    Args:
        seed: the request's; ``None`` draws a fresh one from the operating system.
    """
    return np.random.default_rng(seed)


def draw(distribution: Distribution, rng: np.random.Generator) -> int:
    """Return a token of ``distribution``; takes exactly one uniform number from ``rng``, whatever the support."""
    uniform = rng.random()
    if len(distribution.ids) == 1:
        return int(distribution.ids[0])
    cumulative = np.cumsum(distribution.probabilities)
    # u < 1, but u * total may round up to total: the last token then.
    place = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    return int(distribution.ids[min(int(place), len(cumulative) - 1)])
