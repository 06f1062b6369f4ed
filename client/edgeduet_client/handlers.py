"""Answer one message, or train a block of them: decode, load personal state, work, store, reply.

Personal state of a client is a flat dict of arrays:

* ``params/NAME``: values of the personal groups,
* ``cache/NAME``: last received values of groups the plan tells to remember,
* ``ema/i``, ``frozen/i``: routing averages per site, running and of the previous stage (U16),
* ``teacher/NAME``: values this client began the stage with (distillation, EWC's anchor),
* ``fisher/NAME``: EWC's importance, summed over stages,
* ``prototypes/STAGE/...``: class prototypes (:mod:`edgeduet_client.prototypes`),
* ``contexts/INDEX``: prompts dispatched last, used at inference (U6),
* ``stage``: the stage of the last training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from torch import Tensor

from edgeduet_client.device.training_rules import TrainingRules, device_rules
from edgeduet_client.fisher import diagonal_fisher
from edgeduet_client.local_training import Job, Trained, encode_images, train_clients
from edgeduet_client.personal_store import AFTER_STAGE, Arrays, DiskStore, MemoryStore, PersonalStore
from edgeduet_client.prompt_usage import prompt_usage
from edgeduet_client.prototypes import Prototypes, memorise, recall
from edgeduet_shared.data.own_images import client_folder, folder_stamp
from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.evaluation import evaluate_held_out, evaluate_rows, merged_params, predictor
from edgeduet_shared.experiment import Experiment, OwnExperiment, experiment_for
from edgeduet_shared.messages import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest, decode, encode
from edgeduet_shared.plan import Group, LocalPlan
from edgeduet_shared.privacy import clip_and_noise, privatise_update
from edgeduet_shared.run_config import RunConfig
from edgeduet_shared.seeds import derive_seed

_DIGEST_IMAGES = 512
_TEACHES: tuple[Group, ...] = ("shared_adapter", "prompt", "lora", "head")
"""Groups of the model before the stage; routed adapters and fusion are not on the distilled path."""
_MEMORY = MemoryStore()


@dataclass(frozen=True)
class Client:
    """Who answers, with what: resolved from Flower's context."""

    partition: int
    experiment: Experiment
    seed: int
    run: str
    store: PersonalStore


def client_of(context: Context) -> Client:
    """Resolve the client from run configuration (``edgeduet_shared.run_config``) and node configuration.

    An empty ``personal-dir`` keeps personal state in memory. On a device it lies under the device's home,
    whatever the run says.

    Raises:
        ConfigError: the device does not take part in such a run.
    """
    config = RunConfig.from_flower(context.run_config)
    rules = device_rules()
    if rules is not None:
        rules.check_run(config)
        config = replace(config, personal_dir=str(rules.personal))
    partition = int(context.node_config["partition-id"])
    experiment = experiment_for(config.scenario_json, config.seed, config.split_file)
    if experiment.scenario.data.on_devices:
        experiment = _own_experiment(experiment, partition, rules)
    store: PersonalStore = _disk_store(config.personal_dir) if config.personal_dir else _MEMORY
    if not config.personal_dir:
        _MEMORY.open(config.run_name)
    return Client(partition, experiment, experiment.seed, config.run_name, store)


def _own_experiment(shared: Experiment, partition: int, rules: TrainingRules | None) -> Experiment:
    """Return what this client sees where images lie on the devices: of a simulated one, a folder of its own."""
    data = shared.scenario.data
    images, labels = (client_folder(data.source, partition), None) if rules is None else rules.images()
    return _own(shared, partition, images, labels, folder_stamp(images, labels))


# On a device every message is a process; clients of a simulation share one. The stamp lets new images take part.
@lru_cache(maxsize=1024)
def _own(
    shared: Experiment, partition: int, folder: Path, labels: Path | None, stamp: tuple[tuple[str, int], ...]
) -> Experiment:
    return OwnExperiment(shared, partition, folder, labels)


def personal_snapshot() -> MemoryStore:
    """The personal states of this process's simulated clients, for the run's checkpoint."""
    return _MEMORY


