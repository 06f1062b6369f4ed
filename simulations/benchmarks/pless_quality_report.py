"""Tables and picture of the p-less benchmark from its log."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from pless_quality_measures import Estimate, Values, difference, distinct, estimate, overlap, repetition
from pless_quality_trials import FREE, FREE_TOKENS, TEMPERATURES, TUNED, Size, Trial, sampler_label

P_LESS = "p-less"
GREEDY = "greedy"
HIGHEST_SHOWN = 200.0
"""Perplexities above are no text any more; in the picture they would hide the others."""
COLOURS = {
    "greedy": "#1f1f1f",
    "temperature": "#d1495b",
    "top-k": "#c98a1b",
    "top-p": "#2e86ab",
    "min-p": "#3a7d44",
    "p-less": "#6a1bb1",
    "p-less-norm": "#b18bd4",
}


@dataclass(frozen=True)
class Context:
    """What the numbers depend on besides the log."""

    model: Any
    judge: Any
    size: Size
    tuned: Sequence[Mapping[str, Any]]
    threads: int


@dataclass(frozen=True)
class FreeTexts:
    """Measures of free texts of one sampler at one temperature.

    Attributes:
        loss: the judge's negative log-likelihood per token, nats.
        distinct, overlap: over the texts of one opening, averaged over openings.
        repetition: within a text, averaged.
    """

    loss: Estimate
    distinct: float
    overlap: float
    repetition: float

    @property
    def perplexity(self) -> str:
        """Perplexity with its interval."""
        return f"{math.exp(self.loss.mean):.1f} [{math.exp(self.loss.low):.1f}, {math.exp(self.loss.high):.1f}]"


class Results:
    """The log's complete questions, by sampler and temperature.

    Attributes:
        samplers: labels, greedy first, in the order of the trials.
        questions: how many complete questions there are, by task.
    """

    def __init__(self, trials: Sequence[Trial], records: Mapping[str, Mapping[str, Any]], seeds: int) -> None:
        self._records = records
        self._seeds = seeds
        missing = {(trial.task, trial.item) for trial in trials if not _finished(trial, records)}
        self._complete = [trial for trial in trials if (trial.task, trial.item) not in missing]
        self.samplers = list(dict.fromkeys(trial.sampler for trial in trials))
        self.questions: dict[str, int] = {}
        for task in dict.fromkeys(trial.task for trial in trials):
            self.questions[task] = len({trial.item for trial in self._complete if trial.task == task})
        self._by_cell: dict[tuple[str, str, float | None], list[Trial]] = {}
        for trial in self._complete:
            self._by_cell.setdefault((trial.task, trial.sampler, trial.temperature), []).append(trial)

    @property
    def graded(self) -> list[str]:
        """Tasks with right answers."""
        return [task for task in self.questions if task != FREE]

    def right(self, sampler: str, temperature: float, tasks: Sequence[str] | None = None) -> dict[str, Values]:
        """Return 1 for right and 0 for wrong answers, by task: (Q, S), greedy's one answer repeated for every seed."""
        return {task: self._values(task, sampler, temperature, "correct") for task in tasks or self.graded}

    def right_at_all_temperatures(self, sampler: str) -> dict[str, Values]:
        """Return the share of temperatures at which an answer is right, by task: (Q, S)."""
        by_temperature = [self.right(sampler, temperature) for temperature in TEMPERATURES]
        return {task: np.mean([values[task] for values in by_temperature], axis=0) for task in self.graded}

    def free(self, sampler: str, temperature: float) -> FreeTexts:
        """Return the measures of free texts."""
        texts = self._texts(sampler, temperature)
        return FreeTexts(
            estimate({FREE: self._values(FREE, sampler, temperature, "nll")}),
            float(np.mean([distinct(group) for group in texts])),
            float(np.mean([overlap(group) for group in texts])),
            float(np.mean([repetition(text) for group in texts for text in group])),
        )

    def _texts(self, sampler: str, temperature: float) -> list[list[str]]:
        groups: dict[int, list[str]] = {}
        for trial in self._cell(FREE, sampler, temperature):
            groups.setdefault(trial.item, []).append(self._records[trial.key]["text"])
        return [group * (self._seeds if sampler == GREEDY else 1) for group in groups.values()]

    def _values(self, task: str, sampler: str, temperature: float, fact: str) -> Values:
        rows: dict[int, list[float]] = {}
        for trial in self._cell(task, sampler, temperature):
            key = trial.judged_key if fact == "nll" else trial.key
            rows.setdefault(trial.item, []).append(float(self._records[key][fact]))
        values = np.array([rows[item] for item in sorted(rows)])
        return np.repeat(values, self._seeds, axis=1) if sampler == GREEDY else values

    def _cell(self, task: str, sampler: str, temperature: float) -> list[Trial]:
        return self._by_cell[task, sampler, None if sampler == GREEDY else temperature]


