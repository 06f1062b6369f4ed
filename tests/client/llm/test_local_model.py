"""A model folder is opened with everything that belongs to it, and with nothing it does not need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.families import RULES_VERSION, Family
from edgeduet_client.llm.gate import GATE_FILE, Gate, GateDescription, ModelBinding, TrainingRecord
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.request import GenerationRequest
from tiny_llm import TINY, byte_fallback_tokenizer, write_model

RECORD = TrainingRecord(
    norms="none",
    top_k=20,
    top_p=0.95,
    samples=1,
    positions=1,
    languages=[],
    epochs=1,
    best_epoch=1,
    seed=0,
    learning_rate=1e-3,
    weight_decay=0.0,
    batch=1,
    train_loss=0.0,
    validation_loss=0.0,
    seconds_collecting=0.0,
    seconds_training=0.0,
    texts="none: written by hand",
)


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return write_model(tmp_path / "tiny")


def finished(model: LocalModel, **asked: object) -> tuple[str, Finished]:
    """The text of an answer to a fixed prompt, and how it ended."""
    events = list(model.generate(model.tokenizer.encode("the cat sat"), GenerationRequest(**asked)))
    last = events[-1]
    assert isinstance(last, Finished)
    return "".join(event.text for event in events[:-1] if not isinstance(event, Finished)), last


def store_gate(folder: ModelFolder, second_FM: np.ndarray) -> None:
    """Store a gate whose inner layer is the absolute hidden state, split in two halves of opposite sign."""
    identity = np.eye(TINY.hidden_width, dtype=np.float32)
    binding = ModelBinding.of(folder)
    description = GateDescription(
        tokenizer_sha256=binding.tokenizer_sha256,
        weights_sha256=binding.weights_sha256,
        hidden_width=binding.hidden_width,
        rules_version=RULES_VERSION,
        training=RECORD,
    )
    Gate(np.concatenate([identity, -identity]), second_FM, description).save(folder.file(GATE_FILE))


def test_a_model_opens_by_path_by_name_and_from_an_open_folder(folder: ModelFolder) -> None:
    for model in (
        LocalModel.open(folder.path, threads=1),
        LocalModel.open("tiny", folder.path.parent, threads=1),
        LocalModel.open(folder, threads=1),
    ):
        assert model.manifest.name == "tiny"
        assert model.gate is None
        assert finished(model, max_tokens=3, seed=0)[1].completion_tokens == 3


def test_the_template_gets_the_models_special_tokens(tmp_path: Path) -> None:
    tokenizer = byte_fallback_tokenizer(strips_leading_space=False)
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    model = LocalModel.open(write_model(tmp_path / "m", tokenizer=tokenizer, chat_template=template), threads=1)
    assert model.tokenizer.render_chat([{"role": "user", "content": "the cat"}]) == "<s>the cat</s>"
    ids = model.tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert ids == [1, *model.tokenizer.encode("the cat"), 2]


def test_a_base_model_generates_but_does_not_chat(tmp_path: Path) -> None:
    model = LocalModel.open(write_model(tmp_path / "m", chat_template=None), threads=1)
    assert finished(model, max_tokens=2, seed=0)[1].completion_tokens == 2
    with pytest.raises(RequestError, match="tiny is a base model without a chat template"):
        model.tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_the_gate_is_used_where_there_is_one(folder: ModelFolder) -> None:
    plain, last = finished(LocalModel.open(folder, threads=1), max_tokens=200, seed=4, sampler="temperature")
    assert last.gate_interventions == 0
    # Predicts Symbols, always: other scripts are banned unless the answer is in them.
    second = -np.ones((len(Family), 2 * TINY.hidden_width), np.float32)
    second[Family.SYMBOLS] = 1
    store_gate(folder, second)
    model = LocalModel.open(folder, threads=1)
    gated, last = finished(model, max_tokens=200, seed=4, sampler="temperature")
    assert 0 < last.gate_interventions < 200
    assert gated != plain
    off, last = finished(model, max_tokens=200, seed=4, sampler="temperature", gate="off")
    assert (off, last.gate_interventions) == (plain, 0)


def test_a_gate_that_allows_everything_changes_nothing(folder: ModelFolder) -> None:
    plain, _ = finished(LocalModel.open(folder, threads=1), max_tokens=100, seed=4)
    store_gate(folder, np.ones((len(Family), 2 * TINY.hidden_width), np.float32))
    gated, last = finished(LocalModel.open(folder, threads=1), max_tokens=100, seed=4)
    assert (gated, last.gate_interventions) == (plain, 0)


def test_damage_is_one_line(folder: ModelFolder) -> None:
    data = folder.file("model.onnx.data")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.onnx\.data is missing or has another size"):
        LocalModel.open(folder.path)
    with pytest.raises(ModelError, match=r"no model named 'tinny' in .*did you mean 'tiny'"):
        LocalModel.open("tinny", folder.path.parent)


def test_a_model_larger_than_the_memory_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "huge", memory_weights=10**15)
    with pytest.raises(ModelError, match=r"tiny needs 1,000,000,000 MB of memory and [\d,]+ MB are free; close"):
        LocalModel.open(folder)


def test_answering_imports_neither_torch_nor_transformers_nor_onnx(folder: ModelFolder) -> None:
    script = f"""
import sys
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.request import GenerationRequest
model = LocalModel.open({str(folder.path)!r}, threads=1)
ids = model.tokenizer.encode_chat([{{"role": "user", "content": "the cat"}}])
list(model.generate(ids, GenerationRequest(max_tokens=3, seed=0)))
print([name for name in ("torch", "transformers", "onnx", "flwr", "edgeduet_client.app") if name in sys.modules])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