@lru_cache(maxsize=8)
def _disk_store(folder: str) -> DiskStore:
    return DiskStore(Path(folder))


# -- training ------------------------------------------------------------------------------------------


def handle_train(message: Message, context: Context) -> Message:
    """Train one client for one round."""
    return handle_block([message], [context])[0]


def handle_block(messages: list[Message], contexts: list[Context]) -> list[Message]:
    """Train several clients of one round; those whose work has the same shape run as one block.

    Every reply equals what :func:`handle_train` gives for the message, as precisely as
    :mod:`edgeduet_client.local_training` says.
    """
    torch.set_num_threads(1)
    works = [
        _Work.start(client_of(context), decode(message.content, TrainRequest))
        for message, context in zip(messages, contexts, strict=True)
    ]
    busy = [work for work in works if work.job is not None]
    trained: dict[int, Trained] = {}
    for group in _same_shape(busy):
        first = group[0]
        jobs = [work.job for work in group if work.job is not None]
        for work, result in zip(group, train_clients(first.model, first.plan, first.class_ids, jobs), strict=True):
            trained[id(work)] = result
    replies = [work.finish(trained.get(id(work))) for work in works]
    return [Message(encode(reply), reply_to=message) for message, reply in zip(messages, replies, strict=True)]


def _same_shape(works: Sequence[_Work]) -> list[list[_Work]]:
    groups: dict[Any, list[_Work]] = {}
    for work in works:
        assert work.job is not None
        job = work.job
        key = (
            work.plan,
            work.class_ids,
            tuple(job.contexts_MLW.shape),
            job.frozen is None,
            job.teacher is None,
            tuple(sorted(job.fisher)),
            tuple(job.x.shape[1:]),
        )
        groups.setdefault(key, []).append(work)
    return list(groups.values())