def _finished(trial: Trial, records: Mapping[str, Any]) -> bool:
    return trial.key in records and (trial.task != FREE or trial.judged_key in records)


def write_report(
    trials: Sequence[Trial], records: Mapping[str, Mapping[str, Any]], context: Context, path: Path
) -> None:
    """Write tables to ``path`` and the picture beside it.

    Raises:
        SystemExit: not one question of every task is complete.
    """
    results = Results(trials, records, context.size.seeds)
    empty = [task for task, count in results.questions.items() if count == 0]
    if empty:
        raise SystemExit(f"no complete question of {', '.join(empty)} in the log yet; let it run longer")
    graded_samplers = [name for name in results.samplers if name not in _only_free(results, context)]
    parts = [
        _head(results, context, path),
        "## Right answers\n\n"
        "Share of right answers, mean of the tasks, 95 % bootstrap interval over questions; last column: mean over "
        "the temperatures.\n\n" + accuracy_table(results, graded_samplers),
        "p-less minus the other, paired (same questions, same seeds); bold where the interval leaves 0 out.\n\n"
        + difference_table(results, graded_samplers),
        verdict(results, graded_samplers),
        "By task (mean over seeds):\n\n" + task_table(results, graded_samplers),
        f"## Free texts\n\n{FREE_TOKENS} tokens after an opening. Perplexity under the judge (95 % interval over "
        "openings); distinct bigrams among the texts of one opening (1 = all different), how much of a text's bigrams "
        "the other texts hold (1 = copies), share of trigrams a text repeats.\n\n"
        + free_table(results, results.samplers),
        free_verdict(results),
        f"![right answers over temperature; perplexity against diversity]({path.with_suffix('.png').name})",
    ]
    path.write_text("\n\n".join(parts) + "\n")
    draw(results, graded_samplers, path.with_suffix(".png"))
    print("\n\n".join(parts))


def _only_free(results: Results, context: Context) -> set[str]:
    """Return the samplers that part 1 leaves out."""
    tuned = {sampler_label(settings) for settings in context.tuned}
    return {name for name in results.samplers if name.split()[0] in TUNED and name not in tuned}


def _head(results: Results, context: Context, path: Path) -> str:
    counts = ", ".join(f"{count} {task}" for task, count in results.questions.items())
    tuned = ", ".join(sampler_label(settings) for settings in context.tuned)
    versions = f"onnxruntime {context.model.versions['onnxruntime']}"
    return (
        "# p-less sampling measured\n\n`python simulations/benchmarks/pless_quality_bench.py` (see its head for what "
        f"is measured and how), {datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, "
        f"{versions}, {context.threads} thread. Model {context.model.name} ({context.model.dtype}), judge "
        f"{context.judge.name} ({context.judge.dtype}). Complete questions: {counts}; {context.size.seeds} seeds. "
        f"Tuned on other questions: {tuned} (grids {_grids()}). This file is "
        f"generated; `{path.with_suffix('.png').name}` with it."
    )


