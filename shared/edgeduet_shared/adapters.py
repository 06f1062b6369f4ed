"""Adapters at one site of a frozen tower: routed experts, a router and an always-on shared adapter.

A site sits parallel to the feed-forward part of its block (fed-duet.md 1.4)::

    out  = h + MLP(LN2(h)) + s_moe * (sum_{e in top-k} g_e * A_e(h) + A_shared(h))
    A(h) = a * (W_up dropout(relu(W_down h + b_down)) + b_up)

with ``s_moe = 1``. ``W_up`` and all biases start at zero, so that a fresh site adds exactly zero;
``W_down`` is Kaiming-uniform (a = sqrt 5). The router is noisy top-k gating (Shazeer et al. 2017,
arXiv 1701.06538): while training, ``logit + N(0, 1) * (softplus(x W_noise) + 0.01)``; clean at test;
softmax over the kept k. ``W_g`` and ``W_noise`` start at zero. Equal logits are decided in favour of
the expert with the lower index, so that routing is deterministic.

Two consequences worth knowing: with fresh routers all clean logits are equal, so evaluation uses the
first k experts until the router has learned; with ``top_k = 1`` the kept softmax is constant 1 and
the cross-entropy cannot reach the router.

All experts of a site and its shared adapter are computed as one wide bottleneck whose hidden units
are multiplied by their expert's gate: two matrix products, no loop over experts, and gradients of
experts that were not chosen are exactly zero.

Shape suffixes: B samples, T tokens, D width of the site, E experts, F bottleneck of a routed
adapter, H hidden units of the whole site (E * F + bottleneck of the shared adapter).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeduet_shared.config import AdapterConfig
from edgeduet_shared.errors import ConfigError

SiteNoise = dict[str, Tensor]
"""Randomness of one site and batch: ``router`` (B, E) standard normal, ``dropout`` (B, H) scaled masks."""

_NOISE_FLOOR = 0.01


def kaiming_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Kaiming-uniform values with a = sqrt 5, that is U(-1/sqrt(fan_in), 1/sqrt(fan_in)); fan_in is the last axis."""
    bound = 1.0 / math.sqrt(shape[-1])
    return (torch.rand(shape, generator=generator) * 2.0 - 1.0) * bound


def top_k_gates(logits_BE: Tensor, top_k: int) -> Tensor:
    """Softmax over the ``top_k`` largest logits of each row, zero elsewhere (B, E).

    Among equal logits the lower index is kept. Made of element-wise operations only, so that the
    result does not depend on a sorting algorithm and maps over clients without a fallback.
    """
    experts = logits_BE.shape[-1]
    other, own = logits_BE.unsqueeze(-2), logits_BE.unsqueeze(-1)
    index = torch.arange(experts, device=logits_BE.device)
    earlier = index.unsqueeze(0) < index.unsqueeze(1)
    rank_BE = ((other > own) | ((other == own) & earlier)).sum(-1)
    return logits_BE.masked_fill(rank_BE >= top_k, -math.inf).softmax(-1)


class SharedAdapter(nn.Module):
    """The always-on adapter of a site."""

    def __init__(self, width: int, bottleneck: int) -> None:
        super().__init__()
        self.down_weight = nn.Parameter(torch.zeros(bottleneck, width))
        self.down_bias = nn.Parameter(torch.zeros(bottleneck))
        self.up_weight = nn.Parameter(torch.zeros(width, bottleneck))
        self.up_bias = nn.Parameter(torch.zeros(width))


class RoutedAdapters(nn.Module):
    """The E routed adapters of a site, stacked along the first axis."""

    def __init__(self, width: int, bottleneck: int, experts: int) -> None:
        super().__init__()
        self.down_weight = nn.Parameter(torch.zeros(experts, bottleneck, width))
        self.down_bias = nn.Parameter(torch.zeros(experts, bottleneck))
        self.up_weight = nn.Parameter(torch.zeros(experts, width, bottleneck))
        self.up_bias = nn.Parameter(torch.zeros(experts, width))


