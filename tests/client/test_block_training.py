"""A block of clients trains like each of them alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from client_rounds import CLASSES, FULL, SCENARIO, features, job, model_of, moved, plan_of
from edgeduet_client.local_training import (
    Job,
    Trained,
    log_class_shares,
    log_sampling,
    train_clients,
)
from edgeduet_client.prototypes import Prototypes, memorise, recall
from edgeduet_shared.config import AdapterConfig
from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.plan import LocalPlan
from tiny_towers import CLASS_NAMES, pictures, tiny_backbone

SIZES = (9, 3, 6)
"""With batches of four: three steps, the last of one image; less than a batch; two steps."""

SHIFTS = ("fusion.key.bias", "fusion.value.bias", "fusion.output.bias")
"""What these add is the same for all prompts, or for all classes, and softmax does not see it: their gradient is
rounding alone, which AdamW scales up to whole steps. Values differ, predictions do not."""

STAGES = AdapterConfig(placement="stages", bottleneck=4, shared_bottleneck=8, experts=3, top_k=2)

PLANS: dict[str, LocalPlan] = {
    "fed-duet parametric": plan_of("fed-duet", 0),
    "fed-duet semantic": plan_of("fed-duet", 1),
    "fedavg-adapter": plan_of("fedavg-adapter"),
    "promptfl": plan_of("promptfl"),
    "fedclip": plan_of("fedclip"),
    "pfedmoap": plan_of("pfedmoap"),
}


PROTOTYPES = Prototypes(
    classes_P=torch.tensor([1, 3]),
    counts_P=torch.tensor([6, 2]),
    means_PD=features(FULL, 2, seed=77),
    stages_P=torch.tensor([0, 0]),
    deviations_SD=torch.full((1, features(FULL, 1, seed=77).shape[1]), 0.1),
)


def expected_steps(examples: int, plan: LocalPlan) -> int:
    """Steps a client with ``examples`` images makes in one round."""
    steps = plan.optimiser.local_epochs * math.ceil(examples / plan.optimiser.batch_size)
    return min(steps, plan.optimiser.max_steps) if plan.optimiser.max_steps else steps


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


@pytest.mark.parametrize("name", ["fed-duet parametric", "fed-duet semantic"])
def test_clients_that_rehearse_and_a_client_with_nothing_to_rehearse_share_a_block(name: str) -> None:
    plan = PLANS[name]
    jobs = [job(plan, 0, 9, prototypes=PROTOTYPES), job(plan, 1, 6), job(plan, 2, 3, prototypes=PROTOTYPES)]

    for one, result in zip(jobs, trained(plan, jobs), strict=True):
        [alone] = trained(plan, [one])
        assert max(drift(result, alone).values()) < 1e-5
        assert result.loss == pytest.approx(alone.loss, abs=1e-5)


def test_feature_maps_inside_the_tower_are_rehearsed_too() -> None:
    """Their prototypes are mean maps; a block of clients trains on draws from them as each client alone does."""
    scenario = SCENARIO.model_copy(update={"model": SCENARIO.model.model_copy(update={"adapter": STAGES})})
    plan = plan_of("fedavg-adapter", rehearsal=1.0)
    model = DuetModel(tiny_backbone("resnet"), CLASS_NAMES, scenario.model, plan.parts)
    jobs = [_job_on_maps(model, client, count) for client, count in enumerate((6, 3))]

    together = train_clients(model, plan, CLASSES, jobs)

    for one, result in zip(jobs, together, strict=True):
        [alone] = train_clients(model, plan, CLASSES, [one])
        [without] = train_clients(model, plan, CLASSES, [replace(one, prototypes=None)])
        assert max(drift(result, alone).values()) < 1e-5
        assert max(drift(result, without).values()) > 1e-3


def _job_on_maps(model: DuetModel, client: int, count: int) -> Job:
    x = model.front(pictures(tiny_backbone("resnet"), count, seed=client))
    assert x.ndim == 4
    state: dict[str, Any] = {}
    memorise(state, 0, model.front(pictures(tiny_backbone("resnet"), 4, seed=50)), torch.tensor([1, 1, 3, 3]))
    labels, nothing = torch.arange(count) % len(CLASSES), torch.zeros(0, 4, 1)
    return Job(client, 1, 0, 0, x, labels, moved(model.initial(0), client), nothing, prototypes=recall(state, 1))


@pytest.mark.parametrize("name", ["fed-duet parametric", "fed-duet semantic"])
def test_rehearsal_makes_batches_larger_not_rounds_longer(name: str) -> None:
    plan = PLANS[name]
    [plain], [rehearsing] = trained(plan, [job(plan, 0, 9)]), trained(plan, [job(plan, 0, 9, prototypes=PROTOTYPES)])

    assert plain.steps == rehearsing.steps == expected_steps(9, plan)
    assert any(not torch.equal(value, rehearsing.params[key]) for key, value in plain.params.items())


def test_in_the_first_stage_there_is_nothing_to_rehearse() -> None:
    plan = PLANS["fed-duet parametric"]
    off = plan.model_copy(update={"rehearsal": 0.0})

    [first], [second] = trained(plan, [job(plan, 0, 9)]), trained(off, [job(off, 0, 9)])

    assert plan.rehearsal > 0
    for key, value in first.params.items():
        torch.testing.assert_close(value, second.params[key], rtol=0, atol=1e-5)


def test_what_batches_hold_more_of_than_the_client_has_met_is_told_by_log_sampling() -> None:
    """Four images now, eight before; batches hold one rehearsed feature per two images."""
    plan = PLANS["fed-duet parametric"]
    one = replace(job(plan, 0, 4, prototypes=PROTOTYPES), labels_N=torch.tensor([0, 0, 1, 4]))
    drawn = torch.tensor([2.0, 1.0 + 0.5 * 4 * 6 / 8, 0.0, 0.5 * 4 * 2 / 8, 1.0]) + 0.1
    met = torch.tensor([2.0, 1.0 + 6.0, 0.0, 2.0, 1.0]) + 0.1

    found = log_sampling(one, 0.5, 5).exp()

    torch.testing.assert_close(found, drawn / drawn.sum() / (met / met.sum()))
    assert torch.equal(log_sampling(replace(one, prototypes=None), 0.5, 5), torch.zeros(5))


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
    shares = log_class_shares(torch.tensor([2.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])).exp()

    torch.testing.assert_close(shares, torch.tensor([2.1, 0.1, 1.1, 0.1]) / 3.4)
