"""Tiny GGUF files of every family: imported without loss, compared with transformers' own reading of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.gguf_weights import GgufWeights
from edgeduet_client.llm.importing import ImportOptions, import_model
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.tokenizer import Tokenizer
from tiny_checkpoints import VOCABULARY, TinyGguf

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

ALL_Q4_1 = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"), "Q4_1")
Q4_K_M = {
    "token_embd": "Q6_K",
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",  # another layout than its neighbours: no common product
    "attn_output": "Q4_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q4_K",
    "ffn_down": "Q6_K",
}
FILES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    # name: family, types, attributes of the writer
    "llama-q4_1": ("llama", ALL_Q4_1 | {"token_embd": "Q8_0"}, {}),
    "llama-q4_k_m": ("llama", Q4_K_M, {"tied": False}),
    "llama-q4_0": ("llama", dict.fromkeys((*ALL_Q4_1, "token_embd"), "Q4_0") | {"ffn_up": "Q5_0"}, {}),
    "llama-head-q6_k": ("llama", Q4_K_M | {"token_embd": "Q4_K", "output": "Q6_K"}, {"tied": False}),
    "qwen2-q5": ("qwen2", ALL_Q4_1 | {"attn_v": "Q5_1", "ffn_down": "Q5_K", "token_embd": "Q4_1"}, {}),
    "qwen3-q4_k": ("qwen3", Q4_K_M | {"token_embd": "Q4_K"}, {}),
    "gemma3-q4_k_m": ("gemma3", Q4_K_M | {"ffn_gate": "Q5_0", "token_embd": "Q8_0"}, {"layers": 6}),
    "llama-f16": ("llama", dict.fromkeys(ALL_Q4_1, "F16"), {}),
}


def _write(path: Path, name: str) -> Path:
    family, kinds, attributes = FILES[name]
    tiny = TinyGguf(path, family, kinds, seed=len(name))
    vars(tiny).update(attributes)
    return tiny.write()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _logits(folder: ModelFolder, ids: list[int]) -> np.ndarray:
    session = TargetSession(folder.graph, context_length=folder.manifest.context_length)
    return session.prefill(ids, session.new_cache(), rows=range(len(ids))).logits


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_imported_with_its_own_blocks(name: str, root: Path):
    source = _write(root / f"{name}.gguf", name)
    plain = import_model(str(source), ImportOptions(name="plain", quantisation="none", replace=True), root=root)
    assert plain.manifest.checks["greedy"]["tokens"] == 120
    assert plain.manifest.checks["greedy"]["largest_logit_difference"] < 2e-3

    # By default: the blocks of the file. What is left is the rounding of activations to 8 bits.
    own = import_model(str(source), ImportOptions(compare_with_source=False), root=root)
    kinds = FILES[name][1].values()
    assert own.manifest.dtype == ("int8" if "F16" in kinds else "int4")
    assert own.name == name
    ids = np.random.default_rng(0).integers(0, 300, 40).tolist()
    expected, ours = _logits(plain, ids), _logits(own, ids)
    assert np.corrcoef(ours.ravel(), expected.ravel())[0, 1] > 0.995
    head = "token_embd" if FILES[name][2].get("tied", True) else "output"
    rounded = head not in FILES[name][1]  # a table in float32 goes to 8 bits
    np.testing.assert_allclose(own.head_row_norms(), plain.head_row_norms(), rtol=2e-3 if rounded else 1e-5)


def test_bits_are_those_of_the_file(root: Path):
    source = _write(root / "bits.gguf", "llama-q4_0")
    folder = import_model(str(source), ImportOptions(name="bits", compare_with_source=False), root=root)
    # Four bits and a float32 scale per 32; Q5_0 is held in eight.
    assert 5.0 < folder.manifest.bits_per_weight < 6.0


@pytest.mark.parametrize(("kind", "rounded"), [("Q8_0", False), ("Q4_1", True)])
def test_eight_bits_keep_the_blocks_of_an_eight_bit_file_only(kind: str, rounded: bool, root: Path):
    """A 4-bit file's 8-bit table is rounded anew with the rest: larger blocks are faster."""
    tiny = TinyGguf(
        root / f"eight-{kind.lower()}.gguf", "llama", dict.fromkeys(ALL_Q4_1, kind) | {"token_embd": "Q8_0"}
    )
    options = ImportOptions(name=f"eight-{kind.lower()}", quantisation="int8", compare_with_source=False)
    folder = import_model(str(tiny.write()), options, root=root)
    graph = onnx.load(str(folder.graph), load_external_data=False).graph
    sizes = {
        next(attribute.i for attribute in node.attribute if attribute.name == "block_size")
        for node in graph.node
        if node.op_type == "MatMulNBits" and "down" not in node.input[1]
    }
    assert sizes == ({128} if rounded else {32})


