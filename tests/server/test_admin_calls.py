"""What an operator can do: ``edgeduet-admin`` against a real admin service, over TLS; only Flower is stood in for."""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.numpy import load
from sqlalchemy import select
from typer.testing import CliRunner

from admin_home import AdminHome, admin_home
from edgeduet_server.admin import flower_view
from edgeduet_server.admin_cli.connection import AdminError
from edgeduet_server.admin_cli.main import app
from edgeduet_server.recorder import JsonlRecorder
from edgeduet_server.registry.backup import restore_backup, write_backup
from edgeduet_server.registry.desired import wishes
from edgeduet_server.registry.errors import RegistryError
from edgeduet_server.registry.models import ClientSighting, Device, Run
from edgeduet_server.registry.recorded_run import RecordedRun
from edgeduet_server.registry.runs import begin_run, config_of, end_run, find_run
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.enrolment import make_request, request_code
from edgeduet_shared.errors import EdgeDuetError
from edgeduet_shared.run_config import RunConfig

SCENARIO = """
name = "cameras"
[data]
max_per_class = 12
[model.pool]
size = 6
dispatched = 2
[federation]
clients = 3
rounds = 2
"""
TASKS = ["photo", "sketch"]


class State:
    """A server state with one array."""

    def __init__(self, value: float) -> None:
        self.shared = {"w": np.full(3, value, np.float32)}


