"""Fed-Duet: semantic prompts from the server, private experts on the clients, fused by cross-attention.

Guo, Chen & Cui, "Fed-Duet", ICLR 2026 (OpenReview Jk8g1OxyZY); all formulas in ``methods/fed-duet.md``. A
round is *parametric* (train shared adapter, router and routed adapters; loss on local logits) or
*semantic* (train prompt and fusion on fused logits); each stage begins with the parametric rounds.

Where this working version differs from the published code, and why:

* Routed adapters, prompt and fusion persist on the client (U7); published code resets them each round,
  so that they never learn. ``fed-duet-released`` shows what that does.
* Fusion is used by personal models at inference (U6); the plain global model uses local logits under
  the mean prompt.
* Parametric rounds train on local logits (U9); the fused branch is not trained yet and would be stale.
* Pool, gate and digests persist over tasks; the gate learns from attention mass (mode ``credit``), with
  exploration and replay (U10, U11); the pool follows the clients' prompts (U4).
* Ours: parametric rounds add the cross-entropy of the *generic* path (without routed adapters), with
  logits adjusted by the client's class shares, so that the part that is averaged does not learn the
  client's class mixture. ``generic=0`` switches it off.
* Ours: clients keep class prototypes of earlier stages (class means of frozen features) and rehearse them
  over all classes seen so far, so that neither path forgets them; private parts, fitted to the classes
  of one task, otherwise lose more than they gain on a class-incremental stream. ``rehearsal=0`` switches it off.

Communication: semantic rounds carry adapters only to clients that do not hold the newest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from pydantic import Field

from edgeduet_server.orchestrator import DispatchMode, Orchestrator
from edgeduet_server.strategies.strategy import REHEARSAL, Options, ServerState, Strategy, weighted_mean
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.messages import EvaluateRequest, TrainReply, TrainRequest, context_arrays
from edgeduet_shared.plan import Group, LocalPlan, Parts
from edgeduet_shared.prompts import pool_contexts

_ADAPTERS: tuple[Group, ...] = ("shared_adapter", "router")


class FedDuetOptions(Options):
    """Options of ``fed-duet``; the switches are its ablations."""

    semantic: bool = Field(True, description="semantic path: prompts, pool and semantic rounds")
    parametric: bool = Field(True, description="parametric path: adapters and parametric rounds")
    fusion: bool = Field(True, description="fuse dispatched prompts by cross-attention")
    dispatch: DispatchMode = Field("credit", description="how the orchestrator chooses prompts")
    pool_ema: float = Field(0.1, ge=0, lt=1, description="how far the pool follows the clients' prompts (0 = frozen)")
    parametric_share: float = Field(0.83, gt=0, lt=1, description="share of a stage's rounds that are parametric")
    generic: float = Field(1.0, ge=0, description="weight of the generic path's cross-entropy (0 = off)")
    generic_prior: float = Field(1.0, ge=0, description="logit adjustment of the generic path (0 = off)")
    retention: float = Field(0.1, ge=0, description="distillation of the generic path from the model before the stage")
    rehearsal: float | None = Field(
        None, ge=0, description=f"{REHEARSAL}; unset = 1 with placement 'embedding', else 0"
    )
    balance: float = Field(0.01, ge=0, description="alpha: load balancing (0 = off)")
    consistency: float = Field(0.1, ge=0, description="eta: routing consistency (0 = off)")
    consistency_temperature: float = Field(0.1, gt=0, description="tau of the routing consistency")
    stability: float = Field(0.1, ge=0, description="gamma: expert stability (0 = off)")
    stability_ema: float = Field(0.9, ge=0, lt=1, description="decay of the routing averages")


class FedDuet(Strategy):
    """The working version."""

    name = "fed-duet"
    purpose = "server-dispatched semantic prompts and private routed adapters, fused by cross-attention"
    paper = "Guo et al., ICLR 2026"
    options_type: ClassVar[type[Options]] = FedDuetOptions

    def __init__(self, options: Options, scenario: Any, experiment: Any) -> None:
        super().__init__(options, scenario, experiment)
        if not (self._o.semantic or self._o.parametric):
            raise ConfigError("method 'fed-duet': semantic=false and parametric=false leave nothing to train")
        if self._o.semantic and self._o.parametric and scenario.federation.rounds < 2:
            raise ConfigError(
                "federation.rounds: fed-duet needs at least 2 rounds per stage, one for each of its two phases"
            )

    @property
    def _o(self) -> FedDuetOptions:
        return cast(FedDuetOptions, self.options)

    @property
    def _fuses(self) -> bool:
        return self._o.semantic and self._o.fusion

    @property
    def parts(self) -> Parts:
        """Depends on the ablation."""
        return Parts(
            adapters=self._o.parametric,
            experts=self._o.parametric and self.scenario.model.adapter.experts > 0,
            prompt=self._o.semantic,
            fusion=self._fuses,
        )

    @property
    def owns(self) -> tuple[Group, ...]:
        """Shared adapter and router; mean prompt and fusion as the seed of new clients."""
        adapters: tuple[Group, ...] = _ADAPTERS if self._o.parametric else ()
        prompts: tuple[Group, ...] = ("prompt", "fusion") if self._o.semantic else ()
        return adapters + prompts

    @property
    def _personal(self) -> tuple[Group, ...]:
        return ("routed_adapters", "prompt", "fusion")

    def is_parametric(self, round: int) -> bool:
        """Whether ``round`` of a stage is parametric; each phase has at least one round."""
        if not (self._o.semantic and self._o.parametric):
            return self._o.parametric
        rounds = self.scenario.federation.rounds
        return round < min(max(1, int(rounds * self._o.parametric_share + 0.5)), rounds - 1)

    def plan(self, stage: int, round: int) -> LocalPlan:
        """The phase's plan."""
        options = self._o
        last = self.last_round(round)
        common: dict[str, Any] = {
            "parts": self.parts,
            "personal": self._personal,
            "remember": _ADAPTERS,
            "evaluate_fused": self._fuses,
            "stability_ema": options.stability_ema,
            "digest": True,
            "generic": options.generic,
            "generic_prior": options.generic_prior,
            "distill": options.retention,
            "rehearsal": self.rehearsal(options.rehearsal),
            **self._round_settings(),
        }
        if self.is_parametric(round):
            routed = self.parts.experts
            return LocalPlan(
                train=("shared_adapter", "router", "routed_adapters"),
                upload=_ADAPTERS,
                # The last parametric round closes the stage's routing statistics.
                last_round=last or not self.is_parametric(round + 1),
                balance=options.balance if routed else 0.0,
                consistency=options.consistency if routed else 0.0,
                consistency_temperature=options.consistency_temperature,
                stability=options.stability if routed else 0.0,
                **common,
            )
        return LocalPlan(
            train=("prompt", "fusion"),
            upload=("prompt", "fusion") if last else ("prompt",),
            logits="fused" if self._fuses else "local",
            usage=self._fuses,
            last_round=last,
            **common,
        )

    # -- state -----------------------------------------------------------------------------------------

    @property
    def _orchestrator(self) -> Orchestrator:
        seed = self.experiment.seed
        return Orchestrator(self.scenario.model.pool.dispatched, self._o.dispatch, self._o.pool_ema, seed)

    def initial_state(self, seed: int) -> ServerState:
        """Fresh parameters, pool and gate."""
        state = super().initial_state(seed)
        extra = {}
        if self._fuses:
            config = self.scenario.model
            pool = pool_contexts(self.experiment.backbone, config.pool.size, config.prompt.length, seed)
            extra = self._orchestrator.initial(pool, self.experiment.backbone.embed_dim)
        return replace(state, extra=extra, notes={"version": 0, "holds": {}, "seeded": [], "sent": {}})

    def begin_stage(self, state: ServerState, stage: int) -> ServerState:
        """Mode ``cosine`` compares digests with the pool's mean text features over the classes seen so far."""
        if not self._fuses or self._o.dispatch != "cosine":
            return state
        classes = torch.as_tensor(self.experiment.split.seen_classes(stage))
        contexts = torch.from_numpy(state.extra["pool"])
        with torch.no_grad():
            features_KCD = self.model.run(self.global_params(state), "encode_text_under", contexts, classes)
        mean_KD = torch.nn.functional.normalize(features_KCD.mean(1), dim=-1).numpy()
        return replace(state, extra={**state.extra, "pool/text": mean_KD})

    def configure(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, TrainRequest]:
        """Adapters where they are needed, prompts by dispatch, the mean prompt to clients without one."""
        plan = self.plan(stage, round)
        semantic = not self.is_parametric(round)
        sent = self._sent(state, clients, stage, round)
        requests = {}
        for client in clients:
            groups: list[Group] = []
            if not semantic or state.notes["holds"].get(str(client)) != state.notes["version"]:
                groups += _ADAPTERS
            if client not in state.notes["seeded"]:
                groups += ["prompt", "fusion"]
            shared = {n: v for n, v in state.shared.items() if self.model.group_of(n) in groups}
            contexts = context_arrays({index: state.extra["pool"][index] for index in sent.get(client, [])})
            requests[client] = TrainRequest(stage, round, plan, shared, contexts)
        return requests

    def _sent(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, list[int]]:
        """Pool indices dispatched in a round; the same again when the replies come in."""
        if self.is_parametric(round) or not self._fuses:
            return {}
        return self._dispatch(state, clients, stage, round)

    def _dispatch(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, list[int]]:
        rounds, stages = self.scenario.federation.rounds, len(self.experiment.split.tasks)
        done = (stage * rounds + round) / max(1, stages * rounds)
        return self._orchestrator.dispatch(state.extra, clients, stage, round, done)

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Average what the phase uploads; let the orchestrator learn."""
        parametric = self.is_parametric(round)
        notes = dict(state.notes)
        if parametric:
            notes["version"] = notes["version"] + 1
        else:
            notes["holds"] = {**notes["holds"], **{str(reply.client): notes["version"] for reply in replies}}
            notes["seeded"] = sorted({*notes["seeded"], *(reply.client for reply in replies)})
        uploaded = self.plan(stage, round).upload
        names = [name for name in state.shared if self.model.group_of(name) in uploaded]
        shared = {**state.shared, **weighted_mean(replies, names, state.shared)}
        extra = state.extra
        if self._fuses:
            clients = [reply.client for reply in replies]
            extra = self._orchestrator.learn(state.extra, replies, self._sent(state, clients, stage, round))
        return replace(state, shared=shared, extra=extra, notes=notes)

    def configure_evaluate(self, state: ServerState, clients: Sequence[int], stage: int) -> dict[int, EvaluateRequest]:
        """Clients use the prompts they were sent last; a client that never took part gets the mean prompt."""
        plan = self.plan(stage, self.scenario.federation.rounds - 1)
        common = self.scenario.federation.evaluate_common
        return {client: EvaluateRequest(stage, plan, common, self.global_arrays(state)) for client in clients}
