"""The best fixed arm in hindsight: the arm with most tokens per second under the evidence, and what choosing lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm
from edgeduet_client.llm.speculation.costs import CostModel, DraftCost
from edgeduet_client.llm.speculation.regret import hindsight
from edgeduet_client.llm.speculation.stats import SurvivalStats

STEPS = [10e-3, 11e-3, 12e-3, 13e-3]
COSTS = CostModel({128: STEPS}, {"cheap": DraftCost(0.0, 1e-4), "dear": DraftCost(0.0, 5e-3)})


def evidence(*mean: float, reach: tuple[float, ...] | None = None) -> SurvivalStats:
    return SurvivalStats(50, mean, (0.05,) * len(mean), reach or (1.0,) * len(mean))


def test_the_better_of_two_drafters_at_its_best_length() -> None:
    survival = {"cheap": evidence(0.5, 0.3, 0.05), "dear": evidence(0.9, 0.8, 0.7)}
    found = hindsight(
        survival, {"cheap": [1, 2, 3], "dear": [1, 2, 3]}, COSTS, context_length=100, emitted=180, seconds=1.5
    )
    assert found.arm == Arm("cheap", 2)
    assert found.tokens_per_second == pytest.approx(1.8 / 12.2e-3)
    assert found.regret_seconds == pytest.approx(1.5 - 180 * 12.2e-3 / 1.8)


def test_where_no_drafter_pays_plain_steps_are_best_and_choosing_them_loses_nothing() -> None:
    found = hindsight(
        {"dear": evidence(0.2, 0.1)}, {"dear": [1, 2]}, COSTS, context_length=100, emitted=50, seconds=0.5
    )
    assert found.arm == NO_DRAFT
    assert found.regret_seconds == pytest.approx(0)
    assert found.as_json() == {"drafter": None, "length": 0, "tokens_per_second": 100.0, "regret_seconds": 0.0}


def test_a_lookup_that_seldom_finds_anything_costs_little_where_it_does_not() -> None:
    rare = {"cheap": evidence(0.1, 0.1, 0.1, reach=(0.1, 0.1, 0.1))}
    found = hindsight(rare, {"cheap": [3]}, COSTS, context_length=100, emitted=10, seconds=0.1)
    assert found.arm == Arm("cheap", 3)
    assert found.tokens_per_second == pytest.approx(1.3 / (10e-3 + 0.1 * 3.3e-3))


@given(curves=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=2, max_size=2))
def test_no_arm_is_better_than_the_one_that_is_named(curves: list[list[float]]) -> None:
    survival = dict(zip(("cheap", "dear"), (evidence(*sorted(curve, reverse=True)) for curve in curves), strict=True))
    lengths = {"cheap": [1, 2, 3], "dear": [1, 3]}
    found = hindsight(survival, lengths, COSTS, context_length=100, emitted=1, seconds=1.0)
    rates = [1 / STEPS[0]]
    for name, length in itertools.chain.from_iterable(((name, g) for g in of) for name, of in lengths.items()):
        seconds = COSTS.draft_seconds(name, length) + STEPS[length]
        rates.append((1 + sum(survival[name].mean[:length])) / seconds)
    assert found.tokens_per_second == pytest.approx(max(rates))