class Operator:
    """Somebody at a shell, logged in to a server with a role."""

    def __init__(self, home: AdminHome, folder: Path, role: str = "admin") -> None:
        self.home = home
        self.env = {"EDGEDUET_ADMIN_CONFIG": str(folder / f"{role}.json"), "COLUMNS": "200"}
        self.secret = home.token(role)
        self.text("login", "--server", f"localhost:{home.port}", "--ca", str(home.ca), input=self.secret + "\n")

    def text(self, *arguments: str, input: str | None = None) -> str:
        """Run a command; return what it printed."""
        result = CliRunner().invoke(app, list(arguments), env=self.env, input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    def json(self, *arguments: str) -> Any:
        """Run a command with --json; return what it says."""
        return json.loads(self.text(*arguments, "--json"))


@pytest.fixture(autouse=True)
def fresh_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Flower says is asked anew each time: tests do not wait for seconds to pass."""
    monkeypatch.setattr(flower_view, "FRESH_SECONDS", 0.0)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[AdminHome]:
    with admin_home(tmp_path / "home") as made:
        yield made


@pytest.fixture
def operator(home: AdminHome, tmp_path: Path) -> Operator:
    return Operator(home, tmp_path)


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "cameras.toml"
    path.write_text(SCENARIO)
    return str(path)


def started(operator: Operator, scenario: str, name: str = "night") -> RunConfig:
    """Start a run, as Flower's server process sees it."""
    operator.json("runs", "start", scenario, "--method", "local", "--name", name)
    return next(asked[1] for asked in reversed(operator.home.flower.asked) if asked[0] == "start")


def train(home: AdminHome, config: RunConfig, *, stages: int = 2, end: bool = True) -> None:
    """Do what the ServerApp does with the registry: two stages of two rounds with known numbers."""
    with home.registry.writing() as session:
        flower_id = find_run(session, config.run_name).flower_run_id or "1"
        run_id = begin_run(session, config, flower_id, home.clock.now()).id
    home.flower.runs[flower_id] = "running"
    record = RecordedRun(home.registry, run_id, config, home.clock.now)
    record.describe(tasks=TASKS)
    record.control.sighted({client: 2**63 + 2 + client for client in range(3)})
    recorder = JsonlRecorder(config.run_dir / "metrics.jsonl", [record.listener])
    recorder.record("run-start", stages=2, clients=3)
    for stage in range(stages):
        recorder.record("stage-start", stage=stage)
        for round in range(2):
            failing = (stage, round) == (0, 1)
            record.control.orders(stage, round)
            recorder.record(
                "round",
                stage=stage,
                round=round,
                asked=[0, 1, 2],
                skipped=False,
                clients=[{"client": c, "examples": 4} for c in ((0, 2) if failing else (0, 1, 2))],
                rejected={"client-error": 1} if failing else {},
                failures=[{"client": 1, "reason": "client-error", "text": "Traceback\n  x\nOSError: \x1b[31mno camera"}]
                if failing
                else [],
                missing=[],
                loss=0.5,
                accuracy=0.75,
                trained=["prompt"],
                dispatch={"0": [0, 1], "1": [1, 5]},
                bytes_down=1000,
                bytes_up=500,
                timing={"seconds": 2.0, "client_seconds": 1.0},
            )
        record.keep_model(State(stage), stage)
        recorder.record("evaluate", stage=stage, **evaluation(stage))
    if end:
        recorder.record("run-end")
        with home.registry.writing() as session:
            end_run(session, run_id, "finished", home.clock.now())
        home.flower.runs[flower_id] = "finished:completed"
    recorder.close()


def evaluation(stage: int) -> dict[str, Any]:
    """Task 0 at 80 %, then 60 %; task 1 at 90 %. Client c gets c + 7 of 10 right, and 5 with the global model."""
    correct = [[8, 3], [6, 9]][stage]
    seen = stage + 1
    clients = [
        {
            "client": c,
            "personal": [c + 7] * seen,
            "shared": [5] * seen,
            "totals": [10] * seen,
            "personal_common": [-1] * seen,
            "common_totals": [0] * seen,
            "held_out": -1,
            "held_out_total": 0,
        }
        for c in range(3)
    ]
    return {
        "clients": clients,
        "absent": [],
        "failures": [],
        "common": {"correct": correct, "totals": [10, 10], "held_out": -1, "held_out_total": 0},
        "bytes_down": 1,
        "bytes_up": 1,
        "timing": {"seconds": 1.0, "client_seconds": 1.0},
    }


# -- logging in -----------------------------------------------------------------------------------------


def test_login_keeps_the_token_where_only_its_owner_can_read_it(operator: Operator) -> None:
    path = Path(operator.env["EDGEDUET_ADMIN_CONFIG"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert operator.json("status")["role"] == "admin"
    path.chmod(0o644)
    with pytest.raises(EdgeDuetError, match="others can read the token"):
        operator.json("status")


def test_login_does_not_keep_what_does_not_work(home: AdminHome, tmp_path: Path) -> None:
    env = {"EDGEDUET_ADMIN_CONFIG": str(tmp_path / "admin.json")}
    base = ["login", "--server", f"localhost:{home.port}", "--ca"]
    wrong_ca = tmp_path / "other"
    from edgeduet_server.deployment.pki import Pki

    Pki(wrong_ca).create(["localhost"])
    for ca, token, words in (
        (home.ca, "edt_000000000000_" + "A" * 43, "not one of this server's"),
        (home.ca, "password", "begins with 'edt_'"),
        (home.home / "pki" / "ca.key", home.token(), "not ca.key"),
        (wrong_ca / "ca.crt", home.token(), "did not sign"),
        (tmp_path / "none.crt", home.token(), "cannot be read"),
    ):
        result = CliRunner().invoke(app, [*base, str(ca)], env=env, input=token + "\n")
        assert isinstance(result.exception, EdgeDuetError), result.output
        assert words in str(result.exception)
    assert not (tmp_path / "admin.json").exists()


def test_a_server_that_is_not_there_is_one_line(operator: Operator, home: AdminHome) -> None:
    path = Path(operator.env["EDGEDUET_ADMIN_CONFIG"])
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "server": "localhost:1"}))
    with pytest.raises(AdminError, match=r"localhost:1 cannot be reached"):
        operator.json("status")
    path.unlink()
    with pytest.raises(EdgeDuetError, match="not logged in"):
        operator.json("status")


def test_a_token_in_the_environment_takes_the_place_of_the_one_kept(operator: Operator, home: AdminHome) -> None:
    operator.env["EDGEDUET_ADMIN_TOKEN"] = home.token("viewer")
    assert operator.json("status")["role"] == "viewer"


def test_the_first_token_is_made_on_the_server_itself(home: AdminHome, operator: Operator) -> None:
    made = operator.json("tokens", "create", "first", "--role", "admin", "--home", str(home.home))
    assert home.call("Status", pb.StatusRequest(), made["secret"]).token == "first"
    assert "on the server" in operator.json("audit")["entries"][-1]["token"]


