"""Keep a server running: Flower's SuperLink, the proxy and the admin service, through crashes and nights.

One process per server home, in the foreground (systemd or a container keeps *it* running). Every few
seconds it looks at its programs and does what ``methods/flower.md`` 2.4 found necessary:

====================================  ==========================================================
what happens                          what is done
====================================  ==========================================================
a program dies                        restarted, after a pause that doubles up to a minute
SuperExec dies (runs stay pending)    noticed by its absence; SuperLink is restarted
a run stays pending too long          said in the log and in ``status``; SuperLink is restarted
SuperLink restarts during a run       the run is resumed from its last checkpoint (``[training] resume``)
Flower's database grows               compacted between runs
this process is killed                the next start ends what it left behind
====================================  ==========================================================
"""

from __future__ import annotations

import logging
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from edgeduet_server.deployment.proxy import proxy_command
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.deployment.superlink_client import FlowerRun, SuperLinkClient
from edgeduet_shared.errors import FederationError
from edgeduet_shared.supervision.child import Child, Program
from edgeduet_shared.supervision.programs import environment, program
from edgeduet_shared.supervision.running_state import RunningState

log = logging.getLogger("edgeduet.server")

REGISTRY_VARIABLE = "EDGEDUET_REGISTRY"

TICK = 2.0
# Asking Flower costs a process of a second: not at every tick.
ASK_FLOWER_EVERY = 20.0
# SuperLink starts its SuperExec a little later than itself.
SUPEREXEC_GRACE = 30.0
_SUPEREXEC = "flower-superexec"


@dataclass(frozen=True)
class Health:
    """What the readiness endpoint and ``status`` say."""

    ready: bool
    programs: Mapping[str, Mapping[str, Any]]
    complaints: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {"ready": self.ready, "programs": dict(self.programs), "complaints": list(self.complaints)}


class Supervisor:
    """Runs a server home until it is told to stop.

    Args:
        config: of the home.
        resume: called with Flower's view of the runs when SuperLink has (re)started; resumes what was interrupted.

    Raises:
        ConfigError: another supervisor runs this home, or a program is not installed.
    """

    def __init__(self, config: ServerConfig, resume: Callable[[SuperLinkClient, list[FlowerRun]], None]) -> None:
        self.config = config
        self._resume = resume
        self._stop = threading.Event()
        self._client = SuperLinkClient(config)
        self._asked = self._superlink_since = 0.0
        self._resumed_for = -1
        self._pending_since: dict[str, float] = {}
        self._complaints: tuple[str, ...] = ()
        self._about_flower: list[str] = []
        self._running = RunningState(config.home, "server")
        variables = environment(config.folder("flwr"), {REGISTRY_VARIABLE: config.registry_url})
        logs, settings = config.folder("logs"), config.logs
        self.superlink = Child(
            Program("superlink", lambda: superlink_command(config), variables, config.folder("flwr")), logs, settings
        )
        self.admin = Child(Program("admin", lambda: admin_command(config), variables, config.home), logs, settings)
        self.children = [self.superlink, self.admin]
        if config.network.proxy == "nginx":
            proxy_command(config)  # says at once if nginx is missing
            self.children.append(
                Child(Program("proxy", lambda: proxy_command(config), variables, config.home), logs, settings)
            )

    def run(self) -> None:
        """Supervise until :meth:`stop`; then end everything."""
        with self._running.held():
            self._running.end_leftovers()
            try:
                while not self._stop.is_set():
                    self.tick()
                    self._stop.wait(TICK)
            finally:
                for child in reversed(self.children):
                    child.end()

    def stop(self, *_: object) -> None:
        """Ask :meth:`run` to end; also a signal handler."""
        self._stop.set()

    def tick(self) -> None:
        """Look once at everything."""
        before = self.superlink.pid
        for child in self.children:
            child.tend()
        now = time.monotonic()
        if self.superlink.pid != before:
            self._superlink_since = now
        complaints = [f"{child.program.name} does not run" for child in self.children if not child.running]
        if self.superlink.running:
            self._about_flower = self._watch_flower(now)
            complaints += self._about_flower
        self._complaints = tuple(complaints)
        self._running.note(self.health().as_json())

    def health(self) -> Health:
        """Return how things stand."""
        programs = {child.program.name: child.facts() for child in self.children}
        return Health(all(child.running for child in self.children), programs, self._complaints)

    def _watch_flower(self, now: float) -> list[str]:
        if now - self._superlink_since > SUPEREXEC_GRACE and not _has_superexec(self.superlink.pid):
            self.superlink.restart("its SuperExec is gone: runs would stay pending for ever")
            return ["Flower's SuperExec had died; SuperLink was restarted"]
        if now - self._asked < ASK_FLOWER_EVERY:
            return self._about_flower
        self._asked = now
        try:
            runs = self._client.list_runs()
        except FederationError as error:
            self._asked = now - ASK_FLOWER_EVERY + 3 * TICK  # it may just be starting
            return [f"SuperLink does not answer: {error}"]
        self._resume_once(runs)
        self._compact(runs)
        return self._watch_pending(runs, now)

    def _resume_once(self, runs: list[FlowerRun]) -> None:
        """After each start of SuperLink, once it answers."""
        if self._resumed_for == self.superlink.pid:
            return
        self._resumed_for = self.superlink.pid or -1
        self._resume(self._client, runs)

    def _watch_pending(self, runs: list[FlowerRun], now: float) -> list[str]:
        pending = {run.run_id for run in runs if run.status.startswith("pending")}
        self._pending_since = {run: self._pending_since.get(run, now) for run in pending}
        limit = self.config.training.pending_limit
        stuck = sorted(run for run, since in self._pending_since.items() if now - since > limit)
        if not stuck:
            return []
        self._pending_since = {}
        self.superlink.restart(f"run {stuck[0]} was pending for more than {limit:.0f} s")
        return [f"run {run} stays pending; SuperLink was restarted" for run in stuck]

    def _compact(self, runs: list[FlowerRun]) -> None:
        """Give back the room that finished runs left in Flower's database, while nothing runs."""
        database = self.config.home / "superlink.db"
        limit = self.config.limits.max_superlink_db_bytes
        if any(not run.finished for run in runs) or database_bytes(database) <= limit:
            return
        before = database_bytes(database)
        self.superlink.end()
        compact_database(database)
        log.info("Flower's database compacted from %d to %d bytes", before, database_bytes(database))


