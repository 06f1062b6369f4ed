"""One supervisor per home; who is killed leaves nothing that the next start does not end."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from edgeduet_shared.errors import ConfigError
from edgeduet_shared.supervision.running_state import RunningState


def test_what_the_running_one_noted_can_be_read_and_only_while_it_runs(tmp_path: Path) -> None:
    state = RunningState(tmp_path, "device")
    assert state.read() is None
    with state.held():
        state.note({"programs": {}})
        assert (RunningState(tmp_path, "device").read() or {})["programs"] == {}
    assert state.read() is None
    assert not state.path.exists()


def test_there_is_one_at_a_time(tmp_path: Path) -> None:
    with RunningState(tmp_path, "device").held():
        with pytest.raises(ConfigError, match="edgeduet-client status"), RunningState(tmp_path, "device").held():
            pass
        with RunningState(tmp_path, "server").held():
            pass


def test_a_state_left_by_a_killed_one_is_no_running_one(tmp_path: Path) -> None:
    RunningState(tmp_path, "device").note({"programs": {}})
    assert RunningState(tmp_path, "device").read() is None
    assert not RunningState(tmp_path, "device").stop()


def test_what_a_killed_one_noted_is_not_taken_for_the_state_of_the_next(tmp_path: Path) -> None:
    state = RunningState(tmp_path, "device")
    state.note({"programs": {}, "training": "connected"})
    with state.held():
        assert state.read() is None
        state.end_leftovers()
        state.note({"programs": {}, "training": "connecting"})
        assert (state.read() or {})["training"] == "connecting"
    assert {path.name for path in tmp_path.iterdir()} <= {".device.lock"}


def test_what_a_power_cut_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".device.state.json.0123456789ab.tmp").write_text("{")
    with RunningState(tmp_path, "device").held():
        pass
    assert {path.name for path in tmp_path.iterdir()} <= {".device.lock"}


def test_a_disk_that_cannot_be_written_ends_nobody_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = RunningState(tmp_path, "device")
    with caplog.at_level(logging.ERROR, logger="edgeduet.supervision"):
        # A folder in its place refuses the write as a full disk would, for whoever runs this.
        state.path.mkdir()
        (state.path / "x").touch()
        for _ in range(3):
            state.note({"programs": {}})
        assert [record.getMessage().count("status shows how things stood") for record in caplog.records] == [1]
        (state.path / "x").unlink()
        state.path.rmdir()
        state.note({"programs": {}})
    assert json.loads(state.path.read_text())["programs"] == {}


def test_programs_left_by_a_killed_one_are_ended_and_later_ones_of_the_same_pid_are_not(tmp_path: Path) -> None:
    state = RunningState(tmp_path, "device")
    command = [sys.executable, "-c", "import time; time.sleep(99)"]
    left, other = subprocess.Popen(command), subprocess.Popen(command)
    try:
        created = psutil.Process(left.pid).create_time()
        programs = {
            "a": {"pid": left.pid, "created": created},
            "b": {"pid": other.pid, "created": created - 100},
            "c": {"pid": None, "created": None},
        }
        state.note({"programs": programs})
        with state.held():
            state.end_leftovers()
        left.wait(10)
        assert other.poll() is None
    finally:
        left.kill()
        other.kill()


@pytest.mark.parametrize("content", ["", "[]", '{"programs": 3}', json.dumps({"programs": {"a": {}}})])
def test_a_damaged_state_does_not_keep_a_device_from_starting(tmp_path: Path, content: str) -> None:
    state = RunningState(tmp_path, "device")
    state.path.write_text(content)
    with state.held():
        state.end_leftovers()
