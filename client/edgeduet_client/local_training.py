"""Train one client, or a block of clients at once, for one round.

:func:`train_clients` takes one :class:`Job` per client. One job runs through plain autograd: the
reference. Several jobs of equal shape run as one block: parameters and batches are stacked along a
leading client axis and the very same objective is mapped over it with ``torch.func.vmap``; the result
equals the reference to 1e-5 (``tests/client/test_block_training.py``). Three biases of the fusion are
left out of that: their gradient is zero but for rounding, which AdamW scales up to whole steps; no
prediction depends on them.

Batches, rehearsed features, router noise and dropout masks are drawn per client from seeds that depend on
(seed, client, stage, round) alone, so no result depends on who else is trained, or where.

Shape suffixes: K clients, B samples of a step, N samples of a client, C classes, D joint width,
M dispatched prompts, L context length, W text width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from edgeduet_client.objective import Batch, Objective, without_experts
from edgeduet_client.optimiser import AdamW, clip_gradients, schedule
from edgeduet_client.prototypes import Prototypes
from edgeduet_shared.duet import DuetModel, Noise, Params, stack_noise
from edgeduet_shared.image_tower import EmbeddingTower
from edgeduet_shared.losses import update_ema
from edgeduet_shared.plan import Group, LocalPlan
from edgeduet_shared.seeds import derive_seed

_PROMPT_GROUPS: tuple[Group, ...] = ("prompt", "fusion")
_CHUNK = 512


@dataclass(frozen=True)
class Job:
    """One client's work in one round.

    Attributes:
        client: partition id, for seeds.
        x: cached features (N, ...) of the client's training images.
        labels_N: positions of their classes in ``class_ids``.
        params: all parameters the round starts with.
        contexts_MLW: dispatched prompt contexts, M may be 0.
        frozen: routing averages of the previous stage per site, where there are any.
        ema: running routing averages per site.
        teacher: parameters of the model before this stage (distillation).
        fisher, anchor: EWC's importance and centre per trained parameter.
        prototypes: what is rehearsed of earlier stages, labels as positions in ``class_ids``.
    """

    client: int
    stage: int
    round: int
    seed: int
    x: Tensor
    labels_N: Tensor
    params: Params
    contexts_MLW: Tensor
    frozen: tuple[Tensor, ...] | None = None
    ema: tuple[Tensor, ...] | None = None
    teacher: Params | None = None
    fisher: Params = field(default_factory=dict)
    anchor: Params = field(default_factory=dict)
    prototypes: Prototypes | None = None


@dataclass(frozen=True)
class Trained:
    """What came of a job: new values of the trained groups, and figures of the round (rehearsed features included)."""

    params: Params
    ema: tuple[Tensor, ...] | None
    loss: float
    accuracy: float
    steps: int
    seconds: float


def train_clients(model: DuetModel, plan: LocalPlan, class_ids: Sequence[int], jobs: Sequence[Job]) -> list[Trained]:
    """Train all jobs; one job is the sequential reference, several are one block.

    Clients without images must not be passed.
    """
    started = time.perf_counter()
    block = _Block(model, plan, class_ids, jobs)
    for step in range(block.steps):
        block.step(step)
    return block.results((time.perf_counter() - started) / len(jobs))


class _Block:
    def __init__(self, model: DuetModel, plan: LocalPlan, class_ids: Sequence[int], jobs: Sequence[Job]) -> None:
        self._model, self._plan, self._jobs = model, plan, jobs
        self._classes = torch.as_tensor(class_ids)
        names = [name for name in jobs[0].params if model.group_of(name) in plan.train]
        self._trained = {name: torch.stack([job.params[name] for job in jobs]).clone() for name in names}
        self._fixed = {
            name: torch.stack([job.params[name] for job in jobs]) for name in jobs[0].params if name not in names
        }
        image_frozen = not any(_touches_image(model, name) for name in names)
        text_frozen = not any(_touches_text(model, name) for name in names)
        self._objective = Objective(model, plan, self._classes, image_frozen, text_frozen)
        self._through_frozen = not text_frozen or (not image_frozen and model.front_key != EmbeddingTower.front_key)
        batches = [_batches(job, plan) for job in jobs]
        self._orders = [found.rows for found in batches]
        self._prepared = [
            _prepare(job, found, model, plan, self._classes, image_frozen, text_frozen)
            for job, found in zip(jobs, batches, strict=True)
        ]
        self.steps = max(len(order) for order in self._orders)
        self._width = max(len(batch) for order in self._orders for batch in order)
        self._generators = [
            torch.Generator().manual_seed(derive_seed(job.seed, "noise", job.client, job.stage, job.round))
            for job in jobs
        ]
        self._optimiser = AdamW(self._trained, plan.optimiser.weight_decay)
        self._base_rates = {
            name: plan.optimiser.prompt_lr if model.group_of(name) in _PROMPT_GROUPS else plan.optimiser.lr
            for name in names
        }
        self._loss = [0.0] * len(jobs)
        self._correct = [0.0] * len(jobs)
        self._seen = [0] * len(jobs)
        self._ema = [None if job.ema is None else list(job.ema) for job in jobs]

    def step(self, step: int) -> None:
        batches = [
            _batch_at(prepared, order[step] if step < len(order) else torch.zeros(0, dtype=torch.long), self._width)
            for prepared, order in zip(self._prepared, self._orders, strict=True)
        ]
        for index, batch in enumerate(batches):
            batch["noise"] = self._noise(index, step)
        active = torch.tensor([step < len(order) for order in self._orders])
        grads, figures = self._gradients(batches)
        grads = clip_gradients(grads, self._plan.optimiser.clip_norm)
        factors = torch.tensor(
            [
                schedule(step, len(order), self._plan.optimiser.warmup) if step < len(order) else 0.0
                for order in self._orders
            ]
        )
        self._optimiser.step(grads, {name: rate * factors for name, rate in self._base_rates.items()}, active)
        self._note(step, figures)

    def _gradients(self, batches: list[Batch]) -> tuple[Params, dict[str, Any]]:
        if len(batches) == 1:
            one = {name: value[0].detach().requires_grad_() for name, value in self._trained.items()}
            fixed = {name: value[0] for name, value in self._fixed.items()}
            loss, figures = self._objective(one, fixed, batches[0])
            grads = torch.autograd.grad(loss, list(one.values()), materialize_grads=True)
            return {name: g.unsqueeze(0) for name, g in zip(one, grads, strict=True)}, _with_axis(figures)
        if self._through_frozen:
            return _mapped_gradients(self._objective, self._trained, self._fixed, _stack(batches))
        # One backward pass for all: a client's loss depends on its own parameters only, so the gradient of the sum
        # holds everyone's.
        block = {name: value.detach().requires_grad_() for name, value in self._trained.items()}
        loss_K, figures = vmap(self._objective)(block, self._fixed, _stack(batches))
        grads = torch.autograd.grad(loss_K.sum(), list(block.values()), materialize_grads=True)
        return dict(zip(block, grads, strict=True)), figures

    def _noise(self, index: int, step: int) -> Noise | None:
        """Draw for the real samples only, then pad: a client's draws do not depend on the block."""
        order = self._orders[index]
        real = len(order[step]) if step < len(order) else 0
        if self._objective.image_frozen and self._objective.text_frozen:
            return None
        drawn = self._model.draw_noise(real, len(self._classes), self._generators[index], router=self._plan.noise)
        padded = tuple({key: _pad(value, self._width) for key, value in site.items()} for site in drawn.image)
        return Noise(padded, drawn.text)

    def _note(self, step: int, figures: dict[str, Any]) -> None:
        loss_K, correct_K = figures["loss"].tolist(), figures["correct"].tolist()
        for index, order in enumerate(self._orders):
            if step >= len(order):
                continue
            count = len(order[step])
            self._loss[index] += loss_K[index] * count
            self._correct[index] += correct_K[index]
            self._seen[index] += count
            routing = [site[index].detach() for site in figures["routing"]]
            # Statistics belong to rounds that train the routers; in others only one tower may have run.
            if routing and "router" in self._plan.train:
                self._ema[index] = update_ema(self._ema[index], routing, self._plan.stability_ema)

    def results(self, seconds: float) -> list[Trained]:
        return [
            Trained(
                params={name: value[index].detach().clone() for name, value in self._trained.items()},
                ema=None if self._ema[index] is None else tuple(self._ema[index] or ()),
                loss=self._loss[index] / max(1, self._seen[index]),
                accuracy=self._correct[index] / max(1, self._seen[index]),
                steps=len(self._orders[index]),
                seconds=seconds,
            )
            for index in range(len(self._jobs))
        ]


