"""The deployed system as real processes on loopback: server with its proxy, three devices, TLS and node keys.

Shown: two stages of Fed-Duet give the very weights of the simulation; a killed ClientApp and a killed
SuperNode cost a reply, not the run; the devices answer with their personal models afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from edgeduet_client.classifier.classifier_folder import ClassifierFolder
from edgeduet_client.device.supervisor import client_apps
from edgeduet_server.app import serve
from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_server.deployment.server_config import ServerConfig, load_server_config
from edgeduet_server.deployment.superlink_client import SuperLinkClient
from edgeduet_server.recorder import read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.enrolment import read_request
from edgeduet_shared.errors import EdgeDuetError
from edgeduet_shared.run_config import RunConfig
from edgeduet_shared.supervision.child import end_family
from edgeduet_shared.supervision.running_state import RunningState
from edgeduet_sim.engines.in_process import InProcessGrid, edgeduet_clients

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
DEVICES = 3
# A quiet machine needs a tenth of it.
PATIENCE = 900.0


def scenario(tasks: int) -> Scenario:
    """``tasks`` tasks of two classes in one domain of the generated world."""
    classes = ["circle", "square", "star", "heart"][: 2 * tasks]
    return Scenario.model_validate(
        {
            "name": "deployed",
            "data": {"max_per_class": 12, "classes": classes, "domains": ["photo"]},
            "stream": {"kind": "class-incremental", "classes_per_task": 2},
            "train": {"batch_size": 4},
            "federation": {
                "clients": DEVICES,
                "rounds": 2,
                "quorum": 0.3,
                "round_timeout": PATIENCE,
                "node_wait": PATIENCE,
            },
        }
    )


@dataclass
class System:
    """A server and its devices."""

    folder: Path
    port: int
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def config(self) -> ServerConfig:
        return load_server_config(self.folder / "server")

    @property
    def flower(self) -> SuperLinkClient:
        return SuperLinkClient(self.config)

    def device(self, index: int) -> Path:
        return self.folder / f"device-{index}"

    def device_state(self, index: int) -> dict[str, Any]:
        return RunningState(self.device(index), "device").read() or {}

    def start(self, *command: str) -> None:
        log = (self.folder / f"{len(self.started)}.log").open("wb")
        self.started.append(
            subprocess.Popen(
                python(*command), env=environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        )

    def start_device(self, index: int) -> None:
        self.start("client", "start", str(self.device(index)))

    def run(self, name: str, resolved: Scenario) -> tuple[RunConfig, str]:
        """Start a run; return its configuration and Flower's id of it."""
        config = RunConfig(resolved, "fed-duet", seed=3, run_dir=self.config.folder("runs") / name, run_name=name)
        return config, self.flower.start_run(config)

    def wait_for_end(self, run_id: str) -> str:
        """Return how a run ended."""

        def status() -> str:
            return next(run.status for run in self.flower.list_runs() if run.run_id == run_id)

        wait(lambda: status().startswith("finished"), "the run to end", every=5.0)
        return status()

    def logs(self) -> str:
        """The ends of all logs, for a test that failed."""
        ends = []
        for file in sorted(self.folder.rglob("*.log")):
            ends += [f"--- {file.relative_to(self.folder)}", *file.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(ends)


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("shared", "server", "client", "simulations"))
    return {**os.environ, "PYTHONPATH": path}


def python(side: str, *arguments: str) -> list[str]:
    """The command line of ``edgeduet-server`` or ``edgeduet-client``, installed or not."""
    code = f"from edgeduet_{side}.cli import main; main()"
    return [sys.executable, "-c", code, *arguments]


