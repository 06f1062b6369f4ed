"""A pool of domain experts on every device, and the federated average beside them.

Ours; no paper. Averaging blurs what domains do not share, so the last rounds are not averaged: each client goes on
from the average alone, on its own texts, and what comes of it is its *expert*. All rounds together are as many as
those of the other methods. A device then holds the average, its own expert and, where the scenario lets experts
travel (``drafter.share_experts``), those of all other clients; which of them drafts is the selector's choice,
token by token, from what each would have had accepted.

Where experts do not travel they are not uploaded either: the average is all that leaves a client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pydantic import Field

from edgeduet_server.strategies.drafter_fedavg import DrafterFedAvg
from edgeduet_server.strategies.drafter_strategy import DRAFTER
from edgeduet_server.strategies.strategy import Options, ServerState
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.experiment import Experiment
from edgeduet_shared.messages import EvaluateRequest, TrainReply
from edgeduet_shared.plan import LocalPlan

EXPERTS = "experts/"
"""Extra arrays of the state: ``experts/CLIENT/NAME``."""


class DrafterPoolOptions(Options):
    """Options of ``drafter-pool``."""

    expert_rounds: int = Field(1, ge=1, description="last rounds in which clients train their own experts")
    share: bool = Field(True, description="let experts travel, where the scenario allows it too")


class DrafterPool(DrafterFedAvg):
    """Average, own expert, and others' experts where they may travel."""

    name = "drafter-pool"
    purpose = "the average, and every client's own drafter: handed out as a pool where drafter.share_experts allows it"
    paper = ""
    options_type = DrafterPoolOptions

    def __init__(self, options: Options, scenario: Scenario, experiment: Experiment) -> None:
        super().__init__(options, scenario, experiment)
        wanted = cast(DrafterPoolOptions, options).expert_rounds
        if wanted >= scenario.federation.rounds and scenario.learns == "drafter":
            raise ConfigError(
                f"method '{self.name}': expert_rounds={wanted} of federation.rounds={scenario.federation.rounds} "
                "leaves no round for the average; lower the one or raise the other"
            )

    @property
    def shares(self) -> bool:
        """Whether experts travel."""
        return self.scenario.drafter.share_experts and cast(DrafterPoolOptions, self.options).share

    def expert_round(self, round: int) -> bool:
        """Whether clients train their experts in ``round``."""
        return round >= self.scenario.federation.rounds - cast(DrafterPoolOptions, self.options).expert_rounds

    def plan(self, stage: int, round: int) -> LocalPlan:
        """Train the average; in the last rounds the expert, which is personal."""
        plan = super().plan(stage, round)
        if not self.expert_round(round):
            return plan
        return plan.model_copy(update={"personal": DRAFTER, "upload": DRAFTER if self.shares else ()})

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Average; in the last rounds keep what was uploaded as it is."""
        if not self.expert_round(round):
            return super().aggregate(state, replies, stage, round)
        newest = {f"{EXPERTS}{reply.client}/{name}": value for reply in replies for name, value in reply.update.items()}
        return replace(state, extra={**state.extra, **newest})

    def configure_evaluate(self, state: ServerState, clients: Sequence[int], stage: int) -> dict[int, EvaluateRequest]:
        """Hand out the average, and to each client the experts of all others."""
        requests = super().configure_evaluate(state, clients, stage)
        experts = {name.removeprefix(EXPERTS): value for name, value in state.extra.items()}
        return {
            client: replace(
                request,
                experts={name: value for name, value in experts.items() if not name.startswith(f"{client}/")},
            )
            for client, request in requests.items()
        }
