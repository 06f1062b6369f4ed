"""The figures of a report, as PNG files and as SVG that follows the reader's light or dark theme.

Every figure is drawn by one function from data and a :class:`Palette`. For SVG the palette holds
stand-in colours that are replaced by CSS variables, so that one drawing serves both themes. Methods
differ in colour (Okabe-Ito, adjusted to the theme), in marker and in line style, and lines carry
their names, so that nothing depends on seeing colours.

S seeds, T tasks, M clients, K pool prompts.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from edgeduet_shared.atomic_files import atomic_write_bytes
from edgeduet_shared.metrics import Values, format_bytes
from edgeduet_sim.comparison import MAIN_METHOD, Comparison, MethodResult, band, paired_difference

WIDTH = 4.9
"""Inches of a figure: narrow, so that its letters stay readable when a phone shrinks it."""


@dataclass(frozen=True)
class Palette:
    """Colours of one theme; ``series`` has one per method style, the first for the main method."""

    ink: str
    muted: str
    grid: str
    paper: str
    series: tuple[str, ...]


LIGHT = Palette(
    ink="#1b1f24",
    muted="#5b6470",
    grid="#dde1e6",
    paper="#ffffff",
    series=("#d55e00", "#0072b2", "#009e73", "#b0568f", "#b27d00", "#2f8fc4", "#7a5c3e", "#6a3fb0"),
)
DARK = Palette(
    ink="#e8eaed",
    muted="#a3abb5",
    grid="#363c44",
    paper="#16191d",
    series=("#ff8a3d", "#5cb3e6", "#2fc79a", "#e39acb", "#e8b93a", "#9bd0f0", "#c9a888", "#b79cf0"),
)

# Colours no figure uses by chance; each becomes the CSS variable of its place.
_STAND_IN = Palette(
    ink="#010a01",
    muted="#010a02",
    grid="#010a03",
    paper="#010a04",
    series=tuple(f"#010b{index:02x}" for index in range(len(LIGHT.series))),
)

_KNOWN = (
    "fed-duet",
    "fedavg-adapter",
    "promptfl",
    "pfedmoap",
    "fedavg-lora",
    "fedprox",
    "fedclip",
    "fed-ewc",
    "fed-lwf",
    "fed-duet-released",
)
_MARKERS = "osD^vPXd<>*"
_DASHES: tuple[Any, ...] = ("-", "--", (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2)), (0, (7, 2)), (0, (3, 1, 1, 1, 1, 1)))
_REFERENCE_DASHES: dict[str, Any] = {
    "zero-shot": (0, (1, 2)),
    "local": (0, (4, 2)),
    "joint": (0, (8, 2)),
    "centralised": (0, (8, 2, 1, 2)),
}


@dataclass(frozen=True)
class Style:
    """How one method is drawn."""

    colour: str
    marker: str
    dash: Any
    width: float


def css_variables(palette: Palette) -> str:
    """Return the declarations of one theme for a style sheet."""
    named = {"ink": palette.ink, "muted": palette.muted, "grid": palette.grid, "paper": palette.paper}
    named |= {f"s{index}": colour for index, colour in enumerate(palette.series)}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


def style_of(result: MethodResult, others: Sequence[MethodResult], palette: Palette) -> Style:
    """Return the style of a method: fixed for the methods we ship, by position for variants."""
    name = result.name
    if name == MAIN_METHOD:
        return Style(palette.series[0], "o", "-", 2.6)
    if not result.federated:
        markers = {"zero-shot": "x", "local": "+", "joint": "1", "centralised": "2"}
        return Style(palette.muted, markers[result.spec.name], _REFERENCE_DASHES[result.spec.name], 1.5)
    unknown = [other.name for other in others if other.name not in _KNOWN]
    index = _KNOWN.index(name) if name in _KNOWN else len(_KNOWN) + unknown.index(name)
    colour = palette.series[1 + (index - 1) % (len(palette.series) - 1)]
    return Style(colour, _MARKERS[index % len(_MARKERS)], _DASHES[index % len(_DASHES)], 1.6)


# --- drawing: one function per figure ---------------------------------------------------------------


def stage_curves(
    comparison: Comparison, palette: Palette, values: Callable[[MethodResult], Values], ylabel: str
) -> Figure:
    """Accuracy after each stage: mean over seeds with a band of one standard deviation, names at the right end."""
    figure, axes = _figure(palette, WIDTH, 3.5)
    figure.subplots_adjust(left=0.11, right=0.68, top=0.97, bottom=0.17)
    tasks = comparison.methods[0].runs[0].task_names
    x = np.arange(1, len(tasks) + 1)
    ends: list[tuple[float, str, str]] = []
    for result in reversed(comparison.methods):
        mean, std = band(values(result))
        if np.isnan(mean).all():
            continue
        style = style_of(result, comparison.methods, palette)
        axes.fill_between(x, 100 * (mean - std), 100 * (mean + std), color=style.colour, alpha=0.13, linewidth=0)
        axes.plot(
            x,
            100 * mean,
            color=style.colour,
            linestyle=style.dash,
            linewidth=style.width,
            marker=style.marker,
            markersize=5,
        )
        ends.append((100 * float(mean[-1]), result.name, style.colour))
    axes.set_xlim(0.85, len(x) + 0.15)
    axes.set_xticks(x, _task_labels(tasks))
    axes.set_ylabel(ylabel)
    axes.set_xlabel("after stage")
    _end_labels(axes, ends, palette)
    return figure


def matrix_limits(results: Sequence[MethodResult]) -> tuple[float, float]:
    """Return one colour range in % for the matrices of all methods, so that they can be compared by eye."""
    values = np.concatenate([100 * result.matrix_TT.ravel() for result in results]) if results else np.zeros(1)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    return max(0.0, 10 * math.floor(low / 10)), min(100.0, max(10 * math.ceil(high / 10), low + 10))


def matrix_map(
    result: MethodResult, palette: Palette, tasks: Sequence[str], limits: tuple[float, float] = (0.0, 100.0)
) -> Figure:
    """Accuracy matrix: rows are stages, columns tasks; above the diagonal the task has not been trained yet."""
    t = len(tasks)
    figure, axes = _figure(palette, 3.2, 3.1)
    figure.subplots_adjust(left=0.13, right=0.99, top=0.9, bottom=0.13)
    shown = 100 * result.matrix_TT
    axes.imshow(np.ma.masked_invalid(shown), vmin=limits[0], vmax=limits[1], cmap="cividis", aspect="auto")
    size = 8.5 if t <= 6 else 6.5
    for i in range(t):
        for j in range(t):
            if math.isnan(shown[i, j]) or t > 12:
                continue
            dark_cell = shown[i, j] < limits[0] + 0.55 * (limits[1] - limits[0])
            axes.text(
                j,
                i,
                f"{shown[i, j]:.0f}",
                ha="center",
                va="center",
                fontsize=size,
                color="#ffffff" if dark_cell else "#000000",
                fontstyle="italic" if j > i else "normal",
            )
    # The staircase between what has been trained and what has not.
    corners = np.repeat(np.arange(t + 1), 2)[1:-1] - 0.5
    axes.plot(np.append(corners[1:], t - 0.5), np.append(corners[:-1], t - 0.5), color="#ffffff", linewidth=1.4)
    axes.set_xticks(range(t), [str(j + 1) for j in range(t)])
    axes.set_yticks(range(t), [str(i + 1) for i in range(t)])
    axes.set_xlabel("task")
    axes.set_ylabel("after stage")
    axes.set_title(result.name, fontsize=9, color=palette.ink)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def client_spread(comparison: Comparison, palette: Palette) -> Figure:
    """Personal accuracy of every client after the final stage; a bar marks the mean."""
    results = [r for r in comparison.methods if not np.isnan(r.clients_SM).all()]
    figure, axes = rows_figure(palette, [r.name for r in results])
    for y, result in enumerate(results):
        style = style_of(result, comparison.methods, palette)
        seeds, clients = result.clients_SM.shape
        offsets = np.linspace(-0.22, 0.22, seeds)[:, None] if seeds > 1 else np.zeros((1, 1))
        axes.scatter(
            100 * result.clients_SM,
            np.broadcast_to(y + offsets, (seeds, clients)),
            s=18 if clients <= 50 else 7,
            color=style.colour,
            alpha=0.65,
            linewidth=0,
            marker="o",
        )
        axes.plot([100 * result.numbers["personal"].mean] * 2, [y - 0.36, y + 0.36], color=palette.ink, linewidth=2)
    axes.set_xlabel("personal accuracy of each client, %")
    return figure


def forgetting_dots(comparison: Comparison, palette: Palette) -> Figure:
    """Forgetting of the global and of the personal models; lines are one standard deviation over seeds."""
    results = [r for r in comparison.methods if not math.isnan(r.numbers["forgetting"].mean)]
    figure, axes = rows_figure(palette, [r.name for r in results])
    axes.axvline(0, color=palette.muted, linewidth=0.8)
    for y, result in enumerate(results):
        style = style_of(result, comparison.methods, palette)
        for name, dy, filled in (("forgetting", -0.16, True), ("personal_forgetting", 0.16, False)):
            number = result.numbers[name]
            if math.isnan(number.mean):
                continue
            spread = 0.0 if math.isnan(number.std) else 100 * number.std
            axes.errorbar(
                100 * number.mean,
                y + dy,
                xerr=spread,
                color=style.colour,
                marker="o" if filled else "s",
                markersize=6,
                markerfacecolor=style.colour if filled else palette.paper,
                linewidth=1.2,
            )
    axes.plot([], [], color=palette.ink, marker="o", linestyle="", label="global model")
    axes.plot(
        [], [], color=palette.ink, marker="s", markerfacecolor=palette.paper, linestyle="", label="personal models"
    )
    legend(axes, palette)
    axes.set_xlabel("forgetting, points (lower is better)")
    return figure


def bytes_scatter(comparison: Comparison, palette: Palette) -> Figure:
    """Avg against all bytes moved in the run, log scale; references that do not federate stand left of it."""
    figure, axes = _figure(palette, WIDTH, 3.5)
    figure.subplots_adjust(left=0.11, right=0.97, top=0.96, bottom=0.14)
    results = [r for r in comparison.methods if not math.isnan(r.numbers["avg"].mean)]
    totals = {r.name: float(np.mean(r.bytes_ST[:, -1])) if r.federated else 0.0 for r in results}
    moving = [value for value in totals.values() if value > 0]
    low = 10 ** math.floor(math.log10(min(moving))) if moving else 1e3
    high = max(moving, default=1e6)
    silent_x = low / 3
    axes.set_xscale("log")
    axes.set_xlim(silent_x / 2, high * 12)
    labels: list[tuple[float, float, str, str]] = []
    for result in results:
        style = style_of(result, comparison.methods, palette)
        x = totals[result.name] or silent_x
        number = result.numbers["avg"]
        spread = 0.0 if math.isnan(number.std) else 100 * number.std
        axes.errorbar(
            x,
            100 * number.mean,
            yerr=spread,
            color=style.colour,
            marker=style.marker,
            markersize=9 if result.name == MAIN_METHOD else 7,
            linewidth=1.2,
        )
        labels.append((x, 100 * number.mean, result.name, style.colour))
    if any(value == 0 for value in totals.values()):
        axes.axvline(low / 1.4, color=palette.grid, linewidth=1)
        axes.annotate(
            "no federation",
            (silent_x, 0.01),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=8,
            color=palette.muted,
        )
    axes.xaxis.set_major_locator(LogLocator(numticks=8))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "" if value < low else _round_bytes(value)))
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("bytes moved in the whole run (log scale)")
    axes.set_ylabel("Avg, %")
    _point_labels(axes, labels, palette)
    return figure


def dispatch_map(counts_MK: npt.NDArray[np.int64], palette: Palette) -> Figure:
    """How often the orchestrator sent each prompt of the pool to each client."""
    clients, pool = counts_MK.shape
    figure, axes = _figure(palette, WIDTH, min(6.0, 1.1 + 0.26 * min(clients, 20)))
    bottom = 0.5 / figure.get_figheight()
    figure.subplots_adjust(left=0.1, right=0.95, top=0.98, bottom=bottom)
    image = axes.imshow(counts_MK, cmap="cividis", aspect="auto", vmin=0, interpolation="nearest")
    step = max(1, clients // 10)
    axes.set_yticks(range(0, clients, step), [str(c) for c in range(0, clients, step)])
    axes.set_xticks(range(0, pool, max(1, pool // 8)))
    axes.set_xlabel("prompt of the pool")
    axes.set_ylabel("client")
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, pad=0.015, fraction=0.04)
    bar.ax.tick_params(labelsize=8, colors=palette.muted)
    bar.outline.set_visible(False)
    return figure


def ablation_dots(comparison: Comparison, full: MethodResult, palette: Palette) -> Figure:
    """Change of Avg and of personal accuracy when one part is taken away, paired by seed."""
    results = [r for r in comparison.ablations if r.spec.name == full.spec.name]
    figure, axes = rows_figure(palette, [r.name.removeprefix(f"{full.name}:") for r in results])
    axes.axvline(0, color=palette.muted, linewidth=0.8)
    for y, result in enumerate(results):
        for name, dy, filled in (("avg", -0.16, True), ("personal", 0.16, False)):
            number = paired_difference(result, full, name)
            if math.isnan(number.mean):
                continue
            spread = 0.0 if math.isnan(number.std) else 100 * number.std
            axes.errorbar(
                100 * number.mean,
                y + dy,
                xerr=spread,
                color=palette.series[0 if filled else 1],
                marker="o" if filled else "s",
                markersize=6,
                markerfacecolor=palette.series[0] if filled else palette.paper,
                linewidth=1.2,
            )
    axes.plot([], [], color=palette.series[0], marker="o", linestyle="", label="Avg")
    axes.plot(
        [], [], color=palette.series[1], marker="s", markerfacecolor=palette.paper, linestyle="", label="Personal"
    )
    legend(axes, palette)
    axes.set_xlabel("change in points (left of 0: the part helps)")
    return figure


# --- parts shared by the figures ---------------------------------------------------------------------


def _figure(palette: Palette, width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), facecolor="none")
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.grid(True, color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=palette.muted, labelsize=8.5, length=0)
    for item in (axes.xaxis.label, axes.yaxis.label):
        item.set_color(palette.muted)
        item.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.grid)
    return figure, axes


def rows_figure(palette: Palette, names: Sequence[str]) -> tuple[Figure, Axes]:
    """One row per name, first on top."""
    height = 0.95 + 0.36 * max(1, len(names))
    figure, axes = _figure(palette, WIDTH, height)
    longest = max((len(name) for name in names), default=8)
    figure.subplots_adjust(
        left=min(0.5, 0.03 + 0.0155 * longest), right=0.98, top=1 - 0.3 / height, bottom=0.58 / height
    )
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", colors=palette.ink, labelsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    return figure, axes


def legend(axes: Axes, palette: Palette) -> None:
    """Write what is what above the figure, on the right."""
    shown = axes.legend(
        fontsize=8.5, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1
    )
    for text in shown.get_texts():
        text.set_color(palette.ink)


def _task_labels(tasks: Sequence[str]) -> list[str]:
    readable = [name.replace("_", " ") for name in tasks]
    if len(tasks) > 6 or max(len(name) for name in readable) > 14:
        return [str(i + 1) for i in range(len(tasks))]
    return [f"{i + 1}\n{name}" for i, name in enumerate(readable)]


def spread_out(positions: Sequence[float], gap: float) -> list[float]:
    """Move sorted positions apart until neighbours are at least ``gap`` away, keeping their centre of mass.

    Overlapping neighbours are merged into blocks that are laid out around their common mean.
    """
    blocks: list[tuple[float, int]] = []  # (centre, size)
    for position in positions:
        blocks.append((position, 1))
        while len(blocks) > 1:
            (c1, n1), (c2, n2) = blocks[-2], blocks[-1]
            if c2 - c1 >= gap * (n1 + n2) / 2:
                break
            blocks[-2:] = [((c1 * n1 + c2 * n2) / (n1 + n2), n1 + n2)]
    return [centre + gap * (k - (size - 1) / 2) for centre, size in blocks for k in range(size)]


def _round_bytes(value: float) -> str:
    return format_bytes(value).replace(".0 ", " ")


def _end_labels(axes: Axes, ends: list[tuple[float, str, str]], palette: Palette) -> None:
    """Write names right of the lines' ends, apart from each other, with a thin line to the end where moved."""
    if not ends:
        return
    ordered = sorted(ends)
    low, high = axes.get_ylim()
    height = axes.figure.get_figheight() * 0.77  # type: ignore[union-attr]
    gap = (high - low) * 0.155 / height
    right = axes.get_xlim()[1]
    span = right - axes.get_xlim()[0]
    for (y, name, colour), place in zip(ordered, spread_out([end[0] for end in ordered], gap), strict=True):
        axes.annotate(
            f"{name} {y:.1f}",
            xy=(right - 0.15, y),
            xytext=(right + 0.035 * span, place),
            annotation_clip=False,
            va="center",
            fontsize=8.5,
            fontweight="bold" if name == MAIN_METHOD else "normal",
            color=colour,
            arrowprops={"arrowstyle": "-", "color": palette.grid, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 4},
        )


