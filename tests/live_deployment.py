"""A whole deployment for tests, as real processes on loopback: server with proxy and admin service, devices, TLS.

Started once per module (``with deployed(folder) as system``); each test then starts a run of a minute or breaks
something. Tests wait for what happens, never for a time; :data:`PATIENCE` only ends a test that hangs.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from edgeduet_client.device.device_config import load_device_config, write_device_config
from edgeduet_client.device.enrolment import Enrolment, enrol
from edgeduet_client.device.supervisor import client_apps
from edgeduet_client.personal_store import AFTER_STAGE, DiskStore
from edgeduet_server.app import serve
from edgeduet_server.deployment.home import create_home
from edgeduet_server.deployment.server_config import ServerConfig, load_server_config
from edgeduet_server.recorder import read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.run_config import RunConfig
from edgeduet_shared.supervision.child import end_family
from edgeduet_shared.supervision.running_state import RunningState
from edgeduet_shared.toml_output import toml_lines
from edgeduet_sim.engines.in_process import InProcessGrid, edgeduet_clients

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 3
# A quiet machine needs a tenth of it.
PATIENCE = 900.0

Json = dict[str, Any]


def tiny_scenario(*, tasks: int = 1, devices: int = DEVICES, **federation: Any) -> Scenario:
    """``tasks`` tasks of two classes in one domain of the generated world, two rounds each."""
    classes = ["circle", "square", "star", "heart"][: 2 * tasks]
    waits = {"round_timeout": PATIENCE, "node_wait": PATIENCE}
    return Scenario.model_validate(
        {
            "name": "deployed",
            "data": {"max_per_class": 12, "classes": classes, "domains": ["photo"]},
            "stream": {"kind": "class-incremental", "classes_per_task": 2},
            "train": {"batch_size": 4},
            "federation": {"clients": devices, "rounds": 2, "quorum": 0.3, **waits, **federation},
        }
    )


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which our commands run from this checkout, installed or not."""
    folders = [str(ROOT / folder) for folder in ("shared", "server", "client", "simulations")]
    more = dict(extra or {})
    before = [more.pop("PYTHONPATH")] if "PYTHONPATH" in more else []
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join([*before, *folders])}


def python(module: str, *arguments: str) -> list[str]:
    """Return the command line of a console script, installed or not."""
    return [sys.executable, "-c", f"from {module} import main; main()", *arguments]


def wait(until: Callable[[], object], what: str, *, every: float = 0.3) -> None:
    """Wait for something to happen.

    Raises:
        AssertionError: it did not.
    """
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(every)


def free_ports(count: int) -> int:
    """Return the first of ``count`` ports in a row that nobody uses now."""
    for first in range(21_000 + os.getpid() % 500 * 20, 32_000, count):
        doors: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                doors.append(socket.create_server(("127.0.0.1", port)))
            return first
        except OSError:
            continue
        finally:
            for door in doors:
                door.close()
    raise AssertionError("no free ports")


def kill_whole(pid: int) -> None:
    """Kill -9 a process and all it started, at one moment as near as it goes: first nobody moves, then all die."""
    try:
        leader = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    leader.suspend()
    family = [leader, *leader.children(recursive=True)]
    for verb in ("suspend", "kill"):
        for member in family:
            with suppress(psutil.NoSuchProcess):
                getattr(member, verb)()
    psutil.wait_procs(family, timeout=60)


class Wire:
    """A line between a device and the server that can be cut: what is on it then waits, as in a real network."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._whole = threading.Event()
        self._whole.set()
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self.carried = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Let nothing through, without a word to either side."""
        self._whole.clear()

    def mend(self) -> None:
        """Let everything through again."""
        self._whole.set()

    def close(self) -> None:
        """Take no more connections."""
        self._whole.set()
        self._door.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._whole.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            near.close()
            return
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                self._whole.wait()
                sink.sendall(data)
                self.carried += len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@dataclass
