"""Fed-LwF: learning without forgetting on the averaged adapters.

Li & Hoiem, ECCV 2016. The teacher is the global model as first received in the stage; clients distil its
class probabilities on their new images, over the classes of the current task, at temperature T.
"""

from __future__ import annotations

from typing import cast

from pydantic import Field

from edgeduet_server.strategies.fedavg_adapter import FedAvgAdapter, FedAvgAdapterOptions
from edgeduet_shared.plan import LocalPlan


class FedLwfOptions(FedAvgAdapterOptions):
    """Options of ``fed-lwf``."""

    weight: float = Field(0.3, ge=0, description="weight of distillation")
    temperature: float = Field(2.0, gt=0, description="distillation temperature")


class FedLwf(FedAvgAdapter):
    """Averaged adapters with distillation from the model before the stage."""

    name = "fed-lwf"
    purpose = "FedAvg of adapters with distillation from the previous stage's model"
    paper = "Li & Hoiem, ECCV 2016"
    options_type = FedLwfOptions

    def plan(self, stage: int, round: int) -> LocalPlan:
        """As FedAvg, with distillation."""
        options = cast(FedLwfOptions, self.options)
        return (
            super()
            .plan(stage, round)
            .model_copy(update={"distill": options.weight, "distill_temperature": options.temperature})
        )
