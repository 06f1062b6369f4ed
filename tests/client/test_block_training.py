"""A block of clients trains like each of them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from client_rounds import CLASSES, job, model_of, plan_of
from edgeduet_client.local_training import Job, Trained, expected_steps, log_class_shares, train_clients
from edgeduet_shared.duet import Params
from edgeduet_shared.plan import LocalPlan

SIZES = (9, 3, 6)
"""With batches of four: three steps, the last of one image; less than a batch; two steps."""

SHIFTS = ("fusion.key.bias", "fusion.value.bias", "fusion.output.bias")
"""What these add is the same for all prompts, or for all classes, and softmax does not see it: their gradient is
rounding alone, which AdamW scales up to whole steps. Values differ, predictions do not."""

PLANS: dict[str, LocalPlan] = {
    "fed-duet parametric": plan_of("fed-duet", 0),
    "fed-duet semantic": plan_of("fed-duet", 1),
    "fedavg-adapter": plan_of("fedavg-adapter"),
    "promptfl": plan_of("promptfl"),
    "fedclip": plan_of("fedclip"),
    "pfedmoap": plan_of("pfedmoap"),
}


def trained(plan: LocalPlan, jobs: list[Job]) -> list[Trained]:
    return train_clients(model_of(plan.parts), plan, CLASSES, jobs)


def drift(one: Trained, other: Trained) -> dict[str, float]:
    """Largest difference per parameter that predictions depend on."""
    return {
        name: float((value - other.params[name]).abs().max())
        for name, value in one.params.items()
        if name not in SHIFTS
    }


def probabilities(plan: LocalPlan, one: Job, params: Params) -> Tensor:
    """Of the client's images over all classes, with fused logits where the plan has them."""
    model, values, ids = model_of(plan.parts), {**one.params, **params}, torch.tensor(CLASSES)
    z, t = model.run(values, "encode_image", one.x)[0], model.run(values, "encode_text", ids)[0]
    if plan.logits == "local":
        return model.local_logits(z, t).softmax(-1)
    u = model.run(values, "encode_text_under", one.contexts_MLW, ids)
    fused: Tensor = model.run(values, "fused_logits", z, t, u, plan.mix)[0]
    return fused.softmax(-1)


@pytest.mark.parametrize("name", PLANS)
def test_one_round_of_a_block_equals_the_sequential_reference(name: str) -> None:
    plan = PLANS[name]
    jobs = [job(plan, client, size) for client, size in enumerate(SIZES)]

    block = trained(plan, jobs)

    for one, result in zip(jobs, block, strict=True):
        [alone] = trained(plan, [one])
        assert set(result.params) == set(alone.params)
        assert max(drift(result, alone).values()) < 1e-5
        torch.testing.assert_close(
            probabilities(plan, one, result.params), probabilities(plan, one, alone.params), rtol=0, atol=1e-5
        )
        assert result.loss == pytest.approx(alone.loss, abs=1e-5)
        assert result.accuracy == alone.accuracy
        assert result.steps == alone.steps == expected_steps(len(one.x), plan)
        assert (result.ema is None) == (alone.ema is None)
        for mine, theirs in zip(result.ema or (), alone.ema or (), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
        assert any(not torch.equal(value, one.params[key]) for key, value in result.params.items()), "it learned"


@pytest.mark.parametrize("name", ["fed-duet parametric", "fed-duet semantic"])
def test_a_clients_result_does_not_depend_on_who_shares_its_block(name: str) -> None:
    plan = PLANS[name]
    me = job(plan, 1, 6)

    with_small = trained(plan, [me, job(plan, 2, 2)])[0]
    with_large = trained(plan, [job(plan, 3, 9), job(plan, 4, 4), me])[2]

    assert max(drift(with_small, with_large).values()) < 1e-5


@pytest.mark.parametrize("name", ["fed-duet parametric", "fed-duet semantic"])
@pytest.mark.parametrize("clients", [1, 3])
def test_the_same_seed_gives_the_same_bits(name: str, clients: int) -> None:
    plan = PLANS[name]
    jobs = [job(plan, client, size) for client, size in enumerate(SIZES[:clients])]

    for first, second in zip(trained(plan, jobs), trained(plan, jobs), strict=True):
        assert all(torch.equal(value, second.params[key]) for key, value in first.params.items())
        assert (first.loss, first.accuracy) == (second.loss, second.accuracy)


def test_shifts_of_the_fusion_do_not_reach_predictions() -> None:
    plan = PLANS["pfedmoap"]
    one = job(plan, 0, 6)
    shifted = {name: one.params[name] + 3.0 for name in SHIFTS}

    torch.testing.assert_close(probabilities(plan, one, shifted), probabilities(plan, one, {}), rtol=0, atol=1e-4)


def test_training_changes_neither_the_jobs_values_nor_groups_that_are_not_trained() -> None:
    plan = PLANS["fed-duet parametric"]
    one = job(plan, 0, 5)
    before = {name: value.clone() for name, value in one.params.items()}

    [result] = trained(plan, [one])

    assert all(torch.equal(value, before[name]) for name, value in one.params.items())
    assert {model_of(plan.parts).group_of(name) for name in result.params} == set(plan.train)


def test_a_limit_on_steps_stops_a_round_early() -> None:
    plan = PLANS["fedclip"]
    limited = plan.model_copy(update={"optimiser": plan.optimiser.model_copy(update={"max_steps": 2})})

    assert [result.steps for result in trained(limited, [job(limited, 0, 9), job(limited, 1, 3)])] == [2, 1]


def test_class_shares_keep_absent_classes_finite() -> None:
    shares = log_class_shares(torch.tensor([0, 0, 2]), 4).exp()

    torch.testing.assert_close(shares, torch.tensor([2.1, 0.1, 1.1, 0.1]) / 3.4)
