"""What the bandit selectors share: they hear only of the arm that was played.

They are here to be compared with. All of them begin anew with every request, as their papers do.

The reward of a round is either what the papers count, the ``tokens`` it emitted, in [1, L + 1], or ``rate``: tokens
in the time of a plain step, on the same scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.rates import ArmRates
from edgeduet_client.llm.speculation.selectors.choices import check_choice

Reward = Literal["tokens", "rate"]


class Bandit:
    """A selector that learns from its own rounds only.

    Args:
        arms: to choose from.
        reward: ``tokens`` or ``rate``.
    """

    def __init__(self, arms: Sequence[Arm], *, reward: Reward = "tokens") -> None:
        check_choice("reward", reward, get_args(Reward))
        table = ArmRates(arms)
        self.arms = table.arms
        self.longest = table.depth
        self._reward = reward
        self._plain_seconds: float | None = None
        self.start_request()

    def start_request(self) -> None:
        """Begin anew."""
        self.pulls = np.zeros(len(self.arms), np.int64)
        self.sums = np.zeros(len(self.arms))
        self.rounds = 0

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Return the arm to play."""
        if costs is not None:
            self._plain_seconds = costs.seconds(NO_DRAFT, context_length)
        elif self._reward == "rate":
            raise ValueError("the reward rate needs costs")
        return self.arms[self.pick()]

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Nothing: bandits do not look at what they did not play."""

    def played(self, round: Round) -> None:
        """Take up the reward of a round."""
        self.rewarded(self.arms.index(round.arm), self.reward(round))

    def reward(self, round: Round) -> float:
        """Return the reward of a round, in [0, L + 1]."""
        if self._reward == "tokens":
            return float(round.emitted)
        # The clock may stand still (tests); then a round took what a plain step takes.
        seconds = sum(value for part, value in round.seconds.items() if part != "evaluation")
        assert self._plain_seconds is not None
        rate = round.emitted * (self._plain_seconds / seconds if seconds > 0 else 1.0)
        return min(rate, self.longest + 1.0)

    def rewarded(self, place: int, reward: float) -> None:
        """Count a reward of arm ``place``."""
        self.rounds += 1
        self.pulls[place] += 1
        self.sums[place] += reward

    def pick(self) -> int:
        """Return the index of the arm to play."""
        raise NotImplementedError
