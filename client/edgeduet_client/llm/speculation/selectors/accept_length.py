"""Most accepted tokens per round, whatever they cost. For study: it is easily slower than plain decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import Arm, Round
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.evidence import Evidence
from edgeduet_client.llm.speculation.rates import ArmRates


class AcceptLengthSelector:
    """Plays the arm of the highest expected length.

    Args:
        arms: to choose from.
        discount, carry_over: see :class:`~..evidence.Evidence`.
    """

    def __init__(self, arms: Sequence[Arm], *, discount: float = 0.995, carry_over: float = 4.0) -> None:
        self.table = ArmRates(arms)
        self.evidence = Evidence(self.table.drafters, self.table.depth, discount=discount, carry_over=carry_over)

    def start_request(self) -> None:
        """Begin with what the latest requests showed."""
        self.evidence.start_request()

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Return the arm that promises most tokens per round."""
        return self.table.arms[int(self.table.tokens(self.evidence.survival()).argmax())]

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Take up one start."""
        self.evidence.add(survival, proposed)

    def standing(self) -> Mapping[str, float]:
        """Return nothing: this selector does not compare rates, so all drafters are scored alike."""
        return {}

    def played(self, round: Round) -> None:
        """Nothing: what the arm in use got is known from the text."""
