"""How many devices one server carries: 10, 50 and 200 simulated ones against a real server on this machine.

    python simulations/benchmarks/fleet_load_bench.py            # about 8 CPU minutes
    python simulations/benchmarks/fleet_load_bench.py --devices 10 --rounds 2

``edgeduet-server start`` as it is deployed: SuperLink with TLS, node keys and SQLite state, nginx in front of it, the
admin service, the registry, and the ServerApp of a FedAvg run of adapters. Devices are threads of this process that
speak the real fleet protocol, each with its own key and TLS connection (``fleet_devices.py``); they do no training, so
that what is measured is the server. Every size gets a new server home.

Measured: seconds per round (as recorded by the run), CPU seconds of all of the server's processes per round and how
they are spread, their memory (sum of proportional set sizes, sampled each second, peak), sizes of registry and
Flower's database at the end, replies lost and rounds skipped (both must be 0). Devices share the machine with the
server, and theirs is most of the load: wall seconds are an upper bound, CPU seconds and memory are what to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from fleet_devices import Fleet, let_in

from edgeduet_server.deployment.home import create_home
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.deployment.superlink_client import SuperLinkClient
from edgeduet_server.deployment.supervisor import database_bytes
from edgeduet_server.recorder import read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.metrics import format_bytes
from edgeduet_shared.run_config import RunConfig
from edgeduet_shared.supervision.child import end_family
from edgeduet_shared.supervision.running_state import RunningState

SIZES = (10, 50, 200)
LIMIT = 1800.0
HERE = Path(__file__).resolve().parent


@dataclass
class Load:
    """What one size cost.

    Attributes:
        devices: how many.
        round_seconds: of each round, as recorded.
        evaluation_seconds: of asking everybody after the stage.
        cpu: CPU seconds of the server from the start of the run to its end, by program.
        devices_cpu: CPU seconds of this process, which is all devices.
        peak_memory: bytes (sum of proportional set sizes) of the server's processes.
        registry, superlink: bytes of the databases at the end.
        bytes_down, bytes_up: of all rounds, inside messages.
        lost_replies: asked for in a round and not used, whatever the reason.
        lost_rounds: skipped.
        evaluated: devices whose evaluation arrived.
    """

    devices: int
    round_seconds: list[float]
    evaluation_seconds: float
    cpu: dict[str, float]
    devices_cpu: float
    peak_memory: int
    registry: int
    superlink: int
    bytes_down: int
    bytes_up: int
    lost_replies: int
    lost_rounds: int
    evaluated: int

    @property
    def cpu_per_round(self) -> float:
        """CPU seconds of the server per round, evaluation and start-up shared out."""
        return sum(self.cpu.values()) / len(self.round_seconds)


class Meter:
    """Samples CPU and memory of a process and all below it, each second."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        self._over = threading.Event()
        self.peak = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def spent(self) -> dict[str, float]:
        """Return CPU seconds so far, by program; of processes that have ended, what was seen last."""
        self._sample()
        totals: dict[str, float] = defaultdict(float)
        for name, seconds in list(self._seen.values()):
            totals[name] += seconds
        return dict(totals)

    def stop(self) -> None:
        """Sample no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self._sample()

    def _sample(self) -> None:
        memory = 0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    key = (process.pid, process.create_time())
                    self._seen[key] = (_program(process.cmdline()), times.user + times.system)
                memory += process.memory_full_info().pss
            except psutil.Error:
                continue  # it ended while we looked
        self.peak = max(self.peak, memory)


def _program(command: Sequence[str]) -> str:
    line = " ".join(command)
    known = {
        "flower-superlink": "SuperLink",
        "superexec": "SuperExec",
        "serverapp": "ServerApp",
        "nginx": "nginx",
        "edgeduet_server.admin": "admin service",
        "edgeduet_server.cli": "supervisor",
    }
    return next((name for text, name in known.items() if text in line), "other")


def scenario(devices: int, rounds: int) -> Scenario:
    """One task of the generated world, every device asked in every round."""
    return Scenario.model_validate(
        {
            "name": "load",
            "data": {"max_per_class": 40, "classes": ["circle", "square", "star", "heart"], "domains": ["photo"]},
            "stream": {"kind": "class-incremental", "classes_per_task": 4},
            "partition": {"kind": "iid", "min_size": 0},
            "federation": {
                "clients": devices,
                "rounds": rounds,
                "quorum": 1.0,
                "max_bad_rounds": rounds,
                "round_timeout": LIMIT,
                "node_wait": LIMIT,
            },
        }
    )


def measure(devices: int, rounds: int, work: float, folder: Path) -> Load:
    """Run ``rounds`` rounds with ``devices`` devices against a new server in ``folder``."""
    config = create_home(folder / "server", ["localhost"], public_port=free_ports(4))
    server = _start(config, folder / "server.out")
    fleet = None
    try:
        _wait(lambda: _answers(config, server, folder / "server.out"), "SuperLink")
        authority = config.folder("pki") / "ca.crt"
        keys = let_in(f"127.0.0.1:{config.network.superlink_port}", authority, devices)
        fleet = Fleet(f"localhost:{config.network.public_port}", authority, tasks=1, work=work)
        fleet.start(keys)
        meter, ours = Meter(server.pid), sum(os.times()[:2])
        before = meter.spent()
        run = RunConfig(
            scenario(devices, rounds), "fedavg-adapter", seed=1, run_dir=config.folder("runs") / "load", run_name="load"
        )
        SuperLinkClient(config).start_run(run)
        record = run.run_dir / "metrics.jsonl"
        _wait(lambda: _ended(run.run_dir, server), "the run to end")
        spent, ours = meter.spent(), sum(os.times()[:2]) - ours
        meter.stop()
        cpu = {name: round(seconds - before.get(name, 0.0), 2) for name, seconds in spent.items()}
        if fleet.problems:
            raise RuntimeError(f"{len(fleet.problems)} devices failed, first: {fleet.problems[0]}")
        return _load(list(read_events(record)), devices, cpu, ours, meter.peak, config)
    finally:
        if fleet is not None:
            fleet.over.set()
        RunningState(config.home, "server").stop()
        end_family(server.pid)
        server.wait()


def _load(
    events: list[dict[str, Any]], devices: int, cpu: dict[str, float], ours: float, peak: int, config: ServerConfig
) -> Load:
    rounds = [event for event in events if event["event"] == "round"]
    (evaluation,) = [event for event in events if event["event"] == "evaluate"]
    return Load(
        devices=devices,
        round_seconds=[event["timing"]["seconds"] for event in rounds],
        evaluation_seconds=evaluation["timing"]["seconds"],
        cpu=cpu,
        devices_cpu=ours,
        peak_memory=peak,
        registry=database_bytes(config.home / "registry.db"),
        superlink=database_bytes(config.home / "superlink.db"),
        bytes_down=sum(event["bytes_down"] for event in rounds),
        bytes_up=sum(event["bytes_up"] for event in rounds),
        lost_replies=sum(devices - len(event["clients"]) for event in rounds),
        lost_rounds=sum(event["skipped"] for event in rounds),
        evaluated=len(evaluation["clients"]),
    )


def free_ports(count: int) -> int:
    """Return the first of ``count`` ports in a row that nobody uses now."""
    listening = {connection.laddr.port for connection in psutil.net_connections("tcp") if connection.laddr}
    first = 21_000 + os.getpid() % 500 * 20
    return next(port for port in range(first, 60_000, count) if not listening & set(range(port, port + count)))


def _start(config: ServerConfig, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from edgeduet_server.cli import main; main()", "start", str(config.home)]
    with out.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def _answers(config: ServerConfig, server: subprocess.Popen[bytes], out: Path) -> bool:
    if server.poll() is not None:
        raise RuntimeError(f"the server ended: {out.read_text(errors='replace').strip()[-500:]}")
    state = RunningState(config.home, "server").read()
    ports = {config.network.superlink_port, config.network.public_port}
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return state is not None and ports <= listening


def _ended(folder: Path, server: subprocess.Popen[bytes]) -> bool:
    if server.poll() is not None or (folder / "error.txt").exists():
        raise RuntimeError(f"the run failed; see {folder} and {folder.parents[1] / 'logs'}")
    record = folder / "metrics.jsonl"
    return record.exists() and '"event": "run-end"' in record.read_text().replace('"event":"', '"event": "')


def _wait(until: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not until():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {LIMIT:.0f} s for {what}")
        time.sleep(0.5)


def table(loads: Sequence[Load]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| devices | s per round (each) | evaluation s | server CPU s per round | per device and round, ms "
        "| server memory, peak | registry | Flower's database | down / up | lost replies | lost rounds |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load in loads:
        seconds = ", ".join(f"{value:.1f}" for value in load.round_seconds)
        lines.append(
            f"| {load.devices} | {seconds} | {load.evaluation_seconds:.1f} | {load.cpu_per_round:.1f} "
            f"| {1000 * load.cpu_per_round / load.devices:.0f} | {format_bytes(load.peak_memory)} "
            f"| {format_bytes(load.registry)} | {format_bytes(load.superlink)} "
            f"| {format_bytes(load.bytes_down)} / {format_bytes(load.bytes_up)} | {load.lost_replies} "
            f"| {load.lost_rounds} |"
        )
    names = sorted({name for load in loads for name in load.cpu})
    lines += ["", f"| CPU s of the whole run | {' | '.join(names)} | devices (not the server) |"]
    lines += [f"| ---: |{' ---: |' * (len(names) + 1)}"]
    for load in loads:
        values = " | ".join(f"{load.cpu.get(name, 0.0):.1f}" for name in names)
        lines.append(f"| {load.devices} | {values} | {load.devices_cpu:.1f} |")
    return "\n".join(lines)


def draw(loads: Sequence[Load], path: Path) -> None:
    """Draw the curves."""
    import matplotlib.pyplot as plt

    sizes = [load.devices for load in loads]
    curves = {
        "seconds per round (median)": [sorted(load.round_seconds)[len(load.round_seconds) // 2] for load in loads],
        "server CPU seconds per round": [load.cpu_per_round for load in loads],
        "server memory, MB": [load.peak_memory / 1e6 for load in loads],
    }
    figure, axes = plt.subplots(1, len(curves), figsize=(4 * len(curves), 3), layout="constrained")
    for axis, (name, values) in zip(axes, curves.items(), strict=True):
        axis.plot(sizes, values, marker="o")
        axis.set(title=name, xlabel="devices", ylim=(0, None), xlim=(0, None))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=list(SIZES), help="sizes to measure")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each run")
    parser.add_argument("--work", type=float, default=1.0, help="seconds a message takes a device")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--plot", type=Path, help="also draw the curves here")
    options = parser.parse_args()
    loads = []
    for devices in options.devices:
        with tempfile.TemporaryDirectory(prefix="edgeduet-load-") as folder:
            loads.append(measure(devices, options.rounds, options.work, Path(folder)))
        print(f"{devices} devices: {asdict(loads[-1])}", file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps([asdict(load) for load in loads], indent=1))
    print(table(loads))
    if options.plot:
        draw(loads, options.plot)


if __name__ == "__main__":
    main()
