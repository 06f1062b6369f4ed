"""A client answers: what it keeps, what it sends, what it remembers. Real stack, generated world, tiny sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from edgeduet_client.handlers import handle_block, handle_evaluate, handle_train
from edgeduet_client.local_training import encode_images
from edgeduet_client.personal_store import DiskStore
from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_shared.config import PrivacyConfig, Scenario
from edgeduet_shared.data.split import save_split
from edgeduet_shared.duet import DuetModel
from edgeduet_shared.evaluation import merged_params
from edgeduet_shared.experiment import Experiment, experiment_for
from edgeduet_shared.messages import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest, decode, encode
from edgeduet_shared.plan import LocalPlan
from edgeduet_shared.run_config import RunConfig

EMPTY = 2
"""The client whose training images of the first task were taken away."""
SCENARIO = Scenario.model_validate(
    {
        "name": "tiny",
        "data": {"max_per_class": 6, "domains": ["photo"]},
        "stream": {"kind": "class-incremental", "classes_per_task": 4},
        "model": {
            "adapter": {"experts": 2, "bottleneck": 4, "shared_bottleneck": 8},
            "pool": {"size": 6, "dispatched": 2},
        },
        "train": {"batch_size": 8},
        "federation": {"clients": 3, "rounds": 2},
    }
)


@dataclass
class Device:
    """One run's clients, their states in a folder of its own."""

    folder: Path
    split_file: str

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            SCENARIO,
            "fed-duet",
            run_dir=self.folder,
            run_name="run",
            split_file=self.split_file,
            personal_dir=str(self.folder / "personal"),
        )

    @property
    def experiment(self) -> Experiment:
        return experiment_for(self.config.scenario_json, 0, self.split_file)

    def context(self, client: int) -> Context:
        return Context(1, client + 1, {"partition-id": client}, RecordDict(), self.config.to_flower())

    def train(self, client: int, request: TrainRequest) -> TrainReply:
        message = Message(encode(request), client + 1, "train")
        return decode(handle_train(message, self.context(client)).content, TrainReply)

    def evaluate(self, client: int, request: EvaluateRequest) -> EvaluateReply:
        message = Message(encode(request), client + 1, "evaluate")
        return decode(handle_evaluate(message, self.context(client)).content, EvaluateReply)

    def state(self, client: int) -> dict[str, np.ndarray]:
        found = DiskStore(self.folder / "personal").load("run", client, (9, 9))
        assert found is not None
        return found

    def plan(self, method: str = "fed-duet", round: int = 0, stage: int = 0, **options: Any) -> LocalPlan:
        return make_strategy(method, options, SCENARIO, self.experiment).plan(stage, round)

    def model(self, plan: LocalPlan) -> DuetModel:
        return self.experiment.model(plan.parts)

    def shared(self, plan: LocalPlan, by: float = 0.0) -> dict[str, np.ndarray]:
        """The groups the server owns, each value moved by ``by``."""
        model = self.model(plan)
        groups = ("shared_adapter", "router", "prompt", "fusion")
        return {n: v.numpy() + by for n, v in model.initial(0).items() if model.group_of(n) in groups}

    def contexts(self, *indices: int) -> dict[str, np.ndarray]:
        width = self.model(self.plan()).initial(0)["prompt.context"].shape
        return {str(i): np.random.default_rng(i).normal(0, 0.02, tuple(width)).astype(np.float32) for i in indices}


def barely(plan: LocalPlan) -> LocalPlan:
    """The plan with steps too small to move anything."""
    still = {"lr": 1e-30, "prompt_lr": 1e-30, "weight_decay": 0.0}
    return plan.model_copy(update={"optimiser": plan.optimiser.model_copy(update=still)})


def in_group(device: Device, plan: LocalPlan, arrays: dict[str, np.ndarray], group: str) -> dict[str, np.ndarray]:
    return {n: v for n, v in arrays.items() if device.model(plan).group_of(n.removeprefix("params/")) == group}


