"""AdaNormalHedge (Luo, Schapire 2015): no learning rate, and bounds by the losses' own variation.

With R_i the summed regret and C_i the sum of its absolute steps, Phi(R, C) = exp([R]+^2 / (3 C)) and

    w_i ~ (Phi(R_i + 1, C_i + 1) - Phi(R_i - 1, C_i + 1)) / 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.selectors.hedging import HedgingSelector, Objective, Play


class AdaNormalHedge:
    """The learner, for ``count`` experts."""

    def __init__(self, count: int) -> None:
        self._regrets = np.zeros(count)
        self._moved = np.zeros(count)

    def weights(self) -> NDArray[np.float64]:
        """Return (N,) probabilities; uniform while all weights are 0."""
        upper = np.maximum(self._regrets + 1, 0.0) ** 2 / (3 * (self._moved + 1))
        lower = np.maximum(self._regrets - 1, 0.0) ** 2 / (3 * (self._moved + 1))
        # exp(upper) - exp(lower), all over exp of the greatest exponent.
        heavy = np.exp(upper - upper.max()) * -np.expm1(lower - upper)
        total = float(heavy.sum())
        return heavy / total if total > 0 else np.full(len(heavy), 1 / len(heavy))

    def update(self, losses: NDArray[np.float64]) -> None:
        """Take up (N,) losses in [0, 1]."""
        step = float(self.weights() @ losses) - losses
        self._regrets += step
        self._moved += np.abs(step)


class AdaNormalHedgeSelector(HedgingSelector):
    """Plays what AdaNormalHedge says; options as :class:`HedgingSelector`."""

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        seed: int = 0,
        objective: Objective = "rate",
        play: Play = "sample",
        discount: float = 0.995,
        carry_over: float = 4.0,
    ) -> None:
        super().__init__(
            arms,
            AdaNormalHedge,
            seed=seed,
            objective=objective,
            play=play,
            discount=discount,
            carry_over=carry_over,
        )
