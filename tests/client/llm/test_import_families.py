"""Every family end to end: a random checkpoint as `transformers` saves it, imported, against torch on the same ids."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeduet_client.llm.importing import ImportOptions, import_model
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.session import TargetSession
from tiny_checkpoints import VOCABULARY, save_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _configs() -> dict[str, Any]:
    llama = functools.partial(transformers.LlamaConfig, **_SHAPE)
    qwen2 = functools.partial(transformers.Qwen2Config, **{k: v for k, v in _SHAPE.items() if k != "head_dim"})
    gemma = functools.partial(transformers.Gemma3TextConfig, **_SHAPE, sliding_window=24, query_pre_attn_scalar=20)
    far_and_near = ["sliding_attention", "full_attention", "sliding_attention"]
    return {
        "llama": llama(tie_word_embeddings=True),
        "llama-biases": llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        "llama-rope3": llama(rope_parameters=_LLAMA_3),
        "llama-linear": llama(rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}),
        "llama-no-groups": llama(num_key_value_heads=4),
        "llama-48-wide": llama(hidden_size=48, tie_word_embeddings=True),
        "qwen2": qwen2(tie_word_embeddings=True),
        "qwen2-window": qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=1),
        "qwen3": transformers.Qwen3Config(**{**_SHAPE, "head_dim": 32}, tie_word_embeddings=False),
        "gemma3": gemma(layer_types=far_and_near),
        "gemma3-linear": gemma(layer_types=far_and_near, rope_parameters=_GEMMA_ROPES),
    }


NAMES = [
    "llama",
    "llama-biases",
    "llama-rope3",
    "llama-linear",
    "llama-no-groups",
    "llama-48-wide",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "gemma3",
    "gemma3-linear",
]


@dataclass
class Pair:
    """A checkpoint, its import without quantisation, and both ready to run."""

    source: Path
    folder: ModelFolder
    session: TargetSession
    model: Any

    def torch_rows(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits and final hidden states of every position."""
        with torch.no_grad():
            outcome = self.model(torch.tensor([ids]), output_hidden_states=True)
        return outcome.logits[0].numpy(), outcome.hidden_states[-1][0].numpy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, root: Path) -> Iterator[Pair]:
    source = save_folder(root / "sources" / request.param, _configs()[request.param], seed=len(request.param))
    folder = import_model(str(source), ImportOptions(quantisation="none"), root=root)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    yield Pair(source, folder, TargetSession(folder.graph, context_length=folder.manifest.context_length), model)


def _ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def test_the_import_compared_itself_and_says_so(pair: Pair):
    checks = pair.folder.manifest.checks
    assert checks["compared_with_source"] is True
    assert checks["greedy"]["tokens"] == 120
    assert checks["greedy"]["largest_logit_difference"] < 1e-3
    assert pair.folder.manifest.dtype == "fp32"
    pair.folder.verify()


def test_logits_and_hidden_states_are_those_of_torch(pair: Pair):
    ids = _ids(100)
    logits, hidden = pair.torch_rows(ids)
    ours = pair.session.prefill(ids, pair.session.new_cache(), rows=range(100), hidden=True)
    assert ours.hidden is not None
    scale = np.abs(logits).max()
    assert np.abs(ours.logits - logits).max() < 1e-4 * scale
    assert np.abs(ours.hidden - hidden).max() < 1e-4 * np.abs(hidden).max()


def test_hidden_states_are_what_the_head_multiplies(pair: Pair):
    ours = pair.session.prefill(_ids(20), pair.session.new_cache(), rows=range(20), hidden=True)
    head = pair.model.get_output_embeddings().weight.detach().numpy()
    assert ours.hidden is not None
    np.testing.assert_allclose(ours.hidden @ head.T, ours.logits, atol=1e-4 * np.abs(ours.logits).max())
    np.testing.assert_allclose(pair.folder.head_row_norms(), np.linalg.norm(head, axis=1), rtol=1e-5)


def test_several_new_tokens_after_a_past_are_the_same_as_one_pass(pair: Pair):
    ids = _ids(90, seed=1)
    logits, _ = pair.torch_rows(ids)
    cache, rows = pair.session.new_cache(), []
    start = 0
    for count in (30, 1, 5, 2, 25, 1, 26):
        rows.append(pair.session.forward(ids[start : start + count], cache, rows=range(count)).logits.copy())
        start += count
    assert np.abs(np.concatenate(rows) - logits).max() < 1e-4 * np.abs(logits).max()


def test_only_the_rows_asked_for_are_returned(pair: Pair):
    ids = _ids(40, seed=2)
    logits, _ = pair.torch_rows(ids)
    some = pair.session.forward(ids, pair.session.new_cache(), rows=[0, 17, 39])
    assert some.logits.shape == (3, VOCABULARY)
    assert np.abs(some.logits - logits[[0, 17, 39]]).max() < 1e-4 * np.abs(logits).max()


def test_a_cropped_cache_is_a_fresh_one(pair: Pair):
    ids, others = _ids(60, seed=3), _ids(30, seed=4)
    logits, _ = pair.torch_rows(ids)
    cache = pair.session.new_cache()
    pair.session.prefill([*ids[:35], *others], cache)
    assert cache.crop(35) == 30
    after = pair.session.forward(ids[35:], cache, rows=range(25)).logits
    assert np.abs(after - logits[35:]).max() < 1e-4 * np.abs(logits).max()


@pytest.mark.parametrize(
    ("quantisation", "likeness", "bits"), [("int8", 0.998, 9.01), ("w8a8", 0.99, 9.0), ("int4", 0.93, 8.0)]
)
def test_quantised_the_model_stays_recognisable(
    pair: Pair, root: Path, quantisation: Any, likeness: float, bits: float
):
    name = f"{pair.source.name}.{quantisation}"
    options = ImportOptions(name=name, quantisation=quantisation, largest_ratio=2.0, compare_with_source=False)
    folder = import_model(str(pair.source), options, root=root)
    assert folder.manifest.dtype == quantisation
    assert folder.manifest.checks["compared_with_source"] is False
    # 48 = 3 * 16: blocks of 16 have twice the scales, and little is gained.
    if pair.source.name != "llama-48-wide":
        assert folder.manifest.bits_per_weight < bits
        # Every matrix begins on a page, which is much for matrices this small.
        assert folder.manifest.memory_weights < 0.75 * pair.folder.manifest.memory_weights
    session = TargetSession(folder.graph, context_length=256)
    ids = _ids(60, seed=5)
    logits, _ = pair.torch_rows(ids)
    ours = session.prefill(ids, session.new_cache(), rows=range(60)).logits
    together = np.corrcoef(ours.ravel(), logits.ravel())[0, 1]
    assert together > likeness