# -- runs -----------------------------------------------------------------------------------------------


def test_a_run_starts_from_the_same_file_as_the_simulation(operator: Operator, scenario: str) -> None:
    run = operator.json(
        "runs", "start", scenario, "--method", "fed-duet:fusion=false", "--set", "train.lr=0.01", "--seed", "7"
    )
    config = next(asked[1] for asked in operator.home.flower.asked if asked[0] == "start")
    assert (config.method, config.options, config.seed) == ("fed-duet", {"fusion": False}, 7)
    assert (config.scenario.name, config.scenario.train.lr, config.scenario.federation.rounds) == ("cameras", 0.01, 2)
    assert config.run_dir == operator.home.home / "runs" / run["name"]
    assert run["state"] == "pending"
    assert run["flower_run_id"].isdigit()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--method", "fed-dute"], "did you mean 'fed-duet'"),
        (["demo", "--method", "fed-duet:fusoin=false"], "unknown key 'fusoin'; did you mean 'fusion'"),
        (["demo", "--method", "local", "--set", "train.lr=-1"], "train.lr"),
        (["demo", "--method", "local", "--set", "train.rl=1"], "did you mean 'train.lr'"),
        (["dmeo", "--method", "local"], "did you mean 'demo'"),
        (["missing.toml"], "missing.toml: cannot be read"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_started(
    operator: Operator, arguments: list[str], words: str
) -> None:
    with pytest.raises(EdgeDuetError, match=words):
        operator.json("runs", "start", *arguments)
    assert operator.json("runs", "list")["runs"] == []
    assert not [asked for asked in operator.home.flower.asked if asked[0] == "start"]


OWN_IMAGES = """
name = "cameras"
[data]
source = "device"
classes = ["cat", "dog"]
[stream]
kind = "class-incremental"
[federation]
clients = 3
"""


def test_a_run_on_the_devices_own_images_starts(operator: Operator, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(OWN_IMAGES)
    operator.json("runs", "start", str(tmp_path / "own.toml"), "--method", "fed-duet")
    config = next(asked[1] for asked in operator.home.flower.asked if asked[0] == "start")
    assert config.scenario.data.on_devices


@pytest.mark.parametrize(
    ("method", "change", "words"),
    [
        ("joint", "train.lr=0.01", "method 'joint' trains on all images in one place"),
        ("local", "data.source=device:/srv/folders", "data.source = 'device:/srv/folders' is for simulations"),
        ("local", "data.classes=[]", "needs classes"),
        ("local", "stream.kind=domain-incremental", "needs two or more data.domains"),
        ("local", "partition.kind=dirichlet", r"leave \[partition\] out"),
    ],
)
def test_settings_that_own_images_cannot_have_are_refused_in_one_line(
    operator: Operator, tmp_path: Path, method: str, change: str, words: str
) -> None:
    (tmp_path / "own.toml").write_text(OWN_IMAGES)
    with pytest.raises(EdgeDuetError, match=words) as refused:
        operator.json("runs", "start", str(tmp_path / "own.toml"), "--method", method, "--set", change)
    assert "\n" not in str(refused.value)
    assert not [asked for asked in operator.home.flower.asked if asked[0] == "start"]


def test_one_run_at_a_time_and_each_name_once(operator: Operator, scenario: str) -> None:
    config = started(operator, scenario)
    with pytest.raises(AdminError, match="run 'night' is pending; the devices work on one run at a time"):
        started(operator, scenario, "other")
    train(operator.home, config)
    operator.home.clock.pass_(minutes=1)
    with pytest.raises(AdminError, match="there is a run 'night' already"):
        started(operator, scenario)
    started(operator, scenario, "other")


def test_a_run_that_flower_refuses_is_failed_with_the_reason(operator: Operator, scenario: str) -> None:
    operator.home.flower.problem = "SuperLink is down"
    with pytest.raises(AdminError, match="SuperLink is down"):
        started(operator, scenario)
    assert operator.json("runs", "show")["state"] == "failed"
    assert any("SuperLink is down" in line for line in operator.json("status")["warnings"])


def test_stop_waits_for_the_round_and_resume_goes_on_from_there(operator: Operator, scenario: str) -> None:
    config = started(operator, scenario)
    train(operator.home, config, stages=1, end=False)
    run = operator.json("runs", "stop", "--yes")
    assert (run["state"], run["stop_ordered"]) == ("running", True)
    assert "stops after this round" in operator.text("status")
    assert not [asked for asked in operator.home.flower.asked if asked[0] == "stop"]
    with operator.home.registry.writing() as session:
        end_run(session, find_run(session, "night").id, "stopped", operator.home.clock.now())
    run = operator.json("runs", "resume")
    again = next(asked[1] for asked in reversed(operator.home.flower.asked) if asked[0] == "start")
    assert again.resume
    assert again.identity() == config.identity()
    assert (run["stop_ordered"], run["state"]) == (False, "pending")


def test_stop_now_ends_the_run_in_flower(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario), stages=1, end=False)
    run = operator.json("runs", "stop", "night", "--now", "--yes")
    assert run["state"] == "stopped"
    assert [asked[0] for asked in operator.home.flower.asked].count("stop") == 1


def test_pause_and_unpause_are_orders_for_the_next_round(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario), stages=1, end=False)
    assert operator.json("runs", "pause")["pause_ordered"]
    assert not operator.json("runs", "unpause")["pause_ordered"]
    with operator.home.registry.reading() as session:
        rows = wishes(session, find_run(session, "night").id)
    assert [(row.key, row.value) for row in rows] == [("paused", True), ("paused", False)]
    assert all(row.by.startswith("admin-") for row in rows)


