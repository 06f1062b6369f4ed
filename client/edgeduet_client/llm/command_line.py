"""What the commands of the local model share: arguments and options, and how results are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer


def complete_model(incomplete: str) -> list[str]:
    """Return the imported models whose names begin so."""
    from edgeduet_client.llm.model_folder import list_models

    return [folder.name for folder in list_models()[0] if folder.name.startswith(incomplete)]


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of an imported model, or a model folder.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
ModelsOption = Annotated[
    Path | None,
    typer.Option(
        "--models", metavar="DIR", help="Where models lie.  [default: $EDGEDUET_MODELS, else the user's data folder]"
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Cores to use.  [default: those of this process, at most 4]")
]
JsonOption = Annotated[bool, typer.Option("--json", help="The result as JSON on standard output.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the result.")]
SamplerOption = Annotated[
    str | None, typer.Option("--sampler", help="p-less, greedy, top-p, min-p, ...  [default: p-less]")
]
TemperatureOption = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 = greedy.  [default: the model's, else 1]")
]
MaxTokensOption = Annotated[
    int | None, typer.Option("--max-tokens", "-n", min=1, help="Tokens of an answer.  [default: 512, or what fits]")
]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Same seed, same answer.")]
GateOption = Annotated[
    str, typer.Option("--gate", metavar="auto|on|off", help="The language confusion gate; auto = where it is trained.")
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting of a generation (top_p=0.9, stop='[\"\\n\"]'); repeatable.",
        show_default=False,
    ),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="fast|exact|off",
        help="Draft and verify, for speed; exact: kernels round as in plain decoding.  [default: off]",
    ),
]
DrafterOption = Annotated[
    list[str],
    typer.Option(
        "--drafter",
        metavar="[NAME=]KIND[:KEY=VALUE,...]",
        help="ngram, recurrent, model, truncated, ...; repeatable; none = no drafter.  "
        "[default: ngram and those of the model's folder]",
        show_default=False,
    ),
]
SelectorOption = Annotated[
    str | None,
    typer.Option("--selector", help="Rule that picks drafter and length: ratio, fixed, ...  [default: ratio]"),
]
SpeculationOption = Annotated[
    list[str],
    typer.Option(
        "--speculation",
        metavar="KEY=VALUE",
        help="Any other option of speculation (lengths=[2,4], verify=fly, trace=FILE); repeatable.",
        show_default=False,
    ),
]


@contextmanager
def says_when_interrupted(how: str) -> Iterator[None]:
    """On Ctrl-C, say how things stand and leave with the shell's exit code for an interrupt."""
    try:
        yield
    except KeyboardInterrupt as stop:
        typer.echo(f"interrupted: {how}", err=True)
        raise typer.Exit(130) from stop


def print_piece(text: str) -> None:
    """Print a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print ``value`` as JSON that every parser reads."""
    typer.echo(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2))


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows: in columns that fit on a terminal, one line for each elsewhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        # Whoever greps wants one line per entry.
        console = Console(width=max(120, *(sum(len(cell) + 3 for cell in row) for row in rows)))
    table = Table(*head, title=title, title_justify="left", box=box.SIMPLE, show_header=bool(head), pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
