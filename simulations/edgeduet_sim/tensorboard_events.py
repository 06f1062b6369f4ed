"""Copy a run's events to TensorBoard while it goes on.

One step per round and one per evaluation: ``stage * (rounds + 1) + round``, with the evaluation as the
last round of its stage. A resumed run tells TensorBoard to forget the steps it repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgeduet_shared.metrics import accuracies
from edgeduet_sim.progress import RunTitle, seen_accuracy


class TensorBoardEvents:
    """A listener of the recorder; the file is opened with the first number."""

    def __init__(self, folder: Path, run: RunTitle) -> None:
        self._folder = folder
        self._run = run
        self._writer: Any = None

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write the numbers of a ``round`` or ``evaluate`` event; others have none."""
        numbers = {name: value for name, value in self._numbers(event) if not math.isnan(value)}
        if not numbers:
            return
        step = event["stage"] * (self._run.rounds + 1) + event.get("round", self._run.rounds)
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _numbers(self, event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        if event["event"] == "round":
            for name, key in (("train/loss", "loss"), ("train/accuracy", "accuracy")):
                if event.get(key) is not None:
                    yield name, float(event[key])
            for name, key in (("bytes/up", "bytes_up"), ("bytes/down", "bytes_down")):
                if key in event:
                    yield name, float(event[key])
        elif event["event"] == "evaluate":
            general, personal = seen_accuracy(self._run, event)
            yield "accuracy/global on tasks so far", general
            yield "accuracy/personal on tasks so far", personal
            if event.get("common"):
                values = accuracies(event["common"]["correct"], event["common"]["totals"])
                for task, value in zip(self._run.tasks, values, strict=True):
                    yield f"accuracy on task/{task}", float(value)