def test_angles_of_a_long_context_are_honoured(root: Path):
    """`rope_freqs` (Llama 3.1 in GGUF) and linear scaling change the model; transformers passes both over."""
    divisors = np.linspace(1, 8, 32).astype(np.float32)
    ids = np.random.default_rng(1).integers(0, 300, 60).tolist()
    outcomes = []
    for name, metadata, extra in (
        ("straight", {}, {}),
        ("divided", {}, {"rope_freqs.weight": divisors}),
        ("linear", {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {}),
    ):
        tiny = TinyGguf(root / f"{name}.gguf", "llama", {})
        tiny.metadata, tiny.extra = metadata, extra
        folder = import_model(str(tiny.write()), ImportOptions(quantisation="none"), root=root)
        outcomes.append(_logits(folder, ids))
    straight, divided, linear = outcomes
    assert np.abs(divided - straight).max() > 0.1
    assert np.abs(linear - straight).max() > 0.1
    assert np.abs(linear - divided).max() > 0.1


def test_matrices_of_types_without_blocks_of_ours_are_read_as_numbers(tmp_path: Path):
    tiny = TinyGguf(tmp_path / "m.gguf", "llama", {})
    raw = np.random.default_rng(0).integers(0, 256, (256, 84), dtype=np.uint8)
    raw[:, 80:84] = np.array([0.01, 0.01], np.float16).view(np.uint8)
    tiny.left_out = {"blk.0.ffn_down.weight"}
    tiny.writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q2_K)
    weights = GgufWeights(tiny.write())
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q2_K)
    np.testing.assert_array_equal(weights.matrix("blocks.0.down").dense(), expected)


