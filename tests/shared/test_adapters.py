"""Adapter sites: the formula, routing, noise and initial values (fed-duet.md 1.4)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgeduet_shared.adapters import AdapterSite, top_k_gates
from edgeduet_shared.config import AdapterConfig
from edgeduet_shared.errors import ConfigError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def site_with_values(width: int, config: AdapterConfig, seed: int, *, routed: bool = True) -> AdapterSite:
    """A site whose parameters are all random, none at its initial zero."""
    site = AdapterSite(width, config, routed=routed).requires_grad_(False)
    source = generator(seed)
    for parameter in site.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=source))
    return site


def slow_site(site: AdapterSite, stream: Tensor, routing: Tensor, noise: dict[str, Tensor]) -> np.ndarray:
    """The formula of 1.4, expert by expert and token by token, in float64."""
    value = {name: parameter.numpy().astype(np.float64) for name, parameter in site.named_parameters()}
    h, x = stream.numpy().astype(np.float64), routing.numpy().astype(np.float64)
    bottleneck = site.bottleneck
    added = np.zeros_like(h)
    for sample in range(h.shape[0]):
        mask = noise["dropout"][sample].numpy() if "dropout" in noise else np.ones(site.hidden)
        logits = x[sample] @ value["router.gate_weight"]
        if "router" in noise:
            spread = np.log1p(np.exp(x[sample] @ value["router.noise_weight"])) + 0.01
            logits = logits + noise["router"][sample].numpy() * spread
        kept = sorted(range(site.experts), key=lambda expert: (-logits[expert], expert))[: site.top_k]
        exponentials = np.exp(logits[kept] - logits[kept].max())
        gates = exponentials / exponentials.sum()
        for token in range(h.shape[1]):
            total = np.zeros(site.width)
            for gate, expert in zip(gates, kept, strict=True):
                down = value["routed.down_weight"][expert] @ h[sample, token] + value["routed.down_bias"][expert]
                hidden = np.maximum(down, 0) * mask[expert * bottleneck : (expert + 1) * bottleneck]
                total += gate * (value["routed.up_weight"][expert] @ hidden + value["routed.up_bias"][expert])
            down = value["shared.down_weight"] @ h[sample, token] + value["shared.down_bias"]
            hidden = np.maximum(down, 0) * mask[site.experts * bottleneck :]
            total += value["shared.up_weight"] @ hidden + value["shared.up_bias"]
            added[sample, token] = site.scale * total
    return added


@given(
    seed=st.integers(0, 2**31),
    experts=st.integers(1, 5),
    tokens=st.integers(1, 3),
    dropout=st.sampled_from([0.0, 0.4]),
    training=st.booleans(),
    data=st.data(),
)
def test_a_site_computes_the_formula(
    seed: int, experts: int, tokens: int, dropout: float, training: bool, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    config = AdapterConfig(bottleneck=3, shared_bottleneck=2, experts=experts, top_k=top_k, dropout=dropout, scale=0.3)
    site = site_with_values(5, config, seed)
    source = generator(seed + 1)
    stream, routing = torch.randn(4, tokens, 5, generator=source), torch.randn(4, 5, generator=source)
    noise = site.draw_noise(4, source, router=True) if training else {}

    added, logits = site(stream, routing, noise)

    np.testing.assert_allclose(added.numpy(), slow_site(site, stream, routing, noise), rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(logits, routing @ site.router.gate_weight)


def test_a_fresh_site_adds_exactly_zero_even_while_training() -> None:
    site = AdapterSite(6, AdapterConfig(dropout=0.5), routed=True)
    params = site.initial(generator())
    noise = site.draw_noise(3, generator(), router=True)
    args = (torch.randn(3, 2, 6), torch.randn(3, 6), noise)

    added, _ = torch.func.functional_call(site, params, args)

    assert torch.count_nonzero(added) == 0


def test_down_projections_start_kaiming_uniform_and_all_else_zero() -> None:
    site = AdapterSite(16, AdapterConfig(bottleneck=64, shared_bottleneck=64), routed=True)

    fresh = site.initial(generator(3))

    assert all(torch.equal(value, site.initial(generator(3))[name]) for name, value in fresh.items())
    for name, value in fresh.items():
        if name.endswith("down_weight"):
            assert value.abs().max() <= 1 / math.sqrt(16)
            assert value.std() == pytest.approx(1 / math.sqrt(3 * 16), rel=0.1)
        else:
            assert torch.count_nonzero(value) == 0


@given(st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(1, 5))
def test_gates_keep_k_experts_and_prefer_the_lower_index_on_ties(rows: list[list[int]], top_k: int) -> None:
    gates = top_k_gates(torch.tensor(rows, dtype=torch.float32), top_k)

    torch.testing.assert_close(gates.sum(-1), torch.ones(len(rows)))
    for row, gate in zip(rows, gates, strict=True):
        kept = sorted(sorted(range(5), key=lambda expert: (-row[expert], expert))[:top_k])
        assert gate.nonzero()[:, 0].tolist() == kept


def test_experts_that_are_not_chosen_get_exactly_zero_gradient() -> None:
    site = site_with_values(5, AdapterConfig(bottleneck=3, shared_bottleneck=2, experts=4, top_k=2), 0)
    params = dict(site.named_parameters())
    routing = torch.randn(1, 5, generator=generator(1))
    chosen = set(top_k_gates(routing @ site.router.gate_weight, 2)[0].nonzero()[:, 0].tolist())

    def total(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(site, values, (torch.ones(1, 2, 5), routing))[0].sum()

    gradient = torch.func.grad(total)(params)["routed.up_bias"]

    assert {expert for expert in range(4) if gradient[expert].abs().sum() > 0} == chosen


def test_router_noise_changes_the_choice_and_its_absence_is_the_clean_choice() -> None:
    site = site_with_values(5, AdapterConfig(bottleneck=3, shared_bottleneck=2, experts=4, top_k=1), 0)
    stream, routing = torch.randn(64, 1, 5, generator=generator(1)), torch.randn(64, 5, generator=generator(2))

    clean, _ = site(stream, routing, None)
    without, _ = site(stream, routing, site.draw_noise(64, generator(3), router=False))
    noisy, _ = site(stream, routing, site.draw_noise(64, generator(3), router=True))

    assert torch.equal(clean, without)
    assert (clean != noisy).any(-1).sum() > 5


def test_dropout_masks_keep_the_expectation() -> None:
    site = AdapterSite(4, AdapterConfig(dropout=0.25, bottleneck=8, shared_bottleneck=8), routed=True)

    mask = site.draw_noise(2000, generator(), router=False)["dropout"]

    assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert mask.mean() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("experts", "routed"), [(0, True), (4, False)])
def test_without_routed_adapters_there_is_no_router(experts: int, routed: bool) -> None:
    site = AdapterSite(4, AdapterConfig(experts=experts), routed=routed)

    _, logits = site(torch.ones(2, 3, 4), torch.ones(2, 4))

    assert logits is None
    assert all(name.startswith("shared.") for name, _ in site.named_parameters())
    assert site.draw_noise(2, generator(), router=True) == {}


def test_more_kept_than_there_are_experts_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"top_k=3 exceeds model\.adapter\.experts=2; set top_k to at most 2"):
        AdapterSite(4, AdapterConfig(experts=2, top_k=3), routed=True)
