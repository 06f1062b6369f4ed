"""Flower's own simulation engine (Ray) for the same ServerApp and ClientApp: ``--engine ray``.

Runs ``flwr run`` as Flower's documentation says, from a generated app folder that holds nothing but a
``pyproject.toml`` (components of the installed packages, run configuration), against a SuperLink that
is started for this run only. What ``methods/flower.md`` 1.2 to 1.4 found, and what is done about it:

* offline, ``flwr run`` fails because the SuperLink installs dependencies: switched off,
* the SuperLink started by ``flwr run`` stays for ever and serves later runs with old code: ours is a
  child of this process, in a folder of its own, and is ended with everything it started,
* ``flwr run --stream`` exits 0 for a failed run: ``flwr list`` gives the verdict,
* a run can stay pending for ever when the process that starts apps is dead: there is a deadline.

Ray workers do not share memory: the ClientApp must keep personal state on disk. Time is real here:
``federation.round_timeout`` must be long enough for all clients on this machine's cores.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from edgeduet_server.app import ERROR_FILE
from edgeduet_server.deployment.flower_programs import (
    FlowerApp,
    FlowerCommands,
    write_app_folder,
    write_connection,
)
from edgeduet_server.recorder import Listener
from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.errors import FederationError, RunStopped
from edgeduet_shared.run_config import FlowerConfig, RunConfig
from edgeduet_shared.supervision.programs import environment, program
from edgeduet_shared.toml_output import toml_lines

log = logging.getLogger("edgeduet.sim")

START_LIMIT = 120.0
PENDING_LIMIT = 60.0
POLL = 1.0
STATUS_EVERY = 10.0

_RAY_SWITCHES = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_CONNECTION = "private"


def run_edgeduet(config: RunConfig, *, listeners: Sequence[Listener] = ()) -> None:
    """Run edgeduet's own apps under Flower's simulation engine; see :func:`run_ray`.

    Personal states lie in ``personal/`` of the run's folder, and a checkpoint is written every round:
    the clients keep the states of the last few rounds only.
    """
    personal = config.run_dir / "personal"
    if not config.resume and personal.is_dir():
        shutil.rmtree(personal)
    run_ray(
        FlowerApp(),
        replace(config, personal_dir=str(personal), checkpoint_every=1).to_flower(),
        clients=config.scenario.federation.clients,
        events=config.run_dir / "metrics.jsonl",
        error=config.run_dir / ERROR_FILE,
        listeners=listeners,
    )


def run_ray(
    app: FlowerApp,
    run_config: FlowerConfig,
    *,
    clients: int,
    events: Path,
    error: Path | None = None,
    listeners: Sequence[Listener] = (),
    limit: float = float("inf"),
) -> None:
    """Run apps under Flower's simulation engine until the run is over.

    Args:
        app: the apps.
        run_config: Flower's run configuration, flat.
        clients: number of virtual nodes.
        events: the file the ServerApp records its events in; read while it grows, for ``listeners``.
        error: the file in which the ServerApp says why it stopped, if it does.
        listeners: shown each event.
        limit: seconds after which the run is stopped.

    Raises:
        FederationError: the run did not complete; says what the ServerApp or Flower's log says.
        RunStopped: Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="edgeduet-app-") as name:
        folder = write_app_folder(Path(name), app, run_config)
        run_app_folder(folder, clients=clients, events=events, error=error, listeners=listeners, limit=limit)


def run_app_folder(
    app: Path,
    *,
    clients: int,
    events: Path,
    error: Path | None = None,
    overrides: FlowerConfig | None = None,
    listeners: Sequence[Listener] = (),
    limit: float = float("inf"),
) -> None:
    """Do what ``flwr run APP`` does, offline and from a neutral folder; see :func:`run_ray`.

    ``overrides`` replace values of the app's own run configuration.
    """
    with tempfile.TemporaryDirectory(prefix="edgeduet-ray-") as name:
        tail = _Tail(events, listeners)
        with _superlink(Path(name)) as link:
            run_id = link.submit(app, clients, overrides or {})
            try:
                verdict = _wait(link, run_id, tail, limit)
            except KeyboardInterrupt as stop:
                raise RunStopped("stopped; the same command with --resume goes on from the last checkpoint") from stop
            tail.read()
            if verdict != "finished:completed":
                if error is not None and error.is_file():
                    raise FederationError(error.read_text().strip())
                raise FederationError(f"Flower's simulation ended as '{verdict}': {link.first_error(run_id)}")


