"""FedProx on the adapters: a proximal term keeps local training near the received values.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020.
"""

from __future__ import annotations

from typing import cast

from pydantic import Field

from edgeduet_server.strategies.fedavg_adapter import FedAvgAdapter, FedAvgAdapterOptions
from edgeduet_shared.plan import LocalPlan


class FedProxOptions(FedAvgAdapterOptions):
    """Options of ``fedprox``."""

    mu: float = Field(0.01, ge=0, description="weight of the proximal term")


class FedProx(FedAvgAdapter):
    """Averaged adapters with a proximal term."""

    name = "fedprox"
    purpose = "FedAvg of adapters with a proximal term"
    paper = "Li et al., MLSys 2020"
    options_type = FedProxOptions

    def plan(self, stage: int, round: int) -> LocalPlan:
        """As FedAvg, with the proximal weight."""
        options = cast(FedProxOptions, self.options)
        return super().plan(stage, round).model_copy(update={"proximal": options.mu})
