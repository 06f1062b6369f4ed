"""Any learner under delay, with a guarantee (Joulani, Gyorgy, Szepesvari 2013).

As many copies of the learner as losses are outstanding; a copy predicts again only after it got the loss of its last
prediction. With delays of at most D there are at most D + 1 copies, and regret <= (D + 1) R(T / (D + 1)).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.selectors.hedging import Learner


class Delayed:
    """Copies of a learner, none of which is asked before it got its last loss.

    Args:
        learner: makes one.
    """

    def __init__(self, learner: Callable[[], Learner]) -> None:
        self._new = learner
        self._free: list[Learner] = []
        self._waiting: dict[int, Learner] = {}

    @property
    def copies(self) -> int:
        """How many there are."""
        return len(self._free) + len(self._waiting)

    def weights(self, round: int) -> NDArray[np.float64]:
        """Return the weights for ``round``, a number not used before."""
        if round in self._waiting:
            raise ValueError(f"round {round} was asked for already")
        copy = self._free.pop(0) if self._free else self._new()
        self._waiting[round] = copy
        return copy.weights()

    def update(self, round: int, losses: NDArray[np.float64]) -> None:
        """Give the copy that predicted in ``round`` its losses."""
        copy = self._waiting.pop(round)
        copy.update(losses)
        self._free.append(copy)
