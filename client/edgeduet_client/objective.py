"""The loss of one training step, as a pure function of parameters and batch.

Pure, so that ``torch.func`` can differentiate it for one client or, mapped over a leading client
axis, for many at once; both trainers use this very function.

``loss = CE + generic * CE_generic + alpha * balance + eta * consistency + gamma * stability
+ proximal + EWC + distillation`` (fed-duet.md 2.1). Terms with weight 0 are not computed.

The *generic* term is ours: cross-entropy of the path without routed adapters, with logits adjusted by
the client's own class shares (Menon et al. 2021, "Long-tail learning via logit adjustment"; for
personalised federated learning Chen & Chao 2022, "On bridging generic and personalized federated
learning"). The shared adapter is then fitted to all classes alike and survives averaging, while the
private experts fit what is particular to the client.

*Rehearsal* is ours too: with it a batch also holds features drawn from class prototypes
(:mod:`edgeduet_client.prototypes`), and all losses are over the classes seen so far. Batches then hold old
classes more rarely, or more often, than the client has met them; ``log_sampling`` (log of the class shares in
batches over those of the client) takes that out of the logits under a cross-entropy, so that the private path
fits the client's own mixture of all stages and, with ``generic_prior`` 1, the generic path none.

Shape suffixes: B samples (padded; ``weight`` 0 marks padding), C classes of the task, D joint width,
E experts, M dispatched prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.losses import balance_loss, mean_routing, routing_consistency, stability_loss
from edgeduet_shared.plan import LocalPlan

Batch = dict[str, Any]
"""Tensors of one step: ``x`` or ``z`` (image side frozen), ``y``, ``weight``, ``noise``; and what does
not change within a round: ``text`` (text side frozen), ``dispatched``, ``log_share``, ``log_sampling``,
``frozen``, ``teacher`` (logits of these samples)."""


@dataclass(frozen=True)
class Objective:
    """The loss of ``plan`` on ``model``; ``class_ids_C`` are the classes the labels index.

    Attributes:
        image_frozen: nothing in the image tower is trained: the batch holds ``z`` instead of ``x``.
        text_frozen: nothing in the text tower is trained: the batch holds ``text``.
    """

    model: DuetModel
    plan: LocalPlan
    class_ids_C: Tensor
    image_frozen: bool
    text_frozen: bool

    def __call__(self, trained: Params, fixed: Params, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Return (loss, figures): weighted cross-entropy, correct count and mean routing per site."""
        params = {**fixed, **trained}
        plan = self.plan
        if plan.generic:
            # What is averaged learns from the generic term alone; the private parts fit what it leaves.
            params = {n: v.detach() if self.model.group_of(n) == "shared_adapter" else v for n, v in params.items()}
        noise = batch.get("noise")
        z_BD, image_routing = self._image(params, batch, noise)
        t_CD, text_routing = self._text(params, batch, noise)
        logits_BC = self._logits(params, z_BD, t_CD, batch)
        cross_entropy = _cross_entropy(self._adjusted(logits_BC, plan.prior, batch), batch)
        loss = cross_entropy
        loss = loss + self._routing_losses(image_routing, text_routing, batch)
        general_BC = self._general_logits({**fixed, **trained}, z_BD, t_CD, batch, noise)
        if plan.generic:
            loss = loss + plan.generic * _cross_entropy(self._adjusted(general_BC, plan.generic_prior, batch), batch)
        if plan.distill and "teacher" in batch:
            loss = loss + plan.distill * self._distillation(general_BC, batch)
        loss = loss + self._anchored(trained, batch)
        right = (logits_BC.argmax(-1) == batch["y"]).to(loss.dtype) * batch["weight"]
        routing = [mean_routing(site, batch["weight"]) for site in image_routing]
        routing += [mean_routing(site) for site in text_routing]
        return loss, {"loss": cross_entropy.detach(), "correct": right.sum().detach(), "routing": routing}

    def _image(self, params: Params, batch: Batch, noise: Any, frozen: str = "z") -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.image_frozen:
            return batch[frozen], ()
        z_BD, routing = self.model.run(params, "encode_image", batch["x"], noise)
        return z_BD, routing

    def _text(self, params: Params, batch: Batch, noise: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.text_frozen:
            return batch["text"], ()
        t_CD, routing = self.model.run(params, "encode_text", self.class_ids_C, noise)
        return t_CD, routing

    def _logits(self, params: Params, z_BD: Tensor, t_CD: Tensor, batch: Batch) -> Tensor:
        if self.plan.logits == "local":
            return self.model.local_logits(z_BD, t_CD)
        fused: Tensor = self.model.run(params, "fused_logits", z_BD, t_CD, batch["dispatched"], self.plan.mix)[0]
        return fused

    def _adjusted(self, logits_BC: Tensor, prior: float, batch: Batch) -> Tensor:
        """Logit adjustment: by ``prior`` times the client's class shares, and by how batches differ from them."""
        if prior:
            logits_BC = logits_BC + prior * batch["log_share"]
        return logits_BC + batch["log_sampling"] if self.plan.rehearsal else logits_BC

    def _general_logits(self, params: Params, z_BD: Tensor, t_CD: Tensor, batch: Batch, noise: Any) -> Tensor:
        """Local logits of the plain global model's path: without routed adapters and fusion."""
        if not self.plan.generic or (self.image_frozen and self.text_frozen):
            return self.model.local_logits(z_BD, t_CD)
        shared_only = without_experts(self.model, params)
        z_BD, _ = self._image(shared_only, batch, noise, "z_general")
        t_CD, _ = self._text(shared_only, batch, noise)
        return self.model.local_logits(z_BD, t_CD)

    def _routing_losses(
        self, image_routing: tuple[Tensor, ...], text_routing: tuple[Tensor, ...], batch: Batch
    ) -> Tensor | float:
        plan = self.plan
        total: Tensor | float = 0.0
        sites = (*image_routing, *text_routing)
        if not sites:
            return total
        if plan.balance:
            images = [site.softmax(-1) for site in image_routing]
            total = total + plan.balance * balance_loss(images, batch["weight"])
        if plan.consistency and image_routing and text_routing:
            total = total + plan.consistency * routing_consistency(
                image_routing, text_routing, batch["y"], plan.consistency_temperature, batch["weight"]
            )
        if plan.stability and "frozen" in batch:
            current = [mean_routing(site, batch["weight"]) for site in image_routing]
            current += [mean_routing(site) for site in text_routing]
            total = total + plan.stability * stability_loss(current, batch["frozen"])
        return total

    def _distillation(self, student_BC: Tensor, batch: Batch) -> Tensor:
        """Learning without forgetting (Li & Hoiem 2016): KL to the model before this stage, times T^2."""
        temperature = self.plan.distill_temperature
        each_B = functional.kl_div(
            (student_BC / temperature).log_softmax(-1),
            (batch["teacher"] / temperature).log_softmax(-1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        return temperature**2 * _mean(each_B, batch["weight"])

    def _anchored(self, trained: Params, batch: Batch) -> Tensor | float:
        """FedProx (Li et al. 2020) and elastic weight consolidation (Kirkpatrick et al. 2017)."""
        total: Tensor | float = 0.0
        if self.plan.proximal:
            start = batch["start"]
            total = total + self.plan.proximal / 2 * sum(
                ((value - start[name]) ** 2).sum() for name, value in trained.items()
            )
        if self.plan.ewc and "fisher" in batch:
            fisher, anchor = batch["fisher"], batch["anchor"]
            total = total + self.plan.ewc / 2 * sum(
                (fisher[name] * (value - anchor[name]) ** 2).sum() for name, value in trained.items() if name in fisher
            )
        return total


def without_experts(model: DuetModel, params: Params) -> Params:
    """``params`` with routed adapters that add nothing: the path of the plain global model."""
    return {
        name: torch.zeros_like(value) if model.group_of(name) == "routed_adapters" else value
        for name, value in params.items()
    }


def _cross_entropy(logits_BC: Tensor, batch: Batch) -> Tensor:
    # Not functional.cross_entropy: vmap would take it apart in Python and import sympy to do so.
    picked_B1 = functional.log_softmax(logits_BC, dim=-1).gather(-1, batch["y"].unsqueeze(-1))
    return _mean(-picked_B1.squeeze(-1), batch["weight"])


def _mean(values_B: Tensor, weights_B: Tensor) -> Tensor:
    return (values_B * weights_B).sum() / weights_B.sum().clamp(min=1.0)