@dataclass(frozen=True)
class _Batches:
    """All features a round trains on, images first, then rehearsed ones; their labels; the rows of every step."""

    x: Tensor
    labels: Tensor
    rows: list[Tensor]


def _batches(job: Job, plan: LocalPlan) -> _Batches:
    """Batches of images, each with its share of features drawn from prototypes where there are any."""
    order = _image_batches(job, plan)
    if not plan.rehearsal or job.prototypes is None:
        return _Batches(job.x, job.labels_N, order)
    sizes = [round(len(rows) * plan.rehearsal) for rows in order]
    generator = torch.Generator().manual_seed(derive_seed(job.seed, "rehearsal", job.client, job.stage, job.round))
    x_ND, labels = job.prototypes.draw(sum(sizes), generator)
    x = x_ND.view(-1, *job.x.shape[1:])
    drawn = (len(job.x) + torch.arange(sum(sizes))).split(sizes)
    return _Batches(
        torch.cat([job.x, x]),
        torch.cat([job.labels_N, labels]),
        [torch.cat(pair) for pair in zip(order, drawn, strict=True)],
    )


def _image_batches(job: Job, plan: LocalPlan) -> list[Tensor]:
    """Rows of images of every step: shuffled passes over them, the last short batch kept."""
    generator = torch.Generator().manual_seed(derive_seed(job.seed, "batches", job.client, job.stage, job.round))
    order: list[Tensor] = []
    for _ in range(plan.optimiser.local_epochs):
        shuffled = torch.randperm(len(job.x), generator=generator)
        order += list(shuffled.split(plan.optimiser.batch_size))
    return order[: plan.optimiser.max_steps] if plan.optimiser.max_steps else order


