"""A global model as the server exports it becomes the classifier of a device that has none of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from edgeduet_client.classifier.adopting import GLOBAL, adopt_model
from edgeduet_client.classifier.classifier_folder import ClassifierFolder
from edgeduet_client.classifier.classifying import Classifier, open_image
from edgeduet_client.cli import app
from edgeduet_client.device.device_config import DeviceConfig, ServerSection, write_device_config
from edgeduet_server.global_evaluation import GlobalEvaluation
from edgeduet_server.registry.listener import utc_now
from edgeduet_server.registry.recorded_run import RecordedRun
from edgeduet_server.registry.runs import begin_run
from edgeduet_server.registry.store import Registry
from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.evaluation import predictor
from edgeduet_shared.experiment import experiment_for
from edgeduet_shared.run_config import RunConfig

SCENARIO = Scenario.model_validate(
    {
        "name": "tiny",
        "data": {"max_per_class": 8, "classes": ["circle", "square", "star", "heart"], "domains": ["photo"]},
        "stream": {"kind": "class-incremental", "classes_per_task": 2},
        "federation": {"clients": 2},
    }
)


def kept(folder: Path, method: str) -> tuple[Path, np.ndarray]:
    """A model file as a run's server keeps it, and what the global model answers to a picture (logits over all)."""
    config = RunConfig(SCENARIO, method, seed=5, run_dir=folder / "night", run_name="night")
    experiment = experiment_for(config.scenario_json, config.seed)
    strategy = make_strategy(config.method, config.options, config.scenario, experiment)
    state = strategy.initial_state(config.seed)
    noise = np.random.default_rng(1)
    # Training moves the values; where they are does not matter here, but that they are these.
    shared = {n: (v + 0.05 * noise.standard_normal(v.shape)).astype(np.float32) for n, v in state.shared.items()}
    state = replace(state, shared=shared)
    registry = Registry.open(f"sqlite:///{folder / 'registry.db'}")
    with registry.writing() as session:
        run_id = begin_run(session, config, "1", utc_now()).id
    about = GlobalEvaluation(experiment, strategy).describe(0)
    path = RecordedRun(registry, run_id, config, utc_now).keep_model(state, 0, about)
    registry.close()
    assert path is not None
    predict = predictor(experiment.model(strategy.parts), strategy.global_params(state), 4)
    pixels = experiment.backbone.transform(picture())[None]
    z = predict.model.run(predict.params, "encode_image", predict.model.front(pixels))[0]
    return path, predict.model.run(predict.params, "local_logits", z, predict.text_CD).detach().numpy()[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept(tmp_path_factory.mktemp("run"), "fedavg-adapter")[0]


def picture() -> Image.Image:
    pixels = np.random.default_rng(2).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("method", ["fedavg-adapter", "fed-duet"])
def test_it_answers_as_the_global_model_does_among_the_classes_seen(method: str, tmp_path: Path) -> None:
    path, logits = kept(tmp_path, method)
    facts = adopt_model(tmp_path / "classifier", path)
    assert (facts.run, facts.stage, facts.client, facts.seen) == ("night", 0, GLOBAL, (0, 1))
    picture().save(tmp_path / "picture.png")
    classifier = Classifier(ClassifierFolder(tmp_path / "classifier"), threads=1)
    (answer,) = classifier.classify([open_image(tmp_path / "picture.png", "picture")], top=2)
    seen = np.exp(logits[:2] - logits[:2].max())
    expected = dict(zip(facts.class_names, seen / seen.sum(), strict=False))
    assert set(answer.classes) == {"circle", "square"}
    assert list(answer.probabilities) == pytest.approx([expected[name] for name in answer.classes], abs=1e-4)


def test_a_personal_model_is_replaced_only_when_asked_to(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "classifier"
    adopt_model(root, model)
    (file,) = root.glob("versions/*/classifier.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "client": 1}))
    with pytest.raises(ConfigError, match=r"personal model .* --replace"):
        adopt_model(root, model)
    assert adopt_model(root, model, replace=True).client == GLOBAL


def test_a_file_that_is_no_such_model_is_one_line(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(model), bare)
    (tmp_path / "text").write_text("no model")
    for file, why in ((bare, "no global model"), (tmp_path / "text", "cannot be read"), (tmp_path / "x", "cannot be")):
        with pytest.raises(ConfigError, match=why):
            adopt_model(tmp_path / "classifier", file)
    assert ClassifierFolder(tmp_path / "classifier").current() is None


def test_the_command_says_what_is_in_use(model: Path, tmp_path: Path) -> None:
    config = DeviceConfig(server=ServerSection(name="edge", address="localhost:9443"), home=tmp_path)
    write_device_config(config, tmp_path / "device.toml")
    done = CliRunner().invoke(app, ["adopt", str(tmp_path), str(model)])
    assert done.exit_code == 0, done.output
    assert done.output == "in use: the global model of run night, stage 1, 2 classes\n"
    status = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert "classifier: of run night, stage 0" in status.output