def _grids() -> str:
    return "; ".join(f"{sampler} {', '.join(f'{value:g}' for value in grid)}" for sampler, grid in TUNED.items())


def accuracy_table(results: Results, samplers: Sequence[str]) -> str:
    """Return right answers by sampler and temperature."""
    rows = []
    for sampler in samplers:
        cells = [str(estimate(results.right(sampler, temperature))) for temperature in TEMPERATURES]
        rows.append([sampler, *cells, str(estimate(results.right_at_all_temperatures(sampler)))])
    return _table(["sampler", *(f"T = {t:g}" for t in TEMPERATURES), "mean"], rows)


def difference_table(results: Results, samplers: Sequence[str]) -> str:
    """Return p-less minus every other sampler."""
    rows = []
    for sampler in samplers:
        if sampler != P_LESS:
            rows.append([sampler, *(_signed(found) for found in _differences(results, sampler))])
    return _table(["p-less minus", *(f"T = {t:g}" for t in TEMPERATURES), "mean"], rows)


def _differences(results: Results, other: str) -> list[Estimate]:
    """Return p-less minus ``other`` at every temperature, and over all."""
    found = [difference(results.right(P_LESS, t), results.right(other, t)) for t in TEMPERATURES]
    over_all = difference(results.right_at_all_temperatures(P_LESS), results.right_at_all_temperatures(other))
    return [*found, over_all]


def _signed(found: Estimate) -> str:
    text = f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
    return f"**{text}**" if found.low > 0 or found.high < 0 else text


def verdict(results: Results, samplers: Sequence[str]) -> str:
    """Say where p-less is better, worse, or not to be told apart."""
    sides: dict[str, list[str]] = {"better": [], "worse": [], "not to be told apart": []}
    for sampler in samplers:
        if sampler == P_LESS:
            continue
        for temperature, found in zip(TEMPERATURES, _differences(results, sampler), strict=False):
            side = "better" if found.low > 0 else "worse" if found.high < 0 else "not to be told apart"
            sides[side].append(f"{sampler} at {temperature:g}")
    return "\n".join(
        f"- p-less is {side}{' from' if side.endswith('apart') else ' than'}: {'; '.join(names) or 'none'}."
        for side, names in sides.items()
    )


def task_table(results: Results, samplers: Sequence[str]) -> str:
    """Return right answers by task: one row per sampler, temperatures side by side."""
    rows = []
    for sampler in samplers:
        cells = []
        for task in results.graded:
            shares = [np.mean(results.right(sampler, t, [task])[task]) for t in TEMPERATURES]
            cells.append(f"{shares[0]:.2f}" if sampler == GREEDY else " / ".join(f"{share:.2f}" for share in shares))
        rows.append([sampler, *cells])
    temperatures = " / ".join(f"{t:g}" for t in TEMPERATURES)
    return _table(["sampler", *(f"{task}, T = {temperatures}" for task in results.graded)], rows)


def free_table(results: Results, samplers: Sequence[str]) -> str:
    """Return the measures of free texts."""
    rows = []
    for sampler in samplers:
        for temperature in TEMPERATURES[:1] if sampler == GREEDY else TEMPERATURES:
            found = results.free(sampler, temperature)
            shown = "" if sampler == GREEDY else f"{temperature:g}"
            numbers = (f"{value:.2f}" for value in (found.distinct, found.overlap, found.repetition))
            rows.append([sampler, shown, found.perplexity, *numbers])
    return _table(["sampler", "T", "perplexity", "distinct", "overlap", "repeated"], rows)


def free_verdict(results: Results) -> str:
    """Say which points no other beats in both perplexity and diversity."""
    points = {}
    for sampler in results.samplers:
        for temperature in TEMPERATURES[:1] if sampler == GREEDY else TEMPERATURES:
            found = results.free(sampler, temperature)
            name = sampler if sampler == GREEDY else f"{sampler} at {temperature:g}"
            points[name] = (found.loss.mean, -found.distinct)
    best = [name for name, point in points.items() if not any(_beats(other, point) for other in points.values())]
    beaten = [name for name in points if name.startswith(f"{P_LESS} at") and name not in best]
    return (
        "Not beaten in perplexity and distinct bigrams at once, by the means alone: " + "; ".join(best) + ".\n"
        f"Beaten p-less points: {'; '.join(beaten) or 'none'}."
    )


