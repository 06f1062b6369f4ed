"""Tiny random checkpoints as others write them: `save_pretrained` folders and GGUF files.

Real formats of real families, with a few thousand random numbers as weights. Weights are spread wide enough
that attention attends and greedy text differs from prompt to prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tiny_llm import byte_fallback_tokenizer, byte_level_tokenizer

VOCABULARY = 320


def save_folder(folder: Path, config: Any, *, seed: int = 0, spread: float = 0.12, dtype: str = "float32") -> Path:
    """Write a random model of a ``transformers`` configuration, with a byte-level tokenizer, into ``folder``."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A head spread as wide would be surer of its tokens than any import believes of a trained model.
            parameter.normal_(0.0, spread / 3 if "embed" in name or "lm_head" in name else spread)
            if "norm" in name:
                parameter.add_(0.0 if "gemma" in config.model_type else 1.0)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a tokenizer as ``save_pretrained`` does."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer or byte_level_tokenizer(), eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(folder)


# --- GGUF ---------------------------------------------------------------------------------------------

_NORMAL, _CONTROL, _BYTE = 1, 3, 6
# Where the halves of a block lie: scales, then minima.
_HALVES = {
    "Q4_0": ((0,), ()),
    "Q4_1": ((0,), (2,)),
    "Q5_0": ((0,), ()),
    "Q5_1": ((0,), (2,)),
    "Q8_0": ((0,), ()),
    "Q4_K": ((0,), (2,)),
    "Q5_K": ((0,), (2,)),
    "Q6_K": ((208,), ()),
}
# The largest magnitude of what a scale is multiplied by, so that weights come out about as large in every type.
_REACH = {"Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q8_0": 128, "Q4_K": 480, "Q5_K": 960, "Q6_K": 4096}


