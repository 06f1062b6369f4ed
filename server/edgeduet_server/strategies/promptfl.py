"""PromptFL: FedAvg of a CoOp prompt context.

Guo et al., "PromptFL: Let federated participants cooperatively learn prompts instead of models", IEEE
TMC 2023; the prompt is that of Zhou et al. 2022 (CoOp), class-agnostic context before the class name.
"""

from __future__ import annotations

from edgeduet_server.strategies.strategy import AveragingStrategy
from edgeduet_shared.plan import Group, Parts


class PromptFL(AveragingStrategy):
    """One shared prompt context."""

    name = "promptfl"
    purpose = "FedAvg of one learnable prompt context"
    paper = "Guo et al., IEEE TMC 2023"

    @property
    def parts(self) -> Parts:
        """Prompt only."""
        return Parts(prompt=True)

    @property
    def owns(self) -> tuple[Group, ...]:
        """The prompt."""
        return ("prompt",)
