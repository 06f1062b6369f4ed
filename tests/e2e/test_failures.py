"""A run that is killed with SIGKILL in the middle, for real, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edgeduet_server.recorder import read_events

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
import linear_federation as linear
from edgeduet_sim.engines.in_process import Clients, InProcessGrid, run_in_process
config = json.loads(sys.argv[1])
with InProcessGrid(Clients(linear.client_app, 6, config), workers=config.pop("workers", 0)) as grid:
    run_in_process(linear.server_app, grid, config)
"""


def start(folder: Path, **config: object) -> subprocess.Popen[bytes]:
    settings = {
        "run-dir": str(folder),
        "seed": 5,
        "federation": json.dumps({"clients": 6, "rounds": 4, "participation": 0.7}),
        **config,
    }
    paths = [ROOT / "shared", ROOT / "server", ROOT / "client", ROOT / "simulations", ROOT / "tests"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, json.dumps(settings)], env=environment)


def comparable(folder: Path) -> tuple[list[str], bytes]:
    """Metrics without wall-clock figures, and the final arrays."""
    events = list(read_events(folder / "metrics.jsonl"))
    for event in events:
        event.pop("timing", None)
    final = max((folder / "checkpoints").glob("state-*.safetensors"))
    return [json.dumps(event) for event in events], final.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], bytes]:
    folder = tmp_path_factory.mktemp("whole")
    assert start(folder).wait(timeout=60) == 0
    return comparable(folder)


def test_kill_inside_a_client_then_resume_equals_an_uninterrupted_run(
    tmp_path: Path, whole: tuple[list[str], bytes]
) -> None:
    killed = start(tmp_path, trouble=json.dumps({str(client): "kill@1.2" for client in range(6)}))
    assert killed.wait(timeout=60) == -signal.SIGKILL
    assert start(tmp_path, resume=True).wait(timeout=60) == 0
    assert comparable(tmp_path) == whole


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.35])
def test_kill_at_any_time_then_resume_equals_an_uninterrupted_run(
    tmp_path: Path, whole: tuple[list[str], bytes], delay: float
) -> None:
    running = start(tmp_path, trouble=json.dumps({"2": "slow"}))
    deadline = time.monotonic() + 60
    while not list((tmp_path / "checkpoints").glob("checkpoint-*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(delay)
    running.send_signal(signal.SIGKILL)
    assert running.wait(timeout=60) == -signal.SIGKILL
    assert start(tmp_path, resume=True).wait(timeout=60) == 0
    assert comparable(tmp_path) == whole
