"""Routing losses against slow references, and the properties they must have (fed-duet.md 2.1)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from edgeduet_shared.errors import ConfigError
from edgeduet_shared.losses import balance_loss, mean_routing, routing_consistency, stability_loss, update_ema

SEEDS = st.integers(0, 2**31)


def normal(seed: int, *shape: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def softmax(x: np.ndarray) -> np.ndarray:
    exponentials = np.exp(x - x.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def slow_balance(sites: list[np.ndarray]) -> float:
    values = []
    for probabilities in sites:
        importance = probabilities.sum(0)
        values.append(importance.var() / importance.mean() ** 2)
    return float(np.mean(values))


def slow_consistency(images: list[np.ndarray], texts: list[np.ndarray], labels: np.ndarray, tau: float) -> float:
    values = []
    for depth in range(1, min(len(images), len(texts)) + 1):
        p, q = softmax(images[-depth]), softmax(texts[-depth])[labels]
        count = len(labels)
        similarity = np.array(
            [
                [p[i] @ q[j] / np.linalg.norm(p[i]) / np.linalg.norm(q[j]) / tau for j in range(count)]
                for i in range(count)
            ]
        )
        total = 0.0
        for matrix in (similarity, similarity.T):
            for i in range(count):
                log_share = matrix[i] - np.log(np.exp(matrix[i] - matrix[i].max()).sum()) - matrix[i].max()
                positives = [j for j in range(count) if labels[j] == labels[i]]
                total += -np.mean([log_share[j] for j in positives]) / count
        values.append(total / 2)
    return float(np.mean(values))


@given(seed=SEEDS, batch=st.integers(1, 9), experts=st.integers(1, 6), sites=st.integers(1, 3))
def test_balance_is_the_squared_variation_of_importance(seed: int, batch: int, experts: int, sites: int) -> None:
    probabilities = [normal(seed + site, batch, experts).softmax(-1) for site in range(sites)]

    loss = balance_loss(probabilities)

    assert loss.item() == pytest.approx(slow_balance([site.double().numpy() for site in probabilities]), abs=1e-5)
    assert -1e-6 <= loss.item() <= experts - 1 + 1e-5
    shuffled = [site.flip(0) for site in probabilities]
    torch.testing.assert_close(balance_loss(shuffled), loss, rtol=1e-4, atol=1e-6)


def test_balance_is_zero_at_uniform_use_and_largest_when_one_expert_does_all() -> None:
    each_once = torch.eye(4)
    one_only = torch.eye(4)[[2, 2, 2, 2]]

    assert balance_loss([each_once]).item() == pytest.approx(0.0, abs=1e-6)
    assert balance_loss([torch.full((3, 4), 0.25)]).item() == pytest.approx(0.0, abs=1e-6)
    assert balance_loss([one_only]).item() == pytest.approx(3.0)


@given(
    seed=SEEDS,
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    tau=st.sampled_from([0.1, 0.5, 1.0]),
    image_sites=st.integers(1, 3),
    text_sites=st.integers(1, 3),
)
def test_consistency_is_the_multi_positive_contrast_over_paired_sites(
    seed: int, labels: list[int], tau: float, image_sites: int, text_sites: int
) -> None:
    images = [normal(seed + site, len(labels), 4) for site in range(image_sites)]
    texts = [normal(seed + 10 + site, 4, 4) for site in range(text_sites)]
    picked = torch.tensor(labels)

    loss = routing_consistency(images, texts, picked, tau)

    expected = slow_consistency(
        [x.double().numpy() for x in images], [x.double().numpy() for x in texts], picked.numpy(), tau
    )
    assert loss.item() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert loss.item() >= -1e-6
    shuffled = [image.flip(0) for image in images]
    torch.testing.assert_close(routing_consistency(shuffled, texts, picked.flip(0), tau), loss, rtol=1e-4, atol=1e-5)


def test_consistency_with_one_class_in_the_batch_cannot_be_lowered() -> None:
    """All pairs are positive: equal routing is optimal and the loss is log(batch)."""
    images, texts = [torch.zeros(6, 4)], [torch.zeros(3, 4)]

    assert routing_consistency(images, texts, torch.ones(6, dtype=torch.long), 0.1).item() == pytest.approx(np.log(6))


def test_consistency_is_lower_when_images_are_routed_like_their_class_text() -> None:
    texts = [8.0 * torch.eye(4)]
    labels = torch.tensor([0, 1, 2, 3, 0, 1])

    matched = routing_consistency([texts[0][labels]], texts, labels, 0.1)
    crossed = routing_consistency([texts[0][(labels + 1) % 4]], texts, labels, 0.1)

    assert matched < 0.5 < crossed


@given(seed=SEEDS, batch=st.integers(1, 6), padding=st.integers(1, 4))
def test_padding_rows_with_weight_zero_change_nothing(seed: int, batch: int, padding: int) -> None:
    images, texts = [normal(seed, batch + padding, 4)], [normal(seed + 1, 5, 4)]
    labels = torch.randint(0, 5, (batch + padding,), generator=torch.Generator().manual_seed(seed))
    weights = torch.cat([torch.ones(batch), torch.zeros(padding)])
    real = [images[0][:batch]]

    torch.testing.assert_close(
        routing_consistency(images, texts, labels, 0.1, weights), routing_consistency(real, texts, labels[:batch], 0.1)
    )
    torch.testing.assert_close(
        balance_loss([images[0].softmax(-1)], weights), balance_loss([real[0].softmax(-1)]), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(mean_routing(images[0], weights), mean_routing(real[0]))


def test_a_batch_of_padding_only_gives_finite_values_and_gradients() -> None:
    weights = torch.zeros(3)

    def total(image: Tensor) -> Tensor:
        consistency = routing_consistency([image], [torch.ones(2, 4)], torch.tensor([0, 1, 0]), 0.1, weights)
        return consistency + balance_loss([image.softmax(-1)], weights)

    gradient, value = torch.func.grad_and_value(total)(normal(0, 3, 4))

    assert torch.isfinite(value)
    assert torch.isfinite(gradient).all()


@given(seed=SEEDS, experts=st.integers(1, 6), sites=st.integers(1, 4))
def test_stability_is_the_divergence_from_the_frozen_average(seed: int, experts: int, sites: int) -> None:
    now = [normal(seed + site, experts).softmax(-1) for site in range(sites)]
    before = [normal(seed + 50 + site, experts).softmax(-1) for site in range(sites)]

    loss = stability_loss(now, before)

    pairs = [(p.double().numpy(), q.double().numpy()) for p, q in zip(now, before, strict=True)]
    expected = np.mean([np.sum(p * np.log(p / q)) for p, q in pairs])
    assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert loss.item() >= -1e-6
    assert stability_loss(now, now).item() == pytest.approx(0.0, abs=1e-6)


@given(seed=SEEDS, decay=st.floats(0, 0.99), steps=st.integers(1, 5))
def test_the_moving_average_weighs_step_k_by_decay_to_the_steps_since(seed: int, decay: float, steps: int) -> None:
    history = [normal(seed + step, 4).softmax(-1) for step in range(steps)]

    average: list[Tensor] | None = None
    for current in history:
        average = update_ema(average, [current], decay)

    expected = decay ** (steps - 1) * history[0].double()
    for step in range(1, steps):
        expected = expected + (1 - decay) * decay ** (steps - 1 - step) * history[step].double()
    assert average is not None
    torch.testing.assert_close(average[0].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: balance_loss([]),
        lambda: routing_consistency([torch.ones(1, 2)], [], torch.tensor([0]), 0.1),
        lambda: stability_loss([], []),
    ],
)
def test_a_loss_without_routers_to_look_at_is_a_config_error(loss: object) -> None:
    assert callable(loss)
    with pytest.raises(ConfigError, match="switch the loss off"):
        loss()


def test_stability_refuses_statistics_of_another_number_of_sites() -> None:
    with pytest.raises(ValueError, match="shorter"):
        stability_loss([torch.ones(2) / 2, torch.ones(2) / 2], [torch.ones(2) / 2])
