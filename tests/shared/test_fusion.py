"""Cross-attention fusion against a slow reference (fed-duet.md 1.6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from edgeduet_shared.config import FusionConfig
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.fusion import Fusion


def features(seed: int, *shape: int) -> Tensor:
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def fusion_with_values(embed_dim: int, config: FusionConfig, seed: int) -> Fusion:
    fusion = Fusion(embed_dim, config).requires_grad_(False)
    source = torch.Generator().manual_seed(seed)
    for parameter in fusion.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=source) * 0.5)
    return fusion


def slow_fusion(fusion: Fusion, z: Tensor, t: Tensor, u: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Image by image, class by class, head by head; r is formed explicitly."""
    value = {name: parameter.numpy().astype(np.float64) for name, parameter in fusion.named_parameters()}
    stride, width, heads = fusion.stride, fusion.width, fusion.heads

    def project(part: str, x: np.ndarray) -> np.ndarray:
        return value[f"{part}.weight"] @ x + value[f"{part}.bias"]

    prompts = torch.cat([t[None], u]).numpy().astype(np.float64)
    logits = np.zeros((len(z), t.shape[0]))
    attention = np.zeros((len(z), t.shape[0], len(prompts)))
    for image in range(len(z)):
        pooled = z[image].numpy().astype(np.float64)[::stride]
        query = project("query", pooled)
        for label in range(t.shape[0]):
            keys = [project("key", prompt[label][::stride]) for prompt in prompts]
            values = [project("value", prompt[label][::stride]) for prompt in prompts]
            joined = np.zeros(width)
            for head in range(heads):
                part = slice(head * width // heads, (head + 1) * width // heads)
                scores = np.array([10.0 * query[part] @ key[part] for key in keys])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                attention[image, label] += weights / heads
                joined[part] = sum(weight * v[part] for weight, v in zip(weights, values, strict=True))
            logits[image, label] = pooled @ project("output", joined)
    return logits, attention


@given(
    seed=st.integers(0, 2**31),
    prompts=st.integers(0, 3),
    shape=st.sampled_from([(16, 4, 2), (12, 1, 3), (10, 3, 4), (8, 2, 1)]),
)
def test_fusion_computes_the_formula(seed: int, prompts: int, shape: tuple[int, int, int]) -> None:
    embed_dim, stride, heads = shape
    fusion = fusion_with_values(embed_dim, FusionConfig(stride=stride, heads=heads), seed)
    z, t, u = (
        features(seed + 1, 3, embed_dim),
        features(seed + 2, 2, embed_dim),
        features(seed + 3, prompts, 2, embed_dim),
    )

    logits, attention = fusion(z, t, u)

    slow_logits, slow_attention = slow_fusion(fusion, z, t, u)
    np.testing.assert_allclose(logits.numpy(), slow_logits, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(attention.numpy(), slow_attention, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(attention.sum(-1).numpy(), 1.0, rtol=1e-5)


def test_the_order_of_dispatched_prompts_does_not_matter() -> None:
    fusion = fusion_with_values(16, FusionConfig(stride=2, heads=2), 0)
    z, t, u = features(1, 5, 16), features(2, 3, 16), features(3, 4, 3, 16)
    order = torch.tensor([2, 0, 3, 1])

    logits, attention = fusion(z, t, u)
    shuffled_logits, shuffled_attention = fusion(z, t, u[order])

    torch.testing.assert_close(logits, shuffled_logits)
    torch.testing.assert_close(attention[..., 0], shuffled_attention[..., 0])
    torch.testing.assert_close(attention[..., 1:][..., order], shuffled_attention[..., 1:])


def test_untrained_fusion_is_close_to_the_prompts_own_average_logits() -> None:
    fusion = Fusion(256, FusionConfig(stride=4, heads=8))
    params = fusion.initial(torch.Generator().manual_seed(0))
    z, t, u = features(1, 16, 256), features(2, 5, 256), features(3, 4, 5, 256)

    logits, attention = torch.func.functional_call(fusion, params, (z, t, u))

    kept = (z[:, ::4] @ torch.cat([t[None], u]).mean(0)[:, ::4].T) * 4
    assert (attention - 1 / 5).abs().max() < 0.05
    assert torch.corrcoef(torch.stack([logits.flatten(), kept.flatten()]))[0, 1] > 0.95
    assert logits.std() == pytest.approx(kept.std().item(), rel=0.1)


def test_with_no_dispatched_prompt_all_attention_is_on_the_local_one() -> None:
    fusion = fusion_with_values(8, FusionConfig(stride=2, heads=2), 0)

    _, attention = fusion(features(1, 3, 8), features(2, 4, 8), torch.zeros(0, 4, 8))

    assert torch.equal(attention, torch.ones(3, 4, 1))


def test_heads_that_do_not_divide_the_kept_width_are_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.fusion\.heads=3 does not divide the 8 coordinates .* \[1, 2, 4, 8\]"
    ):
        Fusion(32, FusionConfig(stride=4, heads=3))
