"""``edgeduet-client llm gate``: train and evaluate the language confusion gate of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from edgeduet_client.llm.command_line import (
    JsonOption,
    ModelArgument,
    ModelsOption,
    QuietOption,
    SamplerOption,
    SetOption,
    TemperatureOption,
    ThreadsOption,
    print_json,
    print_table,
    says_when_interrupted,
)

gate_app = typer.Typer(
    name="gate",
    help="The language confusion gate: keeps a model from slipping into another script.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

TextsOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Texts: LANGUAGE.txt or .jsonl files.  [default: texts of installed packages]"),
]
LanguagesOption = Annotated[
    str | None, typer.Option(metavar="CODES", help="Languages of packaged texts, by comma.  [default: a mix of 14]")
]
PerLanguageOption = Annotated[int | None, typer.Option(min=1, help="Texts of each language.  [default: 100]")]


@gate_app.command()
def train(
    model: ModelArgument,
    texts: TextsOption = None,
    languages: LanguagesOption = None,
    per_language: PerLanguageOption = None,
    norms: Annotated[
        str | None,
        typer.Option(metavar="median|paper|none", help="How labels adjust for the norms of tokens.  [default: median]"),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the positions.  [default: 10]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Split, initial weights, order.")] = 0,
    threads: ThreadsOption = None,
    models: ModelsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train the gate of a model and store it with the model. Interrupted, the same command goes on.

    Examples:

    * `edgeduet-client llm gate train gemma3-270m`
    * `edgeduet-client llm gate train gemma3-270m --languages ko,ru,el,en --per-language 50`
    * `edgeduet-client llm gate train assistant --texts ~/texts`
    """
    from edgeduet_client.llm.gate_report import training_facts, training_values
    from edgeduet_client.llm.gate_training import train_gate
    from edgeduet_client.llm.step_progress import StepProgress

    options = gate_options(per_language=per_language, norms=norms, epochs=epochs, seed=seed)
    goes_on = says_when_interrupted("the model is as it was; the same command goes on where this one stopped")
    with goes_on, StepProgress(shown=not quiet) as progress:
        trained = train_gate(
            model,
            texts=texts,
            languages=_codes(languages),
            options=options,
            root=models,
            threads=threads,
            progress=progress,
        )
    if json:
        print_json(training_values(trained))
    else:
        print_table(f"gate of {model}", (), training_facts(trained))


@gate_app.command("eval")
def eval_(
    model: ModelArgument,
    texts: TextsOption = None,
    languages: LanguagesOption = None,
    per_language: PerLanguageOption = None,
    answers: Annotated[int, typer.Option(min=1, help="Free answers, each with and without the gate.")] = 40,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a free answer.")] = 24,
    sampler: SamplerOption = None,
    temperature: TemperatureOption = None,
    set_: SetOption = [],  # noqa: B006 - typer needs a list and copies it
    threads: ThreadsOption = None,
    models: ModelsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure what the gate of a model changes: confusion, legitimate mixing, interventions, time.

    Measured on texts the gate was not trained on; intervals are of 95 %.

    Examples:

    * `edgeduet-client llm gate eval gemma3-270m`
    * `edgeduet-client llm gate eval gemma3-270m --sampler top-p --set top_p=0.9 --json`
    """
    from edgeduet_client.llm.gate_evaluation import evaluate_gate
    from edgeduet_client.llm.gate_report import EVALUATION_HEAD, evaluation_rows, evaluation_values
    from edgeduet_client.llm.request import GenerationRequest
    from edgeduet_client.llm.settings import settings_from
    from edgeduet_client.llm.step_progress import StepProgress

    request = GenerationRequest(**settings_from(set_, sampler=sampler, temperature=temperature))
    with StepProgress(shown=not quiet) as progress:
        found = evaluate_gate(
            model,
            texts=texts,
            languages=_codes(languages),
            request=request,
            options=gate_options(per_language=per_language),
            answers=answers,
            answer_tokens=answer_tokens,
            root=models,
            threads=threads,
            progress=progress,
        )
    if json:
        print_json(evaluation_values(found))
    else:
        title = f"gate of {model}: {found.texts} texts of {', '.join(found.languages)}, sampler {found.request.sampler}"
        print_table(title, EVALUATION_HEAD, evaluation_rows(found))


def gate_options(**given: Any) -> Any:
    """Return the options of a training; what is ``None`` has its default.

    Raises:
        RequestError: a value that is not possible.
    """
    from pydantic import ValidationError

    from edgeduet_client.llm.errors import RequestError
    from edgeduet_client.llm.gate_training import GateOptions

    try:
        return GateOptions(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        name = str(found["loc"][0])
        option = name.replace("_", "-")
        message = found["msg"][:1].lower() + found["msg"][1:]
        raise RequestError(f"--{option} {found['input']}: {message}", name) from error


def _codes(languages: str | None) -> list[str] | None:
    return None if languages is None else [code.strip() for code in languages.split(",") if code.strip()]
