"""What a selector chooses between, what it is told, and what it must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from edgeduet_client.llm.speculation.costs import CostModel


@dataclass(frozen=True)
class Arm:
    """A drafter and how many tokens to ask it for; no drafter and 0: a plain step."""

    drafter: str | None
    length: int


NO_DRAFT = Arm(None, 0)


@dataclass(frozen=True)
class Round:
    """What a round of ``arm`` brought.

    Attributes:
        proposed: drafted tokens; perhaps fewer than the arm's length.
        evaluated: of them, those whose verdict was reached.
        accepted: of those, the ones that were committed.
        emitted: tokens committed in all, the target's own included.
        seconds: by part: draft, verify, catch_up, sampling, evaluation.
        spoke: of a drafter made of others, the part whose proposal it was; empty where none said anything.
    """

    arm: Arm
    proposed: int
    evaluated: int
    accepted: int
    emitted: int
    seconds: Mapping[str, float]
    spoke: str = ""


class Selector(Protocol):
    """Picks the arm of every round; changes how fast an answer comes, never what it is."""

    def start_request(self) -> None:
        """Begin a new request, with what earlier ones taught."""

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Return the arm of the next round, after ``context_length`` tokens."""

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Take up what is known about one start.

        Args:
            survival: curves of all drafters that were scored there.
            proposed: how many tokens each would have proposed; one left out: all it may. A drafter that finds nothing
                to propose costs a plain step, not a long one.
            start: how many tokens were there; from neighbouring starts the rounds of an arm can be followed.
        """

    def played(self, round: Round) -> None:
        """Take up how a round went."""
