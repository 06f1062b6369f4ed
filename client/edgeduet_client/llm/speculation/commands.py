"""``edgeduet-client llm speculate``: replay and draw traces of speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edgeduet_client.llm.command_line import JsonOption, print_json, print_table

speculate_app = typer.Typer(
    name="speculate",
    help="Traces of speculative decoding (`--speculation trace=FILE`): replay them, draw them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

TraceArgument = Annotated[Path, typer.Argument(metavar="TRACE", help="A trace file.", show_default=False)]
REPLAYED = ("ratio", "normalhedge", "hedge", "adanormalhedge", "ucbspec", "exp3spec", "metasd")


@speculate_app.command("replay")
def replay_(
    trace: TraceArgument,
    selector: Annotated[
        list[str],
        typer.Option("--selector", metavar="NAME", help="Selector; repeatable.  [default: all that learn]"),
    ] = [],  # noqa: B006
    eval_budget: Annotated[float, typer.Option(min=0, max=0.9, help="Share of the time for scoring drafters.")] = 0.04,
    seed: Annotated[int, typer.Option(min=0, help="Of verdicts and of selectors that draw.")] = 0,
    json: JsonOption = False,
) -> None:
    """What other selectors, and every fixed arm, would have made of the same text.

    Acceptance is exact for every arm; seconds come from the costs recorded in the trace.

    Examples:

    * `edgeduet-client llm generate assistant "..." --speculate fast --speculation trace=run.jsonl`
    * `edgeduet-client llm speculate replay run.jsonl`
    * `edgeduet-client llm speculate replay run.jsonl --selector ratio --selector ucbspec --json`
    """
    from edgeduet_client.llm.speculation.replay import compare
    from edgeduet_client.llm.speculation.trace import read_trace

    result = compare(read_trace(trace), selector or list(REPLAYED), seed=seed, eval_budget=eval_budget)
    if json:
        print_json(result)
        return
    print_table(
        f"{trace.name}: {result['tokens']} tokens of {result['requests']} answers; * fastest fixed arm",
        ("selector or arm", "tokens/s", "x no draft", "of the fastest arm", "tokens/round", "scoring", "switches"),
        [_cells(row, result["oracle"]) for row in result["rows"]],
    )


@speculate_app.command()
def plot(
    trace: TraceArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PNG", help="Picture.  [default: TRACE with .png]")
    ] = None,
) -> None:
    """Draw arm choice, acceptance and rate over the tokens of a trace.

    Examples:

    * `edgeduet-client llm speculate plot run.jsonl -o run.png`
    """
    from edgeduet_client.llm.speculation.plotting import plot_trace
    from edgeduet_client.llm.speculation.trace import read_trace

    target = output or trace.with_suffix(".png")
    plot_trace(read_trace(trace), target)
    typer.echo(f"wrote {target}")


def _cells(row: dict[str, Any], fastest: str) -> tuple[str, ...]:
    return (
        row["name"] + (" *" if row["name"] == fastest else ""),
        f"{row['tokens_per_second']:.1f}",
        f"{row['of_no_draft']:.3f}",
        f"{row['of_oracle']:.1%}",
        f"{row['tokens_per_round']:.2f}",
        f"{row['scoring_share']:.1%}",
        str(row["switches"]),
    )
