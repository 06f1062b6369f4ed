"""The part of a report that is about drafters: methods by numbers, domains by methods, whom the selector chose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from edgeduet_shared.config import Scenario
from edgeduet_shared.metrics import METRICS, MeanStd, format_value, over_seeds
from edgeduet_sim import plots
from edgeduet_sim.drafter_results import DRAFTER_COLUMNS, MIXED, choices, domain_number
from edgeduet_sim.results import Run

COLUMNS = (*DRAFTER_COLUMNS, "bytes_up", "bytes_down", "trainable", "seconds")
OWN, OTHERS = "own", "others"


@dataclass(frozen=True)
class DrafterMethod:
    """One method over its finished seeds.

    Attributes:
        name: with options.
        runs: finished, sorted by seed.
        numbers: every number over seeds.
    """

    name: str
    runs: tuple[Run, ...]
    numbers: dict[str, MeanStd]

    def domain(self, domain: str, measure: str, *, holders: bool) -> MeanStd:
        """Return a measure of a domain over seeds; see :func:`~edgeduet_sim.drafter_results.domain_number`."""
        return over_seeds([domain_number(run, domain, measure, holders=holders) for run in self.runs])


@dataclass(frozen=True)
class DrafterComparison:
    """All methods run on one scenario that trains drafters, in the order of the catalogue."""

    scenario: Scenario
    methods: tuple[DrafterMethod, ...]
    warnings: tuple[str, ...]

    @property
    def rows(self) -> tuple[tuple[str, str, bool], ...]:
        """(label, domain, whether its holders draft) of every row of the table of domains."""
        names = self.scenario.drafter.domain_names
        rows = [(f"{name}, by its clients", name, True) for name in names]
        rows += [(f"{name}, by the others", name, False) for name in names if len(names) > 1]
        return (*rows, *(((MIXED, MIXED, True),) if len(names) > 1 else ()))


def compare_drafters(runs: Sequence[Run]) -> tuple[DrafterComparison, ...]:
    """Group runs by scenario; groups in order of their names."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.scenario.digest(), []).append(run)
    ordered = sorted(groups.values(), key=lambda group: (group[0].scenario.name, group[0].scenario.digest()))
    return tuple(_compare(group) for group in ordered)


def _compare(runs: Sequence[Run]) -> DrafterComparison:
    by_method: dict[str, list[Run]] = {}
    for run in sorted((run for run in runs if run.finished), key=lambda run: run.seed):
        by_method.setdefault(str(run.method), []).append(run)
    methods = [_method(name, found) for name, found in by_method.items()]
    return DrafterComparison(
        runs[0].scenario, tuple(sorted(methods, key=lambda m: _place(m.name))), tuple(_warnings(runs, methods))
    )


def _method(name: str, runs: Sequence[Run]) -> DrafterMethod:
    summaries = [run.summary() for run in runs]
    return DrafterMethod(name, tuple(runs), {key: over_seeds([s[key] for s in summaries]) for key in summaries[0]})


def _place(name: str) -> tuple[int, str]:
    known = ("drafter-local", "drafter-fedavg", "drafter-fedprox", "drafter-pool")
    base = name.partition(":")[0]
    return (known.index(base) if base in known else len(known)), name


def _warnings(runs: Sequence[Run], methods: Sequence[DrafterMethod]) -> Iterable[str]:
    splits = {(run.seed, str(run.config.get("split"))) for run in runs}
    if len(splits) > len({seed for seed, _ in splits}):
        yield "Runs of one seed used different texts; do not compare them."
    if methods and max(len(method.runs) for method in methods) < 3:
        yield "Fewer than 3 seeds: the spread between seeds is not known well enough to rank close methods."
    unfinished = [f"{run.method} (seed {run.seed})" for run in runs if not run.finished]
    if unfinished:
        yield f"Left out because they did not finish: {', '.join(unfinished)}. The same command goes on."


# --- tables -------------------------------------------------------------------------------------------


def show(name: str, number: MeanStd) -> str:
    """Return ``mean ± std`` for people; the spread only where there are several seeds."""
    text = format_value(name, number.mean)
    unit = METRICS[name].unit
    if math.isnan(number.std) or text == "n/a" or unit not in ("%", "tokens", "x"):
        return text
    return f"{text} ± {100 * number.std:.1f}" if unit == "%" else f"{text} ± {number.std:.2f}"


def methods_table(c: DrafterComparison) -> list[list[str]]:
    """Return head and rows of the table of methods."""
    head = ["method", "seeds", *(METRICS[name].title for name in COLUMNS)]
    return [head, *([m.name, str(len(m.runs)), *(show(n, m.numbers[n]) for n in COLUMNS)] for m in c.methods)]


