"""Fed-EWC: elastic weight consolidation on the averaged adapters.

Kirkpatrick et al., PNAS 2017. After the last round of a stage each client adds the Fisher diagonal on
its own data (at its locally trained values) to its running sum; in later stages it penalises moving
important parameters away from the first values received in the stage, which are the global model
after the stage before. Fisher information never leaves the client.
"""

from __future__ import annotations

from typing import cast

from pydantic import Field

from edgeduet_server.strategies.fedavg_adapter import FedAvgAdapter, FedAvgAdapterOptions
from edgeduet_shared.plan import LocalPlan


class FedEwcOptions(FedAvgAdapterOptions):
    """Options of ``fed-ewc``."""

    weight: float = Field(100.0, ge=0, description="weight of the EWC penalty")


class FedEwc(FedAvgAdapter):
    """Averaged adapters with elastic weight consolidation."""

    name = "fed-ewc"
    purpose = "FedAvg of adapters with elastic weight consolidation"
    paper = "Kirkpatrick et al., PNAS 2017"
    options_type = FedEwcOptions

    def plan(self, stage: int, round: int) -> LocalPlan:
        """As FedAvg, with the EWC weight."""
        options = cast(FedEwcOptions, self.options)
        return super().plan(stage, round).model_copy(update={"ewc": options.weight})
