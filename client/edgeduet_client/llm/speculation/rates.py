"""Expected tokens and seconds of every arm, from evidence and costs: what selectors compare.

A round is a renewal: in the long run tokens per second are E[tokens per round] / E[seconds per round]. The mean of
the rounds' own rates would favour short rounds, and the mean of the tokens alone long ones.

Axes: A arms, D drafters, K tokens of the horizon.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm
from edgeduet_client.llm.speculation.costs import CostModel

SWITCH_HORIZON = 16
"""Rounds over which catching up is written off."""


class ArmRates:
    """The arms of a selector, no draft first.

    Args:
        arms: to choose from; no draft is added where it is missing.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms: tuple[Arm, ...] = (NO_DRAFT, *sorted({arm for arm in arms if arm.drafter is not None}, key=_order))
        self.drafters = tuple(sorted({arm.drafter for arm in self.arms if arm.drafter is not None}))
        self.depth = max(max(arm.length for arm in self.arms), 1)
        rows = {name: row for row, name in enumerate(self.drafters)}
        self._drafter_A = np.array([rows.get(arm.drafter or "", -1) for arm in self.arms])
        self._length_A = np.array([arm.length for arm in self.arms])
        self._places = {arm: place for place, arm in enumerate(self.arms)}

    def place(self, arm: Arm) -> int:
        """Return the index of ``arm``."""
        return self._places[arm]

    def by_arm(self, values_DG: NDArray[np.float64], length_at_A: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (A,) the value of each arm's drafter at its length; 1 for no draft.

        Args:
            values_DG: by drafter and length.
            length_at_A: of each arm, where its length is.
        """
        return np.vstack([values_DG, np.ones(values_DG.shape[1])])[self._drafter_A, length_at_A]

    def tokens(self, survival_DK: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (A,) expected tokens per round, 1 without a draft; NaN where a drafter's curve is."""
        sums = np.zeros((len(self.drafters) + 1, survival_DK.shape[1] + 1))
        np.cumsum(survival_DK, axis=1, out=sums[:-1, 1:])
        return 1 + sums[self._drafter_A, self._length_A]

    def seconds(
        self,
        reach_DK: NDArray[np.float64],
        costs: CostModel,
        context_length: int,
        current: Arm | None = None,
        factor_A: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Return (A,) expected seconds per round; a drafter that often finds less than it may costs smaller steps.

        Args:
            reach_DK: share of drafts with at least k tokens.
            costs: of steps and drafts.
            context_length: tokens so far.
            current: the arm in use; another drafter has to catch up first.
            factor_A: of the drafted tokens.
        """
        steps = costs.step_table(self.depth + 1, context_length)
        looking_D, catching_D = np.zeros((2, len(self.drafters) + 1))
        drafted_DK = np.zeros((len(self.drafters) + 1, self.depth + 1))
        for row, name in enumerate(self.drafters):
            looking_D[row] = costs.draft_seconds(name, 0)
            each = costs.draft_seconds(name, 1) - looking_D[row]
            np.cumsum(reach_DK[row] * (np.diff(steps) + each), out=drafted_DK[row, 1:])
            if current is not None and name != current.drafter:
                catching_D[row] = costs.catch_up(name) / SWITCH_HORIZON
        drafted_A = drafted_DK[self._drafter_A, self._length_A]
        if factor_A is not None:
            drafted_A = drafted_A * factor_A
        return costs.overhead + steps[0] + (looking_D + catching_D)[self._drafter_A] + drafted_A

    def standing(self, rates_A: NDArray[np.float64]) -> dict[str, float]:
        """Return each drafter's best rate as a share of the best of all arms."""
        best = float(rates_A.max())
        return {name: float(rates_A[self._drafter_A == row].max()) / best for row, name in enumerate(self.drafters)}


def _order(arm: Arm) -> tuple[str, int]:
    return arm.drafter or "", arm.length
