"""Write a report: one HTML file that needs nothing else, figures as PNG, tables as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.config import Scenario
from edgeduet_shared.metrics import METRICS, MeanStd, format_value, worst_label
from edgeduet_sim import drafter_report, plots
from edgeduet_sim.comparison import (
    MAIN_METHOD,
    Comparison,
    MethodResult,
    compare,
    dispatch_counts,
    paired_difference,
)
from edgeduet_sim.results import POOLED, Run

MAIN_COLUMNS = (
    "avg",
    "last",
    "forgetting",
    "bwt",
    "fwt",
    "personal",
    "personal_worst",
    "harmonic",
    "zero_shot_retention",
    "bytes_up",
    "bytes_down",
    "trainable",
    "seconds",
)
PAGE_COLUMNS = tuple(name for name in MAIN_COLUMNS if name not in ("bwt", "trainable", "seconds"))
"""The page shows parameters in a table of their own, and the rest further down."""
MORE_COLUMNS = (
    "acc",
    "bwt",
    "learning",
    "intransigence",
    "held_out",
    "personal_avg",
    "personal_weighted",
    "personal_std",
    "personal_forgetting",
    "personal_forgetting_worst",
    "global_on_client",
    "client_on_global",
    "seconds",
)


@dataclass(frozen=True)
class ReportFiles:
    """What :func:`write_report` wrote."""

    html: Path
    markdown: Path
    csv: Path
    figures: tuple[Path, ...]


def write_report(runs: Sequence[Run], out: Path) -> ReportFiles:
    """Write ``report.html``, ``report.md``, ``report.csv`` and ``figures/*.png`` into ``out``.

    Raises:
        EdgeDuetError: the folder cannot be written.
    """
    comparisons = compare([run for run in runs if run.scenario.learns == "classifier"])
    of_drafters = drafter_report.compare_drafters([run for run in runs if run.scenario.learns == "drafter"])
    figures: list[Path] = []

    def draw(scenario: Scenario, drawings: Iterable[_Drawing]) -> list[_Drawing]:
        prefix = f"{scenario.name}-" if len(comparisons) + len(of_drafters) > 1 else ""
        drawn = list(drawings)
        for figure in drawn:
            figures.append(out / "figures" / f"{prefix}{figure.name}.png")
            plots.write_png(figures[-1], figure.draw)
        return drawn

    sections = [_section(c, draw(c.scenario, _figures(c))) for c in comparisons]
    sections += [_drafter_section(c, draw(c.scenario, _drafter_figures(c))) for c in of_drafters]
    texts = [*map(markdown, comparisons), *map(drafter_report.markdown, of_drafters)]
    files = ReportFiles(out / "report.html", out / "report.md", out / "report.csv", tuple(figures))
    atomic_write_text(files.html, _render(sections))
    atomic_write_text(files.markdown, "\n".join(texts))
    atomic_write_text(files.csv, csv_table(runs))
    return files


# --- tables -------------------------------------------------------------------------------------------


def show(name: str, number: MeanStd) -> str:
    """Return ``mean ± std`` for people; the spread only where there are several seeds and it is not 0."""
    text = format_value(name, number.mean)
    if math.isnan(number.std) or text == "n/a" or METRICS[name].unit not in ("%", "points"):
        return text
    return f"{text} ± {100 * number.std:.1f}"


def best_of(results: Iterable[MethodResult], metric: str) -> frozenset[str]:
    """Return the names of the federated methods that share the best mean as printed; none where there is no contest."""
    better = METRICS[metric].better
    candidates = [r for r in results if r.federated and not math.isnan(r.numbers[metric].mean)]
    if better == 0 or len(candidates) < 2:
        return frozenset()
    printed = {r.name: format_value(metric, r.numbers[metric].mean) for r in candidates}
    best = printed[max(candidates, key=lambda r: better * r.numbers[metric].mean).name]
    winners = frozenset(name for name, text in printed.items() if text == best)
    return winners if len(winners) < len(candidates) else frozenset()


def markdown(comparison: Comparison) -> str:
    """Return the tables of one comparison as Markdown."""
    scenario = comparison.scenario
    lines = [f"## {scenario.name}", "", scenario.purpose, ""]
    lines += [f"> {warning}" for warning in comparison.warnings]
    lines += ["", *_markdown_table(comparison.methods, MAIN_COLUMNS), ""]
    lines += [
        "Accuracies in %, mean ± standard deviation over seeds; forgetting, transfer and retention in points. "
        "Bold: best federated method. Bytes: whole run, all clients, measured on serialised messages."
    ]
    full = comparison.find(MAIN_METHOD)
    if comparison.ablations and full is not None:
        lines += ["", "### Ablation", "", *_markdown_table((full, *comparison.ablations), MAIN_COLUMNS[:8])]
    return "\n".join(lines) + "\n"


def _markdown_table(results: Sequence[MethodResult], columns: Sequence[str]) -> list[str]:
    columns = _known(results, columns)
    head = ["method", "seeds", *(METRICS[column].title for column in columns)]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    bold = {column: best_of(results, column) for column in columns}
    for result in results:
        cells = [result.name, str(len(result.runs))]
        for column in columns:
            text = show(column, result.numbers[column])
            cells.append(f"**{text}**" if result.name in bold[column] else text)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def csv_table(runs: Sequence[Run]) -> str:
    """Return one row per finished run with every number, unrounded; empty where a value does not exist."""
    buffer = io.StringIO()
    rows = [(run, run.summary()) for run in runs if run.finished]
    names = list(dict.fromkeys(name for _, summary in rows for name in summary))
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["scenario", "method", "seed", "split", *names, "folder"])
    for run, summary in rows:
        values = [summary.get(name, math.nan) for name in names]
        numbers = ["" if math.isnan(value) else repr(value) for value in values]
        writer.writerow([run.scenario.name, str(run.method), run.seed, run.config["split"], *numbers, run.folder])
    return buffer.getvalue()


# --- figures ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drawing:
    name: str
    title: str
    caption: str
    draw: Callable[[plots.Palette], Figure]
    group: str = ""


def _figures(comparison: Comparison) -> Iterable[_Drawing]:
    """Yield the figures that this comparison has data for."""
    if not comparison.methods:
        return
    c = comparison
    yield _Drawing(
        "accuracy-over-stages",
        "Global model: accuracy over stages",
        "Accuracy of the plain global model on all tasks seen so far. Band: one standard deviation over seeds. "
        "The number after a name is the accuracy after the last stage (Last); Avg is the mean of the curve. "
        "local has no global model.",
        lambda p: plots.stage_curves(c, p, lambda r: r.stages_ST, "accuracy, %"),
    )
    yield _Drawing(
        "personal-over-stages",
        "Personal models: accuracy over stages",
        "Each client's own model on its own test images of all tasks seen so far, mean over clients.",
        lambda p: plots.stage_curves(c, p, lambda r: r.personal_ST, "personal accuracy, %"),
    )
    yield _Drawing(
        "clients",
        "Every client",
        "Personal accuracy after the last stage, one dot per client and seed (seeds one below the other); "
        "the bar is the mean. A long tail to the left means that federation leaves some clients behind.",
        lambda p: plots.client_spread(c, p),
    )
    if any(not math.isnan(r.numbers["forgetting"].mean) for r in c.methods):
        yield _Drawing(
            "forgetting",
            "Forgetting",
            "Best earlier accuracy on a task minus its final accuracy, mean over the old tasks, percentage points. "
            "Negative: old tasks got better. Lines: one standard deviation over seeds.",
            lambda p: plots.forgetting_dots(c, p),
        )
    yield _Drawing(
        "bytes-accuracy",
        "What accuracy costs in bytes",
        "Avg against all bytes of training messages, both ways, all clients, measured on the serialised messages.",
        lambda p: plots.bytes_scatter(c, p),
    )
    full = c.find(MAIN_METHOD)
    if c.ablations and full is not None:
        whole = full
        yield _Drawing(
            "ablation",
            f"What each part of {MAIN_METHOD} contributes",
            "Variant minus whole method, paired by seed; lines are one standard deviation of the difference.",
            lambda p: plots.ablation_dots(c, whole, p),
        )
    for result in c.methods:
        counts = dispatch_counts(result.runs[0])
        if counts.any():
            yield _Drawing(
                f"dispatch-{result.spec.slug}",
                f"Orchestrator: which prompts {result.name} sent to whom",
                f"Number of rounds in which a prompt of the pool went to a client (seed {result.runs[0].seed}). "
                "Even rows: no preference; rows that differ: the orchestrator tells clients apart.",
                lambda p, counts=counts: plots.dispatch_map(counts, p),  # type: ignore[misc]
            )
    tasks = c.methods[0].runs[0].task_names
    shown = [result for result in c.all if not np.isnan(result.matrix_TT).all()]
    limits = plots.matrix_limits(shown)
    for result in shown:
        yield _Drawing(
            f"matrix-{result.spec.slug}",
            result.name,
            "",
            lambda p, result=result: plots.matrix_map(result, p, tasks, limits),  # type: ignore[misc]
            group="matrix",
        )


def _drafter_figures(c: drafter_report.DrafterComparison) -> Iterable[_Drawing]:
    if c.methods:
        yield _Drawing(
            "domains",
            "Tokens per pass of the target, by domain",
            "With the longest draft at every place of the target's own greedy text, by whichever drafter the selector "
            "chose there. Lines: one standard deviation over seeds.",
            lambda p: drafter_report.domain_bars(c, p),
        )


# --- HTML ---------------------------------------------------------------------------------------------


def _section(comparison: Comparison, drawn: Sequence[_Drawing]) -> dict[str, Any]:
    """Everything the template shows about one comparison, as plain values."""
    c = comparison
    full = c.find(MAIN_METHOD)
    return {
        "drafters": False,
        "scenario": c.scenario,
        "facts": _facts(c),
        "verdict": verdict(c),
        "warnings": c.warnings,
        "table": _table(c.methods, PAGE_COLUMNS),
        "more": _table(c.methods, MORE_COLUMNS),
        "ablation": _ablation_table(c, full) if full is not None and c.ablations else None,
        "figures": [_svg(d) for d in drawn if not d.group],
        "matrices": [_svg(d) for d in drawn if d.group == "matrix"],
        "tasks": c.methods[0].runs[0].task_names if c.methods else (),
        "parameters": [_parameter_row(r) for r in c.all],
        "failures": [row for r in c.all for run in r.runs if (row := _failure_row(run))],
        "configuration": configuration_text(c.scenario),
        "runs": [_run_row(run) for r in c.all for run in r.runs],
        "worst": worst_label(max((math.ceil(r.clients_SM.shape[1] / 10) for r in c.methods), default=0)),
    }


def _drafter_section(c: drafter_report.DrafterComparison, drawn: Sequence[_Drawing]) -> dict[str, Any]:
    return drafter_report.section(c) | {
        "figures": [_svg(d) for d in drawn],
        "configuration": configuration_text(c.scenario),
        "runs": [_run_row(run) for m in c.methods for run in m.runs],
    }


def _svg(drawing: _Drawing) -> dict[str, Any]:
    svg = plots.draw_svg(drawing.draw)
    label = re.sub(r"[\"<>&]", "", f"{drawing.title}. {drawing.caption}").strip(". ") + "."
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return {"name": drawing.name, "title": drawing.title, "caption": drawing.caption, "svg": Markup(svg)}


def _known(results: Sequence[MethodResult], columns: Sequence[str]) -> tuple[str, ...]:
    """Leave out columns that have no value for any method (retention without held-out classes)."""
    return tuple(c for c in columns if any(not math.isnan(r.numbers[c].mean) for r in results))


def _table(results: Sequence[MethodResult], columns: Sequence[str]) -> dict[str, Any]:
    columns = _known(results, columns)
    bold = {column: best_of(results, column) for column in columns}
    return {
        "head": [METRICS[column] for column in columns],
        "rows": [
            {
                "name": r.name,
                "main": r.name == MAIN_METHOD,
                "reference": not r.federated,
                "seeds": len(r.runs),
                "cells": [
                    {"text": show(column, r.numbers[column]), "best": r.name in bold[column]} for column in columns
                ],
            }
            for r in results
        ],
    }


def _ablation_table(c: Comparison, full: MethodResult) -> list[dict[str, str]]:
    rows = []
    for variant in (r for r in c.ablations if r.spec.name == full.spec.name):
        row = {"name": "+".join(f"{k}={json.dumps(v)}" for k, v in variant.spec.options.items())}
        for metric in ("avg", "personal", "forgetting"):
            change = paired_difference(variant, full, metric)
            spread = "" if math.isnan(change.std) else f" ± {100 * change.std:.1f}"
            row[metric] = "n/a" if math.isnan(change.mean) else f"{round(100 * change.mean, 1) + 0.0:+.1f}{spread}"
        rows.append(row)
    return rows


def _facts(c: Comparison) -> list[tuple[str, str]]:
    s = c.scenario
    runs = [run for r in c.all for run in r.runs]
    partition = s.partition.kind if s.partition.kind != "dirichlet" else f"Dirichlet, beta {s.partition.beta:g}"
    return [
        ("data", s.data.source.rpartition("/")[2] if s.data.source.startswith("folder:") else s.data.source),
        ("backbone", s.model.backbone),
        ("stream", f"{s.stream.kind}, {len(runs[0].task_names)} tasks" if runs else s.stream.kind),
        ("clients", f"{s.federation.clients}, {partition}"),
        ("rounds", f"{s.federation.rounds} per stage"),
        ("seeds", ", ".join(str(seed) for seed in sorted({run.seed for run in runs}))),
    ]


def verdict(c: Comparison) -> list[str]:
    """Say in words how the main method did; only what the numbers say."""
    full = c.find(MAIN_METHOD)
    if full is None:
        return []
    lines = []
    for metric, label in (("avg", "Avg"), ("personal", "personal accuracy")):
        own = full.numbers[metric]
        if math.isnan(own.mean):
            continue
        text = f"{MAIN_METHOD} reaches {show(metric, own)} % {label}"
        rival = c.best_federated(metric)
        if rival is not None:
            text += (
                f", {_gap_text(paired_difference(full, rival, metric))} the best other federated method ({rival.name})"
            )
        for name in ("zero-shot", "local", "joint"):
            other = c.find(name)
            if other is not None and not math.isnan(other.numbers[metric].mean):
                text += f"; {name}: {format_value(metric, other.numbers[metric].mean)} %"
        lines.append(text + ".")
    rival = c.find("fedavg-adapter")
    own = full.numbers["forgetting"]
    if rival is not None and not math.isnan(own.mean + rival.numbers["forgetting"].mean):
        lines.append(
            f"Forgetting: {format_value('forgetting', own.mean)} points, "
            f"fedavg-adapter: {format_value('forgetting', rival.numbers['forgetting'].mean)}."
        )
    return lines


def _gap_text(gap: MeanStd) -> str:
    """Say where the main method stands against a rival; the difference is paired by seed."""
    points = round(100 * gap.mean, 1)
    if points == 0:
        return "level with"
    spread = "" if math.isnan(gap.std) else f" ± {100 * gap.std:.1f}"
    return f"{abs(points):.1f}{spread} points {'above' if points > 0 else 'BELOW'}"


def _parameter_row(r: MethodResult) -> dict[str, str]:
    config = r.runs[0].config
    parameters: Mapping[str, Any] = config["parameters"]
    rounds = [row for row in r.runs[0].rounds if row.asked]
    asked = sum(row.asked for row in rounds) or 1
    pooled = r.spec.name in POOLED
    per_client = {
        "up": sum(row.bytes_up for row in rounds) / asked,
        "down": sum(row.bytes_down for row in rounds) / asked,
    }
    return {
        "name": r.name,
        "trainable": format_value("trainable", parameters["trainable"]),
        "uploaded": format_value("trainable", parameters["uploaded"]),
        "personal": format_value("trainable", parameters["personal"]),
        "up": "n/a" if pooled else format_value("bytes_up", per_client["up"]),
        "down": "n/a" if pooled else format_value("bytes_down", per_client["down"]),
    }


def _failure_row(run: Run) -> dict[str, str] | None:
    if not run.failures and not run.skipped_rounds:
        return None
    return {
        "name": str(run.method),
        "seed": str(run.seed),
        "skipped": f"{run.skipped_rounds} of {len(run.rounds)}",
        "reasons": ", ".join(f"{count} {reason}" for reason, count in sorted(run.failures.items())) or "none",
    }


def _run_row(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "name": str(run.method),
        "seed": run.seed,
        "split": config["split"],
        "digest": config["digest"],
        "versions": ", ".join(f"{name} {version}" for name, version in config["versions"].items()),
        "git": config["git"],
        "command": shlex.join(config["command"]),
        "folder": run.folder.name,
    }


def configuration_text(scenario: Scenario) -> str:
    """Return the resolved scenario as ``key = value`` lines in the form ``--set`` takes."""
    lines: list[str] = []

    def walk(values: Mapping[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.")
            else:
                lines.append(f"{prefix}{key} = {json.dumps(value)}")

    walk(scenario.model_dump(mode="json"), "")
    return "\n".join(lines)


def _render(sections: Sequence[Mapping[str, Any]]) -> str:
    environment = Environment(
        loader=PackageLoader("edgeduet_sim"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        sections=sections,
        light=plots.css_variables(plots.LIGHT),
        dark=plots.css_variables(plots.DARK),
    )