def test_a_type_that_nobody_reads_is_one_line(tmp_path: Path):
    tiny = TinyGguf(tmp_path / "m.gguf", "llama", {})
    tiny.left_out = {"blk.0.ffn_down.weight"}
    raw = np.zeros((256, 256 // 256 * 292), np.uint8)
    tiny.writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    with pytest.raises(ModelError, match=r"Q8_K of blk\.0\.ffn_down\.weight is not supported; use a file in .*Q4_K"):
        GgufWeights(tiny.write()).matrix("blocks.0.down")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"left_out": {"blk.1.ffn_up.weight"}}, r"the tensor blk\.1\.ffn_up\.weight is missing"),
        ({"left_out": {"blk.1.ffn_norm.weight"}}, r"lack the norm 'blocks\.1\.mlp_norm'"),
        ({"extra": {"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}}, r"no blk\.0\.attn_q_norm\.weight"),
        ({"metadata": {"tokenizer.ggml.pre": "superbpe"}}, r"'superbpe', which is not supported"),
        ({"metadata": {"split.count": 3}}, r"one of several parts"),
        ({"metadata": {"tokenizer.ggml.padding_token_id": 4000}}, r"the tokenizer cannot be read"),
        ({"family": "mamba"}, r"'mamba' is not supported"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_and_leaves_nothing(
    tmp_path: Path, changed: dict[str, Any], message: str
):
    tiny = TinyGguf(tmp_path / "m.gguf", changed.pop("family", "llama"), {})
    vars(tiny).update(changed)
    root = tmp_path / "models"
    with pytest.raises(ModelError, match=message) as refused:
        import_model(str(tiny.write()), ImportOptions(compare_with_source=False), root=root)
    assert "\n" not in str(refused.value)
    assert [path.name for path in root.iterdir()] == [".m.lock"]


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.3, 0.6, 0.95, 0.9999])
def test_a_file_cut_short_is_one_line(tmp_path: Path, kept: float):
    path = TinyGguf(tmp_path / "m.gguf", "llama", {}).write()
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ModelError, match="fetch it again") as refused:
        GgufWeights(path)
    assert "\n" not in str(refused.value)


def test_a_file_of_another_format_is_one_line(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(5000))
    with pytest.raises(ModelError, match="not a whole GGUF file"):
        GgufWeights(path)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # What tells the rules apart: digits, and white space before them.
        ("smollm", "a  12\n34", ["a", "  ", "1", "2", "\n", "3", "4"]),
        ("gpt-2", "a  12", ["a", " ", " 12"]),
        ("qwen2", "a 12 IT'S", ["a", " ", "1", "2", " IT", "'S"]),
        ("llama-bpe", "a 12345!\n\nb", ["a", " ", "123", "45", "!\n\n", "b"]),
    ],
)
def test_text_is_cut_by_the_rule_the_file_names(tmp_path: Path, pre: str, text: str, pieces: list[str]):
    import tokenizers

    tiny = TinyGguf(tmp_path / "m.gguf", "llama", {})
    tiny.metadata["tokenizer.ggml.pre"] = pre
    options = ImportOptions(name="m", quantisation="none", compare_with_source=False)
    folder = import_model(str(tiny.write()), options, root=tmp_path)
    written = tokenizers.Tokenizer.from_file(str(folder.file("tokenizer.json")))
    cut = [piece for piece, _ in written.pre_tokenizer.pre_tokenize_str(text)]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in cut] == pieces
    ours = Tokenizer(folder.file("tokenizer.json"))
    assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == VOCABULARY
    # Llama 3 begins every text with its first token, where it has one.
    assert folder.manifest.add_bos is False


def test_a_sentencepiece_llama_begins_every_text(root: Path):
    """Llama 2 and TinyLlama: no merges in the file, bytes for what the vocabulary lacks, a beginning by default."""
    tiny = TinyGguf(root / "spm.gguf", "llama", {})
    tiny.sentencepiece = True
    folder = import_model(str(tiny.write()), ImportOptions(quantisation="none"), root=root)
    assert folder.manifest.add_bos is True and folder.manifest.bos_id == 1
    assert folder.manifest.eos_ids == [2]
    tokenizer = Tokenizer(folder.file("tokenizer.json"))
    for text in ("the cat on the dog", "Zürich 日本 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)).strip() == text
    assert len(tokenizer.encode("the cat")) < 6  # merged, not spelled


def test_settings_the_file_suggests_are_kept(root: Path):
    tiny = TinyGguf(root / "settings.gguf", "llama", {})
    tiny.metadata |= {"general.sampling.temp": 0.7, "general.sampling.top_k": 40}
    folder = import_model(str(tiny.write()), ImportOptions(compare_with_source=False), root=root)
    assert folder.generation_defaults() == {"temperature": pytest.approx(0.7), "top_k": 40}


def test_plain_tokens_named_like_ends_do_not_end_a_text(root: Path):
    """Gemma's `</s>` is a tag of HTML; only control tokens end an answer."""
    tiny = TinyGguf(root / "ends.gguf", "llama", {})
    folder = import_model(str(tiny.write()), ImportOptions(name="ends", compare_with_source=False), root=root)
    tokenizer = Tokenizer(folder.file("tokenizer.json"))
    assert set(folder.manifest.eos_ids) <= tokenizer.special_ids