def test_a_finished_run_cannot_be_paused_resumed_or_changed(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario))
    for command in (["runs", "pause"], ["runs", "resume"], ["runs", "stop", "--yes"], ["config", "set", "train.lr=1"]):
        with pytest.raises(AdminError, match="is finished"):
            operator.text(*command)


def test_a_killed_server_process_shows_in_status_with_the_remedy(operator: Operator, scenario: str) -> None:
    config = started(operator, scenario)
    train(operator.home, config, stages=1, end=False)
    operator.home.flower.runs = dict.fromkeys(operator.home.flower.runs, "finished:failed")
    status = operator.json("status")
    assert status["run"]["state"] == "failed"
    assert "runs resume night" in status["warnings"][0]


def test_nobody_is_asked_without_a_terminal(operator: Operator, scenario: str) -> None:
    started(operator, scenario)
    for command in (["runs", "stop"], ["tokens", "revoke", "x"], ["clients", "revoke", "x"], ["restore", "x"]):
        with pytest.raises(EdgeDuetError, match="give --yes"):
            operator.text(*command)


def test_rounds_show_who_failed_and_why_without_terminal_escapes(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario))
    rounds = operator.json("rounds", "--limit", "3")["rounds"]
    assert [(r["stage"], r["round"]) for r in rounds] == [(0, 1), (1, 0), (1, 1)]
    assert rounds[0]["failures"] == [{"client": 1, "reason": "client-error", "text": "OSError: \\x1b[31mno camera"}]
    shown = operator.text("rounds")
    assert "no camera" in shown
    assert "\x1b[31mno" not in shown


def test_settings_change_from_the_next_round_and_can_be_taken_back(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario), stages=1, end=False)
    operator.text("config", "set", "train.lr=0.5")
    entry = operator.json("config", "get", "train.lr")["settings"][0]
    assert (entry["value"], entry["scenario_value"], entry["pending"]) == (0.5, 0.001, True)
    assert operator.json("runs", "show")["overrides"] == {"train.lr": 0.5}
    operator.text("config", "set", "train.lr=")
    assert operator.json("config", "get", "train.lr")["settings"][0]["value"] == 0.001
    for setting, words in (
        ("federation.clients=9", "is fixed when a run starts"),
        ("train.lr=-1", "greater than 0"),
        ("train.lrr=1", "no setting"),
        ("train.lr", "expected KEY=VALUE"),
    ):
        with pytest.raises(EdgeDuetError, match=words):
            operator.text("config", "set", setting)
    assert "next round" in operator.text("config", "get")


