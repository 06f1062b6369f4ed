"""NormalHedge (Chaudhuri, Freund, Hsu 2009), the learner HedgeSpec builds on; no learning rate.

R_i adds up the regret to expert i: (weights . losses) - loss_i. With [R]+ the positive part, c solves

    mean_i exp([R_i]+^2 / (2 c)) = e,      w_i ~ ([R_i]+ / c) exp([R_i]+^2 / (2 c)),

uniform while no R_i is positive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.selectors.hedging import HedgingSelector, Objective, Play

_ROUNDING = 1e-12


class NormalHedge:
    """The learner, for ``count`` experts."""

    def __init__(self, count: int) -> None:
        self.regrets = np.zeros(count)
        self._weights: NDArray[np.float64] | None = None

    def weights(self) -> NDArray[np.float64]:
        """Return (N,) probabilities."""
        if self._weights is None:
            self._weights = normalhedge_weights(self.regrets)
        return self._weights

    def update(self, losses: NDArray[np.float64]) -> None:
        """Take up (N,) losses in [0, 1]."""
        self.regrets = self.regrets + float(self.weights() @ losses) - losses
        self._weights = None


def normalhedge_weights(regrets: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N,) probabilities for summed regrets (N,)."""
    positive = np.maximum(regrets, 0.0)
    most = float(positive.max())
    # The rule is blind to scale; regrets that are only rounding must not decide anything.
    if most <= _ROUNDING:
        return np.full(len(positive), 1 / len(positive))
    # Only quotients matter; scaled, no exponent exceeds 1 + ln N.
    scaled = positive / most
    heavy = scaled * np.exp(scaled**2 * inverse_scale(scaled))
    weights: NDArray[np.float64] = heavy / heavy.sum()
    return weights


def inverse_scale(scaled: NDArray[np.float64]) -> float:
    """Return s = 1 / (2 c) with mean exp(s x^2) = e, for x in [0, 1] whose greatest is 1.

    The mean is convex and grows with s, and at 1 + ln N it is at least e, so Newton's steps from there come down to
    the solution without passing it.
    """
    squares = scaled**2
    s = 1.0 + math.log(len(scaled))
    for _ in range(100):
        powers = np.exp(s * squares)
        excess = float(powers.mean()) - math.e
        step = excess / float((squares * powers).mean())
        s -= step
        if abs(step) <= 1e-12 * s:
            break
    return s


class NormalHedgeSelector(HedgingSelector):
    """Plays what NormalHedge says; options as :class:`HedgingSelector`."""

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
            NormalHedge,
            seed=seed,
            objective=objective,
            play=play,
            discount=discount,
            carry_over=carry_over,
        )
