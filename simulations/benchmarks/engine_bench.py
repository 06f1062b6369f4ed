"""What an engine costs: the same apps, the same seed, in process and under Flower's Ray engine.

    python simulations/benchmarks/engine_bench.py            # 10, 100 and 1 000 clients; 20 minutes on 2 cores
    python simulations/benchmarks/engine_bench.py --quick    # 10 clients, 2 minutes

Every run is a process of its own. Measured over it and everything it starts: wall seconds, CPU
seconds, peak memory as if nothing else ran on the machine: pages that its processes share count once, and
so do those that they share with strangers (libraries of another Python with torch). Images are encoded
before anything is measured. Each client holds the same number of images whatever the number of clients, so
that the cost per client and round should be flat.

``in-process`` trains clients one after the other, as Ray's actors do, and must give the same bytes;
``in-process, blocks`` trains 32 clients at once. Wall seconds depend on what else the machine does; CPU
seconds, memory and the ratios within one execution of this script are what to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

MARK = "EDGEDUET_BENCHMARK_RUN"
ENGINES = ("in-process", "in-process, blocks", "ray")
BLOCK = 32
IMAGES_PER_CLIENT = 3
CLASSES, DOMAINS = 20, 4
TEST_FRACTION = 0.3


@dataclass
class Cost:
    """What one run cost.

    Attributes:
        wall: seconds.
        cpu: CPU seconds of all processes.
        memory: peak resident bytes, shared pages once.
        processes: most processes at a time.
        round_seconds: wall seconds per client and round, without the first round.
        weights: hash of the final server state.
    """

    engine: str
    method: str
    clients: int
    rounds: int
    wall: float
    cpu: float
    memory: int
    processes: int
    round_seconds: float
    weights: str


def scenario(clients: int, rounds: int) -> dict[str, Any]:
    """One task with all classes and domains of the generated world, the same number of images per client."""
    per_class = max(2, round(clients * IMAGES_PER_CLIENT / (CLASSES * DOMAINS * (1 - TEST_FRACTION))))
    return {
        "name": f"engine-bench-{clients}",
        "data": {"source": "world", "max_per_class": per_class, "test_fraction": TEST_FRACTION},
        "stream": {"kind": "class-incremental", "classes_per_task": CLASSES},
        "partition": {"kind": "iid", "min_size": 0},
        "federation": {
            "clients": clients,
            "rounds": rounds,
            "node_wait": 600,
            "round_timeout": 3600,
            "evaluate_common": False,
        },
    }


def run_here(engine: str, method: str, clients: int, rounds: int, folder: Path) -> None:
    """Do one run in this process."""
    from edgeduet_server.app import serve
    from edgeduet_shared.config import Scenario
    from edgeduet_shared.run_config import RunConfig

    resolved = Scenario.model_validate(scenario(clients, rounds))
    config = RunConfig(resolved, method, seed=0, run_dir=folder, run_name="benchmark")
    if engine == "prepare":
        from edgeduet_server.strategies.catalogue import make_strategy
        from edgeduet_shared.experiment import experiment_for

        experiment = experiment_for(config.scenario_json, 0)
        experiment.features(make_strategy(method, {}, resolved, experiment).parts)
    elif engine == "ray":
        from edgeduet_sim.engines.ray_engine import run_edgeduet

        run_edgeduet(config)
    else:
        from edgeduet_sim.engines.in_process import InProcessGrid, edgeduet_clients

        block = BLOCK if engine.endswith("blocks") else 1
        with InProcessGrid(edgeduet_clients(config, block_size=block)) as grid:
            serve(grid, config)


def measure(engine: str, method: str, clients: int, rounds: int) -> Cost:
    """Do one run in a process of its own and measure it with everything it starts."""
    with tempfile.TemporaryDirectory(prefix="edgeduet-bench-") as name:
        folder = Path(name) / "run"
        started = time.monotonic()
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        meter = _Meter(_start(engine, method, clients, rounds, folder, mark), mark)
        meter.follow()
        wall = time.monotonic() - started
        events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        trained = [event for event in events if event["event"] == "round"]
        if any(event["skipped"] or event["rejected"].keys() - {"zero-examples"} for event in trained):
            raise SystemExit(f"{engine}, {clients} clients: not a clean run, nothing to compare")
        steady = trained[1:] or trained
        weights = max((folder / "checkpoints").glob("state-*")).read_bytes()
        return Cost(
            engine=engine,
            method=method,
            clients=clients,
            rounds=rounds,
            wall=wall,
            cpu=meter.cpu,
            memory=meter.memory,
            processes=meter.processes,
            round_seconds=sum(event["timing"]["seconds"] for event in steady) / (clients * len(steady)),
            weights=hashlib.sha256(weights).hexdigest()[:12],
        )


def _start(engine: str, method: str, clients: int, rounds: int, folder: Path, mark: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--one", engine, "--methods", method, "--clients", str(clients)]
    environment = {
        **os.environ,
        MARK: mark,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.Popen([*command, "--rounds", str(rounds), "--folder", str(folder)], env=environment)


class _Meter:
    """Follows a process and all others that carry its mark in their environment, however they are related."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self._process = process
        self._mark = mark
        self._known: dict[int, psutil.Process] = {}
        self._strangers: set[int] = set()
        self._cpu: dict[int, float] = {}
        self.memory = 0
        self.processes = 0

    @property
    def cpu(self) -> float:
        """CPU seconds of all processes seen, user and system."""
        return sum(self._cpu.values())

    def follow(self) -> None:
        """Look five times a second (memory, which is dear to ask for, once a second) until the process ends."""
        tick = 0
        while self._process.poll() is None:
            self._meet()
            members = [member for member in list(self._known.values()) if self._note_cpu(member)]
            self.processes = max(self.processes, len(members))
            if tick % 5 == 0:
                self.memory = max(self.memory, resident([member.pid for member in members]))
            tick += 1
            time.sleep(0.2)
        if self._process.returncode != 0:
            raise SystemExit(f"the run failed with exit code {self._process.returncode}")

    def _meet(self) -> None:
        for pid in psutil.pids():
            if pid in self._known or pid in self._strangers:
                continue
            try:
                member = psutil.Process(pid)
                ours = member.environ().get(MARK) == self._mark
            except psutil.Error:
                continue
            if ours:
                self._known[pid] = member
            elif time.time() - member.create_time() > 1:
                self._strangers.add(pid)  # younger ones may still be about to load their program

    def _note_cpu(self, member: psutil.Process) -> bool:
        try:
            times = member.cpu_times()
        except psutil.Error:
            self._known.pop(member.pid, None) if not member.is_running() else None
            return False
        self._cpu[member.pid] = times.user + times.system
        return True