def superlink_command(config: ServerConfig) -> list[str]:
    """Return the command line of SuperLink: TLS, node authentication, state on disk, loopback only."""
    pki = config.folder("pki")
    return [
        program("flower-superlink"),
        *("--ssl-certfile", str(pki / "server.crt"), "--ssl-keyfile", str(pki / "server.key")),
        *("--ssl-ca-certfile", str(pki / "ca.crt"), "--enable-supernode-auth"),
        *("--database", str(config.home / "superlink.db"), "--isolation", "subprocess"),
        *("--host", "127.0.0.1", "--port", str(config.network.superlink_port)),
        "--disable-runtime-dependency-installation",
    ]


def admin_command(config: ServerConfig) -> list[str]:
    """Return the command line of the admin service."""
    return [sys.executable, "-m", "edgeduet_server.admin", str(config.home)]


def stop_running(home: Path) -> bool:
    """Tell the supervisor of a home to stop and wait for it; return whether there was one.

    Raises:
        ConfigError: it did not end in time.
    """
    return RunningState(home, "server").stop()


def read_state(home: Path) -> dict[str, Any] | None:
    """Return what the running supervisor of a home last noted, or ``None`` where none runs."""
    return RunningState(home, "server").read()


def database_bytes(database: Path) -> int:
    """Return the size of a SQLite database with its write-ahead log."""
    files = (database, database.with_name(f"{database.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def compact_database(database: Path) -> None:
    """Give the free pages of a SQLite database, which no process may have open, back to the disk."""
    connection = sqlite3.connect(database)
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("VACUUM")
    finally:
        connection.close()


def _has_superexec(pid: int | None) -> bool:
    try:
        return pid is not None and any(
            _SUPEREXEC in " ".join(child.cmdline()) for child in psutil.Process(pid).children(recursive=True)
        )
    except psutil.Error:
        return True  # it changed while we looked: look again at the next tick