def _beats(left: tuple[float, float], right: tuple[float, float]) -> bool:
    return left != right and left[0] <= right[0] and left[1] <= right[1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def draw(results: Results, samplers: Sequence[str], path: Path) -> None:
    """Draw right answers over temperature, and perplexity against diversity."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.4), layout="constrained")
    _draw_accuracy(left, results, samplers)
    _draw_trade_off(right, results)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_accuracy(axes: Any, results: Results, samplers: Sequence[str]) -> None:
    greedy = estimate(results.right(GREEDY, TEMPERATURES[0]))
    axes.axhspan(greedy.low, greedy.high, color=COLOURS[GREEDY], alpha=0.07, lw=0)
    axes.axhline(greedy.mean, color=COLOURS[GREEDY], ls="--", lw=1.3, label=GREEDY)
    drawn = [name for name in samplers if name != GREEDY]
    for place, sampler in enumerate(drawn):
        found = [estimate(results.right(sampler, temperature)) for temperature in TEMPERATURES]
        means = np.array([each.mean for each in found])
        errors = np.array([[each.mean - each.low for each in found], [each.high - each.mean for each in found]])
        # Side by side, so that no interval hides another.
        shifted = np.array(TEMPERATURES) + (place - (len(drawn) - 1) / 2) * 0.035
        axes.errorbar(
            shifted, means, yerr=errors, label=sampler, capsize=2, markersize=5, marker="o", **_style(sampler)
        )
    axes.set(xlabel="temperature", ylabel="share of right answers", xticks=TEMPERATURES, ylim=(0, None))
    axes.set_title("Right answers, mean of the tasks, 95 % intervals", fontsize=11)
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_trade_off(axes: Any, results: Results) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    left_out: list[str] = []
    for sampler in results.samplers:
        temperatures: Sequence[float] = TEMPERATURES[:1] if sampler == GREEDY else TEMPERATURES
        found = [results.free(sampler, temperature) for temperature in temperatures]
        shown = [math.exp(each.loss.mean) <= HIGHEST_SHOWN for each in found]
        left_out += [f"{sampler} at {t:g}" for t, inside in zip(temperatures, shown, strict=True) if not inside]
        found = [each for each, inside in zip(found, shown, strict=True) if inside]
        temperatures = [t for t, inside in zip(temperatures, shown, strict=True) if inside]
        across = [each.distinct for each in found]
        up = [math.exp(each.loss.mean) for each in found]
        axes.plot(across, up, label=sampler, zorder=3 if sampler == P_LESS else 2, **_style(sampler))
        for x, y, temperature in zip(across, up, temperatures, strict=True):
            axes.plot(x, y, color=_style(sampler)["color"], ls="", marker="o", markersize=3 + 3 * temperature)
    axes.set(xlabel="distinct bigrams among texts of one opening (more = more diverse)", yscale="log")
    axes.set_ylabel("perplexity under the judge (less = more predictable)")
    axes.set_ylim(None, HIGHEST_SHOWN)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("Free texts; the larger the dot, the higher the temperature", fontsize=11)
    if left_out:
        note = f"above {HIGHEST_SHOWN:g}, not shown:\n" + "\n".join(left_out)
        axes.text(0.3, 0.97, note, transform=axes.transAxes, fontsize=8.5, color="#555555", va="top")
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def _style(sampler: str) -> dict[str, Any]:
    name = sampler.split()[0]
    usual = sampler in ("top-p 0.9", "min-p 0.1")
    return {"color": COLOURS[name], "lw": 2.4 if name == P_LESS else 1.2, "ls": ":" if usual else "-"}
