"""What a configuration or GGUF metadata says about a model, and what is refused in one line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.architecture import Architecture, Rope, from_config, from_gguf
from edgeduet_client.llm.errors import ModelError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 12,
    "llama.embedding_length": 96,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 2048,
}


def _gguf(family: str = "llama", **changed: Any) -> Architecture:
    fields = {key.replace("llama", family): value for key, value in GGUF.items()} | {"general.architecture": family}
    return from_gguf(
        fields | {f"{family}.{key}": value for key, value in changed.items()}, vocab_width=320, has_head=False
    )


@pytest.mark.parametrize("key", sorted(set(CONFIG) - {"model_type", "num_key_value_heads"}))
def test_a_missing_entry_is_named(key: str):
    with pytest.raises(ModelError, match=f"config.json: {key} is missing"):
        from_config({name: value for name, value in CONFIG.items() if name != key})


@pytest.mark.parametrize("value", ["many", [1], {}, None])
def test_an_entry_that_is_no_number_is_one_line(value: Any):
    with pytest.raises(ModelError) as refused:
        from_config(CONFIG | {"hidden_size": value})
    assert "config.json" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen2_moe"}, "qwen2_moe"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_key_value_heads": 4}, "6 query heads over 4"),
    ],
)
def test_what_the_graph_cannot_do_is_refused_by_name(changed: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        from_config(CONFIG | changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"expert_count": 8}, "MoE"),
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"attention.value_length": 32}, "attention.value_length"),
        ({"attention.head_count_kv": [1, 2, 3]}, "differs from block to block"),
    ],
)
def test_gguf_variants_are_refused_by_name(changed: dict[str, Any], named: str):
    with pytest.raises(ModelError, match=named):
        _gguf(**changed)


def test_a_gguf_file_without_an_entry_is_incomplete():
    with pytest.raises(ModelError, match=r"llama.context_length is missing"):
        from_gguf({k: v for k, v in GGUF.items() if "context" not in k}, vocab_width=320, has_head=False)


def test_configuration_and_gguf_of_one_model_say_the_same():
    ours = from_config(CONFIG | {"tie_word_embeddings": True})
    theirs = _gguf()
    assert theirs.interleaved_queries
    assert ours == Architecture(**{**vars(theirs), "interleaved_queries": False})


def test_gemma_looks_far_in_every_sixth_block_only():
    arch = _gguf("gemma3", **{"attention.sliding_window": 512, "rope.freq_base": 1e6})
    far = [layer for layer, window in enumerate(arch.windows) if window is None]
    assert far == [5, 11]
    assert [rope.base for rope in arch.ropes] == [1e6 if layer in far else 1e4 for layer in range(12)]


def test_the_largest_gemma_scales_scores_by_width_over_heads():
    assert _gguf("gemma3", **{"attention.key_length": 32}).query_scale == pytest.approx(32**-0.5)
    large = _gguf("gemma3", **{"block_count": 62, "attention.key_length": 32})
    assert large.query_scale == pytest.approx((96 / 6) ** -0.5)


def test_qwen_windows_begin_at_the_block_that_the_configuration_says():
    stated = CONFIG | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9}
    assert from_config(stated).windows == (None,) * 9 + (64,) * 3
    kinds = ["sliding_attention", "full_attention"] * 6
    assert from_config(stated | {"layer_types": kinds}).windows == (64, None) * 6
    assert from_config(stated | {"use_sliding_window": False}).windows == (None,) * 12


@given(base=st.floats(1e3, 1e7), head_dim=st.integers(1, 64).map(lambda half: 2 * half))
def test_angles_are_position_times_base_to_a_falling_power(base: float, head_dim: int):
    cosines, sines = Rope(base).tables(7, head_dim)
    assert cosines.shape == sines.shape == (7, head_dim // 2)
    for pair in range(head_dim // 2):
        angle = 6 * base ** (-2 * pair / head_dim)
        assert cosines[6, pair] == pytest.approx(math.cos(angle), abs=1e-6)
        assert sines[6, pair] == pytest.approx(math.sin(angle), abs=1e-6)


def test_llama_3_scaling_keeps_short_waves_and_divides_long_ones():
    plain = Rope(5e5).frequencies(128)
    scaled = Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192).frequencies(128)
    wave = 2 * math.pi / plain
    np.testing.assert_array_equal(scaled[wave < 8192 / 4], plain[wave < 8192 / 4])
    np.testing.assert_allclose(scaled[wave > 8192], plain[wave > 8192] / 8)
    between = (wave > 8192 / 4) & (wave < 8192)
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_divisors_of_a_file_replace_the_rule():
    rule = Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192).frequencies(128)
    divisors = tuple((Rope(5e5).frequencies(128) / rule).tolist())
    np.testing.assert_allclose(Rope(5e5, divisors=divisors).frequencies(128), rule, rtol=1e-12)
