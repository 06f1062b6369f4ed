"""A frozen block computed from its own weights, with an adapter parallel to its MLP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from open_clip.transformer import CustomResidualAttentionBlock, ResidualAttentionBlock
from torch import Tensor, nn

from edgeduet_shared.adapters import AdapterSite
from edgeduet_shared.config import AdapterConfig
from edgeduet_shared.transformer_block import block_forward

BLOCKS: dict[str, Any] = {
    "plain": lambda: ResidualAttentionBlock(16, 4),
    "layer scale": lambda: ResidualAttentionBlock(16, 4, ls_init_value=0.5),
    "query-key norm": lambda: CustomResidualAttentionBlock(16, 4, qk_norm=True, scale_attn=True, scale_fc=True),
}


def block_and_input(kind: str, causal: bool) -> tuple[nn.Module, Tensor, Tensor | None, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = BLOCKS[kind]().eval().requires_grad_(False)
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        stream = torch.randn(3, 6, 16)
    mask = torch.full((6, 6), float("-inf")).triu_(1) if causal else None
    return block, stream, mask, torch.eye(6)[[5, 2, 0]]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("causal", [True, False])
def test_without_a_site_it_is_open_clips_block(kind: str, causal: bool) -> None:
    block, stream, mask, _ = block_and_input(kind, causal)

    out, logits = block_forward(block, stream, mask=mask)

    torch.testing.assert_close(out, block(stream, attn_mask=mask), rtol=1e-5, atol=1e-5)
    assert logits is None


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("causal", [True, False])
def test_one_row_alone_equals_that_row_of_the_whole(kind: str, causal: bool) -> None:
    block, stream, mask, read = block_and_input(kind, causal)
    site = trained_site()

    whole, whole_logits = block_forward(block, stream, mask=mask, site=site, read_NT=read)
    alone, alone_logits = block_forward(block, stream, mask=mask, site=site, read_NT=read, only_read=True)

    assert alone.shape == (3, 1, 16)
    torch.testing.assert_close(alone[:, 0], whole[torch.arange(3), torch.tensor([5, 2, 0])], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone_logits, whole_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("read_token", [True, False])
def test_the_site_is_parallel_to_the_mlp_and_reads_the_stream_after_attention(read_token: bool) -> None:
    block, stream, mask, read = block_and_input("layer scale", True)
    site = trained_site()

    out, logits = block_forward(block, stream, mask=mask, site=site, read_NT=read if read_token else None)

    normed = block.ln_1(stream)
    h = stream + block.ls_1(block.attn(normed, normed, normed, need_weights=False, attn_mask=mask)[0])
    routing = h[torch.arange(3), torch.tensor([5, 2, 0])] if read_token else h[:, 0]
    added, expected_logits = site(h, routing)
    torch.testing.assert_close(out, h + block.ls_2(block.mlp(block.ln_2(h))) + added, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-5)


def trained_site() -> AdapterSite:
    site = AdapterSite(16, AdapterConfig(bottleneck=3, shared_bottleneck=3), routed=True).requires_grad_(False)
    source = torch.Generator().manual_seed(1)
    for parameter in site.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=source))
    return site
