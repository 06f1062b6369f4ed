"""What the best fixed arm would have made of a request, in hindsight.

The evidence of a request says for every arm how many tokens a round of it brings, and the costs say how long one takes.
The arm with the highest ratio is the best fixed one; regret is the time the request took beyond what that arm would
have needed for the same tokens. It is an estimate: positions stand for the starts of rounds, and where drafts fail in a
row, rounds start at harder places than the average position. Negative: choosing anew each round did better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.rates import ArmRates
from edgeduet_client.llm.speculation.stats import SurvivalStats


@dataclass(frozen=True)
class Hindsight:
    """The best fixed arm, as far as the evidence of one request tells.

    Attributes:
        arm: drafter and length; no draft among them.
        tokens_per_second: what it would have reached, sampling not counted.
        regret_seconds: what the request took beyond that.
    """

    arm: Arm
    tokens_per_second: float
    regret_seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {
            "drafter": self.arm.drafter,
            "length": self.arm.length,
            "tokens_per_second": round(self.tokens_per_second, 3),
            "regret_seconds": round(self.regret_seconds, 6),
        }


def hindsight(
    survival: Mapping[str, SurvivalStats],
    lengths: Mapping[str, Sequence[int]],
    costs: CostModel,
    *,
    context_length: int,
    emitted: int,
    seconds: float,
) -> Hindsight:
    """Return the arm that would have been best throughout, no draft included.

    Args:
        survival: evidence by drafter; drafters without any are not judged.
        lengths: of the arms, by drafter.
        costs: of this machine.
        context_length: tokens at the end of the request.
        emitted: tokens of its rounds.
        seconds: of its rounds, sampling not included.
    """
    arms = [Arm(name, length) for name in survival for length in lengths[name]]
    table = ArmRates(arms)
    survival_DK, reach_DK = np.zeros((2, len(table.drafters), table.depth))
    for row, name in enumerate(table.drafters):
        known = survival[name]
        survival_DK[row, : len(known.mean)] = known.mean[: table.depth]
        reach_DK[row, : len(known.reach)] = known.reach[: table.depth]
    rates_A = table.tokens(survival_DK) / table.seconds(reach_DK, costs, context_length)
    best = int(rates_A.argmax())
    rate = float(rates_A[best])
    return Hindsight(table.arms[best], rate, seconds - emitted / rate)
