"""The folder of one run: written while it runs, read by reports.

    config.json     what was run: resolved scenario, method, options, seed, versions, command
    split.json      who holds which images (see edgeduet_shared.data.split)
    metrics.jsonl   one event per line: rounds, evaluations with their counts, skipped rounds
    summary.json    every metric of the finished run, derived from metrics.jsonl
    checkpoints/    server state after each round, and the clients' personal states
    tensorboard/    the same numbers for TensorBoard
    done            written last; a folder without it holds an unfinished run

T tasks (= stages), M clients.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeduet_server.recorder import read_events
from edgeduet_shared.atomic_files import atomic_write_json, atomic_write_text, write_failure
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import EdgeDuetError, StateError
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_shared.metrics import Evaluations, accuracies, summarise
from edgeduet_sim.drafter_results import figures_of
from edgeduet_sim.drafter_results import summary as drafter_summary

POOLED = ("centralised", "joint")
"""Methods that work on everybody's images at one place: bytes mean nothing for them."""

FORMAT = 1
CONFIG, SPLIT, EVENTS, SUMMARY, DONE = "config.json", "split.json", "metrics.jsonl", "summary.json", "done"


def run_digest(scenario: Scenario, method: MethodSpec, seed: int) -> str:
    """16 hex digits that identify what a run computes; equal digests mean equal results.

    The engine, the number of workers and the block size are left out: they must not change a result.
    """
    identity = {
        "format": FORMAT,
        "scenario": scenario.model_dump(mode="json"),
        "method": method.name,
        "options": dict(method.options),
        "seed": seed,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def run_folder(out: Path, scenario: Scenario, method: MethodSpec, seed: int) -> Path:
    """Return ``OUT/METHOD-seedN-DIGEST``: another configuration never meets the same folder."""
    return out / f"{method.slug}-seed{seed}-{run_digest(scenario, method, seed)[:8]}"


def is_finished(folder: Path) -> bool:
    """Whether ``folder`` holds a run that came to its end."""
    return (folder / DONE).is_file()


class RunFolder:
    """The folder of one run, claimed for writing before any work.

    It must be new, empty, or hold the very same run (``resume=True``). Events are written by the
    round loop's recorder to :attr:`events`; this class owns everything else.
    """

    def __init__(self, path: Path, digest: str, *, resume: bool) -> None:
        """Claim ``path`` for the run that ``digest`` identifies.

        Raises:
            EdgeDuetError: the folder cannot be written, or holds something else.
            StateError: it holds another run, or an unfinished one and ``resume`` is False.
        """
        self.path = path
        self._made = _missing_folders(path)
        self.resumed = _claim(path, digest, resume)

    @property
    def checkpoints(self) -> Path:
        """Where the server state of each round goes."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """The file of events."""
        return self.path / EVENTS

    @property
    def split(self) -> Path:
        """Where the resolved split goes."""
        return self.path / SPLIT

    @property
    def tensorboard(self) -> Path:
        """Where TensorBoard looks."""
        return self.path / "tensorboard"

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``: from here on the folder holds a run."""
        atomic_write_json(self.path / CONFIG, without_nan(config))

    def abandon(self) -> None:
        """Leave nothing behind when a run cannot even begin: remove the folders made for it, if still empty."""
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()

    def finish(self) -> dict[str, Any]:
        """Derive the summary from the recorded events, write it, and mark the run as finished."""
        summary = load_run(self.path).summary()
        atomic_write_json(self.path / SUMMARY, without_nan(summary))
        atomic_write_text(self.path / DONE, "finished\n")
        return summary


def _missing_folders(path: Path) -> tuple[Path, ...]:
    """Return ``path`` and its parents as far as they do not exist, innermost first."""
    return tuple(folder for folder in (path, *path.parents) if not folder.exists())


def _claim(path: Path, digest: str, resume: bool) -> bool:
    """Make sure ``path`` can hold this run; return whether it already holds the beginning of it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".write-test-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise write_failure(path, error) from error
    config = path / CONFIG
    if not config.is_file():
        if any(path.iterdir()):
            raise EdgeDuetError(f"{path} holds files that are not a run of edgeduet-sim; choose another --out")
        return False
    held = _read_json(config).get("digest")
    if held != digest:
        raise StateError(f"{path} holds another run (configuration {held}, this one is {digest}); choose another --out")
    if is_finished(path):
        raise StateError(f"{path} holds this run already, finished; see it with: edgeduet-sim report {path}")
    if not resume:
        raise StateError(f"{path} holds this run, interrupted; continue it with --resume, or remove the folder")
    return True


def without_nan(value: Any) -> Any:
    """Return ``value`` as JSON has words for it: NaN becomes null, numpy values become plain ones."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return without_nan(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [without_nan(item) for item in value]
    if isinstance(value, np.generic):
        return without_nan(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StateError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise StateError(f"{path}: damaged ({error}); remove the run's folder and run it again") from error
    if not isinstance(value, dict):
        raise StateError(f"{path}: damaged (not an object); remove the run's folder and run it again")
    return value


# --- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundRow:
    """One round as recorded. Losses and accuracies are means over the clients that answered, by their images."""

    stage: int
    round: int
    trained: tuple[str, ...]
    loss: float
    accuracy: float
    asked: int
    usable: int
    failures: Mapping[str, int]
    skipped: bool
    bytes_down: int
    bytes_up: int
    seconds: float
    dispatch: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class ClientCounts:
    """One client's evaluation after one stage: correct predictions and images per task, T entries each."""

    personal: tuple[int, ...]
    shared: tuple[int, ...]
    totals: tuple[int, ...]
    common: tuple[int, ...]
    common_totals: tuple[int, ...]


@dataclass(frozen=True)
class StageRow:
    """The evaluation after one stage: global model on the common test sets, and each client's counts.

    ``correct`` and ``totals`` are empty for methods without a global model (``local``). ``figures`` holds, by client,
    what clients with drafters measured.
    """

    stage: int
    correct: tuple[int, ...]
    totals: tuple[int, ...]
    held_out: tuple[int, int]
    clients: Mapping[int, ClientCounts]
    figures: Mapping[int, Mapping[str, float]]
    bytes_down: int
    bytes_up: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """A run read from its folder."""

    folder: Path
    config: Mapping[str, Any]
    finished: bool
    rounds: tuple[RoundRow, ...]
    stages: tuple[StageRow, ...]

    @property
    def scenario(self) -> Scenario:
        """The resolved scenario."""
        return Scenario.model_validate(self.config["scenario"])

    @property
    def method(self) -> MethodSpec:
        """Method and options."""
        return MethodSpec(self.config["method"], self.config["options"])

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.config["seed"])

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the tasks in stream order."""
        return tuple(self.config["tasks"])

    @property
    def failures(self) -> dict[str, int]:
        """Unusable or missing answers by reason, over all rounds."""
        total: dict[str, int] = {}
        for row in self.rounds:
            for reason, count in row.failures.items():
                total[reason] = total.get(reason, 0) + count
        return total

    @property
    def skipped_rounds(self) -> int:
        """Rounds without quorum."""
        return sum(row.skipped for row in self.rounds)

    def stage_bytes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return bytes (down, up) moved in the training rounds of each stage, shape (T,) each.

        Evaluation messages are not counted: a federation in use does not need them.
        """
        down, up = np.zeros((2, len(self.task_names)), np.int64)
        for row in self.rounds:
            down[row.stage] += row.bytes_down
            up[row.stage] += row.bytes_up
        return down, up

    @cached_property
    def evaluations(self) -> Evaluations:
        """The counts of all stages as arrays; stages that have not run are -1."""
        t, m = len(self.task_names), self.scenario.federation.clients
        correct = np.full((t, t), -1, np.int64)
        totals = np.zeros((t, t), np.int64)
        personal, shared, common = np.full((3, m, t, t), -1, np.int64)
        client_totals = np.zeros((m, t, t), np.int64)
        held_out = np.full(t, math.nan)
        for row in self.stages:
            if row.correct:
                correct[row.stage], totals[row.stage] = row.correct, row.totals
            held_out[row.stage] = accuracies(*row.held_out)
            for client, counts in row.clients.items():
                personal[client, row.stage] = counts.personal
                shared[client, row.stage] = counts.shared
                common[client, row.stage] = counts.common
                client_totals[client, row.stage] = counts.totals
                totals[row.stage] = np.maximum(totals[row.stage], counts.common_totals)
        reference = self.config.get("zero_shot") or {}
        return Evaluations(
            kind=self.scenario.stream.kind,
            correct_TT=correct,
            totals_TT=totals,
            personal_MTT=personal,
            shared_MTT=shared,
            client_totals_MTT=client_totals,
            common_MTT=common,
            client_images_M=np.asarray(self.config["client_images"], np.int64),
            held_out_T=held_out,
            zero_shot_T=accuracies(reference["correct"], reference["totals"]) if reference else np.full(t, math.nan),
            zero_shot_held_out=float(accuracies(*reference["held_out"])) if reference else math.nan,
        )

    def summary(self) -> dict[str, float]:
        """Return every number of the run by name; NaN where a value does not exist."""
        down, up = (
            (math.nan, math.nan) if self.method.name in POOLED else (float(part.sum()) for part in self.stage_bytes())
        )
        parameters = self.config["parameters"]
        if self.scenario.learns == "drafter":
            # A device cannot draft before it is handed what the last round made.
            down += sum(row.bytes_down for row in self.stages)
            numbers = drafter_summary(self)
        else:
            numbers = summarise(self.evaluations)
        return numbers | {
            "bytes_down": down,
            "bytes_up": up,
            "trainable": float(parameters["trainable"]),
            "uploaded": float(parameters["uploaded"]),
            "personal_parameters": float(parameters["personal"]),
            "seconds": sum(row.seconds for row in self.rounds) + sum(row.seconds for row in self.stages),
            "skipped_rounds": float(self.skipped_rounds),
            "failed_answers": float(sum(self.failures.values())),
        }


def load_run(folder: Path) -> Run:
    """Read a run folder, finished or not.

    Raises:
        StateError: no run lies there, or a file of it is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise StateError(f"{folder} is not a run folder (no {CONFIG}); see the folders under your --out")
    config = _read_json(folder / CONFIG)
    if config.get("format") != FORMAT:
        raise StateError(f"{folder}: has format {config.get('format')}, this version reads {FORMAT}")
    events = tuple(read_events(folder / EVENTS)) if (folder / EVENTS).is_file() else ()
    return Run(
        folder=folder,
        config=config,
        finished=is_finished(folder),
        rounds=tuple(_round_row(event) for event in events if event["event"] == "round"),
        stages=tuple(_stage_row(event) for event in events if event["event"] == "evaluate"),
    )


def find_runs(paths: Iterable[Path]) -> tuple[Run, ...]:
    """Read the runs at or below ``paths``, each once, sorted by folder.

    Raises:
        StateError: a path does not exist, or no run is found below it.
    """
    folders: set[Path] = set()
    for path in paths:
        found = {config.parent.resolve() for config in path.rglob(CONFIG)}
        if not found:
            raise StateError(f"no run found in {path}; 'edgeduet-sim run' and 'compare' print where theirs are")
        folders |= found
    return tuple(load_run(folder) for folder in sorted(folders))


def _round_row(event: Mapping[str, Any]) -> RoundRow:
    # A method that asks nothing of its clients (zero-shot) records little more than the round itself.
    return RoundRow(
        stage=event["stage"],
        round=event["round"],
        trained=tuple(event.get("trained", ())),
        loss=_number(event.get("loss")),
        accuracy=_number(event.get("accuracy")),
        asked=len(event["asked"]),
        usable=len(event.get("clients", ())),
        failures=dict(event.get("rejected", {})),
        skipped=bool(event["skipped"]),
        bytes_down=event.get("bytes_down", 0),
        bytes_up=event.get("bytes_up", 0),
        seconds=event.get("timing", {}).get("seconds", 0.0),
        dispatch={int(client): tuple(indices) for client, indices in event.get("dispatch", {}).items()},
    )


def _stage_row(event: Mapping[str, Any]) -> StageRow:
    common = event["common"] or {}
    return StageRow(
        stage=event["stage"],
        correct=tuple(common.get("correct", ())),
        totals=tuple(common.get("totals", ())),
        held_out=(common.get("held_out", -1), common.get("held_out_total", 0)),
        clients={
            reply["client"]: ClientCounts(
                personal=tuple(reply["personal"]),
                shared=tuple(reply["shared"]),
                totals=tuple(reply["totals"]),
                common=tuple(reply["personal_common"]),
                common_totals=tuple(reply["common_totals"]),
            )
            for reply in event["clients"]
        },
        figures=figures_of(event),
        bytes_down=event["bytes_down"],
        bytes_up=event["bytes_up"],
        seconds=event["timing"]["seconds"],
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