def command(side: str, *arguments: str) -> str:
    done = subprocess.run(python(side, *arguments), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait(until: Callable[[], object], what: str, *, every: float = 0.5) -> None:
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(every)


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that are free."""
    for first in range(21_000 + os.getpid() % 500 * 20, 32_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as door:
                    door.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise AssertionError("no free ports")


def set_up(system: System) -> None:
    """init, start, enroll, let in, start the devices."""
    folder = system.folder
    command("server", "init", str(folder / "server"), "--name", "localhost", "--port", str(system.port))
    system.start("server", "start", str(folder / "server"))
    keys = []
    for index in range(DEVICES):
        home = system.device(index)
        server = ["--server", f"localhost:{system.port}", "--ca", str(folder / "server/pki/ca.crt")]
        share = ["--name", f"edge-{index}", "--partition", str(index), "--partitions", str(DEVICES), "--json"]
        keys.append(read_request(json.loads(command("client", "enroll", str(home), *server, *share))["request"]))
        text = (home / "device.toml").read_text()
        (home / "device.toml").write_text(
            text.replace("classify_port = 8227", f"classify_port = {system.port + 4 + index}")
        )

    def answers() -> bool:
        try:
            system.flower.list_nodes()
        except EdgeDuetError:
            return False
        return True

    wait(answers, "the server", every=2.0)
    for index, request in enumerate(keys):
        system.flower.register_node(request.public_key, request.name)
        system.start_device(index)
    for index in range(DEVICES):
        wait(lambda index=index: system.device_state(index).get("training") == "connected", f"device {index}")  # type: ignore[misc]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("deployed")
    made: list[System] = []
    try:
        made.append(System(folder, free_ports(4 + DEVICES)))
        set_up(made[0])
        yield made[0]
    finally:
        for started in made[0].started if made else []:
            end_family(started.pid)
            started.wait()


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: System) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


def final_state(run: Path) -> bytes:
    """The arrays of the last checkpoint: shared weights, prompt pool and gate."""
    return sorted(run.glob("checkpoints/state-*.safetensors"))[-1].read_bytes()


def accuracies(run: Path) -> list[Any]:
    events = [event for event in read_events(run / "metrics.jsonl") if event["event"] == "evaluate"]
    return [[(client["client"], client["personal"], client["shared"]) for client in e["clients"]] for e in events]


def test_the_deployed_system_computes_what_the_simulation_computes(system: System, tmp_path: Path) -> None:
    config, run_id = system.run("two-stages", scenario(tasks=2))
    assert system.wait_for_end(run_id) == "finished:completed"

    simulated = RunConfig(config.scenario, config.method, seed=config.seed, run_dir=tmp_path, run_name="two-stages")
    with InProcessGrid(edgeduet_clients(simulated, block_size=1)) as grid:
        serve(grid, simulated)
    assert accuracies(config.run_dir) == accuracies(tmp_path)
    assert len(accuracies(tmp_path)) == 2
    assert final_state(config.run_dir) == final_state(tmp_path)

    for index in range(DEVICES):
        found = ClassifierFolder(system.device(index) / "classifier").current()
        assert found is not None and (found[1].run, found[1].stage) == ("two-stages", 1)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "dot.png")
    shown = command("client", "classify", str(system.device(0)), str(tmp_path / "dot.png"), "--json")
    assert len(json.loads(shown)["answers"]) == 4


@pytest.mark.long
def test_a_killed_client_app_and_a_killed_supernode_cost_a_reply_and_not_the_run(system: System) -> None:
    config, run_id = system.run("killed", scenario(tasks=1))
    metrics = config.run_dir / "metrics.jsonl"
    wait(lambda: metrics.exists() and "stage-start" in metrics.read_text(), "the first round")
    nodes = [system.device_state(index)["programs"]["supernode"]["pid"] for index in range(2)]

    wait(lambda: client_apps(nodes[0]), "a ClientApp of device 0 at work", every=0.05)
    for app, _ in client_apps(nodes[0]):
        app.kill()
    os.kill(nodes[1], signal.SIGKILL)

    assert system.wait_for_end(run_id) == "finished:completed"
    rounds = [event for event in read_events(metrics) if event["event"] == "round"]
    replied = [{client["client"] for client in event["clients"]} for event in rounds]
    assert len(rounds) == 2 and replied[0] < {0, 1, 2} and 2 in replied[0]
    # The same device is back by itself, under the same identity, with its personal state.
    wait(lambda: system.device_state(1).get("training") == "connected", "device 1 to be back")
    state = system.device_state(1)["programs"]["supernode"]
    assert state["restarts"] >= 1 and state["pid"] != nodes[1]
    assert list(system.device(1).glob("personal/two-stages/client-1/*.safetensors"))
    assert {node.status for node in system.flower.list_nodes()} == {"online"}


def test_a_device_that_was_killed_whole_is_started_again_and_ends_what_it_left(system: System) -> None:
    before = system.device_state(2)
    left = psutil.Process(before["programs"]["supernode"]["pid"])
    os.kill(before["pid"], signal.SIGKILL)
    assert left.is_running()

    wait(lambda: not system.device_state(2), "the lock of the killed one")
    system.start_device(2)

    wait(lambda: system.device_state(2).get("training") == "connected", "device 2 to be back")
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert command("client", "status", str(system.device(2))).startswith("edge-2: training connected")


def test_a_device_that_the_server_does_not_accept_says_why_and_how_to_mend_it(system: System, tmp_path: Path) -> None:
    stranger = Pki(tmp_path / "pki")
    stranger.create(["localhost"])
    wrong = {"unknown": system.folder / "server/pki/ca.crt", "misled": stranger.ca_certificate}
    for name, ca in wrong.items():
        home, server = str(tmp_path / name), f"localhost:{system.port}"
        command("client", "enroll", home, "--server", server, "--ca", str(ca), "--name", name)
        text = (tmp_path / name / "device.toml").read_text()
        (tmp_path / name / "device.toml").write_text(text.replace("classify_port = 8227", "classify_port = 0"))
        system.start("client", "start", home)
    # Whichever device it is: Flower's list does not name them.
    system.flower.unregister_node(system.flower.list_nodes()[0].node_id)

    def cause(home: Path) -> object:
        return (RunningState(home, "device").read() or {}).get("cause")

    wait(lambda: cause(tmp_path / "unknown") == "not-registered", "the reason of the unknown device")
    wait(lambda: cause(tmp_path / "misled") == "wrong-ca", "the reason of the misled device")
    devices = [system.device(index) for index in range(DEVICES)]
    wait(lambda: "not-registered" in map(cause, devices), "the reason of the revoked device")
    for name in wrong:
        assert "approve" in status(tmp_path / name) or "pki/ca.crt" in status(tmp_path / name)
        RunningState(tmp_path / name, "device").stop()


def status(home: Path) -> str:
    done = subprocess.run(
        python("client", "status", str(home)), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    return done.stdout
