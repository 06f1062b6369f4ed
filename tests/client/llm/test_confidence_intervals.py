"""Intervals against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.confidence_intervals import Mean, Rate


@given(st.integers(1, 500), st.data())
def test_the_ends_of_wilsons_interval_solve_its_equation(trials: int, data: st.DataObject) -> None:
    """Both ends are the p with |observed - p| = z sqrt(p (1 - p) / n)."""
    events = data.draw(st.integers(0, trials))
    rate = Rate(events, trials)
    for end in rate.interval:
        distance = abs(events / trials - end)
        assert distance == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / trials), abs=1e-6)
    low, high = rate.interval
    assert 0 <= low <= events / trials <= high <= 1


def test_rates_of_few_events() -> None:
    assert Rate(0, 20).interval == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert Rate(10, 20).interval == pytest.approx((0.2993, 0.7007), abs=1e-4)
    assert Rate(0, 0).value is None
    assert Rate(0, 0).interval == (0.0, 1.0)
    assert str(Rate(1, 4)) == "25.00% [4.56%, 69.94%] of 4"


def test_a_mean_counts_values_and_its_interval_counts_groups() -> None:
    rng = np.random.default_rng(0)
    levels = rng.standard_normal(30)
    alike = [[level] * 50 for level in levels]
    single = [[level] for level in levels]
    many, few = Mean.of_groups(alike), Mean.of_groups(single)
    assert (many.count, few.count) == (1500, 30)
    assert many.value == pytest.approx(float(levels.mean()))
    # fifty copies of a value say no more than one
    assert (many.low, many.high) == pytest.approx((few.low, few.high))


def test_about_95_percent_of_the_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        mean = Mean.of_groups([[float(x)] for x in rng.standard_normal(40)])
        hits += mean.low <= 0 <= mean.high
    assert 175 <= hits <= 199


def test_no_values_have_no_mean() -> None:
    assert Mean.of_groups([[], []]).value is None
    assert str(Mean.of_groups([])) == "none observed"


def test_a_ratio_is_of_sums_and_certain_where_the_groups_are_proportional() -> None:
    base = [[1.0, 2.0], [5.0], [], [0.0]]
    half = [[0.5, 1.0], [2.5], [], [0.0]]
    ratio = Mean.ratio(half, base)
    assert (ratio.value, ratio.low, ratio.high, ratio.count) == pytest.approx((0.5, 0.5, 0.5, 4))
    assert Mean.ratio([[1.0]], [[0.0]]).value is None
    assert Mean.ratio([], []).value is None


def test_a_paired_ratio_is_more_certain_than_its_parts() -> None:
    rng = np.random.default_rng(2)
    base = [[float(x)] for x in rng.exponential(size=50)]
    scaled = [[x[0] * float(f)] for x, f in zip(base, rng.uniform(0.4, 0.6, 50), strict=True)]
    ratio, mean = Mean.ratio(scaled, base), Mean.of_groups(base)
    assert mean.value is not None
    assert 0.45 < (ratio.value or 0) < 0.55
    assert ratio.high - ratio.low < 0.3 * (mean.high - mean.low) / mean.value
