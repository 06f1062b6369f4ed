"""Zero-shot: the frozen CLIP with the hand-written template. Nothing is trained or sent.

The yardstick without which no number of a tuned CLIP means anything (fed-duet.md 4.5).
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeduet_server.strategies.strategy import ServerState, Strategy
from edgeduet_shared.messages import TrainReply
from edgeduet_shared.plan import Group, LocalPlan, Parts


class ZeroShot(Strategy):
    """Frozen CLIP, no training."""

    name = "zero-shot"
    purpose = "frozen CLIP with the hand-written template; nothing is trained"
    paper = "Radford et al. 2021"

    @property
    def parts(self) -> Parts:
        """No trainable part."""
        return Parts()

    @property
    def owns(self) -> tuple[Group, ...]:
        """Nothing."""
        return ()

    def plan(self, stage: int, round: int) -> LocalPlan | None:
        """Nothing to do."""
        return None

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Nothing to fold."""
        return state