class Router(nn.Module):
    """Gate and noise matrices (D, E) of a site."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate_weight = nn.Parameter(torch.zeros(width, experts))
        self.noise_weight = nn.Parameter(torch.zeros(width, experts))


class AdapterSite(nn.Module):
    """Everything trainable at one site of a tower.

    Args:
        width: channels D of the stream the site reads and adds to.
        config: bottlenecks, number of experts, top-k, scale, dropout.
        routed: build routed adapters and a router (needs ``config.experts`` > 0).
    """

    def __init__(self, width: int, config: AdapterConfig, *, routed: bool) -> None:
        super().__init__()
        self.width = width
        self.experts = config.experts if routed else 0
        self.bottleneck = config.bottleneck
        self.top_k = config.top_k
        self.scale = config.scale
        self.dropout = config.dropout
        self.hidden = config.shared_bottleneck + self.experts * config.bottleneck
        if self.experts and config.top_k > self.experts:
            raise ConfigError(
                f"model.adapter.top_k={config.top_k} exceeds model.adapter.experts={self.experts}; "
                f"set top_k to at most {self.experts}"
            )
        self.shared = SharedAdapter(width, config.shared_bottleneck)
        if self.experts:
            self.routed = RoutedAdapters(width, config.bottleneck, self.experts)
            self.router = Router(width, self.experts)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh values of this site's parameters, drawn from ``generator``."""
        fresh = {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters()}
        for name in fresh:
            if name.endswith("down_weight"):
                fresh[name] = kaiming_uniform(tuple(fresh[name].shape), generator)
        return fresh

    def draw_noise(self, samples: int, generator: torch.Generator, *, router: bool) -> SiteNoise:
        """Draw router noise (when ``router`` and there is one) and dropout masks (when dropout > 0)."""
        noise: SiteNoise = {}
        device = generator.device
        if router and self.experts:
            noise["router"] = torch.randn(samples, self.experts, generator=generator, device=device)
        if self.dropout > 0:
            kept = torch.rand(samples, self.hidden, generator=generator, device=device) >= self.dropout
            noise["dropout"] = kept.float() / (1.0 - self.dropout)
        return noise

    def forward(
        self, stream_BTD: Tensor, routing_BD: Tensor, noise: SiteNoise | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What the site adds to the stream, and its clean router logits.

        Args:
            stream_BTD: the stream the site is parallel to.
            routing_BD: what the router reads, one vector per sample; the same gates serve all tokens.
            noise: training randomness; None means evaluation. A dropout mask is shared by all tokens
                of a sample.

        Returns:
            the addition (B, T, D), and (B, E) clean logits or None without routed adapters.
        """
        down_HD: Tensor = self.shared.down_weight
        bias_H: Tensor = self.shared.down_bias
        up_DH: Tensor = self.shared.up_weight
        logits_BE = None
        if self.experts:
            logits_BE, gates_BE = self._gates(routing_BD, noise)
            down_HD = torch.cat([self.routed.down_weight.flatten(0, 1), down_HD])
            bias_H = torch.cat([self.routed.down_bias.flatten(), bias_H])
            up_DH = torch.cat([self.routed.up_weight.transpose(0, 1).flatten(1), up_DH], dim=1)
        hidden_BTH = functional.linear(stream_BTD, down_HD, bias_H).relu()
        if noise is not None and "dropout" in noise:
            hidden_BTH = hidden_BTH * noise["dropout"].unsqueeze(1)
        if logits_BE is None:
            added_BTD = functional.linear(hidden_BTH, up_DH, self.shared.up_bias)
        else:
            ones_BF = gates_BE.new_ones(*gates_BE.shape[:-1], self.hidden - self.experts * self.bottleneck)
            weights_BH = torch.cat([gates_BE.repeat_interleave(self.bottleneck, dim=-1), ones_BF], dim=-1)
            bias_BD = gates_BE @ self.routed.up_bias + self.shared.up_bias
            added_BTD = functional.linear(hidden_BTH * weights_BH.unsqueeze(1), up_DH) + bias_BD.unsqueeze(1)
        return self.scale * added_BTD, logits_BE

    def _gates(self, routing_BD: Tensor, noise: SiteNoise | None) -> tuple[Tensor, Tensor]:
        clean_BE = routing_BD @ self.router.gate_weight
        noisy_BE = clean_BE
        if noise is not None and "router" in noise:
            spread_BE = functional.softplus(routing_BD @ self.router.noise_weight) + _NOISE_FLOOR
            noisy_BE = clean_BE + noise["router"] * spread_BE
        return clean_BE, top_k_gates(noisy_BE, self.top_k)