def _wait(link: _SuperLink, run_id: str, tail: _Tail, limit: float) -> str:
    """Follow the run until Flower says it is finished; return its status."""
    started = time.monotonic()
    asked, running, ended = started, False, False
    while True:
        time.sleep(POLL)
        ended = tail.read() or ended
        now = time.monotonic()
        if now - started > limit:
            raise FederationError(f"the run was stopped after {limit:.0f} s; {link.first_error(run_id)}")
        link.check_alive()
        if ended or now - asked > STATUS_EVERY:
            asked = now
            status = link.status(run_id)
            if status.startswith("finished"):
                return status
            running = running or not status.startswith("pending")
            if not running and now - started > PENDING_LIMIT:
                raise FederationError(
                    f"Flower did not start the run within {PENDING_LIMIT:.0f} s ({status}); {link.first_error()}"
                )


class _Tail:
    """Shows listeners what is appended to a file of JSON lines."""

    def __init__(self, path: Path, listeners: Sequence[Listener]) -> None:
        self._path = path
        self._listeners = tuple(listeners)
        self._position = 0

    def read(self) -> bool:
        """Pass on complete new lines; return whether the run has recorded its end."""
        if not self._path.is_file():
            return False
        ended = False
        with self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:
                self._position = 0  # the run resumed and cut its file back
            file.seek(self._position)
            while (line := file.readline()).endswith(b"\n"):
                self._position = file.tell()
                event: dict[str, Any] = json.loads(line)
                ended = ended or event["event"] == "run-end"
                for listener in self._listeners:
                    listener(event)
        return ended


@dataclass
class _SuperLink:
    """A running SuperLink and how to talk to it."""

    folder: Path
    commands: FlowerCommands
    process: subprocess.Popen[bytes]
    log: Path

    def submit(self, app: Path, clients: int, overrides: FlowerConfig) -> str:
        """Start a run; return its id."""
        changes = []
        if overrides:
            path = self.folder / "overrides.toml"
            atomic_write_text(path, toml_lines(overrides))
            changes = ["--run-config", str(path)]
        federation = f"num-supernodes={clients} client-resources-num-cpus=1 init-args-log-to-driver=true"
        answer = self.commands.ask("run", str(app), _CONNECTION, "--federation-config", federation, *changes)
        if not answer.get("run-id"):
            raise FederationError(f"Flower gave no run id: {answer}")
        return str(answer["run-id"])

    def status(self, run_id: str) -> str:
        """Return Flower's status of the run, for example ``running`` or ``finished:completed``."""
        answer = self.commands.ask("list", _CONNECTION, "--run-id", run_id)
        runs = answer.get("runs") or [{}]
        return str(runs[0].get("status", "unknown"))

    def check_alive(self) -> None:
        """Raise if the SuperLink has died."""
        if self.process.poll() is not None:
            raise FederationError(
                f"Flower's SuperLink exited with code {self.process.returncode}: {self.first_error()}"
            )

    def first_error(self, run_id: str = "") -> str:
        """Return where Flower's logs first show trouble: what came first is the cause."""
        text = self.commands.text("log", run_id, _CONNECTION, "--show") if run_id else ""
        text += self.log.read_text(errors="replace") if self.log.is_file() else ""
        lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        for number, line in enumerate(lines):
            if "Traceback (most recent call last)" in line or "ERROR" in line:
                return "its log begins to fail with\n" + "\n".join(lines[number : number + 40])
        return "its log shows no error, and ends with\n" + "\n".join(lines[-10:])


@contextmanager
def _superlink(folder: Path) -> Iterator[_SuperLink]:
    """Start a SuperLink for simulations in ``folder``; end it and everything it started."""
    port = _free_port()
    home = folder / "flwr"
    variables = environment(home, _RAY_SWITCHES)
    write_connection(home, _CONNECTION, f"127.0.0.1:{port}")
    path = folder / "superlink.log"
    command = [
        program("flower-superlink"),
        *("--insecure", "--simulation", "--isolation", "subprocess", "--host", "127.0.0.1", "--port", str(port)),
        "--disable-runtime-dependency-installation",
    ]
    with path.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    link = _SuperLink(folder, FlowerCommands(_CONNECTION, variables, folder), process, path)
    try:
        _wait_for_port(link, port)
        yield link
    finally:
        _end(process.pid)
        process.wait()


def _wait_for_port(link: _SuperLink, port: int) -> None:
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        link.check_alive()
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise FederationError(f"Flower's SuperLink did not start within {START_LIMIT:.0f} s; {link.first_error()}")


def _end(pid: int) -> None:
    """End a process of ours and all its descendants, politely first."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for member in family:
            _quietly(send, member)
        _, family = psutil.wait_procs(family, timeout=5)


def _quietly(send: Callable[[psutil.Process], None], process: psutil.Process) -> None:
    try:
        send(process)
    except psutil.NoSuchProcess:
        log.debug("process %d had ended already", process.pid)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
