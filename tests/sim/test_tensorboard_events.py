"""TensorBoard shows the recorded numbers, and a resumed run does not show a step twice."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from edgeduet_sim.progress import RunTitle
from edgeduet_sim.tensorboard_events import TensorBoardEvents

RUN = RunTitle("fed-duet, seed 0", "domain-incremental", ("photo", "sketch"), 2, 1)


def round_event(stage: int, round: int, loss: float) -> dict[str, Any]:
    return {
        "event": "round",
        "stage": stage,
        "round": round,
        "asked": [0],
        "skipped": False,
        "loss": loss,
        "accuracy": 0.5,
        "bytes_up": 10,
        "bytes_down": 20,
    }


EVALUATE = {
    "event": "evaluate",
    "stage": 0,
    "clients": [{"personal": [3, 0], "totals": [4, 4]}],
    "common": {"correct": [8, 2], "totals": [10, 10], "held_out": -1, "held_out_total": 0},
}


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_numbers_appear_under_their_names_at_increasing_steps(tmp_path: Path):
    board = TensorBoardEvents(tmp_path, RUN)
    for event in (
        {"event": "run-start"},
        round_event(0, 0, 2.0),
        round_event(0, 1, 1.0),
        EVALUATE,
        round_event(1, 0, 3.0),
    ):
        board(event)
    board.close()
    shown = read(tmp_path)
    assert shown["train/loss"] == [(0, 2.0), (1, 1.0), (3, 3.0)]
    assert shown["accuracy/global on tasks so far"] == [(2, pytest.approx(0.8))]
    assert shown["accuracy/personal on tasks so far"] == [(2, pytest.approx(0.75))]
    assert shown["accuracy on task/sketch"] == [(2, pytest.approx(0.2))]
    assert shown["bytes/up"][0] == (0, 10)


def test_a_resumed_run_replaces_the_steps_it_repeats(tmp_path: Path):
    first = TensorBoardEvents(tmp_path, RUN)
    for event in (round_event(0, 0, 2.0), round_event(0, 1, 1.0)):
        first(event)
    first.close()
    time.sleep(1.1)  # files are ordered by the second they were opened in; a real resume is never that quick
    second = TensorBoardEvents(tmp_path, RUN)
    second(round_event(0, 1, 1.5))
    second.close()
    assert read(tmp_path)["train/loss"] == [(0, 2.0), (1, 1.5)]


def test_methods_without_a_global_model_and_empty_rounds_write_nothing_wrong(tmp_path: Path):
    board = TensorBoardEvents(tmp_path, RUN)
    board({"event": "round", "stage": 0, "round": 0, "asked": [], "skipped": False})
    board({**EVALUATE, "common": None})
    board.close()
    assert set(read(tmp_path)) == {"accuracy/personal on tasks so far"}
