"""Real weights through their packages: greedy identity with the source, and what quantisation costs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from edgeduet_client.llm.importing import ImportOptions, import_model
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.sources import PACKAGES
from edgeduet_client.llm.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


def _import(name: str, root: Path, quantisation: Any) -> ModelFolder:
    package = PACKAGES[name]
    if any(importlib.util.find_spec(module) is None for module, _ in package.parts):
        pytest.skip(f"the weights are not here: {package.install}")
    pytest.importorskip("torch")
    return import_model(name, ImportOptions(quantisation=quantisation), root=root)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """SmolLM2-135M in the blocks of its file, which is the default."""
    return _import("smollm2-135m", tmp_path_factory.mktemp("models"), None)


def test_smollm2_keeps_its_own_blocks_and_its_quality(smollm2: ModelFolder):
    manifest = smollm2.manifest
    assert manifest.dtype == "int4"
    assert manifest.checks["greedy"]["tokens"] == 120
    assert manifest.checks["greedy"]["largest_logit_difference"] < 1e-3
    assert manifest.checks["perplexity_ratio"] <= 1.02
    assert manifest.checks["perplexity_fp32"] < 30  # it knows the language of the text
    smollm2.verify()


def test_smollm2_at_eight_bits_keeps_its_quality(smollm2: ModelFolder, tmp_path: Path):
    options = ImportOptions(quantisation="int8", compare_with_source=False)  # compared above
    manifest = import_model("smollm2-135m", options, root=tmp_path).manifest
    assert manifest.dtype == "int8"
    assert manifest.checks["perplexity_ratio"] <= 1.02
    assert manifest.checks["perplexity_fp32"] == smollm2.manifest.checks["perplexity_fp32"]


def test_smollm2_in_integers_keeps_most_of_its_quality(smollm2: ModelFolder, tmp_path: Path):
    options = ImportOptions(quantisation="w8a8", compare_with_source=False)  # compared above
    manifest = import_model("smollm2-135m", options, root=tmp_path).manifest
    assert manifest.dtype == "w8a8"
    assert manifest.checks["perplexity_ratio"] <= 1.05


def test_smollm2_cuts_text_as_it_was_trained(smollm2: ModelFolder):
    """Ids as llama.cpp gives them for the same file."""
    tokenizer = Tokenizer(smollm2.file("tokenizer.json"))
    assert tokenizer.encode("x  12\n   34\t56") == [104, 256, 33, 34, 472, 35, 36, 197, 37, 38]
    assert smollm2.manifest.eos_ids == [2, 0]
    assert smollm2.manifest.licence == "apache-2.0"
    assert smollm2.manifest.add_bos is False


def test_gemma_3_keeps_its_own_blocks_and_its_quality(tmp_path: Path):
    manifest = _import("gemma3-270m", tmp_path, None).manifest
    assert manifest.dtype == "int4"
    assert manifest.checks["greedy"]["tokens"] == 120
    assert manifest.checks["perplexity_ratio"] <= 1.02
    assert manifest.eos_ids == [1, 106]  # and not the HTML tag </s>
