"""pFedMoAP: clients share prompts and mix them with a private attention gate.

Luo et al., "Mixture of experts made personalized: federated prompt learning for vision-language
models", ICLR 2025. Each client uploads its own prompt; it receives the nearest prompts of other
clients, frozen, and trains its prompt and gate on fused logits, which it also uses at test time.

Where we differ: our fused logits weigh both parts (lambda, 1 - lambda) like Fed-Duet's instead of
lambda * local + shared. The plain global model is the mean prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgeduet_server.strategies.strategy import ServerState, Strategy, weighted_mean
from edgeduet_shared.messages import TrainReply, TrainRequest
from edgeduet_shared.plan import Group, LocalPlan, Parts

PROMPT = "prompt.context"


class PFedMoAP(Strategy):
    """Private prompts and gates, prompts of the nearest other clients."""

    name = "pfedmoap"
    purpose = "private prompts, mixed by attention with those of the nearest other clients"
    paper = "Luo et al., ICLR 2025"

    @property
    def parts(self) -> Parts:
        """Prompt and fusion."""
        return Parts(prompt=True, fusion=True)

    @property
    def owns(self) -> tuple[Group, ...]:
        """The mean prompt."""
        return ("prompt",)

    def plan(self, stage: int, round: int) -> LocalPlan:
        """Train prompt and gate on fused logits, upload the prompt."""
        return LocalPlan(
            parts=self.parts,
            train=("prompt", "fusion"),
            upload=("prompt",),
            personal=("prompt", "fusion"),
            logits="fused",
            evaluate_fused=True,
            last_round=self.last_round(round),
            **self._round_settings(),
        )

    def configure(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, TrainRequest]:
        """Send the nearest other prompts; the mean prompt only to clients that have none yet."""
        plan = self.plan(stage, round)
        return {
            client: TrainRequest(
                stage,
                round,
                plan,
                {} if f"prompts/{client}" in state.extra else state.shared,
                self._nearest(state, client),
            )
            for client in clients
        }

    def _nearest(self, state: ServerState, client: int) -> dict[str, np.ndarray]:
        own = state.extra.get(f"prompts/{client}", state.shared[PROMPT])
        others = {
            int(name.removeprefix("prompts/")): value
            for name, value in state.extra.items()
            if name != f"prompts/{client}"
        }
        ranked = sorted(others, key=lambda other: (float(np.linalg.norm(others[other] - own)), other))
        return {str(other): others[other] for other in sorted(ranked[: self.scenario.model.pool.dispatched])}

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Keep every client's newest prompt; average those of this round."""
        prompts = {f"prompts/{reply.client}": reply.update[PROMPT] for reply in replies}
        return replace(
            state,
            shared=weighted_mean(replies, list(state.shared), state.shared),
            extra={**state.extra, **prompts},
        )
