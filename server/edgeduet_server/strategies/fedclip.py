"""FedCLIP: FedAvg of an attention head on the image embedding.

Lu et al., "FedCLIP: Fast generalization and personalization for CLIP in federated learning", IEEE Data
Engineering Bulletin 2023. The head's exact form is in ``edgeduet_shared.head``.
"""

from __future__ import annotations

from edgeduet_server.strategies.strategy import AveragingStrategy
from edgeduet_shared.plan import Group, Parts


class FedClip(AveragingStrategy):
    """Averaged attention head."""

    name = "fedclip"
    purpose = "FedAvg of an attention head on the image embedding"
    paper = "Lu et al., IEEE Data Eng. Bull. 2023"

    @property
    def parts(self) -> Parts:
        """The head."""
        return Parts(head=True)

    @property
    def owns(self) -> tuple[Group, ...]:
        """The head."""
        return ("head",)
