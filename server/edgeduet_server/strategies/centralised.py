"""Upper references: one model on everybody's images, which no federation can have.

``centralised`` trains on all clients' images of the current task (sequential: it forgets like any
other method, but knows no client drift). ``joint`` trains on the images of all tasks so far. Both train
adapter and prompt. Client 0 does the work; nothing about bytes is meant by these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from edgeduet_server.strategies.strategy import AveragingStrategy, ServerState
from edgeduet_shared.messages import TrainRequest
from edgeduet_shared.plan import Group, LocalPlan, Parts


class Centralised(AveragingStrategy):
    """Adapter and prompt on the pooled images of the current task."""

    name = "centralised"
    purpose = "adapter and prompt on all clients' images of the task, one task after the other"
    data: ClassVar[Literal["pooled", "pooled-seen"]] = "pooled"

    @property
    def parts(self) -> Parts:
        """Adapter and prompt."""
        return Parts(adapters=True, prompt=True)

    @property
    def owns(self) -> tuple[Group, ...]:
        """Both."""
        return ("shared_adapter", "prompt")

    def plan(self, stage: int, round: int) -> LocalPlan:
        """Train everything on pooled data."""
        return super().plan(stage, round).model_copy(update={"data": self.data})

    def configure(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, TrainRequest]:
        """Only one client works."""
        return super().configure(state, clients[:1], stage, round)


class Joint(Centralised):
    """Adapter and prompt on the pooled images of all tasks so far."""

    name = "joint"
    purpose = "adapter and prompt on all clients' images of all tasks so far: the upper reference"
    data = "pooled-seen"
