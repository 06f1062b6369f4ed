"""A progress bar for slow data work: on a terminal only, on stderr, gone when done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(description: str, total: int | None, *, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield ``advance(n)``; with ``total`` None the bar only shows that something goes on.

    Draws nothing when ``enabled`` is false or stderr is not a terminal.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.update(task, advance=count)
