"""The target's first layers as drafter."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.graph import build_graph
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.quantisation import QuantisedWeights
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.speculation.target_graph import write_truncated_graph
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.speculation.truncated import FACTORY, frequent_ids, truncate
from tiny_llm import TINY, RandomWeights, write_model

RNG = np.random.default_rng(0)
PROMPT = [5, 6, 7, 8, 120, 33]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return write_model(tmp_path_factory.mktemp("models") / "target", seed=3)


@pytest.fixture(scope="module")
def target(folder: ModelFolder) -> LocalModel:
    return LocalModel.open(folder, threads=1)


def continuation(target: LocalModel, tokens: list[int], count: int) -> list[int]:
    cache, written = target.session.new_cache(), []
    row = target.session.prefill(tokens, cache).logits[0]
    for _ in range(count):
        written.append(int(row[: target.vocabulary.used].argmax()))
        row = target.session.forward(written[-1:], cache).logits[0]
    return written


def test_with_all_layers_it_proposes_exactly_what_the_target_would_write(
    folder: ModelFolder, target: LocalModel
) -> None:
    truncate(folder, "all", layers=2)
    drafter = FACTORY.open("all", {"threshold": 0.0}, target)
    text = CommittedText(PROMPT)
    drafter.start(text)
    draft = drafter.draft(text, 6, RNG)
    assert list(draft.tokens) == continuation(target, PROMPT, 6)[: len(draft.tokens)]
    assert len(draft.tokens) == 6 or draft.tokens[-1] in folder.manifest.eos_ids


def test_it_takes_next_to_no_disk(folder: ModelFolder) -> None:
    card = truncate(folder, "one", layers=1)
    weights = (folder.path / "model.onnx.data").stat().st_size
    assert card.bytes < weights / 10
    assert {path.name for path in (folder.path / "drafters" / "one").iterdir()} == {"drafter.json", "drafter.onnx"}


def test_one_layer_computes_what_a_model_of_that_layer_computes(tmp_path: Path, folder: ModelFolder) -> None:
    one = TINY.with_context(512)
    one = type(one)(**{**one.__dict__, "layers": 1, "windows": (None,), "ropes": one.ropes[:1]})
    write_truncated_graph(tmp_path / "cut.onnx", folder, 1, None)
    cut = TargetSession(tmp_path / "cut.onnx", context_length=64, threads=1, weights=folder.path)
    whole = TargetSession(build_graph(one, RandomWeights(TINY, 3), tmp_path), context_length=64, threads=1)
    ours = cut.forward(PROMPT, cut.new_cache(), rows=range(6), hidden=True)
    theirs = whole.forward(PROMPT, whole.new_cache(), rows=range(6), hidden=True)
    np.testing.assert_allclose(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    assert ours.hidden is not None and theirs.hidden is not None
    np.testing.assert_allclose(ours.hidden, theirs.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantisation", ["none", "int8", "w8a8", "int4"])
def test_a_trimmed_head_has_the_rows_of_its_ids(tmp_path: Path, quantisation: str) -> None:
    folder = write_model(tmp_path / "model", seed=4)
    build_graph(TINY, QuantisedWeights(RandomWeights(TINY, 4), quantisation, keep_blocks=False), folder.path)  # type: ignore[arg-type]
    ids = np.array([0, 3, 17, 250, 299])
    full = TargetSession(folder.graph, context_length=64, threads=1)
    write_truncated_graph(tmp_path / "cut.onnx", folder, 2, ids)
    cut = TargetSession(tmp_path / "cut.onnx", context_length=64, threads=1, weights=folder.path)
    assert cut.vocab_width == 5
    wanted = full.forward(PROMPT, full.new_cache()).logits[0, ids]
    np.testing.assert_allclose(cut.forward(PROMPT, cut.new_cache()).logits[0], wanted, rtol=1e-3, atol=1e-3)


def test_a_trimmed_head_proposes_ids_of_the_target(folder: ModelFolder, target: LocalModel) -> None:
    ids = frequent_ids(folder, 40)
    assert folder.manifest.eos_ids[0] in ids
    truncate(folder, "few", layers=2, head_vocabulary=ids)
    drafter = FACTORY.open("few", {"threshold": 0.0}, target)
    text = CommittedText(PROMPT)
    drafter.start(text)
    draft = drafter.draft(text, 5, RNG)
    row = target.session.prefill(PROMPT, target.new_cache()).logits[0]
    assert draft.tokens[0] == ids[row[ids].argmax()]
    assert set(draft.tokens) <= set(ids.tolist())


@pytest.mark.parametrize("layers", [0, 3])
def test_a_number_of_layers_that_is_not_there_is_refused(folder: ModelFolder, layers: int) -> None:
    with pytest.raises(ModelError, match="2 layers"):
        truncate(folder, "wrong", layers=layers)
    assert not (folder.path / "drafters" / "wrong").exists()


def test_a_drafter_of_another_target_is_refused_in_one_line(tmp_path: Path, folder: ModelFolder) -> None:
    other = LocalModel.open(write_model(tmp_path / "other", seed=9, name="other"), threads=1)
    truncate(folder, "mine", layers=1)
    with pytest.raises(ModelError, match="was made for 'tiny'") as refusal:
        FACTORY.open("d", {"path": str(folder.path / "drafters" / "mine")}, other)
    assert "\n" not in str(refusal.value)


def test_an_altered_graph_is_refused(folder: ModelFolder, target: LocalModel) -> None:
    truncate(folder, "damaged", layers=1)
    graph = folder.path / "drafters" / "damaged" / "drafter.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"x")
    with pytest.raises(ModelError, match="altered"):
        FACTORY.open("damaged", {}, target)


def test_a_description_that_is_no_json_is_refused(folder: ModelFolder, target: LocalModel) -> None:
    truncate(folder, "unreadable", layers=1)
    card = folder.path / "drafters" / "unreadable" / "drafter.json"
    assert json.loads(card.read_text())["layers"] == 1
    card.write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        FACTORY.open("unreadable", {}, target)
