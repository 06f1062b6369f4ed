"""Checkpoints: complete, checked, cheap with many clients; and the events that belong to them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linear_federation as linear
from edgeduet_server.checkpoint import Arrays, CheckpointStore, Progress
from edgeduet_server.recorder import JsonlRecorder, read_events
from edgeduet_server.round_loop import run_training
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import EdgeDuetError, StateError
from edgeduet_sim.engines.in_process import Clients, InProcessGrid


class Memory:
    """Personal states of clients in memory."""

    def __init__(self, states: dict[int, Arrays] | None = None) -> None:
        self.states = states or {}
        self.asked: list[int] = []

    def snapshot(self, clients: Collection[int]) -> dict[int, Arrays]:
        self.asked += sorted(clients)
        return {client: self.states[client] for client in clients if client in self.states}

    def restore(self, states: Mapping[int, Arrays]) -> None:
        self.states = {client: dict(arrays) for client, arrays in states.items()}


def state(value: float, **notes: Any) -> linear.LinearState:
    return linear.LinearState(
        shared={"w": np.full(linear.SIZE, value, np.float32)},
        extra={"pool": np.full((2, 3), value, np.float64), "count": np.array(7)},
        notes=notes,
    )


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    memory = Memory({0: {"p": np.arange(3.0)}, 5: {"q": np.array(2, np.int64)}})
    progress = Progress(1, 2, rejected={"non-finite": 3}, engine_errors=("X",), bytes_up=12)
    CheckpointStore(tmp_path, {"seed": 1}, personal=memory).save(state(0.5, a=[1, "x"]), progress, 99, {0, 5})
    other = Memory({8: {"p": np.zeros(1)}})
    found = CheckpointStore(tmp_path, {"seed": 1}, personal=other).load(linear.LinearState())
    assert found is not None
    loaded, where, events = found
    assert where == progress
    assert events == 99
    assert loaded.notes == {"a": [1, "x"]}
    for one, two in ((loaded.shared, state(0.5).shared), (loaded.extra, state(0.5).extra)):
        assert {k: (v.dtype, v.shape, v.tobytes()) for k, v in one.items()} == {
            k: (v.dtype, v.shape, v.tobytes()) for k, v in two.items()
        }
    assert sorted(other.states) == [0, 5]
    assert other.states[5]["q"].shape == ()


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", {}).load(linear.LinearState()) is None


def test_two_checkpoints_are_kept_and_nothing_else(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, {}, personal=Memory({0: {"p": np.zeros(4)}}))
    for number in range(5):
        store.save(state(number), Progress(0, number), 0, {0})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{kind}-{number:06d}.{suffix}"
        for kind, suffix in (("checkpoint", "json"), ("personal", "bin"), ("state", "safetensors"))
        for number in (4, 5)
    ]


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        # Without its JSON file a checkpoint does not exist, so that one cannot be "gone".
        *((kind, damage) for kind in ("checkpoint", "state", "personal") for damage in ("flip", "cut")),
        ("state", "gone"),
        ("personal", "gone"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, damage: str
) -> None:
    memory = Memory({0: {"p": np.zeros(4)}})
    store = CheckpointStore(tmp_path, {}, personal=memory)
    store.save(state(1), Progress(0, 1), 10, {0})
    memory.states[0]["p"] = np.ones(4)
    store.save(state(2), Progress(0, 2), 20, {0})
    path = next(tmp_path.glob(f"{kind}-000002.*"))
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content if damage == "flip" else content[:-5])

    store = CheckpointStore(tmp_path, {}, personal=memory)
    found = store.load(linear.LinearState())
    assert found is not None
    assert (found[1].round, found[2]) == (1, 10)
    assert not memory.states[0]["p"].any()
    assert any(path.name in record.getMessage() and record.levelno == logging.WARNING for record in caplog.records)
    # The run that goes on from there is not confused by what was damaged.
    store.save(state(3), Progress(0, 2), 30, {0})
    again = CheckpointStore(tmp_path, {}, personal=memory).load(linear.LinearState())
    assert again is not None
    assert again[0].shared["w"][0] == 3
    for number in (4, 5):
        store.save(state(number), Progress(0, number), 10 * number, {0})
    assert not list(tmp_path.glob("*.damaged")), "it goes when the run is past it"


def test_when_every_checkpoint_is_damaged_nothing_is_guessed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, {})
    store.save(state(1), Progress(0, 1), 10, ())
    next(tmp_path.glob("state-*")).write_bytes(b"")
    with pytest.raises(StateError, match="no intact checkpoint is left"):
        CheckpointStore(tmp_path, {}).load(linear.LinearState())


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    CheckpointStore(tmp_path, {"seed": 1, "method": "a"}).save(state(1), Progress(0, 1), 0, ())
    with pytest.raises(StateError, match=r"of another run \(seed is 1, this run has 2\)"):
        CheckpointStore(tmp_path, {"seed": 2, "method": "a"}).load(linear.LinearState())


def test_a_crash_while_saving_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, {})
    store.save(state(1), Progress(0, 1), 0, ())
    with pytest.raises(TypeError):
        store.save(state(2, bad=object()), Progress(0, 2), 0, ())
    found = CheckpointStore(tmp_path, {}).load(linear.LinearState())
    assert found is not None
    assert found[1].round == 1


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeDuetError, match="cannot write"):
        CheckpointStore(tmp_path / "file" / "c", {}).save(state(1), Progress(), 0, ())
    with pytest.raises(EdgeDuetError, match="cannot write"):
        JsonlRecorder(tmp_path / "file" / "m.jsonl")


def test_only_clients_that_worked_are_written(tmp_path: Path) -> None:
    memory = Memory({client: {"p": np.full(50, float(client))} for client in range(100)})
    store = CheckpointStore(tmp_path, {}, personal=memory)
    store.save(state(1), Progress(0, 1), 0, range(100))
    memory.asked.clear()
    memory.states[7] = {"p": np.zeros(50)}
    store.save(state(2), Progress(0, 2), 0, {7})
    assert memory.asked == [7]
    assert (tmp_path / "personal-000002.bin").stat().st_size * 50 < (tmp_path / "personal-000001.bin").stat().st_size
    fresh = Memory()
    CheckpointStore(tmp_path, {}, personal=fresh).load(linear.LinearState())
    assert {client: values["p"][0] for client, values in fresh.states.items()} == {
        client: 0.0 if client == 7 else float(client) for client in range(100)
    }


@settings(max_examples=15)
@given(st.lists(st.sets(st.integers(0, 9), max_size=10), min_size=1, max_size=12))
def test_personal_states_are_right_and_bounded_whoever_works(
    tmp_path_factory: pytest.TempPathFactory, worked: list[set[int]]
) -> None:
    folder = tmp_path_factory.mktemp("c")
    memory = Memory()
    store = CheckpointStore(folder, {}, personal=memory)
    for number, clients in enumerate(worked):
        for client in clients:
            memory.states[client] = {"p": np.full(20, number + client / 10)}
        store.save(state(number), Progress(0, number), 0, clients)
    fresh = Memory()
    CheckpointStore(folder, {}, personal=fresh).load(linear.LinearState())
    assert {c: v["p"].tolist() for c, v in fresh.states.items()} == {
        c: v["p"].tolist() for c, v in memory.states.items()
    }
    one = (20 * 8 + 100) * 10
    # Per kept checkpoint at most twice the live states plus what was just written.
    assert sum(path.stat().st_size for path in folder.glob("personal-*")) <= 2 * 3 * one


def test_events_after_the_checkpoint_are_cut_off_with_a_torn_line(tmp_path: Path) -> None:
    recorder = JsonlRecorder(tmp_path / "m.jsonl")
    recorder.record("round", round=0)
    position = recorder.position()
    recorder.record("round", round=1)
    recorder.close()
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write('{"event":"rou')
    assert [event["round"] for event in read_events(tmp_path / "m.jsonl")] == [0, 1]
    recorder = JsonlRecorder(tmp_path / "m.jsonl")
    recorder.rewind(position)
    recorder.record("round", round=1, loss=0.5)
    assert (tmp_path / "m.jsonl").read_text() == '{"event":"round","round":0}\n{"event":"round","round":1,"loss":0.5}\n'


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"event":"a"}\n{"ev\n{"event":"b"}\n')
    with pytest.raises(StateError, match="line 2"):
        list(read_events(tmp_path / "m.jsonl"))


def test_a_shortened_event_file_is_not_glossed_over(tmp_path: Path) -> None:
    recorder = JsonlRecorder(tmp_path / "m.jsonl")
    with pytest.raises(StateError, match="has 0 bytes, but the checkpoint was made at 50"):
        recorder.rewind(50)


def test_listeners_see_every_event(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    recorder = JsonlRecorder(tmp_path / "m.jsonl", [seen.append])
    recorder.record("round", round=0)
    assert seen == [{"event": "round", "round": 0}]


class Stops(Exception):
    pass


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("when", range(6))
def test_a_run_broken_off_anywhere_and_resumed_ends_the_same(tmp_path: Path, every: int, when: int) -> None:
    scenario = Scenario.model_validate(
        {"name": "linear", "federation": {"clients": 5, "rounds": 3, "participation": 0.6}}
    )

    def start(folder: Path, resume: bool, stop_at: int | None = None) -> linear.LinearState:
        class Strategy(linear.LinearStrategy):
            count = 0

            def aggregate(self, *args: Any) -> linear.LinearState:
                if self.count == stop_at:
                    raise Stops
                self.count += 1
                return super().aggregate(*args)

        grid = InProcessGrid(Clients(linear.client_app, 5, {"seed": 4}))
        return run_training(
            grid,
            Strategy(),
            scenario,
            start=linear.LinearState(),
            stages=2,
            recorder=JsonlRecorder(folder / "m.jsonl"),
            checkpoints=CheckpointStore(folder / "c", {}, every=every, personal=grid),
            seed=4,
            resume=resume,
        )

    whole = start(tmp_path / "whole", False)
    with pytest.raises(Stops):
        start(tmp_path / "broken", False, when)
    resumed = start(tmp_path / "broken", True)
    assert resumed.shared["w"].tobytes() == whole.shared["w"].tobytes()
    assert resumed.notes == whole.notes
    assert _without_timing(tmp_path / "broken" / "m.jsonl") == _without_timing(tmp_path / "whole" / "m.jsonl")


def _without_timing(path: Path) -> list[str]:
    events = list(read_events(path))
    for event in events:
        event.pop("timing", None)
    return [json.dumps(event) for event in events]
