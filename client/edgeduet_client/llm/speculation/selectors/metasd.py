"""MetaSD (arXiv 2604.05417, ACL 2026): UCB on how much the drafter in use agrees with the target.

Its block divergence reward is (1 / N_max) sum_j (1 - TV(p_j, q_j)) over the drafted block: dense, where about half of
the rewards that count accepted tokens are 0. It plays the arm of the highest mean + beta sqrt(2 ln t / n).

Where we differ: we know p and q along the committed text, not along drafts that were rejected. ``divergence`` takes
1 - TV at the first drafted position of the scored starts, which is S(1), of the drafter in use only. ``efficiency`` is
their sparse reward, accepted tokens over the longest draft. Drafters are its arms, so all have one length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.rates import ArmRates
from edgeduet_client.llm.speculation.selectors.choices import check_choice


class MetaSDSelector:
    """Plays the drafter of the highest upper bound, always at one length.

    Args:
        arms: to choose from; no draft is not among those it plays.
        length: of all drafts; default: the one closest to 4 that every drafter has.
        beta: weight of the bonus.
        reward: ``divergence`` or ``efficiency``.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        length: int | None = None,
        beta: float = 1.0,
        reward: Literal["divergence", "efficiency"] = "divergence",
    ) -> None:
        check_choice("reward", reward, ("divergence", "efficiency"))
        table = ArmRates(arms)
        shared = set.intersection(
            *({arm.length for arm in table.arms if arm.drafter == name} for name in table.drafters or (None,))
        )
        if length is not None and length not in shared:
            raise ValueError(f"length={length} is not one that every drafter has; there are {sorted(shared)}")
        if not shared:
            raise ValueError("metasd plays all drafters at one length, and they have none in common")
        self._length = min(shared, key=lambda one: (abs(one - 4), one)) if length is None else length
        self.arms = tuple(arm for arm in table.arms if arm.length == self._length)
        self._beta = beta
        self._dense = reward == "divergence"
        self.start_request()

    def start_request(self) -> None:
        """Begin anew."""
        self.pulls = np.zeros(len(self.arms))
        self.sums = np.zeros(len(self.arms))
        self._latest = NO_DRAFT

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Return the arm of the highest bound; first every arm once."""
        unknown = self.pulls == 0
        if unknown.any():
            # One whose reward is still on its way counts as played.
            waiting = [place for place in np.flatnonzero(unknown) if self.arms[place] != self._latest]
            place = int(waiting[0]) if waiting else int(np.flatnonzero(unknown)[0])
        else:
            bonus = np.sqrt(2 * math.log(max(self.pulls.sum(), 1.0)) / self.pulls)
            place = int((self.sums / self.pulls + self._beta * bonus).argmax())
        self._latest = self.arms[place]
        return self._latest

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Reward the drafter in use, and only that one."""
        name = self._latest.drafter
        if self._dense and name is not None and name in survival:
            self._reward(self._latest, float(survival[name][0]))

    def played(self, round: Round) -> None:
        """Reward the arm with what was accepted."""
        if not self._dense:
            self._reward(round.arm, round.accepted / max(self._length, 1))

    def standing(self) -> Mapping[str, float]:
        """Return nothing: this selector does not compare rates, so all drafters are scored alike."""
        return {}

    def _reward(self, arm: Arm, reward: float) -> None:
        place = self.arms.index(arm)
        self.pulls[place] += 1
        self.sums[place] += reward
