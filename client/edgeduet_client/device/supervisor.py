"""Keep a device running: Flower's SuperNode while it may train, and what answers programs on the device.

One process per device home, in the foreground (systemd or a container keeps *it* running):

=========================================  =====================================================
what happens                               what is done
=========================================  =====================================================
a program dies                             restarted, after a pause that doubles up to a minute
no connection: wrong CA, key, clock ...    the cause and its remedy are said; tried again anyway
SuperNode runs, but has fallen silent      restarted: after a cut network it may wait for ever for nothing
outside hours, on battery, metered         SuperNode is ended; inference goes on
training takes too much memory             the ClientApp is ended; the server counts a failed reply
this process is killed                     the next start ends what it left behind
=========================================  =====================================================
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from edgeduet_client.device.device_config import DeviceConfig
from edgeduet_client.device.enrolment import AUTHORITY, NODE_KEY, read_key
from edgeduet_client.device.exit_reasons import ExitReason, explain_exit
from edgeduet_client.device.permission import look_around, why_not_train
from edgeduet_client.device.server_probe import diagnose
from edgeduet_client.device.training_rules import HOME_VARIABLE
from edgeduet_shared.supervision.child import Child, Program
from edgeduet_shared.supervision.programs import environment, program
from edgeduet_shared.supervision.running_state import RunningState

log = logging.getLogger("edgeduet.device")

KIND = "device"
TICK = 2.0
# Asking for the battery and NetworkManager costs a process: not at every tick.
LOOK_AROUND_EVERY = 30.0
DIAGNOSE_EVERY = 60.0
# A SuperNode asks for work every few seconds, and while it trains sends a sign of life twice a minute. Without a single
# connection for this long its loop has ended: Flower 1.42 leaves it at a TLS handshake that takes more than 30 s, which
# is what a cut network looks like, but the process stays.
SILENT_LIMIT = 90.0
# Texts that Flower has for several causes.
_AMBIGUOUS = {"refused", "not-registered", "unreachable"}
CONNECTED = "SuperNode ID:"
_CONNECTED_AGAIN = "Connection successful"
_NOT_CONNECTED = "Connection attempt failed"
_TAIL_BYTES = 32_768
_CLIENT_APP = "flwr-clientapp"


class Supervisor:
    """Runs a device home until it is told to stop.

    Raises:
        FederationError: Flower is not installed, and the device is to train.
        StateError: the device's key is missing or damaged.
    """

    def __init__(self, config: DeviceConfig) -> None:
        self.config = config
        self._stop = threading.Event()
        self._running = RunningState(config.home, KIND)
        self._looked = -LOOK_AROUND_EVERY
        self._paused: str | None = None
        self._reason: ExitReason | None = None
        self._restarts = 0
        self._connected = False
        self._log_from = 0
        self._diagnosed = -DIAGNOSE_EVERY
        self._spoke = 0.0
        if config.limits.train:
            read_key(config.home)
        self.supernode = Child(self._supernode_program(), config.folder("logs"), config.logs)
        self.servers = [Child(made, config.folder("logs"), config.logs) for made in inference_programs(config)]

    def run(self) -> None:
        """Supervise until :meth:`stop`; then end everything.

        Raises:
            ConfigError: another supervisor runs this home.
        """
        with self._running.held():
            self._running.end_leftovers()
            try:
                while not self._stop.is_set():
                    self.tick()
                    self._stop.wait(TICK)
            finally:
                for child in (*self.servers, self.supernode):
                    child.end()

    def stop(self, *_: object) -> None:
        """Ask :meth:`run` to end; also a signal handler."""
        self._stop.set()

    def tick(self) -> None:
        """Look once at everything."""
        for child in self.servers:
            child.tend()
        self._look_around(time.monotonic())
        if self._paused is None:
            before, size = self.supernode.pid, _size(self.supernode.log_file)
            self.supernode.tend()
            if self.supernode.pid not in (before, None):
                self._log_from = size
                self._connected = False
                self._spoke = time.monotonic()
            self._follow_supernode()
            self._end_silence(time.monotonic())
        elif self.supernode.running:
            log.info("training pauses: %s", self._paused)
            self.supernode.end()
            self._connected = False
        self._running.note(self.state())

    def state(self) -> dict[str, Any]:
        """Return how things stand, for ``status``."""
        children = [*self.servers, self.supernode]
        return {
            "training": self._training(),
            "why": self._paused or (self._reason.line if self._reason and not self._connected else ""),
            "cause": self._reason.word if self._reason and not self._connected else "",
            "programs": {child.program.name: child.facts() for child in children},
            "complaints": self._complaints(),
        }

    def _training(self) -> str:
        if self._paused is not None:
            return "paused"
        if not self.supernode.running:
            return "down"
        return "connected" if self._connected else "connecting"

    def _complaints(self) -> list[str]:
        found = [f"{child.program.name} does not run" for child in self.servers if not child.running]
        if self._paused is None and not self._connected and self._reason is not None:
            found.append(f"not connected: {self._reason.line}")
        elif self._paused is None and not self.supernode.running:
            found.append("supernode does not run")
        return found

    def _look_around(self, now: float) -> None:
        if now - self._looked < LOOK_AROUND_EVERY:
            return
        self._looked = now
        limits = self.config.limits
        why = why_not_train(limits, look_around(limits))
        if why is None and self._paused is not None:
            log.info("training goes on")
        self._paused = why

    def _follow_supernode(self) -> None:
        child = self.supernode
        if child.restarts != self._restarts:
            self._restarts = child.restarts
            self._connected = False
            self._reason = explain_exit(since(child.log_file, self._log_from))
            if self._reason is not None and self._reason.word in _AMBIGUOUS:
                self._reason = diagnose(self.config) or self._reason
            if self._reason is not None:
                log.error("the SuperNode ended (%s): %s", self._reason.word, self._reason.line)
        elif child.running:
            self._follow_connection(since(child.log_file, self._log_from))
        if child.pid is not None:
            self._limit_memory(child.pid)

    def _follow_connection(self, text: str) -> None:
        connected = is_connected(text)
        if connected is False and not self._connected:
            # It tries for ever without a word on why.
            self._find_out_why()
        if connected is None or connected == self._connected:
            return
        self._connected = connected
        if connected:
            log.info("connected to %s", self.config.server.address)
        else:
            log.warning("the connection to %s is lost; it is tried again", self.config.server.address)

    def _find_out_why(self) -> None:
        now = time.monotonic()
        if now - self._diagnosed < DIAGNOSE_EVERY:
            return
        self._diagnosed = now
        reason = diagnose(self.config) or self._reason
        if reason is not None and reason != self._reason:
            log.error("not connected to %s (%s): %s", self.config.server.address, reason.word, reason.line)
        self._reason = reason

    def _end_silence(self, now: float) -> None:
        pid = self.supernode.pid
        if pid is None or speaks_to(pid, self.config.server.port):
            self._spoke = now
        elif now - self._spoke > SILENT_LIMIT:
            self.supernode.restart(f"it has had no connection to {self.config.server.address} for {SILENT_LIMIT:.0f} s")
            self._restarts = self.supernode.restarts
            self._connected = False

    def _limit_memory(self, pid: int) -> None:
        limit = self.config.limits.memory_mb * 1_000_000
        if limit == 0:
            return
        for app, used in client_apps(pid):
            if used > limit:
                log.error("training took %d MB, [limits] memory_mb allows %d: ended", used // 1_000_000, limit // 10**6)
                app.kill()

    def _supernode_program(self) -> Program:
        config, home = self.config, self.config.home
        if config.limits.train:
            program("flower-supernode")  # says at once if it is missing
        variables = supernode_environment(config)
        folder = config.folder("flwr")
        folder.mkdir(parents=True, exist_ok=True)
        return Program("supernode", lambda: supernode_command(config, free_port()), variables, home)


def supernode_environment(config: DeviceConfig) -> dict[str, str]:
    """Return the environment of the SuperNode, which its ClientApps inherit."""
    threads = str(config.limits.threads)
    return environment(
        config.folder("flwr"),
        {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "EDGEDUET_CACHE": str(config.folder("cache")),
            HOME_VARIABLE: str(config.home),
        },
    )


def supernode_command(config: DeviceConfig, port: int) -> list[str]:
    """Return the command line of the SuperNode; ``port`` is for its own ClientApps, on loopback."""
    share = config.data
    return [
        program("flower-supernode"),
        *("--superlink", config.server.address, "--root-certificates", str(config.home / AUTHORITY)),
        *("--auth-supernode-private-key", str(config.home / NODE_KEY)),
        *("--node-config", f"partition-id={share.partition} num-partitions={share.partitions}"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def inference_programs(config: DeviceConfig) -> list[Program]:
    """Return the programs that answer questions on the device."""
    inference, threads = config.inference, str(config.limits.threads)
    variables = environment(config.folder("flwr"), {"OMP_NUM_THREADS": threads, HOME_VARIABLE: str(config.home)})
    programs = []
    if inference.classify_port:
        command = [sys.executable, "-m", "edgeduet_client.device.classify_service", str(config.home)]
        programs.append(_fixed("classify", command, variables, config.home))
    if inference.llm_models:
        command = [sys.executable, "-m", "edgeduet_client", "llm", "serve", *inference.llm_models]
        command += ["--host", inference.host, "--port", str(inference.llm_port), "--no-grpc", "--threads", threads]
        programs.append(_fixed("llm", command, variables, config.home))
    return programs


def _fixed(name: str, command: list[str], variables: Mapping[str, str], folder: Path) -> Program:
    return Program(name, lambda: command, variables, folder)


def client_apps(pid: int) -> list[tuple[psutil.Process, int]]:
    """Return the ClientApps below a SuperNode with the bytes of memory each holds."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    found = []
    for process in below:
        try:
            if _CLIENT_APP in " ".join(process.cmdline()):
                found.append((process, int(process.memory_info().rss)))
        except psutil.Error:
            continue  # it ended while we looked
    return found


def speaks_to(pid: int, port: int) -> bool:
    """Return whether a process has, or is making, a TCP connection to ``port`` of anybody; true if not to be known."""
    try:
        return any(line.raddr and line.raddr.port == port for line in psutil.Process(pid).net_connections("tcp"))
    except psutil.Error:
        return True  # it has just ended, or may not be looked at: what else is known of it decides


def since(file: Path, place: int) -> str:
    """Return what was written to a log since it was ``place`` bytes long, at most the end of it."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            # A shorter file than before was begun anew.
            stream.seek(max(0, size - _TAIL_BYTES, place if place <= size else 0))
            return stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def is_connected(text: str) -> bool | None:
    """Return what a SuperNode said last about its connection, ``None`` where it said nothing."""
    good = max(text.rfind(CONNECTED), text.rfind(_CONNECTED_AGAIN))
    bad = text.rfind(_NOT_CONNECTED)
    return None if good == bad == -1 else good > bad


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])
