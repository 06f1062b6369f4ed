"""Follow the leader: the expert whose losses add up to least. Fast where losses are stochastic; against an adversary
its regret grows like T / 2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.selectors.hedging import HedgingSelector, Objective


class FollowTheLeader:
    """The learner, for ``count`` experts; of equal ones the first."""

    def __init__(self, count: int) -> None:
        self._losses = np.zeros(count)

    def weights(self) -> NDArray[np.float64]:
        """Return (N,): 1 for the leader."""
        weights = np.zeros(len(self._losses))
        weights[self._losses.argmin()] = 1.0
        return weights

    def update(self, losses: NDArray[np.float64]) -> None:
        """Take up (N,) losses in [0, 1]."""
        self._losses += losses


class FollowTheLeaderSelector(HedgingSelector):
    """Plays the leader; options as :class:`HedgingSelector`."""

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        seed: int = 0,
        objective: Objective = "rate",
        discount: float = 0.995,
        carry_over: float = 4.0,
    ) -> None:
        super().__init__(
            arms,
            FollowTheLeader,
            seed=seed,
            objective=objective,
            play="leader",
            discount=discount,
            carry_over=carry_over,
        )
