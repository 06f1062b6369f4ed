"""What distinguishes one decoder-only model from another, in the words the graph builder needs.

Supported families: Llama (SmolLM, SmolLM2), Qwen2 and Qwen2.5, Qwen3, Gemma 3 (text). All share one
skeleton: embedding, blocks of grouped-query attention with rotary positions and a gated MLP around a
residual stream, a final norm and a head. What differs is written down here once, read either from a
Hugging Face ``config.json`` or from the metadata of a GGUF file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from edgeduet_client.llm.errors import ModelError

Family = Literal["llama", "qwen2", "qwen3", "gemma3"]

# The families by the names that files use.
_FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
# Gemma 3 looks far in every sixth block; the others see a window and have their own rotary base.
_GEMMA_PATTERN = 6
_GEMMA_LOCAL_BASE = 10_000.0
# Gemma 3 27B scales its scores by width / heads, the smaller ones by the width of a head. A GGUF file says
# neither; llama.cpp tells the 27B by its number of blocks.
_GEMMA_27B_LAYERS = 62


@dataclass(frozen=True)
class Rope:
    """Rotary positions: ``base`` as theta, and how a long context stretches the angles.

    Attributes:
        scaling: ``None``, ``"linear"`` (all angles divided by ``factor``) or ``"llama3"`` (long waves
            divided by ``factor``, short ones kept, a ramp between; Llama 3.1).
        divisors: one per pair of a head: what its angle is divided by on top. A GGUF file of a Llama 3.1 model
            states these in place of the rule.
    """

    base: float
    scaling: Literal["linear", "llama3"] | None = None
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    divisors: tuple[float, ...] | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angle per position of every pair of a head, float64 ``(head_dim / 2,)``."""
        frequency = self.base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.scaling == "linear":
            frequency = frequency / self.factor
        elif self.scaling == "llama3":
            turns = self.original_context * frequency / (2 * math.pi)
            ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = np.clip(ramp, 0.0, 1.0)
            frequency = frequency * (keep + (1 - keep) / self.factor)
        return frequency if self.divisors is None else frequency / np.asarray(self.divisors, np.float64)

    def tables(self, length: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines, each float32 ``(length, head_dim / 2)``."""
        angle = np.outer(np.arange(length, dtype=np.float64), self.frequencies(head_dim))
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@dataclass(frozen=True)
class Architecture:
    """The shape of one model; widths are counts of numbers, lengths counts of tokens.

    Attributes:
        windows: per block, how many positions it sees back (``None``: all).
        ropes: per block, its rotary positions.
        query_scale: what attention scores are multiplied by.
        embedding_scale: what token embeddings are multiplied by (Gemma: the root of the width).
        unit_offset_norms: the file stores norm weights minus one (Gemma as Hugging Face stores it).
        sandwich_norms: attention and MLP are normed before and after (Gemma 3).
        interleaved_queries: query and key rows are ordered for interleaved rotation (Llama in GGUF).
    """

    family: Family
    layers: int
    hidden_width: int
    mlp_width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_width: int
    context_length: int
    norm_epsilon: float
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    query_scale: float
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied_head: bool = True
    query_key_norms: bool = False
    sandwich_norms: bool = False
    unit_offset_norms: bool = False
    interleaved_queries: bool = False

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads or self.head_dim % 2:
            raise ModelError(
                f"{self.query_heads} query heads over {self.kv_heads} key-value heads of width {self.head_dim} are no "
                "model of this family; fetch the model's settings again"
            )

    @property
    def kv_numbers_per_token(self) -> int:
        """Count of key and value numbers one position holds over all blocks."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Count of the numbers in all matrices."""
        names = ["embedding"] if self.tied_head else ["embedding", "head"]
        block = [self.matrix_shape(name) for name in ("q", "k", "v", "o", "gate", "up", "down")]
        tables = [self.matrix_shape(name) for name in names]
        return sum(rows * width for rows, width in tables) + self.layers * sum(rows * width for rows, width in block)

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a weight matrix, by the names of :class:`edgeduet_client.llm.graph.Weights`."""
        queries, values = self.query_heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "embedding": (self.vocab_width, self.hidden_width),
            "head": (self.vocab_width, self.hidden_width),
            "q": (queries, self.hidden_width),
            "k": (values, self.hidden_width),
            "v": (values, self.hidden_width),
            "o": (self.hidden_width, queries),
            "gate": (self.mlp_width, self.hidden_width),
            "up": (self.mlp_width, self.hidden_width),
            "down": (self.hidden_width, self.mlp_width),
        }
        return shapes[name.rpartition(".")[2]]

    def with_context(self, length: int) -> Architecture:
        """Return the same model limited to ``length`` positions."""
        return replace(self, context_length=min(length, self.context_length))


def from_config(config: Mapping[str, Any]) -> Architecture:
    """Read a Hugging Face ``config.json``.

    Raises:
        ModelError: a family or a feature that the graph builder does not know, or an entry that is missing or
            no number; says which.
    """
    try:
        return _from_config(config)
    except KeyError as error:
        raise ModelError(f"config.json: {error.args[0]} is missing; fetch the file again") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"config.json cannot be understood ({error}); fetch it again") from error


def _from_config(config: Mapping[str, Any]) -> Architecture:
    family = _family(str(config.get("model_type")))
    layers = int(config["num_hidden_layers"])
    hidden = int(config["hidden_size"])
    query_heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // query_heads)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            raise ModelError(f"config.json: {key}={config[key]} is not supported; choose a model without it")
    gemma = family == "gemma3"
    windows, ropes = _config_positions(config, family, layers)
    scalar = float(config.get("query_pre_attn_scalar") or head_dim) if gemma else float(head_dim)
    return Architecture(
        family=family,
        layers=layers,
        hidden_width=hidden,
        mlp_width=int(config["intermediate_size"]),
        query_heads=query_heads,
        kv_heads=int(config.get("num_key_value_heads") or query_heads),
        head_dim=head_dim,
        vocab_width=int(config["vocab_size"]),
        context_length=int(config["max_position_embeddings"]),
        norm_epsilon=float(config["rms_norm_eps"]),
        windows=windows,
        ropes=ropes,
        query_scale=scalar**-0.5,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        activation=_activation(config, gemma),
        # Gemma ties by default, the others do not; a file that says nothing means its family's default.
        tied_head=bool(config.get("tie_word_embeddings", gemma)),
        query_key_norms=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        unit_offset_norms=gemma,
    )


def from_gguf(
    fields: Mapping[str, Any], *, vocab_width: int, has_head: bool, rope_divisors: tuple[float, ...] | None = None
) -> Architecture:
    """Read the metadata of a GGUF file (``key: value``).

    Args:
        fields: the metadata.
        vocab_width: rows of the embedding.
        has_head: the file holds a head of its own.
        rope_divisors: the file's ``rope_freqs``, if it has them (see :class:`Rope`).

    Raises:
        ModelError: as for :func:`from_config`.
    """
    name = str(fields.get("general.architecture"))
    family = _family(name)

    def field(key: str, default: Any = None) -> Any:
        value = fields.get(f"{name}.{key}", default)
        if value is None:
            raise ModelError(f"GGUF metadata: {name}.{key} is missing; the file is incomplete, fetch it again")
        if isinstance(value, list):
            raise ModelError(f"GGUF metadata: {name}.{key} differs from block to block, which is not supported")
        return value

    layers, hidden = int(field("block_count")), int(field("embedding_length"))
    query_heads = int(field("attention.head_count"))
    head_dim = int(field("attention.key_length", hidden // query_heads))
    _refuse_gguf_variants(name, field, head_dim)
    gemma = family == "gemma3"
    windows, ropes = _patterned(
        layers,
        _gguf_rope(field, rope_divisors),
        int(field("attention.sliding_window", 0)) if gemma else None,
        _GEMMA_PATTERN,
    )
    scalar = hidden // query_heads if gemma and layers == _GEMMA_27B_LAYERS else head_dim
    return Architecture(
        family=family,
        layers=layers,
        hidden_width=hidden,
        mlp_width=int(field("feed_forward_length")),
        query_heads=query_heads,
        kv_heads=int(field("attention.head_count_kv", query_heads)),
        head_dim=head_dim,
        vocab_width=vocab_width,
        context_length=int(field("context_length")),
        norm_epsilon=float(field("attention.layer_norm_rms_epsilon")),
        windows=windows,
        ropes=ropes,
        query_scale=scalar**-0.5,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        activation="gelu_tanh" if gemma else "silu",
        tied_head=not has_head,
        query_key_norms=family in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        unit_offset_norms=False,  # converters to GGUF add the one
        interleaved_queries=family == "llama",
    )


def _refuse_gguf_variants(name: str, field: Callable[..., Any], head_dim: int) -> None:
    """Refuse what shares a family's name and is built differently."""
    if int(field("expert_count", 0)):
        raise ModelError(f"GGUF metadata: {name} with experts (MoE) is not supported; choose a dense model")
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(field(key, head_dim)) != head_dim:
            raise ModelError(f"GGUF metadata: {name}.{key} differs from the {head_dim} of a head; not supported")
    if float(field("final_logit_softcapping", 0.0)):
        raise ModelError(f"GGUF metadata: {name}.final_logit_softcapping is not supported; choose a model without it")


def _gguf_rope(field: Callable[..., Any], divisors: tuple[float, ...] | None) -> Rope:
    scaling = str(field("rope.scaling.type", "none"))
    rope = Rope(float(field("rope.freq_base", 10_000.0)), divisors=divisors)
    if scaling == "none":
        return rope
    if scaling == "linear":
        return replace(rope, scaling="linear", factor=float(field("rope.scaling.factor")))
    raise ModelError(f"GGUF metadata: rope scaling '{scaling}' is not supported; import the Hugging Face folder")


def _family(name: str) -> Family:
    if name not in _FAMILIES:
        known = "Llama/SmolLM, Qwen2, Qwen3, Gemma 3"
        raise ModelError(f"model architecture '{name}' is not supported; import a model of the families {known}")
    return _FAMILIES[name]


def _activation(config: Mapping[str, Any], gemma: bool) -> Literal["silu", "gelu_tanh"]:
    named = config.get("hidden_activation") if gemma else config.get("hidden_act", "silu")
    named = named or config.get("hidden_act") or "gelu_pytorch_tanh"
    if named == "silu":
        return "silu"
    if named in ("gelu_pytorch_tanh", "gelu_new"):
        return "gelu_tanh"
    raise ModelError(f"config.json: activation '{named}' is not supported; known: silu, gelu_pytorch_tanh")


def _config_positions(
    config: Mapping[str, Any], family: Family, layers: int
) -> tuple[tuple[int | None, ...], tuple[Rope, ...]]:
    """Windows and rotary positions per block, from the old and the new spelling of ``config.json``."""
    stated = config.get("rope_parameters") or {}
    if family != "gemma3":
        scaled = {**(config.get("rope_scaling") or {}), **stated}
        rope = _rope(float(scaled.get("rope_theta") or config.get("rope_theta") or 10_000.0), scaled, config)
        return _config_windows(config, layers), (rope,) * layers
    far_stated = stated.get("full_attention", config.get("rope_scaling") or {})
    near_stated = stated.get("sliding_attention", {})
    far = _rope(float(far_stated.get("rope_theta") or config.get("rope_theta") or 1_000_000.0), far_stated, config)
    near = Rope(float(near_stated.get("rope_theta") or config.get("rope_local_base_freq") or _GEMMA_LOCAL_BASE))
    window = int(config["sliding_window"])
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds is None:
        return _patterned(layers, far, window, int(config.get("sliding_window_pattern", _GEMMA_PATTERN)), near)
    is_near = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if flag else None for flag in is_near), tuple(near if flag else far for flag in is_near)


