"""The recurrent drafter as a federation trains it, and what a device does with the drafters it is handed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from edgeduet_client.device import training_rules
from edgeduet_client.device.device_config import (
    CONFIG_FILE,
    DataSection,
    DeviceConfig,
    PrivacySection,
    write_device_config,
)
from edgeduet_client.device.training_rules import HOME_VARIABLE
from edgeduet_client.drafters.handlers import handle_evaluate, handle_train, initial_parameters
from edgeduet_client.drafters.judging import judge
from edgeduet_client.drafters.kind import Training
from edgeduet_client.drafters.kinds import drafter_kind
from edgeduet_client.drafters.recurrent import KIND, _tables
from edgeduet_client.drafters.target_data import judged_answers, open_target, training_data
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import MODELS_VARIABLE
from edgeduet_client.llm.speculation import drafter_training
from edgeduet_client.llm.speculation.registry import drafter_factory
from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.experiment import Experiment
from edgeduet_shared.messages import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest, decode, encode
from edgeduet_shared.run_config import RunConfig
from tiny_llm import TEXT, write_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models with one tiny one, and of texts of two domains."""
    root = tmp_path_factory.mktemp("federated")
    write_model(root / "models" / "tiny")
    for domain, text in (("cats", TEXT[1]), ("numbers", TEXT[5])):
        (root / domain).mkdir()
        for number in range(10):
            (root / domain / f"{number}.txt").write_text(f"{text} {number}\n" * 20, "utf-8")
    return root


@pytest.fixture(autouse=True)
def models(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, str(root / "models"))


@pytest.fixture(scope="module")
def scenario(root: Path) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "two-domains",
            "federation": {"clients": 2, "rounds": 2},
            "train": {"lr": 0.003, "batch_size": 32, "local_epochs": 6},
            "drafter": {
                "target": "tiny",
                "domains": [f"{name}=folder:{root / name}" for name in ("cats", "numbers")],
                "train_tokens": 300,
                "given_tokens": 16,
                "written_tokens": 16,
                "test_prompts": 2,
                "prompt_tokens": 8,
                "answer_tokens": 24,
                "width": 16,
                "vocabulary": 320,
            },
        }
    )


def start(scenario: Scenario, seed: int = 0) -> dict[str, np.ndarray]:
    return KIND.initial_parameters(open_target("tiny"), scenario.drafter, seed)


def trained(scenario: Scenario, proximal: float = 0.0) -> Any:
    data = training_data(scenario, 0, 0, KIND)
    return KIND.train(start(scenario), data, scenario.drafter, Training(scenario.train, proximal, 5))


def test_all_clients_begin_with_values_that_depend_on_no_texts(scenario: Scenario):
    one, again, other = start(scenario), start(scenario), start(scenario, 1)
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert any(not np.array_equal(one[name], other[name]) for name in one)
    moved = scenario.drafter.model_copy(update={"domains": ("x=folder:/nowhere",)})
    assert np.array_equal(KIND.initial_parameters(open_target("tiny"), moved, 0)["joint"], one["joint"])


def test_training_is_repeatable_and_makes_better_drafts(scenario: Scenario):
    first, second = trained(scenario), trained(scenario)
    assert all(np.array_equal(first.parameters[name], second.parameters[name]) for name in first.parameters)
    answers = judged_answers(scenario.drafter, 0)
    model = open_target("tiny")
    drafters = {
        "fresh": KIND.open("fresh", start(scenario), model, scenario.drafter),
        "trained": KIND.open("trained", first.parameters, model, scenario.drafter),
    }
    judged = judge(drafters, answers, 3)
    assert judged.mean("trained")[0] > judged.mean("fresh")[0]
    curve = judged.mean("trained")
    assert (np.diff(curve) <= 0).all() and 0 <= curve[-1] <= curve[0] <= 1


def test_the_proximal_term_keeps_training_near_its_start(scenario: Scenario):
    began = start(scenario)

    def distance(values: dict[str, np.ndarray]) -> float:
        return sum(float(np.square(values[name] - began[name]).sum()) for name in began)

    assert distance(trained(scenario, 1.0).parameters) < 0.9 * distance(trained(scenario).parameters)


def test_a_draft_goes_on_from_the_state_that_predicted_the_last_token(scenario: Scenario):
    """Judged over a committed text, and computed position by position from what the target said."""
    import torch

    values = trained(scenario).parameters
    tables = _tables("tiny", 320)
    parameters = {name: torch.from_numpy(array) for name, array in values.items()}
    answer = judged_answers(scenario.drafter, 0)[0]
    drafter = KIND.open("d", values, open_target("tiny"), scenario.drafter)
    first_tokens = judge({"d": drafter}, [answer], 1).answers[0]["d"][:, 0]
    right = []
    for place in range(len(answer.answer) - 1):
        state = torch.from_numpy(answer.hidden_NH[place : place + 1].astype(np.float32))
        embedded = torch.from_numpy(tables.embed(np.array([answer.answer[place]])))
        logits = drafter_training.next_states(parameters, state, embedded).numpy() @ tables.head_NH.T
        right.append(int(tables.vocabulary_N[logits[0].argmax()] == answer.answer[place + 1]))
    assert first_tokens.tolist() == right and sum(right) > 0


