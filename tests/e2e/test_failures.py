"""Clients and runs that fail, with edgeduet's own server, clients, data and backbone.

Shown: kill -9 and resume, a client that raises, returns NaN, never answers, speaks another version, has
no images, has fewer images than a batch; one client; more clients than images.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from edgeduet_client import app as client_module
from edgeduet_server.app import serve
from edgeduet_server.recorder import read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import FederationError
from edgeduet_shared.experiment import experiment_for
from edgeduet_shared.run_config import RunConfig
from edgeduet_sim.engines.in_process import Clients, InProcessGrid, edgeduet_clients

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
Events = list[dict[str, Any]]


def scenario(clients: int = 4, partition: dict[str, Any] | None = None, **federation: Any) -> Scenario:
    """Two tasks of the generated world: two classes in two domains."""
    return Scenario.model_validate(
        {
            "name": "tiny",
            "data": {"max_per_class": 16, "classes": ["circle", "square"], "domains": ["photo", "sketch"]},
            "partition": partition or {},
            "train": {"batch_size": 4},
            "federation": {"clients": clients, "rounds": 2, **federation},
        }
    )


def run(folder: Path, resolved: Scenario, method: str = "fed-duet", clients: Clients | None = None) -> Events:
    """Run to the end; return the events."""
    config = RunConfig(resolved, method, seed=1, run_dir=folder, run_name=folder.name)
    with InProcessGrid(clients or edgeduet_clients(config)) as grid:
        serve(grid, config)
    return list(read_events(folder / "metrics.jsonl"))


def rounds(events: Events) -> Events:
    return [event for event in events if event["event"] == "round"]


def troubled(folder: Path, resolved: Scenario, kind: str, troubled_client: int = 2) -> Clients:
    """Return the real clients, one of which misbehaves whenever it is asked to train."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] != troubled_client:
            return client_module.train(message, context)
        if kind == "raises":
            raise ValueError("the camera is gone")
        if kind == "silent":
            return None  # type: ignore[return-value]
        reply = client_module.train(message, context)
        if kind == "nan":
            update = reply.content.array_records["arrays.update"]
            name = next(iter(update))
            values = update[name].numpy().copy()
            values.flat[0] = np.nan
            reply.content["arrays.update"] = ArrayRecord({**update, name: Array(values)})
        if kind == "version":
            reply.content["meta"] = ConfigRecord({**reply.content.config_records["meta"], "schema": 99})
        return reply

    app.evaluate()(client_module.evaluate)
    app.query("hello")(client_module.hello)
    config = RunConfig(resolved, "fed-duet", seed=1, run_dir=folder, run_name=folder.name)
    return Clients(app, resolved.federation.clients, edgeduet_clients(config).run_config)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("raises", "client-error"), ("nan", "non-finite"), ("silent", "no-answer"), ("version", "other-version")],
)
def test_a_client_that_fails_is_left_out_and_the_run_ends_well(tmp_path: Path, kind: str, reason: str) -> None:
    resolved = scenario()
    events = run(tmp_path, resolved, clients=troubled(tmp_path, resolved, kind))
    assert events[-1]["event"] == "run-end"
    assert events[-1]["rejected"].keys() == {reason}
    assert events[-1]["skipped_rounds"] == 0
    assert all([c["client"] for c in event["clients"]] == [0, 1, 3] for event in rounds(events))
    counts = [event["common"]["correct"] for event in events if event["event"] == "evaluate"]
    assert len(counts) == 2
    assert all(0 <= correct <= total for count in counts for correct, total in zip(count, _totals(events), strict=True))


def _totals(events: Events) -> list[int]:
    return next(event["common"]["totals"] for event in events if event["event"] == "evaluate")


def test_a_client_that_raises_is_named_with_its_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolved = scenario()
    run(tmp_path, resolved, clients=troubled(tmp_path, resolved, "raises"))
    text = next(record.getMessage() for record in caplog.records if "client 2" in record.getMessage())
    assert "stage 1, round 1" in text
    assert "ValueError: the camera is gone" in text


def test_without_quorum_the_run_stops_and_the_reason_is_on_disk(tmp_path: Path) -> None:
    resolved = scenario(clients=1, max_bad_rounds=2)
    with pytest.raises(FederationError, match="the camera is gone"):
        run(tmp_path, resolved, clients=troubled(tmp_path, resolved, "raises", troubled_client=0))
    assert "the camera is gone" in (tmp_path / "error.txt").read_text()


def test_a_client_without_images_trains_nothing_and_is_evaluated(tmp_path: Path) -> None:
    # 11 training images per class and domain go to clients by class: most of the 9 clients get none of some task.
    resolved = scenario(clients=9, partition={"kind": "dirichlet", "beta": 0.05, "min_size": 0}, quorum=0.1)
    split = experiment_for(RunConfig(resolved, "fed-duet").scenario_json, 1).split
    empty = [client for client in range(9) if len(split.train[0][client]) == 0]
    assert empty, "this split has no client without images; choose another seed"
    events = run(tmp_path, resolved)
    assert rounds(events)[0]["rejected"] == {"zero-examples": len(empty)}
    assert not {c["client"] for c in rounds(events)[0]["clients"]} & set(empty)
    evaluated = [event for event in events if event["event"] == "evaluate"]
    assert [client["client"] for client in evaluated[0]["clients"]] == list(range(9))