@dataclass
class _Work:
    """One client's round between decoding and reply."""

    client: Client
    request: TrainRequest
    model: DuetModel
    class_ids: tuple[int, ...]
    state: Arrays
    start_params: Params
    job: Job | None
    started: float

    @property
    def plan(self) -> LocalPlan:
        return self.request.plan

    @classmethod
    def start(cls, client: Client, request: TrainRequest) -> _Work:
        started = time.perf_counter()
        rules = device_rules()
        if rules is not None:
            rules.check_training(request.plan)
        plan, experiment = request.plan, client.experiment
        model = experiment.model(plan.parts)
        at = (request.stage, request.round)
        state = dict(client.store.load(client.run, client.partition, at) or {})
        new_stage = int(state.get("stage", np.array(-1))) != request.stage
        _remember(state, request, model)
        params = merged_params(model, client.seed, _under(state, "cache/"), request.shared, _under(state, "params/"))
        if new_stage and request.stage > 0 and (plan.distill or plan.ewc):
            before = {name: value for name, value in params.items() if model.group_of(name) in _TEACHES}
            state.update({f"teacher/{name}": value.numpy() for name, value in before.items()})
        rows, class_ids = _training_rows(client, request)
        job = None
        if len(rows):
            x, labels = experiment.rows(plan.parts, rows)
            if plan.rehearsal:
                memorise(state, request.stage, x, labels)
            job = Job(
                client=client.partition,
                stage=request.stage,
                round=request.round,
                seed=client.seed,
                x=x,
                labels_N=_positions(labels, class_ids),
                params=params,
                contexts_MLW=_contexts(request.contexts, model),
                frozen=_sites(state, "frozen/"),
                ema=_sites(state, "ema/"),
                teacher=_teacher(state, params) if plan.distill and request.stage > 0 else None,
                fisher=_tensors(_under(state, "fisher/")) if plan.ewc else {},
                anchor=_tensors(_under(state, "teacher/")) if plan.ewc else {},
                prototypes=_prototypes(state, request.stage, class_ids) if plan.rehearsal else None,
            )
        return cls(client, request, model, class_ids, state, params, job, started)

    def finish(self, trained: Trained | None) -> TrainReply:
        """Store the personal state and build the reply; without images the reply has zero examples."""
        client, request, plan, model = self.client, self.request, self.plan, self.model
        if trained is None or self.job is None:
            self._save()
            return TrainReply(client.partition, request.stage, request.round, 0, 0.0, 0.0, 0, self._seconds())
        params = {**self.start_params, **trained.params}
        self._keep(params, trained)
        reply = TrainReply(
            client=client.partition,
            stage=request.stage,
            round=request.round,
            examples=len(self.job.x),
            loss=trained.loss,
            accuracy=trained.accuracy,
            steps=trained.steps,
            seconds=0.0,
            usage=prompt_usage(model, params, self.job, self.class_ids, list(request.contexts)) if plan.usage else {},
            update=self._update(params),
            digest={"digest": self._digest(params)} if plan.digest else {},
        )
        self._save()
        return replace(reply, seconds=self._seconds())

    def _seconds(self) -> float:
        return time.perf_counter() - self.started

    def _keep(self, params: Params, trained: Trained) -> None:
        model, plan, state = self.model, self.plan, self.state
        for name, value in params.items():
            if model.group_of(name) in plan.personal:
                state[f"params/{name}"] = value.numpy()
        if trained.ema is not None:
            _replace_sites(state, "ema/", trained.ema)
        if plan.last_round and trained.ema is not None:
            _replace_sites(state, "frozen/", trained.ema)
        if plan.last_round and plan.ewc and self.job is not None:
            fisher = diagonal_fisher(model, plan, self.class_ids, replace(self.job, params=params))
            for name, value in fisher.items():
                before = state.get(f"fisher/{name}")
                state[f"fisher/{name}"] = value.numpy() if before is None else before + value.numpy()

    def _update(self, params: Params) -> dict[str, np.ndarray]:
        plan, privacy = self.plan, self.plan.privacy
        update = {n: value.numpy() for n, value in params.items() if self.model.group_of(n) in plan.upload}
        if privacy.update_clip > 0 and update:
            start = {name: self.start_params[name].numpy() for name in update}
            update = privatise_update(update, start, privacy.update_clip, privacy.update_noise, self._rng("update"))
        return update

    def _digest(self, params: Params) -> np.ndarray:
        assert self.job is not None
        mean = encode_images(self.model, params, self.job.x[:_DIGEST_IMAGES]).mean(0).numpy()
        privacy = self.plan.privacy
        if privacy.digest_noise == 0:
            return mean
        return clip_and_noise(mean, privacy.digest_clip, privacy.digest_noise, self._rng("digest"))

    def _rng(self, purpose: str) -> np.random.Generator:
        request = self.request
        if self.plan.privacy.noise_seed == "secret":
            # Noise that the server could draw again from the run's seed would hide nothing from it.
            return np.random.default_rng()
        seed = derive_seed(self.client.seed, purpose, self.client.partition, request.stage, request.round)
        return np.random.default_rng(seed)

    def _save(self) -> None:
        at = (self.request.stage, self.request.round)
        self.client.store.save(self.client.run, self.client.partition, at, self.state)


def _remember(state: Arrays, request: TrainRequest, model: DuetModel) -> None:
    """Take over what this request brings, before training changes anything."""
    plan = request.plan
    for name, value in request.shared.items():
        if name in model_names(model) and model.group_of(name) in plan.remember:
            state[f"cache/{name}"] = value
    for key in [key for key in state if key.startswith("contexts/")] if request.contexts else []:
        del state[key]
    for index, value in request.contexts.items():
        state[f"contexts/{index}"] = value
    state["stage"] = np.array(request.stage)


@lru_cache(maxsize=64)
def model_names(model: DuetModel) -> frozenset[str]:
    """Names of the parameters of a model structure."""
    return frozenset(name for name, _ in model.named_parameters())


def _training_rows(client: Client, request: TrainRequest) -> tuple[np.ndarray, tuple[int, ...]]:
    split, stage, data = client.experiment.split, request.stage, request.plan.data
    if data == "own":
        classes = split.seen_classes(stage) if request.plan.rehearsal else split.tasks[stage].class_ids
        return split.train[stage][client.partition], tuple(classes)
    stages = range(stage + 1) if data == "pooled-seen" else [stage]
    rows = np.concatenate([rows for task in stages for rows in split.train[task]])
    classes = split.seen_classes(stage) if data == "pooled-seen" else split.tasks[stage].class_ids
    return np.sort(rows), tuple(classes)