def test_clients_are_left_out_by_number_or_name_but_never_the_last(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario), stages=1, end=False)
    with operator.home.registry.writing() as session:
        run = find_run(session, "night")
        session.get_one(ClientSighting, (run.id, 2)).name = "edge-2"
    assert operator.json("clients", "exclude", "0")["excluded"] == [0]
    assert operator.json("clients", "exclude", "edge-2")["excluded"] == [0, 2]
    with pytest.raises(AdminError, match="client 1 is the last one"):
        operator.text("clients", "exclude", "1")
    with pytest.raises(AdminError, match="clients 0 to 2, not 3"):
        operator.text("clients", "exclude", "3")
    with pytest.raises(AdminError, match="was not seen"):
        operator.text("clients", "exclude", "edge-9")
    assert operator.json("clients", "include", "edge-2")["excluded"] == [0]


# -- numbers --------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_definitions(operator: Operator, scenario: str, tmp_path: Path) -> None:
    train(operator.home, started(operator, scenario))
    found = operator.json("metrics")
    matrix = [[entry["value"] for entry in row["tasks"]] for row in found["global_matrix"]]
    assert matrix == [[0.8, 0.3], [0.6, 0.9]]
    assert found["numbers"]["avg"] == pytest.approx((0.8 + 0.75) / 2)
    assert found["numbers"]["last"] == pytest.approx(0.75)
    assert found["numbers"]["forgetting"] == pytest.approx(0.2)
    assert found["numbers"]["bwt"] == pytest.approx(-0.2)
    assert [c["personal"] for c in found["clients"]] == pytest.approx([0.7, 0.8, 0.9])
    assert [c["general"] for c in found["clients"]] == pytest.approx([0.5] * 3)
    assert found["numbers"]["personal_worst"] == pytest.approx(0.7)
    shown = operator.text("metrics")
    for word in ("photo", "sketch", "80.0", "60.0", "Forgetting"):
        assert word in shown
    png = tmp_path / "matrix.png"
    operator.text("metrics", "--png", str(png))
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > 300 < height * 2


def test_metrics_of_a_run_that_has_not_got_that_far(operator: Operator, scenario: str, tmp_path: Path) -> None:
    config = started(operator, scenario)
    assert "no stage is evaluated yet" in operator.text("metrics")
    with pytest.raises(EdgeDuetError, match="nothing to draw"):
        operator.text("metrics", "--png", str(tmp_path / "x.png"))
    train(operator.home, config, stages=1, end=False)
    matrix = operator.json("metrics")["global_matrix"]
    assert [[entry["value"] for entry in row["tasks"]] for row in matrix] == [[0.8, 0.3]]


def test_prompts_are_counted(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario))
    found = operator.json("prompts")
    assert (found["pool"], found["uses"]) == (6, {"0": 4, "1": 8, "5": 4})
    assert [(c["client"], c["prompts"], c["stage"], c["round"]) for c in found["clients"]] == [
        (0, [0, 1], 1, 1),
        (1, [1, 5], 1, 1),
    ]
    assert "3 of 6 prompts" in operator.text("prompts")


# -- models ---------------------------------------------------------------------------------------------


def test_models_are_listed_exported_promoted_and_rolled_back(operator: Operator, scenario: str, tmp_path: Path) -> None:
    train(operator.home, started(operator, scenario))
    assert [(m["stage"], m["promoted"]) for m in operator.json("models", "list")["models"]] == [(0, False), (1, False)]
    operator.text("models", "export", "night", "--stage", "1", "--out", str(tmp_path / "m.safetensors"))
    assert load((tmp_path / "m.safetensors").read_bytes())["w"].tolist() == [0, 0, 0]
    current = operator.home.home / "models" / "current.safetensors"
    operator.text("models", "promote", "night", "--stage", "1")
    operator.text("models", "promote")
    assert load(current.read_bytes())["w"].tolist() == [1, 1, 1]
    with pytest.raises(AdminError, match="promoted already"):
        operator.text("models", "promote")
    assert "in use now: run night, stage 1" in operator.text("models", "rollback", "--yes")
    assert load(current.read_bytes())["w"].tolist() == [0, 0, 0]
    assert json.loads(current.with_suffix(".json").read_text())["stage"] == 0
    assert "no model is promoted now" in operator.text("models", "rollback", "--yes")
    assert not current.exists()
    with pytest.raises(AdminError, match="nothing to roll back"):
        operator.text("models", "rollback", "--yes")


