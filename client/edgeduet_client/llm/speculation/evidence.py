"""What is known about every drafter: discounted means of its survival curves and of how much it proposes.

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
_REQUEST_WEIGHT = 0.5


class Evidence:
    """Survival and proposed lengths; outlives requests.

    A request starts from what the latest requests showed (each half as important as the one after it), which counts
    for ``carry_over`` starts; so a change of domain is believed soon, and the first rounds play what paid on average.

    Args:
        drafters: D names.
        depth: K.
        discount: weight of what is one scored start older.
        carry_over: starts that earlier requests count for.
    """

    def __init__(
        self, drafters: Sequence[str], depth: int, *, discount: float = 0.995, carry_over: float = 4.0
    ) -> None:
        self.drafters = tuple(drafters)
        self.depth = depth
        self._discount = discount
        self._carry_over = carry_over
        self._row = {name: row for row, name in enumerate(self.drafters)}
        count = len(self.drafters)
        self._prior_DK = np.tile(FIRST_GUESS ** np.arange(1.0, depth + 1), (count, 1))
        # Share of drafts with at least k tokens.
        self._prior_reach_DK = np.ones((count, depth))
        self._prior_weight_D = np.full(count, min(_PRIOR_STARTS, carry_over))
        self._sums_DK = np.zeros((count, depth))
        self._reach_DK = np.zeros((count, depth))
        self._weight_D = np.zeros(count)

    def start_request(self) -> None:
        """Fold the last request into what the next one starts from."""
        seen = self._weight_D > 0
        if seen.any():
            weight = self._weight_D[seen, None]
            for prior, sums in ((self._prior_DK, self._sums_DK), (self._prior_reach_DK, self._reach_DK)):
                prior[seen] += _REQUEST_WEIGHT * (sums[seen] / weight - prior[seen])
            self._prior_weight_D[seen] = self._carry_over
        self._sums_DK[:] = 0
        self._reach_DK[:] = 0
        self._weight_D[:] = 0

    def add(self, survival: Mapping[str, NDArray[np.float64]], proposed: Mapping[str, int] | None = None) -> None:
        """Take up one start.

        Args:
            survival: by drafter that was scored, (K,) or shorter.
            proposed: by drafter, how many tokens it would have proposed; one left out: all it may.
        """
        for name, curve in survival.items():
            row = self._row.get(name)
            if row is None:
                continue
            reach = self.depth if proposed is None else proposed.get(name, self.depth)
            keep = self._discount
            self._sums_DK[row] *= keep
            self._sums_DK[row, : len(curve)] += curve[: self.depth]
            self._reach_DK[row] *= keep
            self._reach_DK[row, :reach] += 1
            self._weight_D[row] = keep * self._weight_D[row] + 1

    def survival(self) -> NDArray[np.float64]:
        """Return (D, K) means of S(1..K)."""
        return self._mean(self._sums_DK, self._prior_DK)

    def reach(self) -> NDArray[np.float64]:
        """Return (D, K): share of drafts that have at least 1..K tokens."""
        return self._mean(self._reach_DK, self._prior_reach_DK)

    def weight(self, drafter: str) -> float:
        """Return how many starts of this request, discounted, are known."""
        return float(self._weight_D[self._row[drafter]])

    def _mean(self, sums_DK: NDArray[np.float64], prior_DK: NDArray[np.float64]) -> NDArray[np.float64]:
        weight = self._prior_weight_D[:, None]
        total = self._weight_D[:, None] + weight
        # carry_over = 0: nothing of earlier requests counts once this one has said anything.
        return np.where(total > 0, (sums_DK + weight * prior_DK) / np.where(total > 0, total, 1), prior_DK)
