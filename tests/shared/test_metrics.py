"""The formulas of fed-duet.md section 7, against hand-made cases and slow loops."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeduet_shared import metrics as m

UNIT = st.floats(0, 1, width=32)


@st.composite
def matrices(draw: st.DrawFn, holes: bool = False) -> np.ndarray:
    t = draw(st.integers(1, 5))
    element = st.one_of(UNIT, st.just(math.nan)) if holes else UNIT
    return draw(arrays(np.float64, (t, t), elements=element))


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, abs_tol=1e-9)


# A hand-made run of three tasks. Worked out on paper:
HAND = np.array([[0.9, 0.3, 0.2], [0.7, 0.8, 0.4], [0.6, 0.5, 0.7]])


def test_hand_made_case_gives_the_numbers_worked_out_on_paper():
    dil = m.stage_accuracies(HAND, "domain-incremental")
    assert dil == pytest.approx([0.9, 0.75, 0.6])
    cil = m.stage_accuracies(HAND, "class-incremental", [10, 30, 60])
    assert cil == pytest.approx([0.9, (7 + 24) / 40, (6 + 15 + 42) / 100])
    assert m.average_incremental_accuracy(dil) == pytest.approx(0.75)
    assert m.last_accuracy(dil) == pytest.approx(0.6)
    assert m.average_final_accuracy(HAND) == pytest.approx(0.6)
    assert m.learning_accuracy(HAND) == pytest.approx(0.8)
    assert m.forgetting_per_task(HAND) == pytest.approx([0.3, 0.3])
    assert m.forgetting(HAND) == pytest.approx(0.3)
    assert m.backward_transfer(HAND) == pytest.approx(-0.3)
    assert m.forward_transfer(HAND, [0.5, 0.25, 0.35]) == pytest.approx(((0.3 - 0.25) + (0.4 - 0.35)) / 2)
    assert m.intransigence(HAND, np.full((3, 3), 0.95)) == pytest.approx(0.15)
    assert m.zero_shot_retention(0.55, 0.6) == pytest.approx(-0.05)


def test_forgetting_uses_the_best_earlier_stage_and_backward_transfer_the_first():
    improves_then_forgets = np.array([[0.5, 0, 0], [0.9, 0.6, 0], [0.7, 0.6, 0.8]])
    assert m.forgetting(improves_then_forgets) == pytest.approx((0.2 + 0.0) / 2)
    assert m.backward_transfer(improves_then_forgets) == pytest.approx((0.2 + 0.0) / 2)


def test_forgetting_is_negative_when_old_tasks_improve():
    assert m.forgetting(np.array([[0.5, 0.0], [0.8, 0.5]])) == pytest.approx(-0.3)


def test_class_incremental_stage_accuracy_is_accuracy_on_the_union_of_test_sets():
    correct, totals = np.array([[8, 1], [6, 3]]), np.array([10, 4])
    stages = m.stage_accuracies(m.accuracies(correct, totals), "class-incremental", totals)
    assert stages == pytest.approx([8 / 10, 9 / 14])


@pytest.mark.parametrize("value", ["forgetting", "backward_transfer"])
def test_one_task_has_no_forgetting(value: str):
    assert math.isnan(getattr(m, value)([[0.9]]))
    assert math.isnan(m.forward_transfer([[0.9]], [0.5]))


def test_what_was_not_measured_is_nan_and_does_not_count_as_zero():
    r = m.accuracies([[3, -1], [2, 0]], [4, 0])
    assert r[0, 0] == 0.75 and r[1, 0] == 0.5
    assert np.isnan(r[:, 1]).all()
    assert m.stage_accuracies(r, "domain-incremental") == pytest.approx([0.75, 0.5])
    assert m.stage_accuracies(r, "class-incremental", [4, 0]) == pytest.approx([0.75, 0.5])
    assert m.format_value("forgetting", math.nan) == "n/a"


def test_a_stage_that_has_not_run_leaves_last_undefined():
    r = np.array([[0.9, 0.1], [math.nan, math.nan]])
    stages = m.stage_accuracies(r, "domain-incremental")
    assert math.isnan(m.last_accuracy(stages)) and math.isnan(m.forgetting(r))


def test_more_correct_than_images_is_refused():
    with pytest.raises(ValueError, match="more correct"):
        m.accuracies([5], [4])


@pytest.mark.parametrize("bad", [np.zeros((2, 3)), np.zeros(3), np.zeros((0, 0))])
def test_a_matrix_must_be_square(bad: np.ndarray):
    with pytest.raises(ValueError, match="square"):
        m.forgetting(bad)


@given(matrices())
def test_forgetting_and_transfer_equal_slow_loops(r: np.ndarray):
    t = len(r)
    if t > 1:
        slow = 0.0
        for j in range(t - 1):
            best = max(r[length, j] for length in range(j, t - 1))
            slow += best - r[t - 1, j]
        assert same(m.forgetting(r), slow / (t - 1))
        assert same(m.backward_transfer(r), sum(r[t - 1, j] - r[j, j] for j in range(t - 1)) / (t - 1))
        b = r[0] / 2
        assert same(m.forward_transfer(r, b), sum(r[j - 1, j] - b[j] for j in range(1, t)) / (t - 1))
    assert same(m.learning_accuracy(r), sum(r[j, j] for j in range(t)) / t)
    assert same(m.average_final_accuracy(r), sum(r[t - 1]) / t)
    assert same(m.intransigence(r, r), 0.0)


@given(matrices(), st.data())
def test_stage_accuracies_equal_slow_loops(r: np.ndarray, data: st.DataObject):
    t = len(r)
    counts = data.draw(st.lists(st.integers(1, 50), min_size=t, max_size=t))
    changing = np.array(
        data.draw(st.lists(st.lists(st.integers(1, 50), min_size=t, max_size=t), min_size=t, max_size=t))
    )
    cil = m.stage_accuracies(r, "class-incremental", counts)
    over_time = m.stage_accuracies(r, "class-incremental", changing)
    dil = m.stage_accuracies(r, "domain-incremental")
    for i in range(t):
        total = sum(counts[j] for j in range(i + 1))
        assert same(cil[i], sum(counts[j] * r[i, j] for j in range(i + 1)) / total)
        then = changing[i, : i + 1]
        assert same(over_time[i], float(sum(then * r[i, : i + 1]) / sum(then)))
        assert same(dil[i], sum(r[i, j] for j in range(i + 1)) / (i + 1))
    assert same(m.average_incremental_accuracy(cil), sum(cil) / t)


@given(matrices())
def test_forgetting_is_at_least_minus_backward_transfer(r: np.ndarray):
    if len(r) > 1:
        assert m.forgetting(r) >= -m.backward_transfer(r) - 1e-9


@given(matrices())
def test_forgetting_over_stages_ends_with_forgetting(r: np.ndarray):
    over = m.forgetting_over_stages(r)
    assert math.isnan(over[0])
    assert same(over[-1], m.forgetting(r))


@given(matrices(holes=True))
def test_holes_never_raise_and_never_leave_the_range(r: np.ndarray):
    for value in (m.forgetting(r), m.backward_transfer(r), m.learning_accuracy(r), m.average_final_accuracy(r)):
        assert math.isnan(value) or -1 <= value <= 1


@given(st.lists(UNIT, min_size=1, max_size=45), st.data())
def test_over_clients_equals_slow_loops(values: list[float], data: st.DataObject):
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(values), max_size=len(values)))
    result = m.over_clients(values, weights)
    average = sum(values) / len(values)
    count = -(-len(values) // 10)
    assert same(result.mean, average)
    assert same(result.weighted, sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights))
    assert result.worst_clients == count
    assert same(result.worst, sum(sorted(values)[:count]) / count)
    assert same(result.std, math.sqrt(sum((v - average) ** 2 for v in values) / len(values)))
    assert result.minimum <= result.worst + 1e-12 <= result.mean + 1e-9


def test_fewer_than_ten_clients_report_the_minimum_and_say_so():
    five = m.over_clients([0.9, 0.2, 0.8, 0.7, 0.6])
    assert five.worst == five.minimum == 0.2
    assert m.worst_label(five.worst_clients) == "worst client"
    many = m.over_clients(np.linspace(0, 1, 30))
    assert many.worst_clients == 3
    assert "3 clients" in m.worst_label(many.worst_clients)


def test_clients_without_test_images_are_left_out_and_counted():
    result = m.over_clients([0.5, math.nan, 1.0], [1, 100, 3])
    assert result.clients == 2
    assert result.mean == pytest.approx(0.75)
    assert result.weighted == pytest.approx(0.875)
    assert math.isnan(m.over_clients([math.nan]).mean)


def test_personal_forgetting_is_per_client_then_mean_and_worst():
    keeps, loses = [[0.5, 0.0], [0.5, 0.5]], [[0.9, 0.0], [0.5, 0.5]]
    assert m.personal_forgetting([keeps, loses]) == pytest.approx((0.2, 0.4))
    assert all(math.isnan(v) for v in m.personal_forgetting([[[0.5]]]))


@given(UNIT, UNIT)
def test_harmonic_mean_lies_between_its_arguments(p: float, g: float):
    value = m.harmonic_mean(p, g)
    assert min(p, g) - 1e-9 <= value <= max(p, g) + 1e-9
    if p > 0.01 and g > 0.01:
        assert value == pytest.approx(2 / (1 / p + 1 / g))
    assert math.isnan(m.harmonic_mean(p, math.nan))


def test_bytes_to_reach_is_cumulative_and_nan_when_never_reached():
    assert m.bytes_to_reach(0.7, [0.5, 0.8, 0.9], [10, 10, 10]) == 20
    assert math.isnan(m.bytes_to_reach(0.95, [0.5, 0.8, 0.9], [10, 10, 10]))
    assert m.bytes_to_reach(0.5, [math.nan, 0.6], [10, 10]) == 20


@given(st.lists(UNIT, min_size=2, max_size=8))
def test_seed_spread_is_the_sample_standard_deviation(values: list[float]):
    average = sum(values) / len(values)
    expected = math.sqrt(sum((v - average) ** 2 for v in values) / (len(values) - 1))
    result = m.over_seeds(values)
    assert same(result.mean, average) and same(result.std, expected) and result.count == len(values)


def test_one_seed_has_no_spread_and_missing_seeds_are_left_out():
    assert math.isnan(m.over_seeds([0.5]).std)
    assert m.over_seeds([0.5, math.nan, 0.7]).count == 2
    assert m.over_seeds([]).count == 0


def two_client_run(kind: m.Kind = "class-incremental") -> m.Evaluations:
    return m.Evaluations(
        kind=kind,
        correct_TT=np.array([[8, 1], [6, 6]]),
        totals_TT=np.array([[10, 10], [10, 10]]),
        personal_MTT=np.array([[[4, 0], [2, 3]], [[-1, -1], [0, 5]]]),
        shared_MTT=np.array([[[3, 0], [3, 2]], [[-1, -1], [0, 4]]]),
        client_totals_MTT=np.array([[[4, 4], [4, 4]], [[0, 5], [0, 5]]]),
        common_MTT=np.array([[[7, 1], [5, 5]], [[-1, -1], [2, 9]]]),
        client_images_M=np.array([30, 10]),
        held_out_T=np.array([0.5, 0.4]),
        zero_shot_T=np.array([0.3, 0.2]),
        zero_shot_held_out=0.6,
    )


def test_summary_of_a_run_by_hand():
    s = m.summarise(two_client_run())
    assert s["avg"] == pytest.approx((0.8 + 0.6) / 2)
    assert s["last"] == pytest.approx(0.6)
    assert s["forgetting"] == pytest.approx(0.2)
    assert s["fwt"] == pytest.approx(0.1 - 0.2)
    assert s["zero_shot_retention"] == pytest.approx(-0.2)
    # client 0: (2 + 3) of (4 + 4); client 1 has no image of task 0: 5 of 5
    assert s["personal"] == pytest.approx((5 / 8 + 1.0) / 2)
    assert s["personal_weighted"] == pytest.approx((30 * 5 / 8 + 10 * 1.0) / 40)
    assert s["personal_worst"] == pytest.approx(5 / 8)
    # stage 0 exists for client 0 only
    assert s["personal_avg"] == pytest.approx((1.0 + (5 / 8 + 1.0) / 2) / 2)
    assert s["personal_forgetting"] == pytest.approx(0.5)
    assert s["global_on_client"] == pytest.approx((5 / 8 + 4 / 5) / 2)
    assert s["client_on_global"] == pytest.approx((10 / 20 + 11 / 20) / 2)
    assert s["harmonic"] == pytest.approx(m.harmonic_mean(s["personal"], 0.6))


def test_domain_incremental_clients_use_the_plain_mean_over_their_domains():
    s = m.summarise(two_client_run("domain-incremental"))
    assert s["personal"] == pytest.approx(((2 / 4 + 3 / 4) / 2 + 1.0) / 2)


def test_a_stage_is_judged_on_the_images_there_were_then():
    # Client 1 is away after the first stage, and client 0 has got 4 more images of task 0 after the second.
    before = two_client_run()
    run = replace(
        before,
        correct_TT=np.array([[3, 0], [8, 9]]),
        totals_TT=np.array([[4, 4], [8, 9]]),
        client_totals_MTT=np.array([[[4, 4], [8, 4]], [[0, 0], [0, 5]]]),
        common_MTT=np.full((2, 2, 2), -1),
    )
    assert run.matrix_TT.tolist() == [[0.75, 0.0], [1.0, 1.0]]
    assert m.summarise(run)["avg"] == pytest.approx((0.75 + 1.0) / 2)
    assert run.personal_stages_MT()[0] == pytest.approx([4 / 4, (2 + 3) / (8 + 4)])


def test_every_summary_number_has_a_name_for_people():
    s = m.summarise(two_client_run())
    unnamed = set(s) - set(m.METRICS) - {"personal_worst_clients"}
    assert unnamed == set()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("avg", 0.8349, "83.5"),
        ("bwt", 0.031, "+3.1"),
        ("forgetting", 0.031, "3.1"),
        ("forgetting", -0.0001, "0.0"),
        ("bwt", -0.0001, "+0.0"),
        ("bytes_up", 1_234_567, "1.2 MB"),
        ("bytes_up", 12, "12 B"),
        ("trainable", 16_002_048, "16,002,048"),
        ("fwt", math.nan, "n/a"),
    ],
)
def test_values_are_formatted_for_people(name: str, value: float, text: str):
    assert m.format_value(name, value) == text


def test_byte_units_are_decimal_and_increase():
    sizes = [m.format_bytes(v) for v in (999, 1000, 1_000_000, 1_000_000_000)]
    assert sizes == ["999 B", "1.0 kB", "1.0 MB", "1.0 GB"]
    assert all(a != b for a, b in pairwise(sizes))
