"""Hedge (Freund, Schapire 1997): weights ~ exp(-eta x cumulative loss).

* With a horizon T: eta = sqrt(8 ln N / T), regret <= sqrt(T ln N / 2); for any eta, ln N / eta + eta T / 8.
* Anytime: eta_t = sqrt(8 ln N / t), regret <= 2 sqrt(T ln N / 2) + sqrt(ln N / 8).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.selectors.hedging import HedgingSelector, Objective, Play


class Hedge:
    """The learner.

    Args:
        count: N experts.
        horizon: T; ``None``: unknown, the rate falls with every round.
        eta: fixed rate instead.
    """

    def __init__(self, count: int, *, horizon: int | None = None, eta: float | None = None) -> None:
        self._log_count = math.log(count)
        self._eta = math.sqrt(8 * self._log_count / horizon) if eta is None and horizon is not None else eta
        self._losses = np.zeros(count)
        self._rounds = 0

    def weights(self) -> NDArray[np.float64]:
        """Return (N,) probabilities."""
        eta = math.sqrt(8 * self._log_count / (self._rounds + 1)) if self._eta is None else self._eta
        weights = np.exp(-eta * (self._losses - self._losses.min()))
        return weights / weights.sum()

    def update(self, losses: NDArray[np.float64]) -> None:
        """Take up (N,) losses in [0, 1]."""
        self._losses += losses
        self._rounds += 1


class HedgeSelector(HedgingSelector):
    """Plays what Hedge says; options as :class:`HedgingSelector`.

    Args:
        horizon: scored starts per request, where known.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        seed: int = 0,
        horizon: int | None = None,
        objective: Objective = "rate",
        play: Play = "sample",
        discount: float = 0.995,
        carry_over: float = 4.0,
    ) -> None:
        super().__init__(
            arms,
            lambda count: Hedge(count, horizon=horizon),
            seed=seed,
            objective=objective,
            play=play,
            discount=discount,
            carry_over=carry_over,
        )