@torch.no_grad()
def _prepare(
    job: Job,
    batches: _Batches,
    model: DuetModel,
    plan: LocalPlan,
    classes_C: Tensor,
    image_frozen: bool,
    text_frozen: bool,
) -> Batch:
    """What stays the same within a round; arrays under ``rows`` are indexed per step."""
    x = batches.x
    constant: Batch = {"rows": {"y": batches.labels}}
    if image_frozen:
        constant["rows"]["z"] = encode_images(model, job.params, x)
        if plan.generic:
            constant["rows"]["z_general"] = encode_images(model, without_experts(model, job.params), x)
    else:
        constant["rows"]["x"] = x
    if text_frozen:
        constant["text"] = model.run(job.params, "encode_text", classes_C)[0]
    if plan.logits == "fused":
        constant["dispatched"] = model.run(job.params, "encode_text_under", job.contexts_MLW, classes_C)
    if plan.prior or plan.generic:
        constant["log_share"] = log_class_shares(*_met(job, len(classes_C)))
    if plan.rehearsal:
        constant["log_sampling"] = log_sampling(job, plan.rehearsal, len(classes_C))
    if plan.stability and job.frozen is not None:
        constant["frozen"] = job.frozen
    if plan.distill and job.teacher is not None:
        teacher = without_experts(model, job.teacher)
        text_CD = model.run(teacher, "encode_text", classes_C)[0]
        constant["rows"]["teacher"] = model.local_logits(encode_images(model, teacher, x), text_CD)
    if plan.proximal:
        constant["start"] = {n: value for n, value in job.params.items() if model.group_of(n) in plan.train}
    if plan.ewc and job.fisher:
        constant["fisher"], constant["anchor"] = job.fisher, job.anchor
    return constant


