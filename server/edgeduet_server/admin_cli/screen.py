"""What ``edgeduet-admin`` prints: tables for people, JSON for programs, a matrix in colours or as PNG."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from edgeduet_shared.metrics import format_bytes
from edgeduet_shared.names import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

Values = Mapping[str, Any]
_STATE_STYLES = {
    "running": "green",
    "finished": "green",
    "online": "green",
    "approved": "green",
    "valid": "green",
    "paused": "yellow",
    "pending": "yellow",
    "requested": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "offline": "red",
    "revoked": "red",
    "expired": "red",
}


def show(fetch: Callable[[], Values], draw: Callable[[Values], RenderableType], *, as_json: bool, watch: float) -> None:
    """Print what ``fetch`` returns, once, or every ``watch`` seconds until Ctrl-C."""
    if watch:
        with suppress(KeyboardInterrupt):
            _watch(fetch, draw, as_json, watch)
    elif as_json:
        typer.echo(json.dumps(fetch(), ensure_ascii=False, indent=2))
    else:
        _console().print(draw(fetch()))


def _watch(fetch: Callable[[], Values], draw: Callable[[Values], RenderableType], as_json: bool, pause: float) -> None:
    from rich.live import Live

    if as_json:
        while True:
            typer.echo(json.dumps(fetch(), ensure_ascii=False))
            time.sleep(pause)
    console = _console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(draw(fetch()), refresh=True)
            time.sleep(pause)


def table(rows: Sequence[Sequence[object]], head: Sequence[str], title: str = "") -> RenderableType:
    """Return a table; words for states are coloured, cells are never read as markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(
        *head, title=title or None, title_justify="left", box=box.SIMPLE, pad_edge=False, show_header=bool(head)
    )
    for row in rows:
        cells = []
        for cell in row:
            text = printable(str(cell))
            cells.append(Text(text, style=_STATE_STYLES.get(text.split(" ")[0], "")))
        result.add_row(*cells)
    return result


def group(*parts: RenderableType | str) -> RenderableType:
    """Return several things one below the other."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(Text(printable(part)) if isinstance(part, str) else part for part in parts))


def matrix(rows: Sequence[Values], tasks: Sequence[str], title: str) -> RenderableType:
    """Return an accuracy matrix in per cent, a row per stage; the better, the greener."""
    from rich import box
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

    result = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    result.add_column("after stage")
    for name in tasks:
        result.add_column(printable(name), justify="right")
    for row in rows:
        cells = []
        for task, entry in enumerate(row["tasks"][: len(tasks)]):
            value = entry["value"]
            if value is None:
                cells.append(Text("-"))
                continue
            shade = int(40 + 120 * value)
            style = Style(color="white", bgcolor=f"rgb({180 - shade},{shade},60)") if task <= row["stage"] else Style()
            cells.append(Text(f" {100 * value:5.1f} ", style=style))
        result.add_row(str(row["stage"] + 1), *cells)
    return result


def matrix_png(panels: Mapping[str, Sequence[Values]], tasks: Sequence[str], path: Path) -> None:
    """Write accuracy matrices side by side as a PNG.

    Args:
        panels: title -> rows.
        tasks: names.
        path: the file.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import numpy as np
    from matplotlib import pyplot as plt

    from edgeduet_shared.atomic_files import atomic_output

    figure, axes = plt.subplots(
        1, len(panels), figsize=(2.2 + 1.1 * len(tasks) * len(panels), 1.8 + 0.6 * len(tasks)), squeeze=False
    )
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        values = np.full((len(rows), len(tasks)), np.nan)
        for index, row in enumerate(rows):
            for task, entry in enumerate(row["tasks"][: len(tasks)]):
                values[index, task] = np.nan if entry["value"] is None else 100 * entry["value"]
        axis.imshow(values, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                axis.text(j, i, f"{value:.1f}", ha="center", va="center", color="white" if value < 60 else "black")
        axis.set_xticks(range(len(tasks)), [printable(task) for task in tasks], rotation=30, ha="right")
        axis.set_yticks(range(len(rows)), [f"stage {row['stage'] + 1}" for row in rows])
        axis.set_title(f"{title}, accuracy in %")
    figure.tight_layout()
    with atomic_output(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
    plt.close(figure)


def moment(text: str | None) -> str:
    """Return a time for people: today's without the date; local time."""
    if not text:
        return ""
    when = datetime.fromisoformat(text).astimezone()
    today = datetime.now(UTC).astimezone().date()
    return f"{when:%H:%M:%S}" if when.date() == today else f"{when:%Y-%m-%d %H:%M}"


def progress(run: Values) -> str:
    """Return how far a run is: ``stage 2/4, round 3/6``."""
    if run["stages"] and run["stages_done"] >= run["stages"]:
        return f"all {run['stages']} stages"
    stages = f"/{run['stages']}" if run["stages"] else ""
    return f"stage {run['stages_done'] + 1}{stages}, round {run['rounds_done']}/{run['rounds_per_stage']}"


def amount(count: float) -> str:
    """Return a byte count for people."""
    return format_bytes(count)


def percent(value: float | None) -> str:
    """Return an accuracy for people."""
    return "n/a" if value is None else f"{100 * value:.1f}"


def _console() -> Any:
    from rich.console import Console

    console = Console()
    # Whoever greps wants one line per entry.
    return console if console.is_terminal else Console(width=240)