def _point_labels(axes: Axes, points: list[tuple[float, float, str, str]], palette: Palette) -> None:
    """Write names right of points, moved apart vertically where they would overlap."""
    low, high = axes.get_ylim()
    margin = 0.08 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    gap = (high - low + 2 * margin) * 0.05
    ordered = sorted(points, key=lambda point: point[1])
    columns: list[list[tuple[float, float, str, str]]] = []
    for point in ordered:
        near = next((c for c in columns if abs(math.log10(c[0][0]) - math.log10(point[0])) < 0.9), None)
        if near is None:
            columns.append([point])
        else:
            near.append(point)
    for column in columns:
        places = spread_out([point[1] for point in column], gap)
        right = max(point[0] for point in column)
        for (x, y, name, colour), place in zip(column, places, strict=True):
            axes.annotate(
                name,
                xy=(x, y),
                xytext=(right * 1.35, place),
                va="center",
                fontsize=8.5,
                fontweight="bold" if name == MAIN_METHOD else "normal",
                color=colour,
                arrowprops={"arrowstyle": "-", "color": palette.grid, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5},
            )


# --- output ------------------------------------------------------------------------------------------

_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "edgeduet",
    "font.family": "sans-serif",
    "figure.dpi": 100,
    "axes.titlepad": 6,
}