def test_a_proposal_is_the_same_now_and_in_hindsight(scenario: Scenario):
    drafter = KIND.open("d", trained(scenario).parameters, open_target("tiny"), scenario.drafter)
    text = judged_answers(scenario.drafter, 1)[0].committed()
    (hindsight,) = drafter.redraft(text, [len(text)], 3)
    assert drafter.draft(text, 3, np.random.default_rng(0)).tokens == hindsight.tokens


def test_an_unknown_kind_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'recurrent'"):
        drafter_kind("recurent")


# --- on a device --------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A device of the first domain, which offers that domain's texts only."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    data = DataSection(partition=0, partitions=2, sources=[f"folder:{root / 'cats'}"])
    write_device_config(DeviceConfig(data=data), tmp_path / CONFIG_FILE)
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    yield tmp_path


def context(scenario: Scenario) -> Context:
    run = RunConfig(scenario, "drafter-pool", run_name="run", personal_dir="/nonexistent")
    return Context(1, 1, {"partition-id": 0}, RecordDict(), run.to_flower())


def train_round(scenario: Scenario, round: int, shared: dict[str, np.ndarray]) -> TrainReply:
    plan = make_strategy("drafter-pool", {}, scenario, Experiment(scenario, 0)).plan(0, round)
    assert plan is not None
    message = Message(encode(TrainRequest(0, round, plan, shared)), 1, "train")
    return decode(handle_train(message, context(scenario)).content, TrainReply)


def evaluate(scenario: Scenario, shared: dict[str, np.ndarray], experts: dict[str, np.ndarray]) -> EvaluateReply:
    plan = make_strategy("drafter-pool", {}, scenario, Experiment(scenario, 0)).plan(0, 1)
    assert plan is not None
    message = Message(encode(EvaluateRequest(0, plan, True, shared, experts=experts)), 1, "evaluate")
    return decode(handle_evaluate(message, context(scenario)).content, EvaluateReply)


def test_a_device_uses_the_drafters_it_holds_and_reads_its_own_domain_only(scenario: Scenario, home: Path, root: Path):
    first = train_round(scenario, 0, {})
    assert first.examples > 0 and first.update.keys() == start(scenario).keys()
    last = train_round(scenario, 1, first.update)
    assert not last.update, "its own drafter stays"
    other = {f"1/{name}": value for name, value in start(scenario).items()}
    reply = evaluate(scenario, first.update, other)
    assert {name.partition("/")[0] for name in reply.figures} == {"cats"}
    folder = root / "models" / "tiny" / "drafters"
    names = {"federated-own", "federated-average", "federated-expert-1"}
    assert {path.parent.name for path in folder.glob("*/drafter.json")} == names
    model = LocalModel.open("tiny", threads=1)
    for name in names:
        drafter = drafter_factory("recurrent").open(name, {"path": str(folder / name)}, model)
        assert drafter.kind == "recurrent" and drafter.memory_bytes() > 0
    evaluate(scenario, first.update, {})
    assert {path.parent.name for path in folder.glob("*/drafter.json")} == names - {"federated-expert-1"}


def test_a_device_refuses_texts_and_models_its_owner_did_not_offer(scenario: Scenario, home: Path, root: Path):
    def changed(**changes: Any) -> Scenario:
        return scenario.model_copy(update={"drafter": scenario.drafter.model_copy(update=changes)})

    with pytest.raises(ConfigError, match="not allowed here"):
        train_round(changed(domains=("secrets=folder:/etc", "b=folder:/b")), 0, {})
    with pytest.raises(ConfigError, match="is a path"):
        train_round(changed(target=str(root / "models" / "tiny")), 0, {})
    with pytest.raises(ConfigError, match="share_drafter"):
        train_round(changed(share_experts=True), 1, start(scenario))
    data = DataSection(partition=0, partitions=2, sources=[f"folder:{root / 'cats'}"])
    willing = DeviceConfig(data=data, privacy=PrivacySection(share_drafter=True))
    write_device_config(willing, home / CONFIG_FILE)
    training_rules._rules.cache_clear()  # on a device every message is a process
    assert train_round(changed(share_experts=True), 1, start(scenario)).update


def test_what_leaves_is_clipped_where_the_plan_says_so(scenario: Scenario):
    privacy = {"update_clip": 1e-3, "noise_seed": "run"}
    private = Scenario.model_validate({**scenario.model_dump(mode="json"), "privacy": privacy})
    plan = make_strategy("drafter-fedavg", {}, private, Experiment(private, 0)).plan(0, 0)
    assert plan is not None
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    run = RunConfig(private, "drafter-fedavg", run_name="private").to_flower()
    message = Message(encode(TrainRequest(0, 0, plan, {})), 1, "train")
    reply = handle_train(message, Context(1, 1, {"partition-id": 0}, RecordDict(), run))
    update, began = decode(reply.content, TrainReply).update, initial_parameters(private, 0, KIND)
    moved = np.sqrt(sum(float(np.square(update[name] - began[name]).sum()) for name in began))
    assert moved == pytest.approx(1e-3, rel=0.01)
