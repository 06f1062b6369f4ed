"""``edgeduet-client llm drafter``: make, list and remove the trained drafters of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeduet_client.llm.command_line import (
    JsonOption,
    ModelArgument,
    ModelsOption,
    QuietOption,
    ThreadsOption,
    print_json,
    print_table,
    says_when_interrupted,
)

if TYPE_CHECKING:
    from edgeduet_client.llm.speculation.drafter_artefact import DrafterCard

drafter_app = typer.Typer(
    name="drafter",
    help="Drafters of a model: small networks that make it faster without changing what it says.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

NameOption = Annotated[str, typer.Option(help="Name of the drafter.")]
DrafterArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of a drafter.", show_default=False)]
ReplaceOption = Annotated[bool, typer.Option("--replace", help="Replace a drafter of that name.")]


@drafter_app.command()
def train(
    model: ModelArgument,
    corpus: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Texts: .txt, .md, .py, .jsonl, ...  [default: what Python ships]"),
    ] = None,
    languages: Annotated[
        str | None, typer.Option(metavar="CODES", help="Languages of packaged texts, by comma, instead of --corpus.")
    ] = None,
    name: NameOption = "recurrent",
    tokens: Annotated[
        int | None, typer.Option(min=200, help="Tokens the model reads and writes.  [default: 250000]")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Updates.  [default: four passes]")] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.05, help="Time to take: fewer tokens and updates.  [default: no limit]")
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=16, help="Tokens the drafter can propose.  [default: 8192]")
    ] = None,
    memory: Annotated[int | None, typer.Option(min=1, help="MB it may take.  [default: what is free]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws, initial parameters, order.")] = 0,
    threads: ThreadsOption = None,
    replace: ReplaceOption = False,
    models: ModelsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a drafter on what the model itself writes. Interrupted, the same command goes on.

    Examples:

    * `edgeduet-client llm drafter train smollm2-135m`
    * `edgeduet-client llm drafter train smollm2-135m --corpus ~/notes --name notes --minutes 20 --threads 1`
    """
    from edgeduet_client.llm.speculation.drafter_making import make_drafter
    from edgeduet_client.llm.step_progress import StepProgress

    options = making_options(
        name=name,
        positions=tokens,
        steps=steps,
        minutes=minutes,
        vocabulary=vocabulary,
        memory_mb=memory,
        seed=seed,
        replace=replace,
    )
    codes = None if languages is None else [code.strip() for code in languages.split(",") if code.strip()]
    goes_on = says_when_interrupted("the model is as it was; the same command goes on where this one stopped")
    with goes_on, StepProgress(shown=not quiet) as progress:
        card = make_drafter(
            model, corpus=corpus, languages=codes, options=options, root=models, threads=threads, progress=progress
        )
    _print_card(card, json=json)
    if not json and not quiet:
        typer.echo(f"use it: edgeduet-client llm chat {model} --speculate fast")


@drafter_app.command()
def truncate(
    model: ModelArgument,
    layers: Annotated[int, typer.Option(min=1, help="The model's layers to keep, from the first.", show_default=False)],
    head_vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens the drafter can propose.  [default: all]")
    ] = None,
    name: NameOption = "truncated",
    replace: ReplaceOption = False,
    models: ModelsOption = None,
    json: JsonOption = False,
) -> None:
    """Make a drafter of the model's own first layers; it shares the model's weights.

    Example: `edgeduet-client llm drafter truncate smollm2-135m --layers 24 --head-vocabulary 16384`
    """
    from edgeduet_client.llm.model_folder import ModelFolder
    from edgeduet_client.llm.speculation import truncated

    folder = ModelFolder.open(model, models)
    ids = None if head_vocabulary is None else truncated.frequent_ids(folder, head_vocabulary)
    card = truncated.truncate(folder, name, layers=layers, head_vocabulary=ids, replace=replace)
    _print_card(card, json=json)


@drafter_app.command()
def copy(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Model that has the drafter.", show_default=False)],
    name: DrafterArgument,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Another import of the same weights.", show_default=False)
    ],
    replace: ReplaceOption = False,
    models: ModelsOption = None,
    json: JsonOption = False,
) -> None:
    """Give a trained drafter to another import (at other bits) of the same model.

    Example: `edgeduet-client llm drafter copy smollm2-135m recurrent smollm2-135m-int8`
    """
    from edgeduet_client.llm.model_folder import ModelFolder
    from edgeduet_client.llm.speculation.drafter_artefact import DrafterFolder, find_drafter
    from edgeduet_client.llm.speculation.drafter_export import export_to

    giving, taking = ModelFolder.open(source, models), ModelFolder.open(model, models)
    drafter = DrafterFolder.open(find_drafter(name, giving), giving.manifest)
    _print_card(export_to(drafter, taking, drafter.card.name, replace=replace), json=json)


