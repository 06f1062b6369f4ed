"""A ClientApp on a device: personal state under the device's home, the classifier follows, rules hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

from edgeduet_client import handlers
from edgeduet_client.classifier.classifier_folder import ERROR_FILE, ClassifierFolder
from edgeduet_client.classifier.classifying import Classifier
from edgeduet_client.device import training_rules
from edgeduet_client.device.device_config import (
    CONFIG_FILE,
    DataSection,
    DeviceConfig,
    PrivacySection,
    write_device_config,
)
from edgeduet_client.device.training_rules import HOME_VARIABLE
from edgeduet_client.handlers import client_of, handle_evaluate, handle_train
from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.experiment import Experiment, experiment_for
from edgeduet_shared.messages import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest, decode, encode
from edgeduet_shared.plan import LocalPlan
from edgeduet_shared.run_config import RunConfig
from own_image_folders import write_images

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
# What a server might ask for: a place outside the device's home.
RUN = RunConfig(SCENARIO, "fed-duet", run_dir=Path("/nonexistent"), run_name="run", personal_dir="/nonexistent")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
    write_device_config(DeviceConfig(), tmp_path / CONFIG_FILE)
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    yield tmp_path


def context() -> Context:
    return Context(1, 1, {"partition-id": 0}, RecordDict(), RUN.to_flower())


def experiment() -> Experiment:
    return experiment_for(RUN.scenario_json, 0, "")


def plan(round: int = 0) -> LocalPlan:
    return make_strategy("fed-duet", {}, SCENARIO, experiment()).plan(0, round)


def shared(of: LocalPlan) -> dict[str, np.ndarray]:
    model = experiment().model(of.parts)
    groups = ("shared_adapter", "router", "prompt", "fusion")
    return {name: value.numpy() for name, value in model.initial(0).items() if model.group_of(name) in groups}


def train(of: LocalPlan, round: int) -> TrainReply:
    message = Message(encode(TrainRequest(0, round, of, shared(of), {})), 1, "train")
    return decode(handle_train(message, context()).content, TrainReply)


def evaluate(of: LocalPlan) -> EvaluateReply:
    message = Message(encode(EvaluateRequest(0, of, False, shared(of))), 1, "evaluate")
    return decode(handle_evaluate(message, context()).content, EvaluateReply)


def test_personal_state_lies_under_the_home_whatever_the_run_says(home: Path) -> None:
    train(plan(), 0)
    assert [path.name for path in home.glob("personal/run/client-0/*")] == ["0000-0000000.safetensors"]
    assert not Path("/nonexistent").exists()


def test_after_a_stage_the_device_answers_with_its_personal_model(home: Path) -> None:
    train(plan(), 0)
    reply = evaluate(plan(1))
    found = ClassifierFolder(home / "classifier").current()
    assert found is not None
    facts = found[1]
    assert (facts.run, facts.client, facts.stage) == ("run", 0, 0)
    assert len(facts.seen) == 4
    assert sum(reply.totals[:1]) > 0
    (answer,) = Classifier(ClassifierFolder(home / "classifier")).classify([Image.new("RGB", (32, 32), "red")], top=4)
    assert set(answer.classes) == {facts.class_names[label] for label in facts.seen}


def test_an_export_that_fails_costs_no_reply_and_is_noted(home: Path) -> None:
    (home / "classifier").mkdir()
    (home / "classifier" / "versions").write_text("in the way")
    reply = evaluate(plan(1))
    assert reply.totals[0] > 0
    assert "stage 0" in (home / "classifier" / ERROR_FILE).read_text()
    (home / "classifier" / "versions").unlink()
    evaluate(plan(1))
    assert not (home / "classifier" / ERROR_FILE).exists()


def test_in_a_simulation_nothing_is_exported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME_VARIABLE)
    simulated = Context(1, 1, {"partition-id": 0}, RecordDict(), {**RUN.to_flower(), "personal-dir": ""})
    handle_evaluate(Message(encode(EvaluateRequest(0, plan(1), False, shared(plan(1)))), 1, "evaluate"), simulated)
    assert not (home / "classifier").exists()


def test_what_the_owner_forbids_is_refused_before_anything_is_done(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = home / "strict"
    privacy = PrivacySection(send_digest=False, send_scores=False)
    write_device_config(DeviceConfig(privacy=privacy), strict / CONFIG_FILE)
    monkeypatch.setenv(HOME_VARIABLE, str(strict))
    with pytest.raises(ConfigError, match="send_digest"):
        train(plan().model_copy(update={"digest": True}), 0)
    with pytest.raises(ConfigError, match="send_scores"):
        evaluate(plan(1))
    assert not (strict / "personal").exists()


def test_a_device_reads_no_folder_it_did_not_offer(home: Path) -> None:
    values = SCENARIO.model_dump(mode="json")
    values["data"]["source"] = "folder:/etc"
    asked = RunConfig(Scenario.model_validate(values), "fed-duet", run_name="run").to_flower()
    with pytest.raises(ConfigError, match="not allowed"):
        client_of(Context(1, 1, {"partition-id": 0}, RecordDict(), asked))


# -- images of the device's own ------------------------------------------------------------------------

OWN = RunConfig(
    Scenario.model_validate(SCENARIO.model_dump() | {"data": {"source": "device", "classes": ["circle", "star"]}}),
    "fed-duet",
    run_dir=Path("/nonexistent"),
    run_name="own",
)


def own_context() -> Context:
    return Context(1, 1, {"partition-id": 1}, RecordDict(), OWN.to_flower())


def set_images(home: Path, images: str, labels: str = "") -> None:
    write_device_config(DeviceConfig(data=DataSection(images=images, labels=labels)), home / CONFIG_FILE)
    # As for every message on a device: a new process.
    training_rules._rules.cache_clear()
    handlers._own.cache_clear()


def test_a_device_reads_its_own_folder_and_what_came_since_the_last_message(home: Path) -> None:
    write_images(home / "pictures", {"circle": 5})
    set_images(home, "pictures")
    before = client_of(own_context()).experiment
    assert len(before.table) == 5
    assert sum(len(task[1]) for task in before.split.train) + sum(len(rows) for rows in before.split.test) == 5
    write_images(home / "pictures", {"star": 3})
    set_images(home, "pictures")
    assert len(client_of(own_context()).experiment.table) == 8


def test_a_labels_file_of_the_device_is_used(home: Path) -> None:
    write_images(home / "pictures", {"circle": 2})
    (home / "labels.csv").write_text("file,class\ncircle/0000.png,star\n")
    set_images(home, "pictures", "labels.csv")
    table = client_of(own_context()).experiment.table
    assert [table.class_names[label] for label in table.labels] == ["star"]


def test_a_device_without_images_of_its_own_says_what_to_set(home: Path) -> None:
    set_images(home, "")
    with pytest.raises(ConfigError, match=r"set \[data\] images in its device.toml"):
        client_of(own_context())


def test_no_server_names_the_folder(home: Path) -> None:
    set_images(home, "pictures")
    data = OWN.scenario.data.model_copy(update={"source": "device:/etc"})
    run = replace(OWN, scenario=OWN.scenario.model_copy(update={"data": data}))
    with pytest.raises(ConfigError, match="is not allowed here"):
        client_of(Context(1, 1, {"partition-id": 1}, RecordDict(), run.to_flower()))