def test_fewer_images_than_a_batch_make_one_short_step(tmp_path: Path) -> None:
    resolved = scenario().model_copy(update={"train": scenario().train.model_copy(update={"batch_size": 64})})
    events = run(tmp_path, resolved)
    clients = [client for event in rounds(events) for client in event["clients"]]
    assert all(0 < client["examples"] < 64 and client["steps"] == 1 for client in clients)
    assert events[-1]["rejected"] == {}


@pytest.mark.parametrize("method", ["fed-duet", "fedavg-adapter", "local"])
def test_one_client_is_a_federation(tmp_path: Path, method: str) -> None:
    events = run(tmp_path, scenario(clients=1), method)
    assert [event["asked"] for event in rounds(events)] == [[0]] * 4
    assert events[-1]["skipped_rounds"] == 0


def test_more_clients_than_images_leave_some_without(tmp_path: Path) -> None:
    resolved = scenario(clients=40, partition={"kind": "iid", "min_size": 0}, quorum=0.3)
    events = run(tmp_path, resolved, "fedavg-adapter")
    first = rounds(events)[0]
    assert len(first["clients"]) + first["rejected"]["zero-examples"] == 40
    assert sum(client["examples"] for client in first["clients"]) < 40
    assert events[-1]["skipped_rounds"] == 0


# -- kill -9 and resume ------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path
from edgeduet_server.app import serve
from edgeduet_shared.config import Scenario
from edgeduet_shared.run_config import RunConfig
from edgeduet_sim.engines.in_process import InProcessGrid, edgeduet_clients
scenario = Scenario.model_validate_json(sys.argv[2])
folder, resume = Path(sys.argv[1]), "resume" in sys.argv
config = RunConfig(scenario, "fed-duet", seed=1, run_dir=folder, run_name="kill", resume=resume)
with InProcessGrid(edgeduet_clients(config)) as grid:
    serve(grid, config)
"""


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    paths = [ROOT / "shared", ROOT / "server", ROOT / "client", ROOT / "simulations"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    resolved = scenario(participation=0.7).model_dump_json()
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), resolved, *words], env=environment)


def comparable(folder: Path) -> tuple[list[str], bytes, list[bytes]]:
    """Metrics without wall-clock figures, the server's final arrays, every client's final personal state."""
    events = list(read_events(folder / "metrics.jsonl"))
    for event in events:
        event.pop("timing", None)
    checkpoint = max((folder / "checkpoints").glob("checkpoint-*.json"))
    body = json.loads(json.loads(checkpoint.read_text())["checkpoint"])
    personal = [
        (folder / "checkpoints" / blob["file"]).read_bytes()[blob["offset"] : blob["offset"] + blob["length"]]
        for blob in body["personal"].values()
    ]
    return [json.dumps(e) for e in events], (folder / "checkpoints" / body["state"]["file"]).read_bytes(), personal


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes, list[bytes]]:
    folder = tmp_path_factory.mktemp("whole")
    assert start(folder).wait(timeout=120) == 0
    return comparable(folder)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [1, 4])
def test_kill_9_and_resume_ends_bit_identical(
    tmp_path: Path, whole: tuple[list[str], bytes, list[bytes]], checkpoint: int
) -> None:
    """Killed as soon as a checkpoint is there: the next round is going on."""
    running = start(tmp_path)
    wanted = tmp_path / "checkpoints" / f"checkpoint-{checkpoint:06d}.json"
    deadline = time.monotonic() + 120
    while not wanted.exists():
        assert running.poll() is None, "the run was over before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    assert running.wait(timeout=60) == -signal.SIGKILL
    assert start(tmp_path, "resume").wait(timeout=120) == 0
    assert len(whole[2]) == 4
    assert comparable(tmp_path) == whole


def start_autograd_threads() -> None:
    """Backward passes within backward passes, so deep that torch moves to another thread; forks cannot train then."""

    class Nested(torch.autograd.Function):
        depth = 70

        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            Nested.depth -= 1
            if Nested.depth > 0:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True)).sum().backward()
            return gradient

    Nested.apply(torch.ones(1, requires_grad=True)).sum().backward()


_FORKING = """
import sys
from pathlib import Path
import test_failures
test_failures.run_with_workers(Path(sys.argv[1]), 2)
"""


def run_with_workers(folder: Path, workers: int) -> Any:
    config = RunConfig(scenario(clients=3), "fed-duet", seed=1, run_dir=folder, run_name=f"workers-{workers}")
    with InProcessGrid(edgeduet_clients(config), workers=workers) as grid:
        serve(grid, config)
    return comparable(folder)


def test_worker_processes_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Forked from a fresh process, or spawned where forks could not train.

    Personal states live in the workers then, and are still part of the checkpoint.
    """
    alone = run_with_workers(tmp_path / "alone", 0)
    assert len(alone[2]) == 3
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", ""), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", _FORKING, str(tmp_path / "forked")], env=environment, check=True, timeout=300)

    start_autograd_threads()
    with caplog.at_level(logging.INFO, logger="edgeduet.sim"):
        spawned = run_with_workers(tmp_path / "spawned", 2)

    assert comparable(tmp_path / "forked") == alone
    assert spawned == alone
    assert "workers are spawned" in caplog.text


def test_forks_that_cannot_train_are_warned_of_where_workers_cannot_be_spawned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    start_autograd_threads()
    with InProcessGrid(Clients(ClientApp(), 2, {}), workers=2):
        assert "module:attribute" in caplog.text
