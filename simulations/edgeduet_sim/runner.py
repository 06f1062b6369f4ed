"""Run one method on one scenario with one seed, or many of them, from resolved configuration to summary."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeduet_server.app import serve
from edgeduet_server.recorder import Listener
from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_server.strategies.strategy import Strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.data.own_images import client_folder
from edgeduet_shared.data.split import save_split
from edgeduet_shared.errors import ConfigError, EdgeDuetError, RunStopped, nearest
from edgeduet_shared.evaluation import evaluate_held_out, evaluate_rows, predictor
from edgeduet_shared.experiment import Experiment, OwnExperiment, experiment_for
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_shared.metrics import METRICS, format_value
from edgeduet_shared.plan import Parts
from edgeduet_shared.run_config import RunConfig
from edgeduet_sim.budget import count_budget
from edgeduet_sim.drafter_results import DRAFTER_COLUMNS, outcome
from edgeduet_sim.drafter_runs import drafter_facts
from edgeduet_sim.progress import Narrator, RunTitle
from edgeduet_sim.results import FORMAT, Run, RunFolder, is_finished, load_run, run_digest, run_folder, without_nan
from edgeduet_sim.tensorboard_events import TensorBoardEvents
from edgeduet_sim.versions import git_revision, versions

log = logging.getLogger("edgeduet.sim")

ENGINES = ("in-process", "ray")
AUTOMATIC_BLOCK = 32
"""Clients trained together unless told otherwise: more gain little and cost memory."""

ABLATIONS = (
    "fed-duet:semantic=false",
    "fed-duet:parametric=false",
    "fed-duet:fusion=false",
    "fed-duet:dispatch=random",
    "fed-duet:consistency=0",
    "fed-duet:stability=0",
    "fed-duet:generic=0",
    "fed-duet:retention=0",
    "fed-duet:rehearsal=0",
    "fed-duet:pool_ema=0",
)
"""fed-duet with one part taken away each (``compare --ablate``)."""

SUMMARY_LINES = (
    "avg",
    "last",
    "forgetting",
    "bwt",
    "fwt",
    "zero_shot_retention",
    "personal",
    "personal_worst",
    "harmonic",
)


@dataclass(frozen=True)
class EngineSetup:
    """What runs the clients; never changes a number."""

    engine: str = "in-process"
    block: int = 0
    workers: int = 0

    @classmethod
    def parse(cls, engine: str, *, block: int = 0, workers: int = 0) -> EngineSetup:
        """Check the engine's name.

        Raises:
            ConfigError: no such engine.
        """
        if engine not in ENGINES:
            raise ConfigError(f"--engine {engine}: unknown engine{nearest(engine, ENGINES)}")
        return cls(engine, block, workers)


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    scenario: Scenario
    method: MethodSpec
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """How the run is called on the screen."""
        return f"{self.method}, seed {self.seed}"

    @property
    def digest(self) -> str:
        """Identifies what the run computes."""
        return run_digest(self.scenario, self.method, self.seed)

    @property
    def split_file(self) -> Path:
        """The split that all methods of one scenario and seed below the same folder read."""
        return self.folder.parent / "splits" / f"{self.scenario.name}-seed{self.seed}-{self.scenario.digest()[:8]}.json"

    def run_config(self, setup: EngineSetup, *, resume: bool) -> RunConfig:
        """Return the configuration both Flower apps read."""
        return RunConfig(
            scenario=self.scenario,
            method=self.method.name,
            options=dict(self.method.options),
            seed=self.seed,
            run_dir=self.folder.absolute(),
            run_name=self.digest,
            split_file=str(self.split_file.absolute()),
            # Ray's workers share no memory, so their clients keep personal state on disk.
            personal_dir=str(self.folder.absolute() / "personal") if setup.engine == "ray" else "",
            resume=resume,
        )


def make_job(scenario: Scenario, method: MethodSpec, seed: int, out: Path) -> Job:
    """Return the run of ``method`` on ``scenario`` with ``seed`` in its own folder below ``out``."""
    return Job(scenario, method, seed, run_folder(out, scenario, method, seed))


def with_ablations(specs: Sequence[MethodSpec]) -> tuple[MethodSpec, ...]:
    """Add fed-duet with each of its parts taken away, where not already there."""
    known = {str(spec) for spec in specs}
    return (*specs, *(MethodSpec.parse(text) for text in ABLATIONS if text not in known))


def run_one(
    job: Job, setup: EngineSetup, narrator: Narrator, *, resume: bool = False, command: Sequence[str] = ()
) -> Run:
    """Make one run: claim its folder, load data and backbone, train all stages, derive the summary.

    Args:
        job: what to run.
        setup: what runs the clients.
        narrator: shows what happens.
        resume: go on with an interrupted run in the folder.
        command: the command line, kept with the result.

    Raises:
        EdgeDuetError: one line for the user; a run that could not begin leaves no folder behind.
        RunStopped: interrupted; ``--resume`` goes on.
    """
    folder = RunFolder(job.folder, job.digest, resume=resume)
    config = job.run_config(setup, resume=folder.resumed)
    try:
        experiment = experiment_for(config.scenario_json, config.seed, config.split_file)
        strategy = make_strategy(job.method.name, job.method.options, job.scenario, experiment)
        title = _prepare(job, experiment, strategy, folder, setup, narrator, command)
    except BaseException:
        if not folder.resumed:
            folder.abandon()
        raise
    narrator.begin(title)
    board = TensorBoardEvents(folder.tensorboard, title)
    try:
        with narrator:
            _train(config, setup, [board, lambda event: narrator.event(title, event)])
            numbers = folder.finish()
            narrator.event(title, {"event": "summary", "folder": str(folder.path), "numbers": without_nan(numbers)})
            run = load_run(folder.path)
            narrator.end(title, outcome_text(run))
    except (EdgeDuetError, KeyboardInterrupt) as error:
        narrator.end(title, f"stopped: {error}" if str(error) else "stopped")
        raise
    finally:
        board.close()
    return run


def _prepare(
    job: Job,
    experiment: Experiment,
    strategy: Strategy,
    folder: RunFolder,
    setup: EngineSetup,
    narrator: Narrator,
    command: Sequence[str],
) -> RunTitle:
    """Load what the run needs, say what it will be, and write its configuration."""
    if job.scenario.learns == "drafter":
        return _prepare_drafters(job, strategy, folder, setup, narrator, command)
    scenario, split = job.scenario, experiment.split
    views = client_views(experiment)
    skipped = sum(view.table.skipped for view in views)
    if skipped:
        narrator.message(f"left out {skipped} images that cannot be read (--skip-corrupt)")
    for view in views:
        view.features(strategy.parts)
    reference = zero_shot_reference(views)
    budget = count_budget(strategy, len(split.tasks))
    narrator.message(f"{job.name}\n{budget.text()}")
    title = RunTitle(
        name=job.name,
        kind=scenario.stream.kind,
        tasks=tuple(task.name for task in split.tasks),
        rounds=scenario.federation.rounds,
        clients=scenario.federation.clients,
    )
    if not job.split_file.exists():
        # The first method of a scenario and seed writes the split, the others read it.
        job.split_file.parent.mkdir(parents=True, exist_ok=True)
        save_split(split, job.split_file)
    if not folder.resumed:
        shutil.copyfile(job.split_file, folder.split)
        folder.begin(
            {
                **_identity(job, setup, command),
                "backbone": {"name": experiment.backbone.name, "fingerprint": experiment.backbone.fingerprint},
                "split": split.digest,
                "data": {
                    "source": scenario.data.source,
                    "fingerprint": _fingerprint(views),
                    "images": sum(len(view.table) for view in views),
                    "classes": len(experiment.table.class_names),
                    "domains": list(experiment.table.domain_names),
                    "skipped": skipped,
                },
                "tasks": list(title.tasks),
                "client_images": [
                    sum(len(task[client]) for view in views for task in view.split.train)
                    for client in range(scenario.federation.clients)
                ],
                "parameters": budget.as_record(),
                "zero_shot": reference,
            }
        )
    return title


def _prepare_drafters(
    job: Job, strategy: Strategy, folder: RunFolder, setup: EngineSetup, narrator: Narrator, command: Sequence[str]
) -> RunTitle:
    """As :func:`_prepare`, where clients train drafters; the first run of a scenario has the target read its texts."""
    scenario = job.scenario
    facts = drafter_facts(scenario, strategy, job.seed, narrator.message)
    narrator.message(f"{job.name}\n{facts.budget.text()}")
    title = RunTitle(
        name=job.name,
        kind=scenario.stream.kind,
        tasks=("drafting",),
        rounds=scenario.federation.rounds,
        clients=scenario.federation.clients,
    )
    if not folder.resumed:
        folder.begin({**_identity(job, setup, command), **facts.as_record(), "tasks": list(title.tasks)})
    return title


def _identity(job: Job, setup: EngineSetup, command: Sequence[str]) -> dict[str, Any]:
    """What ``config.json`` says of any run."""
    return {
        "format": FORMAT,
        "digest": job.digest,
        "scenario": job.scenario.model_dump(mode="json"),
        "method": job.method.name,
        "options": dict(job.method.options),
        "seed": job.seed,
        "engine": {"name": setup.engine, "block": setup.block, "workers": setup.workers},
        "versions": versions(),
        "git": git_revision(),
        "command": list(command),
    }


def client_views(experiment: Experiment) -> list[Experiment]:
    """Return the experiments that hold images: the one of all clients, or one each where images lie on the devices."""
    if not experiment.scenario.data.on_devices:
        return [experiment]
    clients, source = range(experiment.scenario.federation.clients), experiment.scenario.data.source
    return [OwnExperiment(experiment, client, client_folder(source, client)) for client in clients]


def _fingerprint(views: Sequence[Experiment]) -> str:
    """Identify the images of a run."""
    if len(views) == 1:
        return views[0].table.fingerprint
    return hashlib.sha256("".join(view.table.fingerprint for view in views).encode()).hexdigest()[:16]


def zero_shot_reference(views: Sequence[Experiment]) -> dict[str, Any]:
    """Count what the frozen backbone with the hand-written template gets right: b_j, and held-out classes.

    Task j is scored over the classes of tasks 0..j.
    """
    parts, split = Parts(), views[0].split
    predict = predictor(views[0].model(parts), {}, len(split.class_names))
    correct = np.sum([evaluate_rows(predict, view, parts, 0, view.split.test) for view in views], axis=0)
    held_out = [evaluate_held_out(predict, view, parts) for view in views]
    return {
        "correct": correct.tolist(),
        "totals": np.sum([[len(rows) for rows in view.split.test] for view in views], axis=0).tolist(),
        "held_out": held_out[0] if len(views) == 1 else [-1, 0],
    }


def notice(scenario: Scenario) -> str:
    """Say which data and backbone are in use, and how to get the other."""
    if scenario.learns == "drafter":
        return f"drafters of {scenario.drafter.target}; domains: {', '.join(scenario.drafter.domains)}"
    world = scenario.data.source == "world"
    source = "the generated world" if world else scenario.data.source
    other = "real images: --data PATH or --data hub:NAME" if world else "the generated world: --data world"
    return f"data: {source}; backbone: {scenario.model.backbone} ({other}; another backbone: --set model.backbone=NAME)"


def _train(config: RunConfig, setup: EngineSetup, listeners: Sequence[Listener]) -> None:
    """Run all stages on the chosen engine."""
    if setup.engine == "ray":
        from edgeduet_sim.engines.ray_engine import run_edgeduet

        run_edgeduet(config, listeners=listeners)
        return
    from edgeduet_sim.engines.in_process import InProcessGrid, edgeduet_clients

    clients = edgeduet_clients(config, block_size=setup.block or AUTOMATIC_BLOCK)
    with InProcessGrid(clients, workers=setup.workers) as grid:
        # This process may have made the same run before: personal states come from the checkpoint or not at all.
        grid.restore({})
        try:
            serve(grid, config, listeners=listeners)
        finally:
            if not setup.workers:  # worker processes take their states with them
                grid.restore({})


def summary_text(run: Run) -> str:
    """Return the numbers of a run, one per line."""
    summary = run.summary()
    lines = DRAFTER_COLUMNS if run.scenario.learns == "drafter" else SUMMARY_LINES
    names = (*lines, "bytes_up", "bytes_down", "seconds")
    return "\n".join(
        f"{METRICS[name].title:>14} {format_value(name, summary[name]):>9}  {METRICS[name].meaning}" for name in names
    )


def outcome_text(run: Run) -> str:
    """Return how a run came out, in one line."""
    s = run.summary()
    if run.scenario.learns == "drafter":
        return outcome(s)
    moved = f"up {format_value('bytes_up', s['bytes_up'])}, down {format_value('bytes_down', s['bytes_down'])}"
    return (
        f"Avg {format_value('avg', s['avg'])}, Last {format_value('last', s['last'])}, "
        f"Forgetting {format_value('forgetting', s['forgetting'])}, "
        f"Personal {format_value('personal', s['personal'])}, {moved}, {s['seconds']:.0f} s"
    )


# --- many runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of several jobs."""

    runs: tuple[Run, ...]
    failed: Mapping[str, str]

    def raise_failures(self) -> None:
        """Raise one error naming the runs that failed, if any did."""
        if self.failed:
            name, reason = next(iter(self.failed.items()))
            total = len(self.failed) + len(self.runs)
            more = f" (and {len(self.failed) - 1} more)" if len(self.failed) > 1 else ""
            raise EdgeDuetError(
                f"{len(self.failed)} of {total} runs failed: {name}: {reason}{more}; the same command tries again"
            )