def domains_table(c: DrafterComparison, measure: str) -> list[list[str]]:
    """Return head and rows of the table of domains by methods.

    Args:
        c: what to show.
        measure: ``tokens`` (per pass, longest draft), or a depth ``1``, ``2``, ... for the share accepted.
    """
    name = "drafted_own" if measure == "tokens" else "accepted_own"
    rows = [
        [label, *(show(name, m.domain(domain, measure, holders=holders)) for m in c.methods)]
        for label, domain, holders in c.rows
    ]
    return [["texts", *(m.name for m in c.methods)], *rows]


def choice_rows(c: DrafterComparison) -> list[list[str]]:
    """Return, for methods with several drafters on a client, how often each was chosen (first seed)."""
    rows = []
    for method in c.methods:
        run = method.runs[0]
        for client in sorted(run.stages[-1].figures) if run.stages else ():
            for domain in c.scenario.drafter.domain_names:
                found = choices(run, client, domain)
                if len(found) > 1:
                    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in found.items() if share >= 0.005)
                    rows.append([method.name, f"{client} ({c.scenario.drafter.domain(client)})", domain, shares])
    return [["method", "client", "texts", "drafters chosen"], *rows] if rows else []


def markdown(c: DrafterComparison) -> str:
    """Return the tables of one comparison as Markdown."""
    depth = c.scenario.drafter.depth
    parts = [f"## {c.scenario.name}", "", c.scenario.purpose, "", *(f"> {warning}" for warning in c.warnings), ""]
    parts += [*_markdown(methods_table(c)), "", EXPLANATION.format(depth=depth), ""]
    parts += ["### Tokens per pass of the target, by domain", "", *_markdown(domains_table(c, "tokens")), ""]
    for level in range(1, depth + 1):
        what = "First drafted token" if level == 1 else f"First {level} drafted tokens"
        parts += [f"### {what} accepted, %", "", *_markdown(domains_table(c, str(level))), ""]
    chosen = choice_rows(c)
    if chosen:
        parts += ["### Whom the selector chose", "", *_markdown(chosen), ""]
    return "\n".join(parts)


EXPLANATION = (
    "Mean ± standard deviation over seeds. Own domain, other domains, mixed: tokens per pass of the target with drafts "
    "of {depth} tokens at every place of its own greedy text; mixed changes the domain with every text. Per pass and "
    "speed: rounds with lengths chosen too, at the costs the scenario states, not measured. Bytes: whole run and the "
    "hand-out after it, all clients, measured on serialised messages."
)


def _markdown(table: Sequence[Sequence[str]]) -> list[str]:
    head, *rows = table
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


# --- figure -------------------------------------------------------------------------------------------


def domain_bars(c: DrafterComparison, palette: plots.Palette) -> Figure:
    """Tokens per pass of every method on every domain; lines are one standard deviation over seeds."""
    rows = c.rows
    figure, axes = plots.rows_figure(palette, [label for label, _, _ in rows])
    height = 0.8 / max(1, len(c.methods))
    for place, method in enumerate(c.methods):
        numbers = [method.domain(domain, "tokens", holders=holders) for _, domain, holders in rows]
        axes.barh(
            np.arange(len(rows)) - 0.4 + height * (place + 0.5),
            [number.mean - 1 for number in numbers],
            left=1.0,
            height=0.9 * height,
            xerr=[0.0 if math.isnan(number.std) else number.std for number in numbers],
            ecolor=palette.ink,
            color=palette.series[place % len(palette.series)],
            label=method.name,
        )
    axes.set_xlim(left=1.0)
    axes.set_xlabel("tokens per pass of the target")
    plots.legend(axes, palette)
    # The legend has two columns above the figure.
    lines = (len(c.methods) + 1) // 2
    tall = figure.get_figheight() + 0.3 * len(rows) + 0.2 * lines
    figure.set_figheight(tall)
    figure.subplots_adjust(top=1 - (0.1 + 0.2 * lines) / tall, bottom=0.55 / tall)
    return figure


def section(c: DrafterComparison) -> dict[str, object]:
    """Everything the template shows about one comparison of drafters, as plain values."""
    depth = c.scenario.drafter.depth
    return {
        "drafters": True,
        "scenario": c.scenario,
        "warnings": c.warnings,
        "explanation": EXPLANATION.format(depth=depth),
        "methods": methods_table(c),
        "domains": [
            ("Tokens per pass of the target", domains_table(c, "tokens")),
            *((f"First {k} drafted accepted, %", domains_table(c, str(k))) for k in range(1, depth + 1)),
        ],
        "choices": choice_rows(c),
    }
