"""Which answers the p-less benchmark draws: samplers, temperatures, seeds, questions, and in which order."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pless_quality_tasks import GradedTask

TEMPERATURES = (0.5, 1.0, 1.5, 2.0)
TOP_P_GRID = (0.9, 0.7, 0.5, 0.3)
MIN_P_GRID = (0.05, 0.1, 0.2, 0.4)
TUNED = {"top-p": TOP_P_GRID, "min-p": MIN_P_GRID}
"""Grids, least truncation first: of equally good values the first is taken."""
USUAL = ({"sampler": "top-p", "top_p": 0.9}, {"sampler": "min-p", "min_p": 0.1})
"""What the p-less paper compares with; in part 2 besides the tuned ones."""
ALWAYS: tuple[dict[str, Any], ...] = (
    {"sampler": "temperature"},
    {"sampler": "top-k", "top_k": 40},
    {"sampler": "p-less"},
    {"sampler": "p-less-norm"},
)
FREE_TOKENS = 40
FREE = "free text"


@dataclass(frozen=True)
class Size:
    """How much is measured: questions per task, openings, seeds."""

    tuning: int = 8
    questions: int = 24
    openings: int = 8
    seeds: int = 3


QUICK = Size(tuning=2, questions=3, openings=2, seeds=3)


@dataclass(frozen=True)
class Trial:
    """One answer to be drawn.

    Attributes:
        part: ``tuning``, a graded task's name with ``measured``, or free text.
        settings: of the sampler, without temperature and seed.
        temperature: ``None`` for greedy.
    """

    part: str
    task: str
    item: int
    settings: Mapping[str, Any]
    temperature: float | None
    seed: int

    @property
    def sampler(self) -> str:
        """The sampler and its setting, as the tables call it."""
        return sampler_label(self.settings)

    @property
    def judged_key(self) -> str:
        """What the log knows the judge's opinion of this trial by."""
        return f"judged/{self.key}"

    @property
    def key(self) -> str:
        """What the log knows this trial by."""
        return f"{self.part}/{self.task}/{self.item}/{self.sampler}/{self.temperature}/{self.seed}"

    @property
    def request_seed(self) -> int:
        """A seed that differs between questions and is shared by all samplers and temperatures."""
        return zlib.crc32(f"{self.task}/{self.item}/{self.seed}".encode())


def sampler_label(settings: Mapping[str, Any]) -> str:
    """Return a sampler and its setting, as the tables call them."""
    return " ".join(f"{value:g}" if isinstance(value, float | int) else str(value) for value in settings.values())


def tuning_trials(tasks: Sequence[GradedTask]) -> Iterator[Trial]:
    """Yield the trials that choose the values of top-p and min-p."""
    for task in tasks:
        for item in range(len(task.tuning)):
            for sampler, grid in TUNED.items():
                for value in grid:
                    settings = {"sampler": sampler, sampler.replace("-", "_"): value}
                    for temperature in TEMPERATURES:
                        yield Trial("tuning", task.name, item, settings, temperature, 0)


def measured_trials(tasks: Sequence[GradedTask], size: Size, tuned: Sequence[Mapping[str, Any]]) -> Iterator[Trial]:
    """Yield all trials of both parts, question by question in turn."""
    graded = (*ALWAYS, *tuned)
    free = (*ALWAYS, *tuned, *(usual for usual in USUAL if usual not in tuned))
    for item in range(max(size.questions, size.openings)):
        for task in tasks:
            if item < len(task.questions):
                yield from _all_samplers("measured", task.name, item, graded, size.seeds)
        # Openings are fewer and dearer: one for every third question.
        if item % 3 == 0 and item // 3 < size.openings:
            yield from _all_samplers("measured", FREE, item // 3, free, size.seeds)


def _all_samplers(
    part: str, task: str, item: int, samplers: Sequence[Mapping[str, Any]], seeds: int
) -> Iterator[Trial]:
    yield Trial(part, task, item, {"sampler": "greedy"}, None, 0)
    for seed in range(seeds):
        for settings in samplers:
            for temperature in TEMPERATURES:
                yield Trial(part, task, item, settings, temperature, seed)
