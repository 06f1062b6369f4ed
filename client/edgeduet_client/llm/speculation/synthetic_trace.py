"""Traces that are made up: for studying selectors on drafters and domains no machine at hand has.

The target is greedy, so every drafted token is accepted or not. Text is harder in some stretches than in others: one
slowly moving difficulty (an AR(1) process) is shared by all drafters, on top of which each has luck of its own. So
verdicts of neighbouring positions, and of different drafters, are correlated, as they are in real text.

Axes: P starts, K depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.costs import CostModel, DraftCost
from edgeduet_client.llm.speculation.trace import Trace, TracedRequest

PERSISTENCE = 0.7
"""Correlation of the difficulty of neighbouring positions."""
SHARED = 0.5
"""Part of the variance of a verdict that is the text's rather than the drafter's."""


@dataclass(frozen=True)
class SyntheticDrafter:
    """A drafter.

    Attributes:
        acceptance: of a drafted token, by domain.
        found: share of starts at which it proposes anything, by domain; left out: everywhere.
        first, each: seconds of a draft, and of each token of it.
    """

    acceptance: Mapping[str, float]
    first: float = 0.0
    each: float = 0.0
    found: Mapping[str, float] | None = None


def synthetic_trace(
    drafters: Mapping[str, SyntheticDrafter],
    domains: Sequence[str],
    *,
    steps: Sequence[float],
    tokens: int,
    lengths: Sequence[int] = (1, 2, 3, 4, 6, 8),
    prompt: int = 64,
    persistence: float = PERSISTENCE,
    shared: float = SHARED,
    seed: int = 0,
) -> Trace:
    """Return a trace of one request per entry of ``domains``.

    Args:
        drafters: by name.
        domains: of each request.
        steps: seconds of a step of 1, 2, ... rows; as many as the longest length and one.
        tokens: starts of each request.
        lengths: of every drafter.
        prompt: tokens.
        persistence, shared: of difficulty; 0 and 0: all verdicts are independent.
    """
    depth = max(lengths)
    costs = CostModel({0: steps}, {name: DraftCost(one.first, one.each) for name, one in drafters.items()})
    rng = np.random.default_rng(seed)
    difficulty = _Difficulty(persistence, shared, rng)
    requests = [_request(drafters, domain, tokens, depth, prompt, difficulty) for domain in domains]
    return Trace({name: tuple(lengths) for name in drafters}, depth, costs, requests)


@dataclass(frozen=True)
class _Difficulty:
    """Standard normal processes that say how hard positions are."""

    persistence: float
    shared: float
    rng: np.random.Generator

    def slow(self, count: int) -> NDArray[np.float64]:
        """Return (count,) of a stationary AR(1) process of variance 1."""
        noise = self.rng.standard_normal(count)
        values = np.empty(count)
        values[0] = noise[0]
        step = (1 - self.persistence**2) ** 0.5
        for place in range(1, count):
            values[place] = self.persistence * values[place - 1] + step * noise[place]
        return values

    def own(self, common: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return how hard positions are for one drafter."""
        luck = self.rng.standard_normal(len(common))
        return self.shared**0.5 * common + (1 - self.shared) ** 0.5 * luck


def _request(
    drafters: Mapping[str, SyntheticDrafter],
    domain: str,
    tokens: int,
    depth: int,
    prompt: int,
    difficulty: _Difficulty,
) -> TracedRequest:
    common = difficulty.slow(tokens + depth)
    chances, survival, proposed = {}, {}, {}
    for name, drafter in drafters.items():
        passes = _below(difficulty.own(common), drafter.acceptance[domain])
        found = np.ones(tokens, np.bool_)
        if drafter.found is not None:
            found = _below(difficulty.slow(tokens), drafter.found[domain])
        windows_PK = np.lib.stride_tricks.sliding_window_view(passes, depth)[:tokens] & found[:, None]
        # Behind a rejection nothing is said.
        chances[name] = np.cumprod(windows_PK, axis=1).astype(np.float64)
        survival[name] = chances[name]
        proposed[name] = np.where(found, depth, 0)
    return TracedRequest(prompt, prompt + 1, np.ones(tokens), chances, survival, proposed)


def _below(values: NDArray[np.float64], share: float) -> NDArray[np.bool_]:
    """Return where standard normal values lie among the lowest ``share``."""
    if share <= 0 or share >= 1:
        return np.full(len(values), share >= 1)
    return values < NormalDist().inv_cdf(share)
