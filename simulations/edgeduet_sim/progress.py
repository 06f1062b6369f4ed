"""Show runs while they go on: live on a terminal, a line per round elsewhere, or JSON events.

Input are the events of the round loop (``edgeduet_server.round_loop``): ``run-start``,
``stage-start``, ``round``, ``evaluate``, ``run-end``. Stages and rounds are 1-based in what people read.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from edgeduet_shared.metrics import Kind, accuracies, format_bytes, mean
from edgeduet_sim.drafter_results import evaluation_line


@dataclass(frozen=True)
class RunTitle:
    """What a viewer needs to know of a run.

    Attributes:
        name: for example ``fed-duet, seed 0``; unique among the runs shown together.
        kind: stream kind, which decides how a stage accuracy is formed.
        tasks: names of the tasks; one stage each.
        rounds: rounds per stage.
        clients: number of clients.
    """

    name: str
    kind: Kind
    tasks: tuple[str, ...]
    rounds: int
    clients: int

    @property
    def steps(self) -> int:
        """Rounds and evaluations of the whole run."""
        return len(self.tasks) * (self.rounds + 1)


class Narrator(Protocol):
    """Shows one or several runs."""

    def message(self, text: str) -> None:
        """Show a line for people."""

    def begin(self, run: RunTitle) -> None:
        """A run starts, or goes on."""

    def event(self, run: RunTitle, event: Mapping[str, Any]) -> None:
        """Something happened in ``run``."""

    def end(self, run: RunTitle, text: str) -> None:
        """``run`` is over; ``text`` says how it came out."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def seen_accuracy(run: RunTitle, event: Mapping[str, Any]) -> tuple[float, float]:
    """Return (global, mean personal) accuracy over the tasks seen so far, from an ``evaluate`` event."""
    seen = event["stage"] + 1

    def over_tasks(correct: Any, totals: Any) -> float:
        weights = totals[:seen] if run.kind == "class-incremental" else None
        return mean(accuracies(correct[:seen], totals[:seen]), weights)

    common = event.get("common")
    general = over_tasks(common["correct"], common["totals"]) if common else float("nan")
    personal = [over_tasks(reply["personal"], reply["totals"]) for reply in event["clients"]]
    return general, mean(np.asarray(personal, dtype=np.float64))


def round_text(run: RunTitle, event: Mapping[str, Any]) -> str:
    """One line about a ``round`` event."""
    asked, usable = len(event["asked"]), len(event.get("clients", ()))
    parts = [f"stage {event['stage'] + 1}/{len(run.tasks)}", f"round {event['round'] + 1}/{run.rounds}"]
    if not asked:
        return ", ".join([*parts, "nothing to train"])
    parts.append(f"clients {usable}/{asked}")
    if event.get("loss") is not None:
        parts += [f"loss {event['loss']:.3f}", f"train acc {_percent(event['accuracy'])}"]
    parts.append(f"up {format_bytes(event['bytes_up'])}, down {format_bytes(event['bytes_down'])}")
    if event["skipped"]:
        parts.append("SKIPPED")
    if event.get("rejected"):
        parts.append("unusable: " + ", ".join(f"{count} {reason}" for reason, count in event["rejected"].items()))
    return ", ".join(parts)


def evaluation_text(run: RunTitle, event: Mapping[str, Any]) -> str:
    """One line about an ``evaluate`` event."""
    if any(reply.get("figures") for reply in event["clients"]):
        return f"drafters judged: {evaluation_line(event)}"
    general, personal = seen_accuracy(run, event)
    stage = event["stage"]
    return (
        f"stage {stage + 1}/{len(run.tasks)} ({run.tasks[stage]}) done: global {_percent(general)}, "
        f"personal {_percent(personal)} on all tasks so far"
    )


def _percent(value: float) -> str:
    return "n/a" if value != value else f"{100 * value:.1f} %"


