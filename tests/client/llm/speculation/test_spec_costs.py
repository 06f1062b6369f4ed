"""What rounds cost: interpolated, corrected by what rounds took, kept as JSON, measured on a real model."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round
from edgeduet_client.llm.speculation.calibration import calibrated_costs
from edgeduet_client.llm.speculation.costs import CostModel, DraftCost, bucket_of
from table_model import TableDrafter, TableTarget

STEPS = [1.0, 1.2, 1.4, 1.6, 1.8]


def costs(**settings: Any) -> CostModel:
    return CostModel({128: STEPS}, {"a": DraftCost(0.1, 0.05), "b": DraftCost(0.0, 0.2)}, **settings)


def round_of(arm: Arm, verify: float, *, proposed: int | None = None, **seconds: float) -> Round:
    proposed = arm.length if proposed is None else proposed
    return Round(arm, proposed, proposed, proposed, proposed + 1, {"verify": verify, **seconds})


def test_a_round_costs_overhead_draft_and_step() -> None:
    model = costs(overhead=0.01)
    assert model.seconds(NO_DRAFT, 10) == pytest.approx(1.01)
    assert model.seconds(Arm("a", 2), 10) == pytest.approx(0.01 + 0.1 + 2 * 0.05 + 1.4)
    assert model.seconds(Arm("b", 4), 10) == pytest.approx(0.01 + 0.8 + 1.8)


def test_steps_larger_than_any_measured_follow_a_straight_line() -> None:
    assert costs().step_seconds(7, 10) == pytest.approx(2.2)
    assert CostModel({128: [1.0]}, {}).step_seconds(3, 10) == pytest.approx(3.0)


def test_filled_steps_cost_what_they_are_filled_to() -> None:
    model = costs(granule=2)
    assert model.step_seconds(1, 10) == model.step_seconds(2, 10) == pytest.approx(1.2)
    assert model.seconds(Arm("b", 3), 10) == pytest.approx(0.6 + 1.6)


def test_a_context_longer_than_any_known_starts_like_the_nearest_and_is_learnt_by_itself() -> None:
    model = CostModel({128: STEPS, 1000: [2.0, 2.1]}, {})
    assert bucket_of(256) == 0 and bucket_of(257) == 1 and bucket_of(1024) == 2 and bucket_of(1025) == 3
    assert model.step_seconds(1, 5000) == pytest.approx(2.0)
    for _ in range(60):
        model.observe(round_of(NO_DRAFT, 3.0), 5000)
        model.observe(round_of(NO_DRAFT, 1.0), 128)
    assert model.step_seconds(1, 5000) == pytest.approx(3.0, rel=0.01)
    assert model.step_seconds(1, 128) == pytest.approx(1.0, rel=0.01)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=60), st.integers(0, 4))
def test_what_is_believed_stays_within_what_was_believed_and_seen(seen: list[float], length: int) -> None:
    model, arm = costs(), Arm("a", length) if length else NO_DRAFT
    for seconds in seen:
        model.observe(round_of(arm, seconds), 10)
    low, high = min([STEPS[length], *seen]), max([STEPS[length], *seen])
    assert low * (1 - 1e-9) <= model.step_seconds(length + 1, 10) <= high * (1 + 1e-9)


def test_one_interrupted_step_moves_little_and_a_lasting_change_everything() -> None:
    model = costs()
    for _ in range(40):
        model.observe(round_of(NO_DRAFT, 1.0), 10)
    model.observe(round_of(NO_DRAFT, 30.0), 10)
    assert model.step_seconds(1, 10) == pytest.approx(1.0, rel=0.01)
    for _ in range(20):
        model.observe(round_of(NO_DRAFT, 3.0), 10)
    assert model.step_seconds(1, 10) == pytest.approx(3.0, rel=0.1)


def test_steps_not_made_lately_follow_by_half_and_those_made_lately_do_not() -> None:
    model = costs()
    for _ in range(50):
        model.observe(round_of(NO_DRAFT, 1.0), 10)
    before = model.step_seconds(2, 10)
    for _ in range(10):
        model.observe(round_of(Arm("b", 4), 3.6), 10)
    assert model.step_seconds(5, 10) > 3.0
    assert before < model.step_seconds(2, 10) < 2 * before
    assert model.step_seconds(1, 10) == pytest.approx(1.0, rel=1e-6)


def test_drafting_and_catching_up_are_corrected_too() -> None:
    model = costs()
    for _ in range(40):
        model.observe(round_of(Arm("a", 2), 1.4, draft=0.4, catch_up=0.05), 10)
    assert model.draft_seconds("a", 2) == pytest.approx(0.4, rel=0.02)
    assert model.catch_up("a") == pytest.approx(0.05, rel=0.02)
    assert model.draft_seconds("b", 2) == pytest.approx(0.4)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    model = costs()
    model.observe(round_of(Arm("a", 2), 0.0, draft=0.0), 10)
    assert model.as_json() == costs().as_json()


def test_the_age_of_a_step_is_how_many_rounds_ago_it_was_made() -> None:
    model = costs()
    assert model.age(2, 10) > 1000
    model.observe(round_of(Arm("a", 1), 1.2), 10)
    assert model.age(2, 10) == 0
    model.observe(round_of(NO_DRAFT, 1.0), 10)
    assert model.age(2, 10) == 1 and model.age(1, 10) == 0


def test_json_brings_the_same_costs_back_and_rubbish_is_refused() -> None:
    model = costs(overhead=0.01, granule=2, catch_up={"a": 0.3})
    model.observe(round_of(Arm("a", 3), 2.0, draft=0.2), 10)
    back = CostModel.from_json(json.loads(json.dumps(model.as_json())))
    for arm in (NO_DRAFT, Arm("a", 1), Arm("b", 3)):
        assert back.seconds(arm, 100) == pytest.approx(model.seconds(arm, 100))
    assert back.catch_up("a") == 0.3 and back.granule == 2
    for wrong in ({}, {**model.as_json(), "format": 99}, {**model.as_json(), "steps": {}}):
        with pytest.raises(ModelError, match="calibrate again"):
            CostModel.from_json(wrong)


def test_a_machine_ten_times_as_slow_has_the_same_quotients() -> None:
    slow = costs(catch_up={"a": 0.1}).scaled(10)
    for arm in (NO_DRAFT, Arm("a", 2), Arm("b", 4)):
        assert slow.seconds(arm, 10) == pytest.approx(10 * costs().seconds(arm, 10))


class CountingTarget(TableTarget):
    """Says how often it was stepped; has the number of threads a session has."""

    threads = 1
    steps = 0

    def forward(self, *args: Any, **settings: Any) -> Any:
        self.steps += 1
        return super().forward(*args, **settings)


def calibrate(target: Any, folder: Path, **settings: Any) -> CostModel:
    ticks = count()
    asked: dict[str, Any] = {"vocabulary": 4, "longest": 3, "weights_sha256": "0" * 64} | settings
    return calibrated_costs(
        target,
        {"table": TableDrafter(4, name="table", draws=draw)},
        **asked,
        folder=folder,
        clock=lambda: next(ticks) * 1e-3,
    )


def test_calibration_measures_once_for_the_same_question(tmp_path: Path) -> None:
    target = CountingTarget(4)
    first = calibrate(target, tmp_path)
    measured = target.steps
    assert measured > 0
    assert calibrate(target, tmp_path).as_json() == first.as_json()
    assert target.steps == measured
    calibrate(target, tmp_path, calibrate="on")
    calibrate(target, tmp_path, weights_sha256="1" * 64)
    assert target.steps == 3 * measured
    assert len(list((tmp_path / "costs").glob("*.json"))) == 2


def test_calibration_survives_a_damaged_answer_on_disk(tmp_path: Path) -> None:
    target = CountingTarget(4)
    first = calibrate(target, tmp_path)
    (kept,) = (tmp_path / "costs").glob("*.json")
    for damaged in ("", "{", "[]", json.dumps({"asked": {}, "costs": {}})):
        kept.write_text(damaged, "utf-8")
        assert calibrate(target, tmp_path).as_json() == first.as_json()


def test_calibration_that_is_off_makes_no_step_and_keeps_nothing(tmp_path: Path) -> None:
    target = CountingTarget(4)
    guessed = calibrate(target, tmp_path, calibrate="off")
    assert target.steps == 0 and not list(tmp_path.iterdir())
    assert guessed.drafters == ("table",)
    assert np.all(np.diff(guessed.step_table(4, 10)) > 0)
