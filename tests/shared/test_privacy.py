"""Clipping, noise and the epsilon that is reported for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from scipy.optimize import brentq
from scipy.stats import norm

from edgeduet_shared.privacy import clip_and_noise, epsilon, privatise_update

DELTA = 1e-5
VALUES = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
VECTORS = arrays(np.float32, array_shapes(max_dims=3, max_side=6), elements=VALUES)
CLIPS = st.floats(1e-3, 1e3)


def source(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def length(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector.astype(np.float64).ravel()))


def joint_change(update: dict[str, np.ndarray], start: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([(update[name].astype(np.float64) - start[name]).ravel() for name in sorted(update)])


# -- one vector --------------------------------------------------------------------------------------


@given(VECTORS, CLIPS)
def test_a_clipped_vector_is_never_longer_than_the_norm_and_keeps_its_direction(vector: np.ndarray, clip: float):
    clipped = clip_and_noise(vector, clip, 0.0, source())

    assert clipped.shape == vector.shape and clipped.dtype == np.float32
    assert length(clipped) <= clip * (1 + 1e-5)
    expected = vector.astype(np.float64) * min(1.0, clip / max(length(vector), 1e-300))
    np.testing.assert_allclose(clipped, expected, rtol=1e-5, atol=1e-30)


@given(VECTORS)
def test_without_noise_a_vector_within_the_norm_comes_back_bit_for_bit_and_nothing_is_drawn(vector: np.ndarray):
    rng = source()
    before = rng.bit_generator.state

    assert np.array_equal(clip_and_noise(vector, length(vector) * 1.01 + 1e-3, 0.0, rng), vector)
    assert rng.bit_generator.state == before


def test_a_zero_vector_stays_zero_without_noise_and_is_hidden_in_noise_with_it():
    zero = np.zeros(1000, np.float32)

    assert np.array_equal(clip_and_noise(zero, 1.0, 0.0, source()), zero)
    assert np.std(clip_and_noise(zero, 1.0, 1.0, source())) > 0.5


@pytest.mark.parametrize(("clip", "multiplier"), [(1.0, 0.1), (1.0, 10.0), (0.25, 2.0)])
def test_noise_is_gaussian_with_std_clip_times_multiplier_around_the_clipped_vector(clip: float, multiplier: float):
    vector = np.full(200_000, 3.0, np.float32)
    clipped = clip_and_noise(vector, clip, 0.0, source())

    noise = clip_and_noise(vector, clip, multiplier, source(7)).astype(np.float64) - clipped

    std = clip * multiplier
    assert np.std(noise) == pytest.approx(std, rel=0.01)
    assert abs(noise.mean()) < 5 * std / math.sqrt(len(vector))
    # A Gaussian, not merely something of that width.
    assert np.mean(np.abs(noise) < std) == pytest.approx(0.6827, abs=0.005)
    assert np.mean(np.abs(noise) < 2 * std) == pytest.approx(0.9545, abs=0.003)


def test_the_same_generator_state_gives_the_same_noise_and_another_gives_other_noise():
    vector = np.arange(8, dtype=np.float32)
    first, again, other = (clip_and_noise(vector, 1.0, 1.0, source(seed)) for seed in (1, 1, 2))

    assert np.array_equal(first, again) and not np.array_equal(first, other)


# -- an update of several arrays ---------------------------------------------------------------------


def update_pair(seed: int, scale: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    rng = source(seed)
    shapes = {"b": (3,), "a": (2, 4), "c": (1, 2, 2)}
    start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    update = {name: (value + scale * rng.normal(size=value.shape)).astype(np.float32) for name, value in start.items()}
    return update, start


@given(st.integers(0, 2**32 - 1), st.floats(1e-2, 1e2), CLIPS)
def test_the_joint_change_over_all_arrays_is_clipped_not_each_array(seed: int, scale: float, clip: float):
    update, start = update_pair(seed, scale)
    change = joint_change(update, start)

    private = privatise_update(update, start, clip, 0.0, source())

    sent = joint_change(private, start)
    rounding = 1e-5 * (1 + length(change))
    assert length(sent) <= clip + rounding
    np.testing.assert_allclose(sent, change * min(1.0, clip / length(change)), atol=rounding)
    assert {name: value.shape for name, value in private.items()} == {n: v.shape for n, v in update.items()}


def test_noise_on_an_update_has_the_same_std_in_every_array():
    start = {"a": np.zeros((100, 300), np.float32), "b": np.ones(30_000, np.float32)}

    private = privatise_update(start, start, 2.0, 0.5, source(3))

    for name in start:
        assert np.std(private[name] - start[name]) == pytest.approx(1.0, rel=0.02)
    assert abs(np.corrcoef(private["a"].ravel(), private["b"])[0, 1]) < 0.03


def test_the_noise_does_not_depend_on_the_order_of_the_names():
    update, start = update_pair(0, 1.0)
    turned = {name: update[name] for name in reversed(update)}

    one, two = (privatise_update(values, start, 1.0, 1.0, source(5)) for values in (update, turned))

    assert all(np.array_equal(one[name], two[name]) for name in update)


def test_an_update_of_nothing_is_nothing():
    assert privatise_update({}, {}, 1.0, 1.0, source()) == {}


def test_neither_update_nor_start_is_changed():
    update, start = update_pair(0, 10.0)
    kept = [{name: value.copy() for name, value in values.items()} for values in (update, start)]

    privatise_update(update, start, 1.0, 1.0, source())

    for values, before in zip((update, start), kept, strict=True):
        assert all(np.array_equal(values[name], before[name]) for name in before)


# -- epsilon -----------------------------------------------------------------------------------------


def rho(multiplier: float, releases: int) -> float:
    """Renyi divergence per order: a clipped vector can move by twice the norm, so the noise counts half."""
    return releases / (2 * (multiplier / 2) ** 2)


def classic_bound(multiplier: float, releases: int) -> float:
    """``min over a of rho a + log(1/delta) / (a - 1)`` (Mironov 2017, proposition 3), in closed form."""
    return rho(multiplier, releases) + 2 * math.sqrt(rho(multiplier, releases) * math.log(1 / DELTA))


def exact_epsilon(multiplier: float, releases: int) -> float:
    """The least epsilon that is true (Balle & Wang 2018, theorem 8): composed Gaussians are one Gaussian."""
    shift = math.sqrt(releases) / (multiplier / 2)

    def excess(value: float) -> float:
        tail = norm.logcdf(-shift / 2 - value / shift)
        return float(norm.cdf(shift / 2 - value / shift) - math.exp(value + tail) - DELTA)

    return float(brentq(excess, 0.0, 2 * classic_bound(multiplier, releases) + 1))


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0, 10.0, 40.0])
@pytest.mark.parametrize("releases", [1, 12, 100])
def test_epsilon_is_true_and_no_looser_than_the_textbook_bound(multiplier: float, releases: int):
    reported = epsilon(multiplier, releases, DELTA)

    assert exact_epsilon(multiplier, releases) <= reported * (1 + 1e-9)
    # The accountant searches a fixed list of orders, hence the slack.
    assert reported <= classic_bound(multiplier, releases) * 1.02


@given(st.floats(0.5, 20), st.floats(1.05, 4), st.integers(1, 200), st.integers(1, 100))
def test_more_noise_means_less_epsilon_and_more_releases_mean_more(multiplier, factor, releases, more):
    base = epsilon(multiplier, releases, DELTA)

    assert epsilon(multiplier * factor, releases, DELTA) < base < epsilon(multiplier, releases + more, DELTA)
    assert epsilon(multiplier, releases, DELTA / 10) > base


def test_releases_compose_like_one_with_less_noise():
    assert epsilon(6.0, 9, DELTA) == pytest.approx(epsilon(2.0, 1, DELTA), rel=1e-9)


def test_nothing_released_costs_nothing_and_no_noise_protects_nothing():
    assert epsilon(1.0, 0, DELTA) == 0.0
    assert epsilon(0.0, 0, DELTA) == 0.0
    assert epsilon(0.0, 1, DELTA) == math.inf
