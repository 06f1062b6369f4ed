"""A tiny language model as the importer would write it, with random weights, and tokenizers of both kinds.

Two Llama blocks and a vocabulary of about 300: a real graph and real tokenizers, built in milliseconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from edgeduet_client.llm.architecture import Architecture, Rope
from edgeduet_client.llm.block_matrix import DenseMatrix
from edgeduet_client.llm.graph import build_graph
from edgeduet_client.llm.model_folder import CHAT_TEMPLATE, TOKENIZER, ModelFolder, file_sha256, write_manifest

TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "the cat sat on the mat and the dog sat on the cat",
    "Über Straßen fährt der Zug nach Köln, größer als je zuvor.",
    "日本語の文と中文的句子。",
    "Привет, мир! Γειά σου κόσμε 🙂🙂👩‍👩‍👧",
    "one two three four five six seven eight nine ten",
]

CHAT_TEMPLATE_SOURCE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


SHARED_FACTS = (
    "layers",
    "hidden_width",
    "query_heads",
    "kv_heads",
    "head_dim",
    "context_length",
    "vocab_width",
)
"""What an architecture and a manifest both say."""

TINY = Architecture(
    family="llama",
    layers=2,
    hidden_width=48,
    mlp_width=64,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_width=320,
    context_length=512,
    norm_epsilon=1e-5,
    windows=(None, None),
    ropes=(Rope(base=10_000.0),) * 2,
    query_scale=0.25,
    tied_head=False,
)


class RandomWeights:
    """Weights of a model nobody trained, spread so that its distributions are neither flat nor certain."""

    def __init__(self, architecture: Architecture, seed: int) -> None:
        arch = architecture
        sizes = {
            "q": (arch.query_heads * arch.head_dim, arch.hidden_width),
            "k": (arch.kv_heads * arch.head_dim, arch.hidden_width),
            "v": (arch.kv_heads * arch.head_dim, arch.hidden_width),
            "o": (arch.hidden_width, arch.query_heads * arch.head_dim),
            "gate": (arch.mlp_width, arch.hidden_width),
            "up": (arch.mlp_width, arch.hidden_width),
            "down": (arch.hidden_width, arch.mlp_width),
        }
        shapes = {f"blocks.{layer}.{name}": size for layer in range(arch.layers) for name, size in sizes.items()}
        shapes |= dict.fromkeys(("embedding", "head"), (arch.vocab_width, arch.hidden_width))
        rng = np.random.default_rng(seed)
        self._matrices = {
            name: DenseMatrix((2.0 * rng.standard_normal(size) / size[1] ** 0.5).astype(np.float32))
            for name, size in shapes.items()
        }
        self._width = arch.hidden_width

    def matrix(self, name: str) -> DenseMatrix:
        """Return one weight matrix."""
        return self._matrices[name]

    def vector(self, name: str) -> np.ndarray | None:
        """Return ones for every norm; there are no biases."""
        return np.ones(self._width, np.float32) if name.endswith("norm") else None


def write_graph(folder: Path, architecture: Architecture = TINY, *, seed: int = 0) -> Path:
    """Write a random model of ``architecture`` into ``folder`` and return the path of its graph."""
    folder.mkdir(parents=True, exist_ok=True)
    return build_graph(architecture, RandomWeights(architecture, seed), folder)


def write_model(
    path: Path,
    *,
    architecture: Architecture = TINY,
    tokenizer: Tokenizer | None = None,
    chat_template: str | None = CHAT_TEMPLATE_SOURCE,
    seed: int = 0,
    **facts: Any,
) -> ModelFolder:
    """Write a model folder, by default a chat model with the byte-level tokenizer; ``facts`` go into its manifest."""
    write_graph(path, architecture, seed=seed)
    tokenizer = tokenizer or byte_level_tokenizer()
    tokenizer.save(str(path / TOKENIZER))
    if chat_template is not None:
        (path / CHAT_TEMPLATE).write_text(chat_template, "utf-8")
    end = tokenizer.token_to_id("<|end|>") or tokenizer.token_to_id("</s>")
    shared = {name: getattr(architecture, name) for name in SHARED_FACTS}
    stated = {
        "name": "tiny",
        "source": "tests/tiny_llm.py",
        "source_sha256": "0" * 64,
        "licence": "none",
        "architecture": architecture.family,
        "native_context_length": architecture.context_length,
        "vocab_size": tokenizer.get_vocab_size(),
        "tokenizer_sha256": file_sha256(path / TOKENIZER),
        "bos_id": tokenizer.token_to_id("<s>"),
        "eos_ids": [end],
        "pad_id": None,
        "add_bos": tokenizer.token_to_id("<s>") is not None,
        "dtype": "fp32",
        "bits_per_weight": 32.0,
        "memory_weights": 0,
        "memory_kv_per_token": 4 * architecture.kv_numbers_per_token,
        "versions": {},
        "checks": {},
    }
    write_manifest(path, shared | stated | facts)
    return ModelFolder.open(path)


def byte_level_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on ``TEXT``, with ``<|start|>`` and ``<|end|>`` as special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback_tokenizer(*, strips_leading_space: bool) -> Tokenizer:
    """Return a SentencePiece-like tokenizer with byte fallback: as Llama 2 (which strips) or Gemma (which keeps)."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for character in sorted(set("▁thecatsondg .!,本語")):
        vocabulary.setdefault(character, len(vocabulary))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("c", "a"), ("ca", "t"), ("▁", "cat"), ("o", "n"), ("▁", "▁")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips_leading_space else replace
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips_leading_space else parts)
    return tokenizer