def random_blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator, size: float) -> np.ndarray:
    """Bytes of a matrix of ``shape`` in a quantised GGUF type: random codes, weights of about ``size``."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, width = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (shape[0], shape[1] // numbers, width), dtype=np.uint8)
    scales_at, minima_at = _HALVES[kind]
    scale = (size / _REACH[kind]) * rng.uniform(0.7, 1.3, raw.shape[:2])
    for at in scales_at:
        raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    for at in minima_at:
        # Q4_1 and Q5_1 add their minimum, the K types subtract theirs times up to 63: both centre the codes.
        minimum = scale / 4 if kind.endswith("K") else -size * np.ones_like(scale)
        raw[..., at : at + 2] = minimum.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(shape[0], -1)


class TinyGguf:
    """Writes one GGUF file; every matrix in the type that ``kinds`` says, by its part (``"ffn_down"``)."""

    def __init__(self, path: Path, family: str, kinds: dict[str, str], *, seed: int = 0) -> None:
        from gguf import GGUFWriter

        self.path = path
        self.family = family
        self.kinds = kinds
        self.hidden, self.mlp, self.layers, self.kv_heads = 256, 256, 2, 2
        # transformers reads files of some families only with the head width that all their releases have.
        self.heads, self.head_dim = {"qwen3": (4, 128), "gemma3": (2, 256)}.get(family, (4, 64))
        self.vocabulary = VOCABULARY
        self.tied = True
        self.sentencepiece = family == "gemma3"
        self.metadata: dict[str, Any] = {}
        self.left_out: set[str] = set()
        self.extra: dict[str, np.ndarray] = {}
        self.rng = np.random.default_rng(seed)
        self.writer = GGUFWriter(path, family)

    def write(self) -> Path:
        """Write the file."""
        self._add_shape()
        if self.sentencepiece:
            self._add_sentencepiece(byte_fallback_tokenizer(strips_leading_space=self.family != "gemma3"))
        else:
            self._add_byte_level(byte_level_tokenizer())
        for key, value in self.metadata.items():
            add = {str: self.writer.add_string, bool: self.writer.add_bool, int: self.writer.add_uint32}
            add.get(type(value), self.writer.add_float32)(key, value)
        self._add_tensors()
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def _add_shape(self) -> None:
        writer = self.writer
        writer.add_name("tiny")
        writer.add_license("apache-2.0")
        writer.add_context_length(512)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.mlp)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        if self.family == "gemma3":
            writer.add_sliding_window(24)
        else:
            writer.add_rope_dimension_count(self.head_dim)

    def _add_byte_level(self, tokenizer: Tokenizer) -> None:
        import json

        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        tokens = [tokenizer.id_to_token(place) for place in range(tokenizer.get_vocab_size())]
        tokens += [f"[PAD{place}]" for place in range(len(tokens), self.vocabulary)]
        self.writer.add_tokenizer_model("gpt2")
        self.metadata.setdefault("tokenizer.ggml.pre", "qwen2" if self.family.startswith("qwen") else "smollm")
        self.writer.add_token_list(tokens)
        self.writer.add_token_types([_CONTROL if token.startswith("<|") else _NORMAL for token in tokens])
        self.writer.add_token_merges([" ".join(merge) for merge in merges])
        self.metadata.setdefault("tokenizer.ggml.eos_token_id", tokenizer.token_to_id("<|end|>"))

    def _add_sentencepiece(self, tokenizer: Tokenizer) -> None:
        tokens = [tokenizer.id_to_token(place) for place in range(tokenizer.get_vocab_size())]
        tokens += [f"<unused{place}>" for place in range(len(tokens), self.vocabulary)]
        kinds = [
            _CONTROL if t in ("<unk>", "<s>", "</s>") else _BYTE if t.startswith("<0x") else _NORMAL for t in tokens
        ]
        self.writer.add_tokenizer_model("llama")
        self.writer.add_token_list(tokens)
        self.writer.add_token_scores([-float(place) for place in range(len(tokens))])
        self.writer.add_token_types(kinds)
        self.writer.add_bos_token_id(1)
        self.metadata.setdefault("tokenizer.ggml.eos_token_id", 2)

    def _add_tensors(self) -> None:
        queries, values = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {
            "attn_q": (queries, self.hidden),
            "attn_k": (values, self.hidden),
            "attn_v": (values, self.hidden),
            "attn_output": (self.hidden, queries),
            "ffn_gate": (self.mlp, self.hidden),
            "ffn_up": (self.mlp, self.hidden),
            "ffn_down": (self.hidden, self.mlp),
        }
        norms = {"attn_norm": self.hidden, "ffn_norm": self.hidden}
        if self.family in ("gemma3", "qwen3"):
            norms |= {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        if self.family == "gemma3":
            norms |= {"post_attention_norm": self.hidden, "post_ffw_norm": self.hidden}
        self._matrix("token_embd", "token_embd", (self.vocabulary, self.hidden), 0.03)
        if not self.tied:
            self._matrix("output", "output", (self.vocabulary, self.hidden), 0.03)
        self._vector("output_norm.weight", self.hidden)
        for layer in range(self.layers):
            for part, shape in matrices.items():
                self._matrix(f"blk.{layer}.{part}", part, shape, 0.2)
            for part, width in norms.items():
                self._vector(f"blk.{layer}.{part}.weight", width)
            if self.family == "qwen2":
                for part in ("attn_q", "attn_k", "attn_v"):
                    self._vector(f"blk.{layer}.{part}.bias", matrices[part][0])
        for name, content in self.extra.items():
            self.writer.add_tensor(name, content)

    def _matrix(self, name: str, part: str, shape: tuple[int, int], size: float) -> None:
        from gguf import GGMLQuantizationType

        if f"{name}.weight" in self.left_out:
            return
        kind = self.kinds.get(name, self.kinds.get(part, "F32"))
        if kind == "F32":
            self.writer.add_tensor(f"{name}.weight", (size / 2 * self.rng.standard_normal(shape)).astype(np.float32))
        elif kind == "F16":
            self.writer.add_tensor(f"{name}.weight", (size / 2 * self.rng.standard_normal(shape)).astype(np.float16))
        else:
            raw = random_blocks(kind, shape, self.rng, size)
            self.writer.add_tensor(f"{name}.weight", raw, raw_dtype=GGMLQuantizationType[kind])

    def _vector(self, name: str, width: int) -> None:
        if name not in self.left_out:
            self.writer.add_tensor(name, self.rng.uniform(0.5, 1.5, width).astype(np.float32))
