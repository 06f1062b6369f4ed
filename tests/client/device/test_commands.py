"""status, logs, reset: what they say, and what reset removes and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgeduet_client.cli import app
from edgeduet_client.device.device_config import CONFIG_FILE, DeviceConfig, write_device_config
from edgeduet_client.device.log_view import follow_file, last_lines
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.supervision.running_state import RunningState

STATE = {
    "training": "connected",
    "why": "",
    "cause": "",
    "programs": {"supernode": {"pid": 1, "created": 0.0, "restarts": 2, "last_exit": None}},
    "complaints": [],
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_device_config(DeviceConfig(), tmp_path / CONFIG_FILE)
    for name in ("personal", "classifier", "cache", "flwr", "identity", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    return tmp_path


def test_status_of_a_device_that_does_not_run_is_exit_code_1(home: Path) -> None:
    shown = CliRunner().invoke(app, ["status", str(home)])
    assert shown.exit_code == 1
    assert "edgeduet-client start" in shown.output


def test_status_says_what_runs_and_complaints_are_exit_code_1(home: Path) -> None:
    state = RunningState(home, "device")
    with state.held():
        state.note(STATE)
        good = CliRunner().invoke(app, ["status", str(home)])
        assert good.exit_code == 0, good.output
        assert "training connected" in good.output and "2 restarts" in good.output
        state.note({**STATE, "complaints": ["not connected: clock"]})
        bad = CliRunner().invoke(app, ["status", str(home), "--json"])
        assert bad.exit_code == 1
        assert json.loads(bad.output)["complaints"] == ["not connected: clock"]


def test_reset_removes_what_was_learned_and_keeps_the_identity(home: Path) -> None:
    shown = CliRunner().invoke(app, ["reset", str(home), "--yes"])
    assert shown.exit_code == 0, shown.output
    left = {path.name for path in home.iterdir() if not path.name.startswith(".")}
    assert left == {"identity", "logs", CONFIG_FILE}


def test_reset_with_identity_leaves_no_device(home: Path) -> None:
    CliRunner().invoke(app, ["reset", str(home), "--yes", "--identity"])
    assert not (home / "identity").exists() and not (home / CONFIG_FILE).exists()


def test_reset_asks_and_does_nothing_where_nobody_can_answer(home: Path) -> None:
    refused = CliRunner().invoke(app, ["reset", str(home)])
    assert isinstance(refused.exception, ConfigError) and "--yes" in str(refused.exception)
    assert (home / "personal" / "file").exists()


def test_reset_of_a_running_device_or_of_another_folder_is_refused(home: Path, tmp_path: Path) -> None:
    state = RunningState(home, "device")
    with state.held():
        state.note(STATE)
        refused = CliRunner().invoke(app, ["reset", str(home), "--yes"])
    assert isinstance(refused.exception, ConfigError) and "stop" in str(refused.exception)
    assert (home / "personal" / "file").exists()
    foreign = CliRunner().invoke(app, ["reset", str(tmp_path / "personal"), "--yes"])
    assert isinstance(foreign.exception, ConfigError)


def test_a_damaged_configuration_can_be_reset(home: Path) -> None:
    (home / CONFIG_FILE).write_text("[")
    assert CliRunner().invoke(app, ["reset", str(home), "--yes", "--identity"]).exit_code == 0


def test_logs_are_shown_and_unknown_programs_refused(home: Path) -> None:
    (home / "logs" / "supernode.log").write_text("a\nb\nc\n")
    shown = CliRunner().invoke(app, ["logs", str(home), "-p", "supernode", "-n", "2"])
    assert shown.output == "b\nc\n"
    refused = CliRunner().invoke(app, ["logs", str(home), "-p", "supernod"])
    assert "did you mean 'supernode'" in str(refused.exception)
    early = CliRunner().invoke(app, ["logs", str(home), "-p", "llm"])
    assert "has the device been started" in str(early.exception)


def test_a_log_is_followed_over_a_rotation(tmp_path: Path) -> None:
    file = tmp_path / "a.log"
    file.write_text("old\n")

    def append() -> None:
        with file.open("a") as stream:
            stream.write("one\ntw")

    def rotate() -> None:
        with file.open("a") as stream:
            stream.write("o\n")
        file.rename(tmp_path / "a.log.1")
        file.write_text("three\n")

    acts = [append, rotate]

    class Over(Exception):
        pass

    def wait() -> None:
        if not acts:
            raise Over
        acts.pop(0)()

    seen = []
    with pytest.raises(Over):
        for line in follow_file(file, wait=wait):
            seen.append(line)
    assert seen == ["one", "two", "three"]
    assert last_lines(tmp_path / "a.log.1", 9) == ["old", "one", "two"]