def resident(pids: Sequence[int]) -> int:
    """Bytes that processes hold together, whoever else maps the same files.

    Pages of a file count once per group: private ones of every process, and of the shared ones, per mapping,
    as many as the process that holds most of them (which ones they are, nobody says). Everything else counts
    as the kernel shares it out.
    """
    total = 0
    shared: dict[tuple[str, str], int] = {}
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps").read_text()
        except OSError:  # it has ended
            continue
        for file, offset, sizes in _mappings(text):
            if file.startswith("/") and not file.startswith(("/dev/", "/memfd:")):
                total += sizes["Private_Clean"] + sizes["Private_Dirty"]
                held = sizes["Shared_Clean"] + sizes["Shared_Dirty"]
                shared[file, offset] = max(shared.get((file, offset), 0), held)
            else:
                total += sizes["Pss"]
    return 1024 * (total + sum(shared.values()))


_SIZES = ("Pss", "Private_Clean", "Private_Dirty", "Shared_Clean", "Shared_Dirty")


def _mappings(smaps: str) -> Iterator[tuple[str, str, dict[str, int]]]:
    """File, offset in it and sizes in KiB of every mapping listed in ``/proc/PID/smaps``."""
    file, offset, sizes = "", "", dict.fromkeys(_SIZES, 0)
    for line in smaps.splitlines():
        first, *rest = line.split(maxsplit=5)
        if first[0].islower() or first[0].isdigit():  # 7f12-7f34 r-xp 00001000 fe:00 1234 /usr/lib/...
            yield file, offset, sizes
            offset, file = rest[1], rest[4] if len(rest) > 4 else ""
            sizes = dict.fromkeys(_SIZES, 0)
        elif first[:-1] in sizes:
            sizes[first[:-1]] = int(rest[0])
    yield file, offset, sizes


