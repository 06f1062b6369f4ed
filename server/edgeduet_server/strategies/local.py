"""Local only: every client tunes its own adapter and prompt and never communicates.

The control for federation itself. There is no global model; what the clients' models do on the common
test sets is reported as "client on global".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from edgeduet_server.strategies.strategy import ServerState, Strategy
from edgeduet_shared.messages import TrainReply
from edgeduet_shared.plan import Group, LocalPlan, Parts


class Local(Strategy):
    """Adapter and prompt per client, no communication of parameters."""

    name = "local"
    purpose = "each client tunes its own adapter and prompt; nothing is shared"
    has_global_model = False
    trains: ClassVar[tuple[Group, ...]] = ("shared_adapter", "prompt")

    @property
    def parts(self) -> Parts:
        """Adapter and prompt."""
        return Parts(adapters=True, prompt=True)

    @property
    def owns(self) -> tuple[Group, ...]:
        """Nothing."""
        return ()

    def plan(self, stage: int, round: int) -> LocalPlan:
        """Train everything, keep everything."""
        return LocalPlan(
            parts=self.parts,
            train=self.trains,
            personal=self.trains,
            last_round=self.last_round(round),
            **self._round_settings(),
        )

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Nothing to fold."""
        return state