def _positions(labels: Tensor, class_ids: Sequence[int]) -> Tensor:
    lookup = torch.full((max(class_ids) + 1,), -1, dtype=torch.long)
    lookup[torch.as_tensor(class_ids)] = torch.arange(len(class_ids))
    return lookup[labels]


# -- evaluation ----------------------------------------------------------------------------------------


def handle_evaluate(message: Message, context: Context) -> Message:
    """Evaluate the personal and the plain global model of one client after a stage."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    client, request = client_of(context), decode(message.content, EvaluateRequest)
    rules = device_rules()
    if rules is not None:
        rules.check_evaluation()
    plan, experiment, stage = request.plan, client.experiment, request.stage
    model, split = experiment.model(plan.parts), experiment.split
    classes = len(split.class_names)
    state = client.store.load(client.run, client.partition, (stage, AFTER_STAGE)) or {}
    general = merged_params(model, client.seed, request.shared)
    own = merged_params(model, client.seed, request.shared, _under(state, "params/"))
    contexts = _contexts(request.contexts or _under(state, "contexts/"), model) if plan.evaluate_fused else None
    personal = predictor(model, own, classes, contexts_MLW=contexts, mix=plan.mix)
    shared = predictor(model, general, classes)
    mine = [rows[client.partition] for rows in split.client_test]
    # Where images lie on the devices, nothing is common.
    common = [] if experiment.scenario.data.on_devices else split.test
    held_out = evaluate_held_out(personal, experiment, plan.parts)
    reply = EvaluateReply(
        client=client.partition,
        stage=stage,
        personal=evaluate_rows(personal, experiment, plan.parts, stage, mine),
        shared=evaluate_rows(shared, experiment, plan.parts, stage, mine),
        totals=tuple(len(rows) for rows in mine),
        personal_common=(
            evaluate_rows(personal, experiment, plan.parts, stage, common)
            if request.common and common
            else (-1,) * len(split.tasks)
        ),
        common_totals=tuple(len(rows) for rows in common) or (0,) * len(split.tasks),
        held_out=held_out[0],
        held_out_total=held_out[1],
        seconds=time.perf_counter() - started,
    )
    if rules is not None:
        from edgeduet_client.classifier.stage_export import export_after_stage

        export_after_stage(personal, experiment, rules.classifier, run=client.run, client=client.partition, stage=stage)
    return Message(encode(reply), reply_to=message)


# -- state ---------------------------------------------------------------------------------------------


def _under(state: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _tensors(arrays: Mapping[str, np.ndarray]) -> Params:
    return {name: torch.from_numpy(np.array(value, dtype=np.float32)) for name, value in arrays.items()}


def _teacher(state: Arrays, params: Params) -> Params:
    before = _tensors(_under(state, "teacher/"))
    return {name: before.get(name, value) for name, value in params.items()}


def _prototypes(state: Arrays, stage: int, class_ids: Sequence[int]) -> Prototypes | None:
    found = recall(state, stage)
    return None if found is None else replace(found, classes_P=_positions(found.classes_P, class_ids))


def _sites(state: Arrays, prefix: str) -> tuple[Tensor, ...] | None:
    found = _under(state, prefix)
    if not found:
        return None
    return tuple(torch.from_numpy(np.array(found[str(index)])) for index in range(len(found)))


def _replace_sites(state: Arrays, prefix: str, sites: Sequence[Tensor]) -> None:
    for index, site in enumerate(sites):
        state[f"{prefix}{index}"] = site.numpy()


def _contexts(contexts: Mapping[str, np.ndarray], model: DuetModel) -> Tensor:
    """Stack dispatched contexts (M, L, W) in the order of their pool indices."""
    ordered = [contexts[key] for key in sorted(contexts, key=int)]
    if ordered:
        return torch.from_numpy(np.stack(ordered).astype(np.float32))
    return torch.zeros(0, model.config.prompt.length, 1)