@pytest.fixture(autouse=True)
def sender() -> None:
    """Flower's messages take their sender from the task of the process."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


@pytest.fixture(scope="module")
def split_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    split = Experiment(SCENARIO, 0).split
    first = tuple(rows[:0] if client == EMPTY else rows for client, rows in enumerate(split.train[0]))
    path = tmp_path_factory.mktemp("split") / "split.json"
    save_split(replace(split, train=(first, *split.train[1:])), path)
    return str(path)


@pytest.fixture
def device(tmp_path: Path, split_file: str) -> Device:
    return Device(tmp_path, split_file)


# -- training ----------------------------------------------------------------------------------------


def test_a_client_without_images_replies_with_zero_examples_and_remembers_what_it_was_sent(device: Device) -> None:
    plan = device.plan()

    reply = device.train(EMPTY, TrainRequest(0, 0, plan, device.shared(plan, 0.5)))

    assert (reply.client, reply.examples, reply.steps, reply.update, reply.digest) == (EMPTY, 0, 0, {}, {})
    cached = in_group(device, plan, _under(device.state(EMPTY), "cache/"), "shared_adapter")
    assert cached and all(np.array_equal(v, device.shared(plan, 0.5)[n]) for n, v in cached.items())


def test_personal_groups_never_leave_and_are_where_the_next_round_starts(device: Device) -> None:
    plan = device.plan()
    first = device.train(0, TrainRequest(0, 0, plan, device.shared(plan)))
    learned = in_group(device, plan, _under(device.state(0), "params/"), "routed_adapters")

    second = device.train(0, TrainRequest(0, 1, barely(plan), device.shared(plan)))

    groups = {device.model(plan).group_of(name) for reply in (first, second) for name in reply.update}
    assert groups == {"shared_adapter", "router"}
    fresh = device.model(plan).initial(0)
    assert any(not np.array_equal(value, fresh[name].numpy()) for name, value in learned.items())
    again = in_group(device, plan, _under(device.state(0), "params/"), "routed_adapters")
    assert learned.keys() == again.keys()
    for name, value in learned.items():
        np.testing.assert_allclose(again[name], value, rtol=0, atol=1e-20)


def test_a_round_that_is_repeated_gives_the_same_reply(device: Device) -> None:
    plan = device.plan()
    device.train(0, TrainRequest(0, 0, plan, device.shared(plan)))
    request = TrainRequest(0, 1, plan, device.shared(plan))

    first, second = device.train(0, request), device.train(0, request)

    assert first.loss == second.loss
    assert all(np.array_equal(value, second.update[name]) for name, value in first.update.items())


def test_groups_to_remember_are_used_when_they_are_not_sent(device: Device) -> None:
    plan = barely(device.plan())
    sent = device.shared(plan, 0.25)
    device.train(0, TrainRequest(0, 0, plan, sent))

    reply = device.train(0, TrainRequest(0, 1, plan, {}))

    assert reply.update and all(np.array_equal(value, sent[name]) for name, value in reply.update.items())
    newer = device.train(0, TrainRequest(0, 2, plan, device.shared(plan, 0.5)))
    assert all(np.array_equal(v, device.shared(plan, 0.5)[n]) for n, v in newer.update.items()), "what is sent wins"


def test_a_block_of_clients_replies_like_each_of_them(device: Device, tmp_path: Path) -> None:
    plan = device.plan()
    # Random, not constant: equal columns make gradients that are zero but for rounding, which AdamW scales up.
    source = np.random.default_rng(0)
    moved = {n: v + source.normal(0, 0.05, v.shape).astype(np.float32) for n, v in device.shared(plan).items()}
    request = TrainRequest(0, 0, plan, moved)
    alone = Device(tmp_path / "alone", device.split_file)
    messages = [Message(encode(request), client + 1, "train") for client in range(3)]

    answers = handle_block(messages, [device.context(client) for client in range(3)])

    for client, answer in enumerate(answers):
        together, single = decode(answer.content, TrainReply), alone.train(client, request)
        assert (together.client, together.examples, together.steps) == (client, single.examples, single.steps)
        assert together.update.keys() == single.update.keys()
        for name, value in together.update.items():
            np.testing.assert_allclose(value, single.update[name], rtol=0, atol=1e-5)


def test_the_digest_is_the_mean_of_normalised_image_features(device: Device) -> None:
    plan = barely(device.plan())
    reply = device.train(0, TrainRequest(0, 0, plan, device.shared(plan)))

    model = device.model(plan)
    x, _ = device.experiment.rows(plan.parts, device.experiment.split.train[0][0])
    features = encode_images(model, merged_params(model, 0, device.shared(plan)), x)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(len(x)))
    np.testing.assert_allclose(reply.digest["digest"], features.mean(0).numpy(), atol=1e-5)


def test_a_private_digest_is_clipped_and_carries_noise_that_differs_per_round(device: Device) -> None:
    def digest(noise: float, round: int = 0) -> np.ndarray:
        privacy = PrivacyConfig(digest_clip=0.1, digest_noise=noise, noise_seed="run")
        plan = barely(device.plan()).model_copy(update={"privacy": privacy})
        return device.train(0, TrainRequest(0, round, plan, device.shared(plan))).digest["digest"]

    nearly_none, noisy = digest(1e-6), digest(1.0)

    assert np.linalg.norm(nearly_none) == pytest.approx(0.1, rel=1e-3)
    assert (noisy - nearly_none).std() == pytest.approx(0.1, rel=0.5)
    assert np.array_equal(noisy, digest(1.0)), "a repeated round must not be averaged away"
    assert not np.allclose(noisy, digest(1.0, round=1), atol=0.01)


def test_usage_and_the_local_share_sum_to_one(device: Device) -> None:
    plan = device.plan(round=1)
    contexts = device.contexts(11, 4)
    reply = device.train(0, TrainRequest(0, 1, plan, device.shared(plan), contexts))

    model, split = device.model(plan), device.experiment.split
    params = merged_params(model, 0, device.shared(plan), _under(device.state(0), "params/"))
    x, labels = device.experiment.rows(plan.parts, split.train[0][0])
    ids = torch.as_tensor(split.tasks[0].class_ids)
    stacked = torch.from_numpy(np.stack([contexts["4"], contexts["11"]]))
    with torch.no_grad():
        z, t = encode_images(model, params, x), model.run(params, "encode_text", ids)[0]
        u = model.run(params, "encode_text_under", stacked, ids)
        attention = model.run(params, "fused_logits", z, t, u, 0.5)[1]
    true = torch.stack([attention[i, ids.tolist().index(int(label))] for i, label in enumerate(labels)]).mean(0)
    assert reply.usage == pytest.approx({"4": true[1].item(), "11": true[2].item()}, abs=1e-5)
    assert sum(reply.usage.values()) + true[0].item() == pytest.approx(1.0, abs=1e-5)


def test_fisher_information_is_kept_after_the_last_round_of_a_stage_and_never_sent(device: Device) -> None:
    plans = [device.plan("fed-ewc", round) for round in range(2)]
    shared = {n: v.numpy() for n, v in device.model(plans[0]).initial(0).items()}
    device.train(0, TrainRequest(0, 0, plans[0], shared))
    assert not _under(device.state(0), "fisher/")

    reply = device.train(0, TrainRequest(0, 1, plans[1], shared))

    fisher = _under(device.state(0), "fisher/")
    assert fisher.keys() == shared.keys() == reply.update.keys()
    assert all((value >= 0).all() for value in fisher.values()) and any(value.any() for value in fisher.values())


def test_the_next_stage_is_anchored_to_the_first_values_received_in_it(device: Device) -> None:
    """fed-ewc: a huge weight holds important parameters where the stage found them, also in its second round."""
    plans = [device.plan("fed-ewc", round, weight=1e6) for round in range(2)]
    start = {n: v.numpy() for n, v in device.model(plans[0]).initial(0).items()}
    first = device.train(0, TrainRequest(0, 1, plans[1], start)).update
    device.train(0, TrainRequest(1, 0, plans[0], first))

    anchor = _under(device.state(0), "teacher/")
    device.train(0, TrainRequest(1, 1, plans[1], start))

    assert anchor and all(np.array_equal(value, first[name]) for name, value in anchor.items())
    again = _under(device.state(0), "teacher/")
    assert again.keys() == anchor.keys() and all(np.array_equal(v, again[n]) for n, v in anchor.items())


def test_distillation_teaches_what_the_model_was_before_the_stage(device: Device) -> None:
    """fed-lwf: in the stage's second round the teacher is still the model the stage began with."""
    plans = [device.plan("fed-lwf", round) for round in range(2)]
    start = {n: v.numpy() for n, v in device.model(plans[0]).initial(0).items()}
    moved = {name: value + 0.05 for name, value in start.items()}
    device.train(0, TrainRequest(0, 1, plans[1], start))
    device.train(0, TrainRequest(1, 0, plans[0], start))
    device.train(0, TrainRequest(1, 1, plans[1], moved))

    teacher = _under(device.state(0), "teacher/")

    assert teacher and all(np.array_equal(value, start[name]) for name, value in teacher.items())