class Silent:
    """Shows nothing but messages (``--quiet``: not even those)."""

    def __init__(self, *, messages: bool = False) -> None:
        self._messages = messages

    def message(self, text: str) -> None:
        """Print the line, unless quiet."""
        if self._messages:
            print(text, flush=True)

    def begin(self, run: RunTitle) -> None:
        """Say nothing."""

    def event(self, run: RunTitle, event: Mapping[str, Any]) -> None:
        """Say nothing."""

    def end(self, run: RunTitle, text: str) -> None:
        """Say nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""


class Lines(Silent):
    """One quiet line per round: for logs and pipes."""

    def __init__(self) -> None:
        super().__init__(messages=True)

    def event(self, run: RunTitle, event: Mapping[str, Any]) -> None:
        """Print rounds that asked something of clients, and evaluations."""
        if event["event"] == "round" and event["asked"]:
            self.message(f"{run.name}: {round_text(run, event)}")
        elif event["event"] == "evaluate":
            self.message(f"{run.name}: {evaluation_text(run, event)}")

    def end(self, run: RunTitle, text: str) -> None:
        """Print how the run came out."""
        self.message(f"{run.name}: {text}")


class JsonEvents(Silent):
    """Every event as one JSON object per line on stdout, with the run's name; messages go to stderr."""

    def message(self, text: str) -> None:
        """Print to stderr, so that stdout holds nothing but JSON."""
        print(text, file=sys.stderr, flush=True)

    def begin(self, run: RunTitle) -> None:
        """Announce the run with what is needed to read its events."""
        self._write(
            run,
            {"event": "run", "kind": run.kind, "tasks": run.tasks, "rounds": run.rounds, "clients": run.clients},
        )

    def event(self, run: RunTitle, event: Mapping[str, Any]) -> None:
        """Pass the event on."""
        self._write(run, event)

    def end(self, run: RunTitle, text: str) -> None:
        """Announce the end."""
        self._write(run, {"event": "end", "text": text})

    def _write(self, run: RunTitle, event: Mapping[str, Any]) -> None:
        print(json.dumps({"run": run.name, **event}, allow_nan=False), flush=True)


@dataclass
class _Shown:
    """A run on the screen."""

    task: TaskID
    bytes: int = 0
    accuracy: float = field(default=float("nan"))


class Live:
    """Live bars on a terminal: one per run that is going on, with stage, round, clients, loss, accuracy, bytes, ETA."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: dict[str, _Shown] = {}
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=18),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )

    def message(self, text: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(text, markup=False, highlight=False)

    def begin(self, run: RunTitle) -> None:
        """Add a bar."""
        self._shown[run.name] = _Shown(self._bars.add_task(run.name, total=run.steps, state="starting"))

    def event(self, run: RunTitle, event: Mapping[str, Any]) -> None:
        """Move the bar."""
        shown = self._shown[run.name]
        kind = event["event"]
        if kind not in ("round", "evaluate"):
            return
        stage, done = event["stage"], event["round"] + 1 if kind == "round" else run.rounds + 1
        shown.bytes += event.get("bytes_up", 0) + event.get("bytes_down", 0) if kind == "round" else 0
        state = [f"stage {stage + 1}/{len(run.tasks)}"]
        if kind == "round":
            usable, asked = len(event.get("clients", ())), len(event["asked"])
            state += [f"round {done}/{run.rounds}", f"clients {usable}/{asked}"]
            if event.get("loss") is not None:
                state.append(f"loss {event['loss']:.2f}")
            if event["skipped"]:
                self.message(f"{run.name}: {round_text(run, event)}")
        else:
            shown.accuracy, _ = seen_accuracy(run, event)
            self.message(f"{run.name}: {evaluation_text(run, event)}")
        state += [f"acc {_percent(shown.accuracy)}", format_bytes(shown.bytes)]
        self._bars.update(shown.task, completed=stage * (run.rounds + 1) + done, state="  ".join(state))

    def end(self, run: RunTitle, text: str) -> None:
        """Remove the bar, keep a line."""
        shown = self._shown.pop(run.name, None)
        if shown is not None:
            self._bars.remove_task(shown.task)
        self.message(f"{run.name}: {text}")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def make_narrator(*, as_json: bool, quiet: bool, console: Console | None = None) -> Narrator:
    """Choose how to show runs: JSON events, nothing, live bars on a terminal, or one line per round."""
    if as_json:
        return JsonEvents()
    if quiet:
        return Silent()
    console = console or Console()
    return Live(console) if console.is_terminal else Lines()


@contextmanager
def warnings_shown(narrator: Narrator) -> Iterator[None]:
    """Show what our code logs as a warning as one line of the narrator; Flower's own log stays silent.

    A client's traceback is in the events of the run; here its first line is enough.
    """

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            narrator.message(f"{record.levelname.lower()}: {record.getMessage().splitlines()[0]}")

    handler = Shown(logging.WARNING)
    ours = [logging.getLogger(name) for name in ("edgeduet", "edgeduet_shared")]
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.ERROR)
    for logger in ours:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        flower.setLevel(level)
        for logger in ours:
            logger.removeHandler(handler)
            logger.propagate = True