def draw_svg(draw: Callable[[Palette], Figure]) -> str:
    """Return a figure as inline SVG whose colours are CSS variables of the page."""
    buffer = io.StringIO()
    with mpl.rc_context(_RC):
        figure = draw(_STAND_IN)
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    return themed(text)


def themed(svg: str) -> str:
    """Replace stand-in colours by CSS variables, fonts by the page's font, and ids that would repeat on a page."""
    names = {"ink": _STAND_IN.ink, "muted": _STAND_IN.muted, "grid": _STAND_IN.grid, "paper": _STAND_IN.paper}
    names |= {f"s{index}": colour for index, colour in enumerate(_STAND_IN.series)}
    for name, colour in names.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r"font: ((?:\w+ )*)([\d.]+px) [^;\"]*", r"font: \1\2 var(--font)", svg)
    svg = re.sub(
        r' id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick|[A-Z]\w+|legend|image)_?\d*"', "", svg
    )
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg height="[^"]*" width="[^"]*"', r"<svg \1", svg)
    return svg.replace("<metadata>", "<metadata hidden>") if "<metadata>" in svg else svg


def write_png(path: Path, draw: Callable[[Palette], Figure]) -> None:
    """Write a figure with the light palette on white paper."""
    buffer = io.BytesIO()
    with mpl.rc_context(_RC):
        figure = draw(LIGHT)
        figure.set_facecolor(LIGHT.paper)
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    atomic_write_bytes(path, buffer.getvalue())
