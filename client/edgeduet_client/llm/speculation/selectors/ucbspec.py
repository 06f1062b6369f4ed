"""UCBSpec (BanditSpec, arXiv 2505.15141 v2): upper confidence bounds on the tokens a round emits.

Every arm is played once; then the one with the highest mean + radius, where after t rounds an arm played n times has

    radius = (L / 2) sqrt( (1 + n) / n^2 x (1 + 2 ln(A t^2 sqrt(1 + n) / delta)) ),

A arms, L the longest draft. This is the paper's formula. Its released script divides by the pulls of all arms
together, which makes the bonus the same for all and the choice greedy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.selectors.bandit import Bandit, Reward


class UCBSpecSelector(Bandit):
    """Plays the arm of the highest upper bound.

    Args:
        arms: to choose from.
        delta: chance that a bound fails.
        reward: ``tokens`` as in the paper, or ``rate``.
    """

    def __init__(self, arms: Sequence[Arm], *, delta: float = 0.05, reward: Reward = "tokens") -> None:
        if not 0 < delta < 1:
            raise ValueError(f"delta={delta} is not between 0 and 1")
        self._delta = delta
        super().__init__(arms, reward=reward)

    def pick(self) -> int:
        """Return the arm of the highest bound; first every arm once."""
        if (self.pulls == 0).any():
            return int((self.pulls == 0).argmax())
        return int((self.sums / self.pulls + self.radius()).argmax())

    def radius(self) -> np.ndarray:
        """Return (A,) radii."""
        n, t = self.pulls.astype(float), self.rounds + 1
        confidence = 1 + 2 * np.log(len(n) * t**2 * np.sqrt(1 + n) / self._delta)
        return self.longest / 2 * np.sqrt((1 + n) / n**2 * confidence)
