"""AdamW over a client axis: each client moves exactly as under ``torch.optim``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgeduet_client.optimiser import AdamW, clip_gradients, schedule

SHAPES = {"matrix": (4, 3), "vector": (5,), "number": (1,)}

seeds = st.integers(0, 2**32 - 1)
rates = st.floats(1e-5, 1.0)


def drawn(clients: int, generator: torch.Generator, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: scale * torch.randn(clients, *shape, generator=generator) for name, shape in SHAPES.items()}


@given(
    seed=seeds,
    clients=st.integers(1, 3),
    steps=st.lists(st.tuples(rates, rates), min_size=1, max_size=8),
    decay=st.sampled_from([0.0, 0.01, 0.5]),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_each_client_moves_as_under_torchs_adamw_with_a_changing_rate(
    seed: int, clients: int, steps: list[tuple[float, float]], decay: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = drawn(clients, generator)
    theirs = {name: [one.clone().requires_grad_() for one in value] for name, value in values.items()}
    groups = [{"params": theirs["matrix"]}, {"params": theirs["vector"] + theirs["number"]}]
    reference = torch.optim.AdamW(groups, weight_decay=decay)
    ours = AdamW(values, decay)

    for first, second in steps:
        grads = drawn(clients, generator, scale)
        for name, ones in theirs.items():
            for one, grad in zip(ones, grads[name], strict=True):
                one.grad = grad.clone()
        reference.param_groups[0]["lr"], reference.param_groups[1]["lr"] = first, second
        reference.step()
        by_name = {"matrix": first, "vector": second, "number": second}
        ours.step(
            grads,
            {name: torch.full((clients,), rate) for name, rate in by_name.items()},
            torch.ones(clients, dtype=torch.bool),
        )

    for name, ones in theirs.items():
        torch.testing.assert_close(values[name], torch.stack([one.detach() for one in ones]), rtol=1e-5, atol=2e-6)


@given(seed=seeds, stops=st.lists(st.integers(0, 5), min_size=2, max_size=4))
def test_a_client_that_has_stopped_does_not_move_at_all_and_the_others_do_not_notice(
    seed: int, stops: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    clients = len(stops)
    together = drawn(clients, generator)
    alone = [{name: value[k : k + 1].clone() for name, value in together.items()} for k in range(clients)]
    block, singles = AdamW(together, 0.1), [AdamW(values, 0.1) for values in alone]

    for step in range(6):
        grads = drawn(clients, generator)
        active = torch.tensor([step < stop for stop in stops])
        before = {name: value.clone() for name, value in together.items()}
        block.step(grads, {name: torch.full((clients,), 0.1) for name in SHAPES}, active)
        for k in range(clients):
            if step < stops[k]:
                singles[k].step(
                    {name: grad[k : k + 1] for name, grad in grads.items()},
                    {name: torch.full((1,), 0.1) for name in SHAPES},
                    torch.ones(1, dtype=torch.bool),
                )
            else:
                assert all(torch.equal(together[name][k], before[name][k]) for name in SHAPES), "weight decay included"

    for k in range(clients):
        for name in SHAPES:
            torch.testing.assert_close(together[name][k], alone[k][name][0], rtol=1e-6, atol=1e-7)


@given(seed=seeds, clients=st.integers(1, 4), limit=st.floats(1e-3, 1e3), scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]))
def test_gradients_are_clipped_per_client_as_torch_clips_one_model(
    seed: int, clients: int, limit: float, scale: float
) -> None:
    grads = drawn(clients, torch.Generator().manual_seed(seed), scale)

    clipped = clip_gradients(grads, limit)

    for k in range(clients):
        holders = {name: torch.zeros(shape, requires_grad=True) for name, shape in SHAPES.items()}
        for name, holder in holders.items():
            holder.grad = grads[name][k].clone()
        torch.nn.utils.clip_grad_norm_(list(holders.values()), limit)
        for name, holder in holders.items():
            assert holder.grad is not None
            torch.testing.assert_close(clipped[name][k], holder.grad, rtol=1e-5, atol=1e-7)


@given(steps=st.integers(1, 400), warmup=st.floats(0, 1))
def test_the_schedule_is_defined_for_every_number_of_steps_and_peaks_at_one(steps: int, warmup: float) -> None:
    factors = [schedule(step, steps, warmup) for step in range(steps)]

    assert all(0 < factor <= 1 for factor in factors)
    peak = factors.index(max(factors))
    assert factors[peak] == pytest.approx(1.0)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_the_schedule_of_one_step_is_the_full_rate() -> None:
    assert schedule(0, 1, 0.1) == 1.0
    assert [schedule(step, 4, 0.5) for step in range(4)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