def _config_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Windows of Qwen's blocks: the later ones may be limited (Llama's see everything)."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if not window:
        return (None,) * layers
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 0))
        return tuple(int(window) if layer >= first else None for layer in range(layers))
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _patterned(
    layers: int, far: Rope, window: int | None, pattern: int, near: Rope | None = None
) -> tuple[tuple[int | None, ...], tuple[Rope, ...]]:
    """Every ``pattern``-th block sees everything, the others ``window`` positions; no window: all see everything."""
    if not window:
        return (None,) * layers, (far,) * layers
    near = near or Rope(_GEMMA_LOCAL_BASE)
    is_near = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return tuple(window if flag else None for flag in is_near), tuple(near if flag else far for flag in is_near)


def _rope(base: float, stated: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
    kind = stated.get("rope_type", stated.get("type", "default"))
    part = stated.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1.0):
        raise ModelError(f"config.json: partial_rotary_factor={part} is not supported; choose a model without it")
    if kind in (None, "default"):
        return Rope(base)
    if kind == "linear":
        return Rope(base, "linear", float(stated["factor"]))
    if kind == "llama3":
        return Rope(
            base,
            "llama3",
            float(stated["factor"]),
            float(stated["low_freq_factor"]),
            float(stated["high_freq_factor"]),
            int(stated["original_max_position_embeddings"]),
        )
    raise ModelError(f"config.json: rope type '{kind}' is not supported; known: default, linear, llama3")