class LiveDevice:
    """One enrolled device."""

    home: Path
    index: int
    enrolment: Enrolment
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self.enrolment.name

    def start(self, extra: Mapping[str, str] | None = None) -> None:
        """Run ``edgeduet-client start``."""
        self.process = start("edgeduet_client.cli", "start", str(self.home), out=self.home / "out", extra=extra)

    def end(self) -> None:
        """Stop it as an operator would."""
        if self.process is not None:
            end_family(self.process.pid)
            self.process.wait()
            self.process = None

    def kill(self) -> None:
        """Kill -9 everything of it at once: a power cut."""
        assert self.process is not None
        kill_whole(self.process.pid)
        self.process.wait()
        self.process = None

    def state(self) -> Json:
        """Return what its supervisor last noted; empty while none runs."""
        return RunningState(self.home, "device").read() or {}

    def connected(self) -> bool:
        return self.state().get("training") == "connected"

    def cause(self) -> str:
        """Return why it is not connected, in a word."""
        return str(self.state().get("cause", ""))

    def apps(self) -> list[psutil.Process]:
        """Return its ClientApps that are at work."""
        supernode = self.state().get("programs", {}).get("supernode", {}).get("pid")
        return [] if supernode is None else [process for process, _ in client_apps(supernode)]

    def set(self, section: str, **values: Any) -> None:
        """Change its device.toml; sources and privacy hold from the next message on, the rest from the next start."""
        config = load_device_config(self.home)
        changed = getattr(config, section).model_copy(update=values)
        write_device_config(config.model_copy(update={section: changed}), self.home / "device.toml")

    def command(self, *words: str, code: int = 0) -> str:
        """Run ``edgeduet-client WORDS HOME``."""
        return run_command("edgeduet_client.cli", words[0], str(self.home), *words[1:], code=code)

    def personal(self, run: str) -> Path:
        return self.home / "personal" / run / f"client-{self.index}"

    def personal_state(self, run: str) -> dict[str, Any]:
        """Return its personal state after the last stage; fails where something of it is damaged or left over."""
        folder = self.personal(run)
        leftovers = [path.name for path in folder.iterdir() if path.suffix != ".safetensors"]
        assert not leftovers, f"{folder} holds {leftovers}"
        return self.newest_state(run)

    def newest_state(self, run: str) -> dict[str, Any]:
        """Return its newest whole personal state, whatever else lies there."""
        state = DiskStore(self.home / "personal").load(run, self.index, (10**6, AFTER_STAGE))
        assert state, f"no personal state in {self.personal(run)}"
        return state