def test_a_damaged_or_missing_model_is_neither_sent_nor_promoted(operator: Operator, scenario: str) -> None:
    train(operator.home, started(operator, scenario))
    path = operator.home.home / "runs" / "night" / "models" / "stage-002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    for command in (["models", "export"], ["models", "promote"]):
        with pytest.raises(AdminError, match="is damaged"):
            operator.text(*command)
    path.unlink()
    with pytest.raises(AdminError, match="cannot be read"):
        operator.text("models", "promote")
    with pytest.raises(AdminError, match="no model of stage 8"):
        operator.text("models", "promote", "--stage", "9")


# -- devices --------------------------------------------------------------------------------------------


def request_of(home: AdminHome, name: str = "edge-1", server: str = "fl.example.org:9443", **past: float) -> str:
    key = ec.generate_private_key(ec.SECP384R1())
    return make_request(key, name=name, server=server, now=home.clock.now() - timedelta(**past))


def approve(operator: Operator, line: str, code: str | None = None) -> Any:
    return operator.json("clients", "approve", line, "--code", code or request_code(line))


def test_a_device_is_let_in_once_its_code_is_right(operator: Operator) -> None:
    line = request_of(operator.home)
    with pytest.raises(AdminError, match="code does not belong to this request of 'edge-1'"):
        approve(operator, line, "AAAA-BBBB-CCCC")
    assert not operator.home.flower.keys
    device = approve(operator, line)
    assert (device["name"], device["status"]) == ("edge-1", "approved")
    operator.home.flower.nodes[device["node_id"]] = "online"
    shown = operator.json("clients", "list")["clients"][0]
    assert shown["node_id"] == device["node_id"]
    assert operator.json("clients", "show", "edge-1")["fingerprint"] == device["fingerprint"]


def test_a_request_is_good_once(operator: Operator) -> None:
    line = request_of(operator.home)
    approve(operator, line)
    with pytest.raises(AdminError, match="was used before"):
        approve(operator, line)
    operator.text("clients", "revoke", "edge-1", "--yes")
    with pytest.raises(AdminError, match="was used before"):
        approve(operator, line)
    assert len([asked for asked in operator.home.flower.asked if asked[0] == "register"]) == 1


def test_a_request_that_flower_could_not_take_may_be_tried_again(operator: Operator) -> None:
    line = request_of(operator.home)
    operator.home.flower.problem = "SuperLink is down"
    with pytest.raises(AdminError, match="SuperLink is down"):
        approve(operator, line)
    operator.home.flower.problem = ""
    assert approve(operator, line)["status"] == "approved"


def test_requests_that_are_old_or_meant_for_another_server_are_refused(operator: Operator) -> None:
    with pytest.raises(EdgeDuetError, match="good for 24 hours"):
        approve(operator, request_of(operator.home, days=2))
    with pytest.raises(AdminError, match=r"meant for the server evil\.example"):
        approve(operator, request_of(operator.home, server="evil.example:9443"))
    assert not operator.home.flower.keys


def test_revoking_says_that_it_is_permanent_and_frees_the_name(operator: Operator) -> None:
    result = CliRunner().invoke(app, ["clients", "revoke", "--help"], env=operator.env)
    assert "permanent" in result.output
    key = ec.generate_private_key(ec.SECP384R1())
    now = operator.home.clock.now()
    first = make_request(key, name="edge-1", server="localhost:1", now=now)
    node = approve(operator, first)["node_id"]
    with pytest.raises(AdminError, match="there is a device 'edge-1' already"):
        approve(operator, request_of(operator.home))
    assert operator.json("clients", "revoke", "edge-1", "--yes")["status"] == "revoked"
    assert operator.home.flower.nodes[node] == "unregistered"
    with pytest.raises(AdminError, match="is revoked already"):
        operator.text("clients", "revoke", "edge-1", "--yes")
    same_key = make_request(key, name="edge-2", server="localhost:1", now=now)
    with pytest.raises(AdminError, match="a revoked key cannot come back"):
        approve(operator, same_key)
    assert approve(operator, request_of(operator.home))["status"] == "approved"
    assert operator.json("clients", "show", "edge-1")["status"] == "approved"


