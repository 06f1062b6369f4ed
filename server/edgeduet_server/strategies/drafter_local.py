"""Local only: every client trains a drafter on its own texts and never communicates.

The control for federation: what a device reaches alone in its domain, and how little of that helps in others.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeduet_server.strategies.drafter_strategy import DRAFTER, DrafterStrategy
from edgeduet_server.strategies.local import Local
from edgeduet_server.strategies.strategy import ServerState
from edgeduet_shared.messages import TrainReply
from edgeduet_shared.plan import Group


class DrafterLocal(DrafterStrategy, Local):
    """A drafter per client."""

    name = "drafter-local"
    purpose = "each client trains its own drafter; nothing is shared"
    trains = DRAFTER

    @property
    def owns(self) -> tuple[Group, ...]:
        """Nothing."""
        return ()

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Nothing to fold."""
        return state