def table(costs: Sequence[Cost]) -> str:
    """Return the costs as text."""
    lines = [
        f"{'clients':>7}  {'engine':<20} {'wall s':>8} {'CPU s':>8} {'CPU ms per':>11} {'wall ms per':>12} "
        f"{'memory':>9} {'proc.':>5}  weights",
        f"{'':>7}  {'':<20} {'':>8} {'':>8} {'client-rd.':>11} {'client-rd.':>12} {'MB':>9}",
    ]
    lines += [
        f"{cost.clients:>7}  {cost.engine:<20} {cost.wall:>8.1f} {cost.cpu:>8.1f} "
        f"{1000 * cost.cpu / (cost.clients * cost.rounds):>11.1f} {1000 * cost.round_seconds:>12.2f} "
        f"{cost.memory / 1e6:>9.0f} {cost.processes:>5}  {cost.weights}"
        for cost in costs
    ]
    return "\n".join(lines)


def ratios(costs: Sequence[Cost]) -> dict[str, float]:
    """Return what Ray costs more, per number of clients, and how flat the cost per client and round is."""
    by = {(cost.engine, cost.clients): cost for cost in costs}
    result: dict[str, float] = {}
    for engine, clients in by:
        ray, here = by.get(("ray", clients)), by[engine, clients]
        if ray is not None and engine != "ray":
            result[f"{clients} clients: ray / {engine}: CPU"] = ray.cpu / here.cpu
            result[f"{clients} clients: ray / {engine}: memory"] = ray.memory / here.memory
            result[f"{clients} clients: ray / {engine}: wall"] = ray.wall / here.wall
    for engine in ENGINES:
        sizes = sorted(clients for name, clients in by if name == engine)
        for small, large in itertools.pairwise(sizes):
            name = f"{engine}: cost per client and round, {large} / {small} clients"
            result[name] = by[engine, large].round_seconds / by[engine, small].round_seconds
            if engine != "ray" and ("ray", large) in by and ("ray", small) in by:
                # What is left when start-up (imports, workers, Ray's own processes) is taken away.
                name = f"{large} against {small} clients: ray / {engine}: added CPU"
                added = by[engine, large].cpu - by[engine, small].cpu
                result[name] = (by["ray", large].cpu - by["ray", small].cpu) / added
    return result


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 clients only, 2 rounds")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--methods", nargs="+", default=["fedavg-adapter"], help="compared method by method")
    parser.add_argument("--out", type=Path, default=Path("engine_bench.json"), help="results as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_here(options.one, options.methods[0], options.clients[0], options.rounds, options.folder)
        return
    clients, rounds = ([10], 2) if options.quick else (options.clients, options.rounds)
    report = []
    for method in options.methods:
        costs: list[Cost] = []
        for count in clients:
            if _start("prepare", method, count, rounds, Path(), "none").wait() != 0:
                raise SystemExit(f"{count} clients: the images cannot be prepared")
            for engine in options.engines:
                costs.append(measure(engine, method, count, rounds))
                print(table(costs[-1:]).splitlines()[-1], flush=True)
        print(f"\n{method}, {rounds} rounds\n{table(costs)}\n")
        for name, ratio in ratios(costs).items():
            print(f"{name:<72} {ratio:6.1f}")
        report.append({"method": method, "costs": [asdict(cost) for cost in costs], "ratios": ratios(costs)})
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