def test_a_device_is_shown_with_its_part_in_the_run(operator: Operator, scenario: str) -> None:
    nodes = []
    for name in ("edge-0", "edge-1"):
        nodes.append(approve(operator, request_of(operator.home, name))["node_id"])
    assert nodes == [str(2**63 + 2), str(2**63 + 3)]
    operator.home.flower.nodes.update(dict.fromkeys(nodes, "online"))
    train(operator.home, started(operator, scenario))
    clients = {c["name"]: c for c in operator.json("clients", "list")["clients"]}
    assert (clients["edge-1"]["client"], clients["edge-1"]["rounds_used"], clients["edge-1"]["rounds_asked"]) == (
        1,
        3,
        4,
    )
    assert clients["edge-1"]["last_failure"].endswith("no camera")
    assert clients[""]["status"] == ""  # client 2 spoke, but its node is not enrolled here
    status = operator.json("status")
    assert status["devices"] == 2
    assert "edge-1" in operator.text("clients", "list")


def test_without_flower_the_list_says_so(operator: Operator) -> None:
    operator.home.flower.problem = "connection refused"
    assert "who is online is not known: connection refused" in operator.text("clients", "list")
    assert any("SuperLink does not answer" in line for line in operator.json("status")["warnings"])


# -- status, doctor, backups ----------------------------------------------------------------------------


def test_status_says_what_happened_in_the_last_round(operator: Operator, scenario: str) -> None:
    config = started(operator, scenario)
    train(operator.home, config, stages=1, end=False)
    status = operator.json("status")
    assert (status["run"]["stages_done"], status["run"]["rounds_done"]) == (1, 0)
    assert any("client 1: client-error: OSError" in line for line in status["warnings"])
    shown = operator.text("status")
    assert "night" in shown
    assert "stage 2/2, round 0/2" in shown


def test_doctor_names_what_is_wrong_and_its_remedy(operator: Operator) -> None:
    operator.home.flower.problem = "connection refused"
    result = CliRunner().invoke(app, ["doctor", "--json"], env=operator.env)
    assert result.exit_code == 1
    checks = {check["what"]: check for check in json.loads(result.output)["checks"]}
    assert not checks["SuperLink"]["ok"]
    assert not checks["tokens"]["ok"]  # the test's own token ends tomorrow
    assert "tokens create" in checks["tokens"]["text"]
    assert checks["certificate"]["ok"]
    assert checks["clocks"]["ok"]


def test_a_backup_brings_back_runs_but_no_revoked_access(operator: Operator, scenario: str, tmp_path: Path) -> None:
    train(operator.home, started(operator, scenario))
    approve(operator, request_of(operator.home))
    gone = operator.json("tokens", "create", "gone")
    before = operator.json("metrics")
    out = tmp_path / "copy.jsonl.gz"
    name = operator.json("backup", "--out", str(out))["name"]
    assert out.read_bytes() == (operator.home.home / "backups" / name).read_bytes()
    assert stat.S_IMODE((operator.home.home / "backups" / name).stat().st_mode) == 0o600
    operator.text("tokens", "revoke", "gone", "--yes")
    operator.text("clients", "revoke", "edge-1", "--yes")
    started(operator, scenario, "second")
    with pytest.raises(AdminError, match="stop it before"):
        operator.text("restore", name, "--yes")
    operator.text("runs", "stop", "second", "--now", "--yes")
    saved = operator.json("restore", name, "--yes")["saved_as"]
    assert [run["name"] for run in operator.json("runs", "list")["runs"]] == ["night"]
    assert operator.json("metrics") == before
    assert operator.json("clients", "show", "edge-1")["status"] == "revoked"
    with pytest.raises(grpc.RpcError, match="revoked"):
        operator.home.call("Status", pb.StatusRequest(), gone["secret"])
    # The audit log kept what was done since.
    assert "RevokeClient" in [entry["action"] for entry in operator.json("audit")["entries"]]
    operator.text("restore", saved, "--yes")
    assert [run["name"] for run in operator.json("runs", "list")["runs"]] == ["second", "night"]


