"""EXP3Spec (BanditSpec, arXiv 2505.15141 v2): exponential weights on importance-weighted losses.

The arm I, drawn with probability p_I, that emits Y tokens of at most L + 1 is charged (L + 1 - Y) / (L p_I), all others
nothing; weights are exp(-eta_t x sum), eta_t = sqrt(ln A / (t A)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.selectors.bandit import Bandit, Reward


class EXP3SpecSelector(Bandit):
    """Draws an arm.

    Args:
        arms: to choose from.
        seed: of the arm that is drawn.
        reward: ``tokens`` as in the paper, or ``rate``.
    """

    def __init__(self, arms: Sequence[Arm], *, seed: int = 0, reward: Reward = "tokens") -> None:
        self._rng = np.random.default_rng(seed)
        super().__init__(arms, reward=reward)

    def probabilities(self) -> NDArray[np.float64]:
        """Return (A,) probabilities of the next round; ``sums`` holds charged losses."""
        count = len(self.arms)
        eta = math.sqrt(math.log(count) / ((self.rounds + 1) * count))
        weights = np.exp(-eta * (self.sums - self.sums.min()))
        return weights / weights.sum()

    def pick(self) -> int:
        """Return an arm drawn from the probabilities."""
        self._drawn_from = self.probabilities()
        return int(self._rng.choice(len(self.arms), p=self._drawn_from))

    def rewarded(self, place: int, reward: float) -> None:
        """Charge the arm that was played."""
        super().rewarded(place, (self.longest + 1 - reward) / (self.longest * float(self._drawn_from[place])))
