"""Progress bars: live on a terminal, quiet lines (training) or nothing (the rest) elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    track,
)

_LOG_SECONDS = 30.0
_T = TypeVar("_T")


def counted(items: Iterable[_T], label: str, *, total: int | None = None) -> Iterable[_T]:
    """Iterate with a bar that disappears at the end; nothing is printed when not on a terminal."""
    console = Console(stderr=True)
    return track(items, label, total=total, console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def training_bar(name: str, *, total: int, completed: int = 0) -> Iterator[Callable[..., None]]:
    """Yield ``report(step, loss=...)``: a live bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        last = [time.monotonic()]

        def line(step: int, **values: float) -> None:
            if step < total and time.monotonic() - last[0] < _LOG_SECONDS:
                return
            last[0] = time.monotonic()
            shown = " ".join(f"{key}={value:.4f}" for key, value in values.items())
            console.print(f"{name} step={step}/{total} {shown}", highlight=False)

        yield line
        return
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total, completed=completed, shown="")

        def update(step: int, **values: float) -> None:
            shown = " ".join(f"{key} {value:.3f}" for key, value in values.items())
            progress.update(task, completed=step, shown=shown)

        yield update