def test_a_backup_moves_a_registry_from_one_database_to_the_other(
    home: AdminHome, operator: Operator, scenario: str, tmp_path: Path, registry_url: str
) -> None:
    train(home, started(operator, scenario))
    approve(operator, request_of(home))
    path = write_backup(home.registry, tmp_path, home.clock.now())
    other = Registry.open(registry_url.replace("registry.db", "other.db"))
    assert restore_backup(other, path) > 20
    with other.writing() as session, home.registry.reading() as original:
        copied = find_run(session, "night")
        assert copied.created_at == find_run(original, "night").created_at
        assert session.scalars(select(Device.name)).all() == ["edge-1"]
        # New rows get new numbers.
        session.add(
            Run(**{c.name: getattr(copied, c.name) for c in Run.__table__.columns if c.name != "id"} | {"name": "new"})
        )
        session.flush()
        assert config_of(find_run(session, "new"), resume=True).resume
    other.close()


@pytest.mark.parametrize("harm", ["cut", "text", "revision", "row"])
def test_a_damaged_backup_changes_nothing(operator: Operator, scenario: str, harm: str) -> None:
    import gzip

    train(operator.home, started(operator, scenario))
    path = operator.home.home / "backups" / operator.json("backup")["name"]
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    if harm == "cut":
        lines = lines[:-1]
    elif harm == "row":
        del lines[3]
    elif harm == "revision":
        lines[0] = lines[0].replace("0001", "0099")
    path.write_bytes(b"no gzip" if harm == "text" else gzip.compress("\n".join(lines).encode()))
    with pytest.raises(RegistryError):
        restore_backup(operator.home.registry, path)
    assert [run["name"] for run in operator.json("runs", "list")["runs"]] == ["night"]
    assert len(operator.json("rounds")["rounds"]) == 4


# -- the command itself ---------------------------------------------------------------------------------


def test_every_command_explains_itself_with_an_example() -> None:
    import click
    import typer

    def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                yield from commands(command, (*path, name))
            else:
                yield (*path, name), command

    root = typer.main.get_command(app)
    found = dict(commands(root))  # type: ignore[arg-type]
    assert len(found) > 30
    for path, command in found.items():
        if path != ("logout",):
            assert f"edgeduet-admin {' '.join(path)}" in (command.help or ""), path


def test_completion_knows_runs_and_devices(operator: Operator, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeduet_server.admin_cli.options import complete_device, complete_run, complete_setting

    started(operator, scenario)
    approve(operator, request_of(operator.home))
    monkeypatch.setenv("EDGEDUET_ADMIN_CONFIG", operator.env["EDGEDUET_ADMIN_CONFIG"])
    assert complete_run("ni") == ["night"]
    assert complete_device("edge") == ["edge-1"]
    assert "train.lr=" in complete_setting("train")
    monkeypatch.setenv("EDGEDUET_ADMIN_CONFIG", "/nowhere/admin.json")
    assert complete_run("") == []


@pytest.mark.parametrize("as_json", [True, False])
def test_watching_asks_again_until_ctrl_c(operator: Operator, monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("edgeduet_server.admin_cli.screen.time.sleep", sleep)
    shown = operator.text("status", "--watch", "7", *(["--json"] if as_json else []))
    assert pauses == [7, 7, 7]
    if as_json:
        assert [json.loads(line)["role"] for line in shown.splitlines()] == ["admin"] * 3
    else:
        assert "nothing is wrong" in shown


def test_help_and_completion_load_nothing_heavy(repo_root: Path) -> None:
    code = "import edgeduet_server.admin_cli.main, sys; print(*{name.split('.')[0] for name in sys.modules})"
    path = ":".join(str(repo_root / folder) for folder in ("shared", "server"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert not set(done.stdout.split()) & {"torch", "flwr", "grpc", "sqlalchemy", "matplotlib", "numpy", "google"}


def test_times_in_json_are_utc(operator: Operator) -> None:
    assert datetime.fromisoformat(operator.json("status")["time"]).tzinfo == UTC
