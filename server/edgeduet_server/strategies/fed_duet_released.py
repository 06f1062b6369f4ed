"""Fed-Duet as its published code behaves, for reference (commit ``6f1f255``, fed-duet.md 0.1).

Written from a description of that behaviour, not from the code, which has no licence:

* every client-round starts from the global state: routed adapters, prompt and fusion are reset, so that
  only the last semantic round of a stage leaves a trace, and routed adapters never learn (items 2, 3);
* no auxiliary loss (item 1); parametric rounds train on fused logits through the untrained gate (U9);
* fusion in training only; predictions use the local prompt (item 4);
* the pool is frozen; pool, gate and digests are built anew for every task; the gate's target is its own
  last choice (items 5, 1.3).

Not imitated: token-0 routing in the text tower (item 7; routed adapters add nothing here anyway) and
the training transform on test images (item 8), which would make numbers incomparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from edgeduet_server.orchestrator import Orchestrator
from edgeduet_server.strategies.fed_duet import FedDuet
from edgeduet_server.strategies.strategy import Options, ServerState
from edgeduet_shared.messages import TrainRequest, context_arrays
from edgeduet_shared.plan import Group, LocalPlan, Parts
from edgeduet_shared.prompts import pool_contexts
from edgeduet_shared.seeds import derive_seed


class ReleasedOptions(Options):
    """No options: it is a reference point."""


class FedDuetReleased(FedDuet):
    """What the published code does."""

    name = "fed-duet-released"
    purpose = "Fed-Duet as its published code behaves (private parts reset each round, fusion in training only)"
    options_type = ReleasedOptions

    def __init__(self, options: Options, scenario: Any, experiment: Any) -> None:
        from edgeduet_server.strategies.fed_duet import FedDuetOptions

        fixed = FedDuetOptions(
            dispatch="paper",
            parametric_share=0.5,
            pool_ema=0,
            generic=0,
            generic_prior=0,
            retention=0,
            rehearsal=0,
            balance=0,
            consistency=0,
            stability=0,
        )
        super().__init__(fixed, scenario, experiment)

    @property
    def parts(self) -> Parts:
        """All parts."""
        return Parts(adapters=True, experts=self.scenario.model.adapter.experts > 0, prompt=True, fusion=True)

    @property
    def _personal(self) -> tuple[Group, ...]:
        return ()

    def plan(self, stage: int, round: int) -> LocalPlan:
        """As the working version, with fused logits in both phases and plain ones at inference."""
        plan = super().plan(stage, round)
        upload: tuple[Group, ...] = plan.upload
        if not self.is_parametric(round):
            upload = ("prompt", "fusion") if self.last_round(round) else ()
        return plan.model_copy(update={"logits": "fused", "evaluate_fused": False, "upload": upload, "usage": False})

    def begin_stage(self, state: ServerState, stage: int) -> ServerState:
        """Pool, gate and digests are built anew."""
        config = self.scenario.model
        seed = derive_seed(self.experiment.seed, "released", stage)
        pool = pool_contexts(self.experiment.backbone, config.pool.size, config.prompt.length, self.experiment.seed)
        fresh = Orchestrator(config.pool.dispatched, "paper", 0.0, seed)
        return replace(state, extra=fresh.initial(pool, self.experiment.backbone.embed_dim))

    def _sent(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, list[int]]:
        return self._dispatch(state, clients, stage, round)

    def configure(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, TrainRequest]:
        """Everything the server holds goes to everybody, with dispatched prompts, in every round."""
        plan = self.plan(stage, round)
        sent = self._sent(state, clients, stage, round)
        return {
            client: TrainRequest(
                stage,
                round,
                plan,
                state.shared,
                context_arrays({index: state.extra["pool"][index] for index in sent[client]}),
            )
            for client in clients
        }
