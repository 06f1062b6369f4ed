"""FedAvg of adapters: the plainest federated parameter-efficient tuning of CLIP.

McMahan et al. 2017 on the always-on adapters that Fed-Duet shares, in the same places and of the same
size; no prompt, no experts, no routing. What Fed-Duet adds must beat this.

``prior`` adds logit adjustment (Menon et al. 2021) by each client's class shares: the control that tells
how much of a gain comes from that term of our ``fed-duet`` alone. ``rehearsal`` is the same for its class prototypes.
"""

from __future__ import annotations

from typing import cast

from pydantic import Field

from edgeduet_server.strategies.strategy import REHEARSAL, AveragingStrategy, Options
from edgeduet_shared.plan import Group, LocalPlan, Parts


class FedAvgAdapterOptions(Options):
    """Options of ``fedavg-adapter`` and of the methods that extend it."""

    prior: float = Field(0.0, ge=0, description="logit adjustment by the client's class shares (0 = off)")
    rehearsal: float = Field(0.0, ge=0, description=REHEARSAL)


class FedAvgAdapter(AveragingStrategy):
    """Averaged adapters."""

    name = "fedavg-adapter"
    purpose = "FedAvg of the shared adapters"
    paper = "McMahan et al., AISTATS 2017"
    options_type = FedAvgAdapterOptions

    @property
    def parts(self) -> Parts:
        """Shared adapters."""
        return Parts(adapters=True)

    @property
    def owns(self) -> tuple[Group, ...]:
        """The adapters."""
        return ("shared_adapter",)

    def plan(self, stage: int, round: int) -> LocalPlan:
        """Train and upload the adapters."""
        options = cast(FedAvgAdapterOptions, self.options)
        return (
            super()
            .plan(stage, round)
            .model_copy(update={"prior": options.prior, "rehearsal": self.rehearsal(options.rehearsal)})
        )