def _met(job: Job, classes: int) -> tuple[Tensor, Tensor]:
    """Images of each class (C,) in this stage, and in the earlier ones that are rehearsed."""
    now_C = torch.bincount(job.labels_N, minlength=classes).float()
    before_C = torch.zeros(classes)
    if job.prototypes is not None:
        before_C.index_add_(0, job.prototypes.classes_P, job.prototypes.counts_P.float())
    return now_C, before_C


def log_class_shares(*counts_C: Tensor) -> Tensor:
    """Log of class shares (C,), each class counted 0.1 more so that absent ones stay finite."""
    total_C = torch.stack(counts_C).sum(0) + 0.1
    return (total_C / total_C.sum()).log()


def log_sampling(job: Job, rehearsal: float, classes: int) -> Tensor:
    """Log of class shares in batches, minus log of the client's class shares over all stages (C,)."""
    now_C, before_C = _met(job, classes)
    drawn_C = rehearsal * now_C.sum() * before_C / before_C.sum().clamp(min=1.0)
    return log_class_shares(now_C, drawn_C) - log_class_shares(now_C, before_C)


@torch.no_grad()
def encode_images(model: DuetModel, params: Params, x: Tensor) -> Tensor:
    """Normalised image features (N, D), in evaluation mode and in chunks."""
    return torch.cat([model.run(params, "encode_image", chunk)[0] for chunk in x.split(_CHUNK)])


def _mapped_gradients(
    objective: Objective, trained: Params, fixed: Params, stacked: Batch
) -> tuple[Params, dict[str, Any]]:
    """Gradients per client of an objective that runs through frozen layers all clients share.

    One backward pass over the sum would multiply by a shared weight in one large product and a fifth slower.
    ``torch.func.grad`` imports torch's compiler (0.8 CPU seconds, 150 MB), so it is left alone where it gains nothing.
    """
    from torch.func import grad

    result: tuple[Params, dict[str, Any]] = vmap(grad(objective, has_aux=True))(trained, fixed, stacked)
    return result


def _batch_at(prepared: Batch, rows: Tensor, width: int) -> Batch:
    batch: Batch = {name: value for name, value in prepared.items() if name != "rows"}
    for name, values in prepared["rows"].items():
        batch[name] = _pad(values[rows], width)
    batch["weight"] = _pad(torch.ones(len(rows)), width)
    return batch


def _pad(values: Tensor, width: int) -> Tensor:
    missing = width - len(values)
    return values if missing == 0 else torch.cat([values, values.new_zeros(missing, *values.shape[1:])])


def _stack(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return torch.stack(list(batches))
    if isinstance(first, Noise):
        return stack_noise(batches)
    if isinstance(first, dict):
        return {name: _stack([batch[name] for batch in batches]) for name in first}
    return tuple(_stack(list(items)) for items in zip(*batches, strict=True))


def _with_axis(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [site.unsqueeze(0) for site in value] if isinstance(value, list) else value.unsqueeze(0)
        for name, value in figures.items()
    }


def _touches_image(model: DuetModel, name: str) -> bool:
    group = model.group_of(name)
    return group in ("head", "lora") or name.startswith("image_adapters.")


def _touches_text(model: DuetModel, name: str) -> bool:
    group = model.group_of(name)
    return group in ("prompt", "lora") or name.startswith("text_adapters.")
