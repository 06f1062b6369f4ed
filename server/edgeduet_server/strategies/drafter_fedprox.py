"""FedProx on drafters: a proximal term keeps training on one domain near the received average.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.
"""

from __future__ import annotations

from typing import cast

from pydantic import Field

from edgeduet_server.strategies.drafter_fedavg import DrafterFedAvg
from edgeduet_server.strategies.strategy import Options
from edgeduet_shared.plan import LocalPlan


class DrafterFedProxOptions(Options):
    """Options of ``drafter-fedprox``."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term")


class DrafterFedProx(DrafterFedAvg):
    """Averaged drafters with a proximal term."""

    name = "drafter-fedprox"
    purpose = "FedAvg of one drafter with a proximal term"
    paper = "Li et al., MLSys 2020"
    options_type = DrafterFedProxOptions

    def plan(self, stage: int, round: int) -> LocalPlan:
        """As FedAvg, with the proximal weight."""
        options = cast(DrafterFedProxOptions, self.options)
        return super().plan(stage, round).model_copy(update={"proximal": options.mu})