def run_all(
    jobs: Sequence[Job], setup: EngineSetup, narrator: Narrator, *, processes: int = 1, command: Sequence[str] = ()
) -> Outcome:
    """Make every run that is not finished yet; go on with interrupted ones.

    All methods and options are checked before the first run starts. A run that fails does not stop the
    others.

    Raises:
        ConfigError: an unknown method or option.
        RunStopped: interrupted.
    """
    for job in jobs:
        # Building a strategy loads no data: it only checks its options.
        config = job.run_config(setup, resume=False)
        make_strategy(job.method.name, job.method.options, job.scenario, experiment_for(config.scenario_json, job.seed))
    left = [job for job in jobs if not is_finished(job.folder)]
    if len(left) < len(jobs):
        narrator.message(f"{len(jobs) - len(left)} of {len(jobs)} runs are finished already and kept")
    failed: dict[str, str] = {}
    ended: list[str] = []
    started = time.monotonic()

    def attempt(job: Job, make: Callable[[Job], object]) -> None:
        try:
            make(job)
        except RunStopped:
            raise
        except EdgeDuetError as error:
            failed[job.name] = str(error)
            narrator.message(f"{job.name} FAILED: {error}")
        ended.append(job.name)
        if len(ended) < len(left):
            rest = (time.monotonic() - started) / len(ended) * (len(left) - len(ended))
            narrator.message(f"{len(ended)} of {len(left)} runs done, about {_duration(rest)} to go")

    if processes <= 1 or len(left) <= 1:
        for job in left:
            attempt(job, lambda job: run_one(job, setup, narrator, resume=True, command=command))
    else:
        _run_in_processes(left, setup, narrator, processes, command, attempt)
    return Outcome(tuple(load_run(job.folder) for job in jobs if is_finished(job.folder)), failed)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _run_in_processes(
    jobs: Sequence[Job],
    setup: EngineSetup,
    narrator: Narrator,
    processes: int,
    command: Sequence[str],
    attempt: Callable[[Job, Callable[[Job], object]], None],
) -> None:
    """Run each job in a process of its own (:mod:`edgeduet_sim.one_run`), several at a time."""
    children: set[subprocess.Popen[str]] = set()
    lock = threading.Lock()

    def make(job: Job) -> None:
        request = {
            "scenario": job.scenario.model_dump(mode="json"),
            "method": job.method.name,
            "options": dict(job.method.options),
            "seed": job.seed,
            "folder": str(job.folder.absolute()),
            "engine": [setup.engine, setup.block, setup.workers],
            "command": list(command),
        }
        child = subprocess.Popen(
            [sys.executable, "-m", "edgeduet_sim.one_run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with lock:
            children.add(child)
        _follow(child, json.dumps(request), narrator, lock)
        with lock:
            children.discard(child)

    with ThreadPoolExecutor(processes) as pool, narrator:
        futures = [pool.submit(attempt, job, make) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            with lock:
                for child in children:
                    child.send_signal(signal.SIGINT)
            raise


def _follow(child: subprocess.Popen[str], request: str, narrator: Narrator, lock: threading.Lock) -> None:
    """Feed a child its job, pass its events on, and raise what it reports."""
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(child.stderr or ()), daemon=True)
    reader.start()
    child.stdin.write(request)
    child.stdin.close()
    title: RunTitle | None = None
    for line in child.stdout:
        event = json.loads(line)
        with lock:
            if event["event"] == "run":
                title = RunTitle(event["run"], event["kind"], tuple(event["tasks"]), event["rounds"], event["clients"])
                narrator.begin(title)
            elif title is not None and event["event"] == "end":
                narrator.end(title, event["text"])
            elif title is not None:
                narrator.event(title, event)
    code = child.wait()
    reader.join()
    if code == 130 or code == -signal.SIGINT:
        raise RunStopped("interrupted; the same command goes on with what is left")
    if code != 0:
        errors = [line.strip().removeprefix("error: ") for line in said if line.startswith("error: ")]
        raise EdgeDuetError(errors[-1] if errors else f"its process ended with exit code {code}; {''.join(said[-3:])}")
