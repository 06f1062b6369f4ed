"""Always the same arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.rates import ArmRates


class FixedSelector:
    """Plays one arm; learns nothing.

    Args:
        arms: to choose from.
        drafter: of the arm; default: the first arm's. ``none``: no draft.
        length: of the arm; default: the drafter's longest.
    """

    def __init__(self, arms: Sequence[Arm], *, drafter: str | None = None, length: int | None = None) -> None:
        drafting = [arm for arm in arms if arm.drafter is not None]
        self.arm = NO_DRAFT
        if drafter == "none" or not drafting:
            return
        name = drafting[0].drafter if drafter is None else drafter
        lengths = sorted(arm.length for arm in drafting if arm.drafter == name)
        if not lengths:
            raise ValueError(f"drafter={name} is not one of {', '.join(ArmRates(arms).drafters)}")
        if length is not None and length not in lengths:
            raise ValueError(f"length={length} is not one of {lengths}")
        self.arm = Arm(name, lengths[-1] if length is None else length)

    def start_request(self) -> None:
        """Nothing is kept."""

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Return the arm."""
        return self.arm

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Nothing is learnt."""

    def played(self, round: Round) -> None:
        """Nothing is learnt."""