@drafter_app.command("list")
def list_(model: ModelArgument, models: ModelsOption = None, json: JsonOption = False) -> None:
    """List the drafters of a model.

    Example: `edgeduet-client llm drafter list smollm2-135m`
    """
    from edgeduet_client.llm.model_folder import ModelFolder
    from edgeduet_client.llm.speculation.drafter_artefact import list_drafters

    folder = ModelFolder.open(model, models)
    usable, broken = list_drafters(folder)
    if json:
        print_json([drafter.card.model_dump(mode="json") for drafter in usable])
    elif usable:
        rows = [
            [card.name, card.kind, f"{card.vocabulary:,}", f"{card.bytes / 1e6:.1f} MB", _first_shares(card)]
            for card in (drafter.card for drafter in usable)
        ]
        print_table(f"drafters of {folder.name}", ("name", "kind", "tokens", "size", "first token right"), rows)
    else:
        typer.echo(f"{folder.name} has no drafter; try: edgeduet-client llm drafter train {folder.name}")
    for line in broken:
        typer.echo(f"not usable: {line}", err=True)


@drafter_app.command()
def show(model: ModelArgument, name: DrafterArgument, models: ModelsOption = None, json: JsonOption = False) -> None:
    """Show what is known about a drafter: training, acceptance, parity.

    Example: `edgeduet-client llm drafter show smollm2-135m recurrent`
    """
    from edgeduet_client.llm.model_folder import ModelFolder
    from edgeduet_client.llm.speculation.drafter_artefact import DrafterFolder, find_drafter

    folder = ModelFolder.open(model, models)
    _print_card(DrafterFolder.open(find_drafter(name, folder), folder.manifest).card, json=json)


@drafter_app.command()
def remove(model: ModelArgument, name: DrafterArgument, models: ModelsOption = None) -> None:
    """Delete a drafter.

    Example: `edgeduet-client llm drafter remove smollm2-135m recurrent`
    """
    from edgeduet_client.llm.model_folder import ModelFolder
    from edgeduet_client.llm.speculation.drafter_artefact import remove_drafter

    folder = ModelFolder.open(model, models)
    remove_drafter(folder, name)
    typer.echo(f"removed the drafter {name} of {folder.name}")


def making_options(**given: Any) -> Any:
    """Return the options of a training; what is ``None`` has its default.

    Raises:
        RequestError: a value that is not possible.
    """
    from pydantic import ValidationError

    from edgeduet_client.llm.errors import RequestError
    from edgeduet_client.llm.speculation.drafter_making import MakingOptions

    try:
        return MakingOptions(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        name = str(found["loc"][0])
        message = found["msg"][:1].lower() + found["msg"][1:]
        raise RequestError(f"--{name.replace('_', '-')} {found['input']}: {message}", name) from error


def _print_card(card: DrafterCard, *, json: bool) -> None:
    if json:
        typer.echo(card.model_dump_json(indent=2))
        return
    rows = [
        ["kind", card.kind],
        ["made for", card.target.model],
        ["can propose", f"{card.vocabulary:,} tokens"],
        ["size", f"{card.bytes / 1e6:.1f} MB"],
    ]
    if card.layers is not None:
        rows.append(["layers", str(card.layers)])
    for domain, shares in card.acceptance.items():
        told = ", ".join("-" if share is None else f"{share:.0%}" for share in shares)
        rows.append([f"right in {domain}", f"{told} (tokens 1, 2, 3, each if those before it were)"])
    if card.training:
        rows.append(["texts", f"{card.training['texts']}, {sum(card.training['domains'].values()):,} tokens"])
        rows.append(["updates", f"{card.training['steps']:,.0f}, loss {card.training['loss']:.2f}"])
        seconds = card.training["seconds_reading"] + card.training["seconds_training"]
        rows.append(["time", f"{seconds / 60:.1f} min"])
    if card.parity:
        rows.append(["8 bits", f"same best token as in float32 in {card.parity['same_best']:.1%} of places"])
    print_table(f"drafter {card.name}", (), rows)


def _first_shares(card: DrafterCard) -> str:
    told = [f"{domain} {shares[0]:.0%}" for domain, shares in card.acceptance.items() if shares[0] is not None]
    return ", ".join(told) or "not measured"
