"""The selector over a client's pool of drafters, and costs as the scenario states them."""

from __future__ import annotations

from collections.abc import Sequence

from edgeduet_client.llm.speculation.arms import Arm, Selector
from edgeduet_client.llm.speculation.costs import CostModel, DraftCost
from edgeduet_client.llm.speculation.selectors import new_selector
from edgeduet_shared.config import DrafterConfig


def stated_costs(drafters: Sequence[str], depth: int, *, draft: float, verify: float) -> CostModel:
    """Return costs in plain steps of the target.

    Args:
        drafters: their names; they cost the same.
        depth: longest draft.
        draft: of a drafted token.
        verify: of each row of a step beyond the first.
    """
    steps = [1.0 + verify * row for row in range(depth + 1)]
    return CostModel({0: steps}, {name: DraftCost(0.0, draft) for name in drafters})


def pool_selector(drafters: Sequence[str], config: DrafterConfig) -> Selector:
    """Return the rule that maximises tokens per second, over every drafter and every length up to ``config.depth``."""
    arms = [Arm(name, length) for name in drafters for length in range(1, config.depth + 1)]
    # Stated costs do not drift, so that no round need be spent on looking at them again.
    return new_selector("ratio", arms, {"probe_share": 0.0})
