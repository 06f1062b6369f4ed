"""The loss of one step: what each term does, and that a term that is off is not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from client_rounds import CLASSES, FULL, features, model_of, moved
from edgeduet_client.objective import Batch, Objective, without_experts
from edgeduet_shared.duet import Params
from edgeduet_shared.plan import LocalPlan

MODEL = model_of(FULL)
IDS = torch.tensor(CLASSES)
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
ADAPTERS = ("shared_adapter", "router", "routed_adapters")
VALUES = moved(MODEL.initial(0))
OTHER = moved(MODEL.initial(0), seed=9)
TRAINED = {name: value for name, value in VALUES.items() if MODEL.group_of(name) in ADAPTERS}
FIXED = {name: value for name, value in VALUES.items() if name not in TRAINED}
SHARES = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05])


def batch(count: int = 6, padding: int = 0) -> Batch:
    """A step of ``count`` images and ``padding`` rows of rubbish with weight 0; inputs of every term."""
    generator = torch.Generator().manual_seed(3)
    noise = MODEL.draw_noise(count, len(CLASSES), generator)
    image = tuple({key: _lengthened(value, padding) for key, value in site.items()} for site in noise.image)
    sites = MODEL.router_shapes.image_sites + MODEL.router_shapes.text_sites
    return {
        "x": _lengthened(features(FULL, 6, 0)[:count], padding),
        "y": torch.cat([LABELS[:count], torch.full((padding,), 3)]),
        "weight": torch.cat([torch.ones(count), torch.zeros(padding)]),
        "noise": noise._replace(image=image),
        "log_share": SHARES.log(),
        "log_sampling": torch.tensor([0.3, -0.2, 0.0, 0.5, -0.6]),
        "frozen": tuple(torch.tensor([0.6, 0.3, 0.1]) for _ in range(sites)),
        "teacher": _lengthened(5 * torch.randn(6, 5, generator=generator)[:count], padding),
        "start": {name: OTHER[name] for name in TRAINED},
        "fisher": {name: OTHER[name].square() for name in TRAINED},
        "anchor": {name: OTHER[name] for name in TRAINED},
    }


def _lengthened(values: Tensor, by: int) -> Tensor:
    return torch.cat([values, torch.full((by, *values.shape[1:]), 7.0)])


def loss_of(step: Batch, trained: Params = TRAINED, **terms: Any) -> Tensor:
    plan = LocalPlan(parts=FULL, train=ADAPTERS, **terms)
    return Objective(MODEL, plan, IDS, False, False)(trained, FIXED, step)[0]


def gradients(step: Batch, **terms: Any) -> Params:
    return torch.func.grad(lambda trained: loss_of(step, trained, **terms))(TRAINED)


def same(first: Params, second: Params) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


TERMS = ("prior", "generic", "balance", "consistency", "stability", "proximal", "ewc", "distill", "rehearsal")
ALL_ON: dict[str, Any] = {**dict.fromkeys(TERMS, 0.5), "generic_prior": 0.5}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_weight_zero_is_not_there_and_any_other_weight_is_felt(term: str) -> None:
    plain = gradients(batch())

    assert same(gradients(batch(), **{term: 0.0}), plain)
    assert not same(gradients(batch(), **{term: 0.5}), plain)


def test_the_generic_prior_alone_does_nothing() -> None:
    assert same(gradients(batch(), generic_prior=1.0), gradients(batch()))


def test_with_the_generic_term_the_shared_adapter_learns_from_the_generic_path_alone() -> None:
    shared = [name for name in TRAINED if MODEL.group_of(name) == "shared_adapter"]
    private = [name for name in TRAINED if name not in shared]
    both = gradients(batch(), generic=1.0, balance=0.5, consistency=0.5, prior=0.7)
    without_own = gradients(batch(), generic=1.0)

    def generic_only(trained: Params) -> Tensor:
        params = without_experts(MODEL, {**FIXED, **trained})
        step = batch()
        z = MODEL.run(params, "encode_image", step["x"], step["noise"])[0]
        t = MODEL.run(params, "encode_text", IDS, step["noise"])[0]
        return cross_entropy(MODEL.local_logits(z, t), step["y"])

    expected = torch.func.grad(generic_only)(TRAINED)
    for name in shared:
        torch.testing.assert_close(both[name], expected[name], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(without_own[name], expected[name], rtol=1e-4, atol=1e-6)
    plain = gradients(batch())
    for name in private:
        torch.testing.assert_close(without_own[name], plain[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_padding_changes_neither_loss_nor_gradients_nor_figures(count: int) -> None:
    plan = LocalPlan(parts=FULL, train=ADAPTERS, **ALL_ON)
    objective = Objective(MODEL, plan, IDS, False, False)
    step = torch.func.grad_and_value(objective, has_aux=True)

    exact, (loss, figures) = step(TRAINED, FIXED, batch(count))
    padded, (padded_loss, padded_figures) = step(TRAINED, FIXED, batch(count, padding=3))

    torch.testing.assert_close(padded_loss, loss, rtol=1e-5, atol=1e-5)
    for name, value in exact.items():
        torch.testing.assert_close(padded[name], value, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(padded_figures["routing"], figures["routing"])
    assert padded_figures["correct"] == figures["correct"]


def test_a_step_of_padding_only_has_finite_gradients_and_no_cross_entropy() -> None:
    plan = LocalPlan(parts=FULL, train=ADAPTERS, generic=1.0, consistency=0.5, distill=0.5)
    grads, (loss, figures) = torch.func.grad_and_value(Objective(MODEL, plan, IDS, False, False), has_aux=True)(
        TRAINED, FIXED, batch(0, padding=4)
    )

    assert loss == 0 and figures["correct"] == 0
    assert all(torch.equal(value, torch.zeros_like(value)) for value in grads.values())


@settings(max_examples=10)
@given(prior=st.floats(0.05, 3.0))
def test_the_prior_adds_that_many_log_shares_to_the_logits_of_the_loss(prior: float) -> None:
    step = batch()
    z = MODEL.run(VALUES, "encode_image", step["x"], step["noise"])[0]
    t = MODEL.run(VALUES, "encode_text", IDS, step["noise"])[0]
    adjusted = MODEL.local_logits(z, t) + prior * SHARES.log()
    expected = torch.stack([adjusted[i].logsumexp(0) - adjusted[i, y] for i, y in enumerate(LABELS)]).mean()

    torch.testing.assert_close(loss_of(step, prior=prior), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("term", ["prior", "generic_prior"])
def test_with_rehearsal_both_paths_see_how_batches_differ_from_what_the_client_met(term: str) -> None:
    """Rehearsal adds ``log_sampling`` to the logits of the loss; so does a prior whose shares are those."""
    step = batch()
    with_prior = {**step, "log_share": step["log_sampling"]}
    weights = {"generic": 1.0} if term == "generic_prior" else {}

    both = loss_of(step, rehearsal=1.0, **weights)

    plain = loss_of(step, **weights)
    if term == "prior":
        torch.testing.assert_close(both, loss_of(with_prior, prior=1.0))
    else:
        torch.testing.assert_close(both, loss_of(with_prior, prior=1.0, generic_prior=1.0, **weights))
    assert both != plain


def test_distillation_is_zero_when_the_student_is_its_teacher() -> None:
    step = batch()
    z = MODEL.run(VALUES, "encode_image", step["x"], step["noise"])[0]
    t = MODEL.run(VALUES, "encode_text", IDS, step["noise"])[0]
    same_logits = {**step, "teacher": MODEL.local_logits(z, t)}

    assert (loss_of(same_logits, distill=10.0) - loss_of(step)).item() == pytest.approx(0.0, abs=1e-4)
    assert loss_of(step, distill=10.0) > loss_of(step) + 0.1


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_distillation_is_kl_from_teacher_to_student_times_temperature_squared(temperature: float) -> None:
    step = batch()
    z = MODEL.run(VALUES, "encode_image", step["x"], step["noise"])[0]
    t = MODEL.run(VALUES, "encode_text", IDS, step["noise"])[0]
    q, p = ((logits / temperature).softmax(-1) for logits in (MODEL.local_logits(z, t), step["teacher"]))
    kl = torch.stack([sum(p[i, c] * (p[i, c] / q[i, c]).log() for c in CLASSES) for i in range(6)]).mean()

    felt = loss_of(step, distill=0.5, distill_temperature=temperature) - loss_of(step)

    torch.testing.assert_close(felt, 0.5 * temperature**2 * kl, rtol=1e-3, atol=1e-4)


def test_proximal_and_consolidation_penalties_are_those_of_the_papers() -> None:
    step, plain = batch(), loss_of(batch())
    distance = sum(float((TRAINED[n] - OTHER[n]).double().square().sum()) for n in TRAINED)
    weighted = sum(float((OTHER[n].double() ** 2 * (TRAINED[n] - OTHER[n]).double() ** 2).sum()) for n in TRAINED)

    assert (loss_of(step, proximal=0.3) - plain).item() == pytest.approx(0.3 / 2 * distance, rel=1e-3)
    assert (loss_of(step, ewc=4.0) - plain).item() == pytest.approx(4.0 / 2 * weighted, rel=1e-3)
    without_fisher = {name: value for name, value in step.items() if name not in ("fisher", "anchor")}
    assert torch.equal(loss_of(without_fisher, ewc=4.0), plain), "the first stage has nothing to hold on to"