@dataclass
class Deployment:
    """A server, its devices, and an operator's shell."""

    folder: Path
    config: ServerConfig
    by_command: bool = False
    devices: list[LiveDevice] = field(default_factory=list)
    wires: dict[int, Wire] = field(default_factory=dict)
    server: subprocess.Popen[bytes] | None = None

    # -- server -------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        """Run ``edgeduet-server start`` until SuperLink and admin service listen."""
        home, network = self.config.home, self.config.network
        server = self.server = start("edgeduet_server.cli", "start", str(home), out=self.folder / "server.out")
        # The ports alone may be those of programs that a killed one left.
        wait(lambda: server.poll() is not None or self.server_state().get("pid") == server.pid, "the supervisor")
        for port in (network.superlink_port, network.public_port, network.admin_port):
            wait(lambda port=port: self._listens(port), f"port {port} of the server")  # type: ignore[misc]

    def _listens(self, port: int) -> bool:
        assert self.server is not None and self.server.poll() is None, self.logs()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def kill_server(self) -> None:
        """Kill -9 supervisor, SuperLink, ServerApp, proxy and admin service at once."""
        assert self.server is not None
        kill_whole(self.server.pid)
        self.server.wait()

    def server_state(self) -> Json:
        return RunningState(self.config.home, "server").read() or {}

    # -- operator -----------------------------------------------------------------------------------------

    def admin(self, *arguments: str, input: str | None = None, code: int = 0) -> str:
        """Run ``edgeduet-admin``; return what it printed (its error where it is to fail)."""
        extra = {"EDGEDUET_ADMIN_CONFIG": str(self.folder / "admin.json"), "COLUMNS": "300"}
        return run_command("edgeduet_server.admin_cli.main", *arguments, input=input, code=code, extra=extra)

    def json(self, *arguments: str, input: str | None = None) -> Any:
        return json.loads(self.admin(*arguments, "--json", input=input))

    def status(self) -> tuple[Json, str]:
        """Return ``edgeduet-admin status`` as JSON, and its warnings as one text."""
        status = self.json("status")
        return status, "\n".join(status["warnings"])

    def log_in(self) -> None:
        """Make a first token on the server and log in with it."""
        home = self.config.home
        token = self.json("tokens", "create", "first", "--role", "admin", "--home", str(home))
        where = ("--server", f"localhost:{self.config.network.admin_port}", "--ca", str(home / "pki/ca.crt"))
        self.admin("login", *where, input=token["secret"] + "\n")

    def enrol(self, name: str, index: int = 0, *, port: int | None = None, ca: Path | None = None) -> LiveDevice:
        """Make a device's identity; nobody has let it in yet."""
        home, authority = self.folder / name, ca or self.config.folder("pki") / "ca.crt"
        server = f"localhost:{port or self.config.network.public_port}"
        if self.by_command:
            what = ("--server", server, "--ca", str(authority), "--name", name)
            share = ("--partition", str(index), "--partitions", str(DEVICES))
            made = Enrolment(
                **json.loads(run_command("edgeduet_client.cli", "enroll", str(home), *what, *share, "--json"))
            )
        else:
            made = enrol(home, server, authority, name, partition=index, partitions=DEVICES)
        device = LiveDevice(home, index, made)
        device.set("inference", classify_port=0)
        self.devices.append(device)
        return device

    def approve(self, device: LiveDevice) -> Json:
        """Let a device in."""
        made = device.enrolment
        answer: Json = self.json("clients", "approve", "-", "--code", made.code, input=made.request)
        return answer

    def start_run(self, name: str, scenario: Scenario, *, method: str = "fed-duet", seed: int = 3) -> Path:
        """Start a run with ``edgeduet-admin``; return its folder."""
        file = self.folder / f"{name}.toml"
        file.write_text(scenario_toml(scenario))
        self.json("runs", "start", str(file), "--method", method, "--name", name, "--seed", str(seed))
        return self.config.folder("runs") / name

    # -- what happened ------------------------------------------------------------------------------------

    def events(self, run: str, kind: str = "") -> list[Json]:
        """Return what a run has recorded so far."""
        path = self.config.folder("runs") / run / "metrics.jsonl"
        return [event for event in read_events(path) if kind in ("", event["event"])] if path.exists() else []

    def run_state(self, run: str) -> str:
        """Return the state of a run in the registry, without asking Flower."""
        with sqlite3.connect(f"file:{self.config.home / 'registry.db'}?mode=ro", uri=True, timeout=30) as registry:
            row = registry.execute("SELECT state FROM runs WHERE name = ?", (run,)).fetchone()
        return str(row[0]) if row else ""

    def wait_for(self, run: str, state: str) -> None:
        """Wait until a run is in a state; one that ended otherwise fails the test."""
        ends = {"finished", "failed", "stopped"} - {state}

        def there() -> bool:
            now = self.run_state(run)
            assert now not in ends, f"run {run} is {now}\n{self.admin('runs', 'show', run)}"
            return now == state

        wait(there, f"run {run} to be {state}")

    def wait_for_event(self, run: str, kind: str, count: int = 1) -> list[Json]:
        """Wait until ``count`` events of a kind are recorded; return them."""
        wait(lambda: len(self.events(run, kind)) >= count, f"{count} {kind} event(s) of run {run}")
        return self.events(run, kind)

    def app_at_work(self, device: LiveDevice, run: str) -> psutil.Process:
        """Wait until a device works on what comes after the last event of a run; return its ClientApp.

        One that dies before it has taken its message is just started again.
        """
        self.wait_for_event(run, "stage-start")
        # The process of the message before may still be on its way out. Times of processes are good to a second.
        since = (self.config.folder("runs") / run / "metrics.jsonl").stat().st_mtime - 0.5
        found: list[psutil.Process] = []

        def works() -> bool:
            with suppress(psutil.Error):
                found[:] = [app for app in device.apps() if app.create_time() > since and _has_torch(app)]
            return bool(found)

        wait(works, f"a ClientApp of {device.name} at work", every=0.05)
        return found[0]

    def assert_complete(self, run: str, *, stages: int = 1, rounds: int = 2, clients: int = DEVICES) -> list[Json]:
        """Fail unless every round is there once and everybody was evaluated; return the rounds.

        Both records must say so: the run's own file, and what ``edgeduet-admin`` reads from the registry.
        """
        found = self.assert_rounds(run, stages=stages, rounds=rounds)
        evaluated = self.events(run, "evaluate")
        assert [[c["client"] for c in event["clients"]] for event in evaluated] == [list(range(clients))] * stages
        metrics = self.json("metrics", run)
        assert len(metrics["personal_matrix"]) == stages and len(metrics["clients"]) == clients
        return found

    def assert_rounds(self, run: str, *, stages: int = 1, rounds: int = 2) -> list[Json]:
        """Fail unless the run has ended and every round is in both records once; return the rounds."""
        found = self.events(run, "round")
        places = [(event["stage"], event["round"]) for event in found]
        assert places == [(stage, round) for stage in range(stages) for round in range(rounds)]
        assert [event["event"] for event in self.events(run)][-1] == "run-end"
        listed = self.json("rounds", run)["rounds"]
        assert [(row["stage"], row["round"]) for row in listed] == places
        return found

    def logs(self) -> str:
        """Return the ends of all logs, for a test that failed."""
        ends = []
        for file in sorted([*self.folder.rglob("*.log"), *self.folder.rglob("*out"), *self.folder.rglob("error.txt")]):
            if file.is_file():
                ends += [f"--- {file.relative_to(self.folder)}", *file.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(ends)

    def close(self) -> None:
        """End everything that was started."""
        for wire in self.wires.values():
            wire.close()
        for device in self.devices:
            with suppress(psutil.Error):
                device.end()
        if self.server is not None:
            end_family(self.server.pid)
            self.server.wait()
            # What a killed supervisor left has no parent any more.
            for process in psutil.process_iter(["cmdline"]):
                if any(str(self.folder) in part for part in process.info["cmdline"] or []):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()


def _has_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


def simulate(run: Path, scenario: Scenario, folder: Path, *, seed: int = 3) -> None:
    """Do in this process what the run of that folder did on devices; ``folder`` takes the results."""
    simulated = RunConfig(scenario, "fed-duet", seed=seed, run_dir=folder, run_name=run.name)
    with InProcessGrid(edgeduet_clients(simulated, block_size=1)) as grid:
        serve(grid, simulated)


def final_state(run: Path) -> bytes:
    """Return the arrays of a run's last checkpoint: shared weights, prompt pool and gate."""
    return sorted(run.glob("checkpoints/state-*.safetensors"))[-1].read_bytes()


def accuracies(run: Path) -> list[Any]:
    """Return what every client counted after each stage."""
    events = [event for event in read_events(run / "metrics.jsonl") if event["event"] == "evaluate"]
    return [[(client["client"], client["personal"], client["shared"]) for client in e["clients"]] for e in events]


def start(module: str, *arguments: str, out: Path, extra: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; what it prints goes to ``out``."""
    with out.open("ab") as log:
        return subprocess.Popen(
            python(module, *arguments),
            env=environment(extra),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_command(
    module: str, *arguments: str, input: str | None = None, code: int = 0, extra: Mapping[str, str] | None = None
) -> str:
    """Run a command to its end; return what it printed (its error where it is to fail)."""
    done = subprocess.run(
        python(module, *arguments),
        env=environment(extra),
        input=input if input is not None else "",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr if code == 2 else done.stdout


@contextmanager
def deployed(
    folder: Path,
    *,
    devices: int = DEVICES,
    wired: Collection[int] = (),
    extra: Mapping[str, str] | None = None,
    commands: bool = False,
) -> Iterator[Deployment]:
    """Make a server and let ``devices`` devices in; all are connected on entry, and gone on exit.

    Args:
        folder: where everything is kept.
        devices: number of devices; device i holds share i.
        wired: devices that are to reach the server over a :class:`Wire` of ``system.wires``.
        extra: more environment of the devices.
        commands: make homes with the commands, not with what is behind them (a second of CPU each).
    """
    home, port = folder / "server", free_ports(4)
    if commands:
        run_command("edgeduet_server.cli", "init", str(home), "--name", "localhost", "--port", str(port))
    else:
        create_home(home, ["localhost"], public_port=port)
    config = load_server_config(home)
    system = Deployment(folder, config, by_command=commands)
    try:
        system.start_server()
        system.log_in()
        for index in range(devices):
            if index in wired:
                system.wires[index] = Wire(config.network.public_port)
            wire = system.wires.get(index)
            device = system.enrol(f"edge-{index}", index, port=wire.port if wire else None)
            system.approve(device)
            device.start(extra)
        for device in system.devices:
            wait(device.connected, f"{device.name} to be connected")
        yield system
    finally:
        system.close()


def scenario_toml(scenario: Scenario) -> str:
    """Return a scenario as an operator would write it."""
    values = scenario.model_dump(mode="json", exclude_defaults=True)
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [toml_lines({name: value for name, value in values.items() if name not in sections})]
    lines += [f"[{name}]\n{toml_lines(value)}" for name, value in sections.items()]
    return "\n".join(lines) + "\n"