def test_class_prototypes_stay_and_are_rehearsed_in_the_next_stage_among_all_classes_seen(device: Device) -> None:
    plan = device.plan()
    shared = device.shared(plan)
    first = device.train(0, TrainRequest(0, 0, plan, shared))
    kept = {n: v for n, v in device.state(0).items() if n.startswith("prototypes/")}
    split = device.experiment.split
    assert set(kept["prototypes/0/classes"]) == set(split.labels[split.train[0][0]])
    assert int(kept["prototypes/0/counts"].sum()) == first.examples

    rehearsed = device.train(0, TrainRequest(1, 0, plan, shared))

    assert rehearsed.examples == len(split.train[1][0])
    assert {device.model(plan).group_of(name) for name in rehearsed.update} == {"shared_adapter", "router"}
    assert set(rehearsed.digest) == {"digest"} and not rehearsed.usage
    assert "prototypes/1/classes" in device.state(0)
    forgetful = Device(device.folder / "forgetful", device.split_file)
    other = forgetful.train(0, TrainRequest(1, 0, plan, shared))
    assert any(not np.array_equal(value, other.update[name]) for name, value in rehearsed.update.items())


# -- evaluation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_a_task_is_scored_among_the_classes_seen_up_to_it_or_up_to_now(device: Device, stage: int) -> None:
    plan = device.plan(round=1)
    model, split = device.model(plan), device.experiment.split
    shared = device.shared(plan, 0.02)

    reply = device.evaluate(1, EvaluateRequest(stage, plan, True, shared))

    tasks = len(split.tasks)
    assert all(len(counts) == tasks for counts in (reply.personal, reply.shared, reply.personal_common))
    assert reply.totals == tuple(len(rows[1]) for rows in split.client_test)
    assert reply.common_totals == tuple(len(rows) for rows in split.test)
    params = merged_params(model, 0, shared)
    every = torch.arange(len(split.class_names))
    expected = []
    with torch.no_grad():
        text = model.run(params, "encode_text", every)[0]
        for task in range(tasks):
            x, labels = device.experiment.rows(plan.parts, split.client_test[task][1])
            allowed = {c for seen in split.tasks[: max(stage, task) + 1] for c in seen.class_ids}
            logits = model.local_logits(encode_images(model, params, x), text) if len(x) else torch.zeros(0, len(every))
            best = [max(allowed, key=lambda c, row=row: float(row[c])) for row in logits]
            expected.append(sum(int(c == label) for c, label in zip(best, labels.tolist(), strict=True)))
    assert reply.shared == tuple(expected)


def test_where_the_common_test_sets_are_not_asked_for_there_is_no_count(device: Device) -> None:
    plan = device.plan(round=1)

    reply = device.evaluate(0, EvaluateRequest(0, plan, False, device.shared(plan)))

    assert set(reply.personal_common) == {-1}


def test_what_a_client_learned_is_in_its_personal_model_only(device: Device) -> None:
    quick = {"lr": 0.05, "prompt_lr": 0.05, "local_epochs": 8}
    plan = device.plan(round=1)
    fast = plan.model_copy(update={"optimiser": plan.optimiser.model_copy(update=quick)})
    shared = device.shared(plan)
    before = device.evaluate(0, EvaluateRequest(0, plan, True, shared))
    device.train(0, TrainRequest(0, 1, fast, shared, device.contexts(1, 2)))

    after = device.evaluate(0, EvaluateRequest(0, plan, True, shared))

    assert after.shared == before.shared
    assert after.personal_common != before.personal_common


def _under(state: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
