"""One frozen open_clip transformer block, with an optional adapter site parallel to its MLP.

open_clip's own block calls ``nn.MultiheadAttention`` and so fused attention kernels that
``torch.func.vmap`` can only run one client after another. The same attention is therefore computed
from the block's own weights with plain matrix products: equal up to float rounding, and vectorised
over clients. Nothing of the block is replaced or changed.

Shape suffixes: N sequences, T tokens, Q query tokens (T, or 1), W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeduet_shared.adapters import AdapterSite, SiteNoise


def block_forward(
    block: Any,
    stream_NTW: Tensor,
    *,
    mask: Tensor | None = None,
    site: AdapterSite | None = None,
    noise: SiteNoise | None = None,
    read_NT: Tensor | None = None,
    only_read: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run ``block``, adding what ``site`` computes from the stream after attention.

    Args:
        block: ``ResidualAttentionBlock`` or ``CustomResidualAttentionBlock`` of open_clip.
        stream_NTW: input of the block.
        mask: additive attention mask broadcastable to (N, heads, T, T).
        site: adapters parallel to the MLP, or None.
        noise: training randomness of the site.
        read_NT: one-hot choice of the token the router reads; None reads token 0.
        only_read: compute only the read token's output, (N, 1, W). For the last block, whose other
            outputs nobody uses.

    Returns:
        the block's output, and the site's clean router logits (N, E) or None.
    """
    h_NQW = _after_attention(block, stream_NTW, mask, read_NT if only_read else None)
    out_NQW = h_NQW + block.ls_2(block.mlp(block.ln_2(h_NQW)))
    if site is None:
        return out_NQW, None
    routing_NW = h_NQW[:, 0] if read_NT is None or only_read else read_token(h_NQW, read_NT)
    added_NQW, logits_NE = site(h_NQW, routing_NW, noise)
    return out_NQW + added_NQW, logits_NE


def read_token(stream_NTW: Tensor, read_NT: Tensor) -> Tensor:
    """The token each row of the one-hot ``read_NT`` points at, (N, W).

    A product with exact ones and zeros instead of an index: it has a fast backward pass under vmap.
    """
    return torch.einsum("nt,ntw->nw", read_NT, stream_NTW)


def _after_attention(block: Any, stream_NTW: Tensor, mask: Tensor | None, read_NT: Tensor | None) -> Tensor:
    normed_NTW = block.ln_1(stream_NTW)
    if not isinstance(block.attn, nn.MultiheadAttention):
        # Blocks with query/key normalisation and the like bring their own attention.
        h_NTW = stream_NTW + block.ls_1(block.ln_attn(block.attn(normed_NTW, attn_mask=mask)))
        return h_NTW if read_NT is None else read_token(h_NTW, read_NT).unsqueeze(1)
    if read_NT is None:
        return stream_NTW + block.ls_1(_self_attention(block.attn, normed_NTW, normed_NTW, mask))
    query_N1W = read_token(normed_NTW, read_NT).unsqueeze(1)
    rows = None
    if mask is not None:
        # -inf times 0 would be NaN in a one-hot product, so the mask is turned into 0/1 and back.
        allowed_NT = read_NT @ (mask == 0).to(read_NT.dtype)
        rows = torch.where(allowed_NT > 0, 0.0, float("-inf"))[:, None, None, :]
    attended_N1W = _self_attention(block.attn, query_N1W, normed_NTW, rows)
    return read_token(stream_NTW, read_NT).unsqueeze(1) + block.ls_1(attended_N1W)


def _self_attention(
    attention: nn.MultiheadAttention, query_NQW: Tensor, context_NTW: Tensor, mask: Tensor | None
) -> Tensor:
    width, heads = attention.embed_dim, attention.num_heads
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if query_NQW is context_NTW:
        q, k, v = functional.linear(context_NTW, weight, bias).chunk(3, dim=-1)
    else:
        q = functional.linear(query_NQW, weight[:width], None if bias is None else bias[:width])
        k, v = functional.linear(context_NTW, weight[width:], None if bias is None else bias[width:]).chunk(2, dim=-1)
    q, k, v = (part.unflatten(-1, (heads, width // heads)).transpose(1, 2) for part in (q, k, v))
    scores = (q * (width // heads) ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = scores + mask
    attended_NQW = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return functional.linear(attended_NQW, attention.out_proj.weight, attention.out_proj.bias)
