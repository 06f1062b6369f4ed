"""What is known about every drafter: discounted means of its survival curves and of how much it proposes.

A cascade says what its first part says wherever that says anything. So of a cascade only the places are kept where its
first part is silent, and its curve is put together:

    S_cascade = S_first + (1 - reach_first(1)) S_silent,

and likewise how much it proposes. Both are then judged on the same places, though one is scored more often: texts
change, and a comparison of different places is none.

Axes: D drafters, K tokens of the horizon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

FIRST_GUESS = 0.4
"""Acceptance of every drafter before anything is known: S(k) = .4^k."""
_PRIOR_STARTS = 1.0
"""Starts the first guess counts for."""
_REQUEST_WEIGHT = 0.3
_LEAST_STARTS = 3.0
"""A request that showed less says nothing to later ones."""
_OVERLAP = 4.0
"""Neighbouring starts overlap: so many of them say as much as one by itself."""
_STARTS_OF_ONE = 8.0
_STEADIEST = 16.0


class Evidence:
    """Survival and proposed lengths; outlives requests.

    A request starts from what the latest requests showed, which counts for ``carry_over`` starts where requests differ
    from each other (a change of domain is believed soon, and the first rounds play what paid on average), and for up
    to 16 times as many where they turn out alike.

    Args:
        drafters: D names.
        depth: K.
        discount: weight of what is one scored start older.
        carry_over: starts that earlier requests count for.
        first_parts: of cascades among them, the name of the first part, which is among them too.
    """

    def __init__(
        self,
        drafters: Sequence[str],
        depth: int,
        *,
        discount: float = 0.995,
        carry_over: float = 4.0,
        first_parts: Mapping[str, str] | None = None,
    ) -> None:
        self.drafters = tuple(drafters)
        self.depth = depth
        self._discount = discount
        self._carry_over = carry_over
        self._row = {name: row for row, name in enumerate(self.drafters)}
        self._first_parts = dict(first_parts or {})
        count = len(self.drafters)
        self._prior_DK = np.tile(FIRST_GUESS ** np.arange(1.0, depth + 1), (count, 1))
        # Share of drafts with at least k tokens.
        self._prior_reach_DK = np.ones((count, depth))
        self._prior_weight_D = np.full(count, min(_PRIOR_STARTS, carry_over))
        self._known = np.zeros(count, np.bool_)
        self._sums_DK = np.zeros((count, depth))
        self._reach_DK = np.zeros((count, depth))
        self._weight_D = np.zeros(count)
        self._variation = _Variation()
        self._means: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def start_request(self) -> None:
        """Fold the last request into what the next one starts from."""
        for row in np.flatnonzero(self._weight_D >= _LEAST_STARTS):
            weight = float(self._weight_D[row])
            mean = min(float(self._sums_DK[row, 0]) / weight, 1.0)
            if self._known[row]:
                self._variation.add(mean - float(self._prior_DK[row, 0]), mean, weight)
            part = _REQUEST_WEIGHT if self._known[row] else 1.0
            for prior, sums in ((self._prior_DK, self._sums_DK), (self._prior_reach_DK, self._reach_DK)):
                prior[row] += part * (np.minimum(sums[row] / weight, 1.0) - prior[row])
            self._known[row] = True
        self._prior_weight_D[self._known] = self._carry_over * self._variation.steadiness()
        self.forget(0.0)

    def add(self, survival: Mapping[str, NDArray[np.float64]], proposed: Mapping[str, int] | None = None) -> None:
        """Take up one scored start.

        Args:
            survival: by drafter that was scored, (K,) or shorter.
            proposed: by drafter, how many tokens it would have proposed; one left out: all it may.
        """
        known = [name for name in survival if name in self._row and self._says_something(name, survival, proposed)]
        if not known:
            return
        rows = np.array([self._row[name] for name in known])
        curves_RK = np.zeros((len(rows), self.depth))
        for place, name in enumerate(known):
            curve = survival[name]
            curves_RK[place, : len(curve)] = curve[: self.depth]
        drafted_R = np.array([self.depth if proposed is None else proposed.get(name, self.depth) for name in known])
        self._take(rows, curves_RK, (np.arange(self.depth) < drafted_R[:, None]).astype(np.float64))

    def _says_something(
        self, name: str, survival: Mapping[str, NDArray[np.float64]], proposed: Mapping[str, int] | None
    ) -> bool:
        """Whether a start tells something about a drafter that its first part does not tell."""
        first = self._first_parts.get(name)
        return first is None or (first in survival and proposed is not None and proposed.get(first, self.depth) == 0)

    def add_round(
        self,
        drafter: str,
        asked: int,
        proposed: int,
        accepted: int,
        *,
        factors: tuple[float, float] = (1.0, 1.0),
        spoke: str = "",
    ) -> None:
        """Take up a round that was played: a start of its own, known at once and for nothing, ``asked`` levels deep.

        How many tokens are asked for is settled before any of them is judged, so nothing is censored up to there.
        What lies deeper is 0 where an asked token was missing or rejected, else what is expected behind ``asked``.

        Args:
            factors: how rounds of the arm differ from positions, in accepted and in proposed tokens.
            spoke: of a cascade, the part whose proposal it was.
        """
        first = self._first_parts.get(drafter)
        if first is not None and spoke != first:
            # Its first part was silent there, which says something about that part as well.
            self._take(np.array([self._row[first]]), *np.zeros((2, 1, self.depth)))
        row = self._row[first if first is not None and spoke == first else drafter]
        curves = []
        for means_DK, count, factor in zip(self._kept(), (accepted, proposed), factors, strict=True):
            curve = (np.arange(self.depth) < count) / factor
            if count >= asked:
                expected = means_DK[row] / max(means_DK[row, asked - 1], 1e-9)
                curve[asked:] = np.minimum(expected[asked:], 1.0) / factor
            curves.append(curve)
        self._take(np.array([row]), curves[0][None], curves[1][None])

    def forget(self, share: float) -> None:
        """Let what this request showed count for ``share`` of what it did: its text has changed."""
        self._means = None
        self._sums_DK *= share
        self._reach_DK *= share
        self._weight_D *= share

    def survival(self) -> NDArray[np.float64]:
        """Return (D, K) means of S(1..K); not to be written to."""
        if self._means is None:
            survival_DK, reach_DK = self._kept()
            for name, first in self._first_parts.items():
                row, before = self._row[name], self._row[first]
                silent = 1 - reach_DK[before, 0]
                survival_DK[row] = survival_DK[before] + silent * survival_DK[row]
                reach_DK[row] = reach_DK[before] + silent * reach_DK[row]
            self._means = survival_DK, reach_DK
        return self._means[0]

    def _kept(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (D, K) means of survival and reach as they are kept: of cascades, where their first part is silent."""
        return self._mean(self._sums_DK, self._prior_DK), self._mean(self._reach_DK, self._prior_reach_DK)

    def reach(self) -> NDArray[np.float64]:
        """Return (D, K): share of drafts that have at least 1..K tokens; not to be written to."""
        self.survival()
        assert self._means is not None
        return self._means[1]

    def weight(self, drafter: str) -> float:
        """Return how many starts of this request, discounted, are known."""
        return float(self._weight_D[self._row[drafter]])

    def _take(self, rows: NDArray[np.int64], curves_RK: NDArray[np.float64], reach_RK: NDArray[np.float64]) -> None:
        self._means = None
        keep = self._discount
        self._sums_DK[rows] = keep * self._sums_DK[rows] + curves_RK
        self._reach_DK[rows] = keep * self._reach_DK[rows] + reach_RK
        self._weight_D[rows] = keep * self._weight_D[rows] + 1

    def _mean(self, sums_DK: NDArray[np.float64], prior_DK: NDArray[np.float64]) -> NDArray[np.float64]:
        weight = self._prior_weight_D[:, None]
        total = self._weight_D[:, None] + weight
        # carry_over = 0: nothing of earlier requests counts once this one has said anything.
        mean_DK = (sums_DK + weight * prior_DK) / np.where(total > 0, total, 1)
        # Played rounds, corrected for where they start, can add up to a little more than 1.
        return np.minimum(np.where(total > 0, mean_DK, prior_DK), 1.0)


class _Variation:
    """How much requests differ from what earlier ones led to expect, beyond what so few starts explain."""

    def __init__(self) -> None:
        self._between = 1.0
        self._within = 1.0

    def add(self, difference: float, mean: float, starts: float) -> None:
        spread = max(mean * (1 - mean), 0.01) * _OVERLAP
        between = max(difference**2 - spread / starts, 0.0)
        self._between += 0.25 * (between - self._between)
        self._within += 0.25 * (spread - self._within)

    def steadiness(self) -> float:
        """Return 1 where requests differ, up to 16 where they are all alike."""
        starts = self._within / max(self._between, 1e-6)
        return float(np.clip(starts / _STARTS_OF_ONE, 1.0, _STEADIEST))
