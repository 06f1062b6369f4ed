"""FedAvg of LoRA updates, made with ``peft`` and saved in its format.

Hu et al., "LoRA: Low-rank adaptation of large language models", ICLR 2022. A and B are averaged
separately, as common implementations do; the mean of products differs from the product of means.
"""

from __future__ import annotations

from edgeduet_server.strategies.strategy import AveragingStrategy
from edgeduet_shared.plan import Group, Parts


class FedAvgLora(AveragingStrategy):
    """Averaged LoRA."""

    name = "fedavg-lora"
    purpose = "FedAvg of LoRA updates (peft)"
    paper = "Hu et al., ICLR 2022"

    @property
    def parts(self) -> Parts:
        """LoRA."""
        return Parts(lora=True)

    @property
    def owns(self) -> tuple[Group, ...]:
        """The LoRA matrices."""
        return ("lora",)
