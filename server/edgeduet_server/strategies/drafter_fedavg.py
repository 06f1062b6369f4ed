"""FedAvg of drafters: one drafter for everybody's domains.

McMahan et al. 2017 on all parameters of the drafter, weighted by tokens trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeduet_server.strategies.drafter_strategy import DrafterStrategy, settle_layout
from edgeduet_server.strategies.strategy import AveragingStrategy, ServerState
from edgeduet_shared.messages import TrainReply


class DrafterFedAvg(DrafterStrategy, AveragingStrategy):
    """Averaged drafters."""

    name = "drafter-fedavg"
    purpose = "FedAvg of one drafter over all clients' domains"
    paper = "McMahan et al., AISTATS 2017"

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Average what was uploaded."""
        return super().aggregate(*settle_layout(state, replies), stage, round)
