"""``edgeduet-client llm``: import a model, talk to it, serve it, measure it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeduet_client.llm.command_line import (
    DrafterOption,
    GateOption,
    JsonOption,
    MaxTokensOption,
    ModelArgument,
    ModelsOption,
    QuietOption,
    SamplerOption,
    SeedOption,
    SelectorOption,
    SetOption,
    SpeculateOption,
    SpeculationOption,
    TemperatureOption,
    ThreadsOption,
    complete_model,
    print_json,
    print_piece,
    print_table,
    says_when_interrupted,
)
from edgeduet_client.llm.gate_commands import gate_app
from edgeduet_client.llm.speculation.commands import speculate_app
from edgeduet_client.llm.speculation.drafter_commands import drafter_app

llm_app = typer.Typer(
    name="llm",
    help="The private language model of this device.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
llm_app.add_typer(gate_app)
llm_app.add_typer(drafter_app)
llm_app.add_typer(speculate_app)


def _complete_source(incomplete: str) -> list[str]:
    from edgeduet_client.llm.sources import PACKAGES

    return [name for name in PACKAGES if name.startswith(incomplete)]


@llm_app.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="GGUF file, Hugging Face folder or repo id, or a short name (smollm2-135m, gemma3-270m).",
            autocompletion=_complete_source,
            show_default=False,
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the model.  [default: from the source]")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="none|int8|w8a8|int4",
            help="Bits of the weights; w8a8: for speculation.  [default: a 4-bit GGUF's own, else int8]",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=64, help="Positions to support.  [default: the model's, at most 8192]")
    ] = None,
    max_perplexity_ratio: Annotated[
        float | None,
        typer.Option(min=1.0, help="Refuse a quantisation that costs more.  [default: 1.02, w8a8 1.05, int4 1.1]"),
    ] = None,
    no_source_check: Annotated[
        bool, typer.Option("--no-source-check", help="Leave out the comparison with the source model (needs torch).")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a model of that name.")] = False,
    models: ModelsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make a model folder out of weights, and check it against its source.

    Examples:

    * `edgeduet-client llm import smollm2-135m`
    * `edgeduet-client llm import ~/Downloads/model.Q4_K_M.gguf --name assistant`
    * `edgeduet-client llm import HuggingFaceTB/SmolLM2-135M-Instruct --quantize int8`
    """
    from edgeduet_client.llm.errors import RequestError
    from edgeduet_client.llm.importing import ImportOptions, import_model
    from edgeduet_client.llm.model_tables import model_facts
    from edgeduet_client.llm.step_progress import StepProgress

    if quantize not in (None, "none", "int8", "w8a8", "int4"):
        raise RequestError(f"--quantize {quantize} is not known; choose none, int8, w8a8 or int4", "quantize")
    options = ImportOptions(
        name=name,
        quantisation=quantize,  # type: ignore[arg-type]
        context_length=context,
        largest_ratio=max_perplexity_ratio,
        compare_with_source=not no_source_check,
        replace=replace,
    )
    with says_when_interrupted("nothing was imported"), StepProgress(shown=not quiet) as progress:
        folder = import_model(source, options, root=models, progress=progress)
    if json:
        typer.echo(folder.manifest.model_dump_json(indent=2))
        return
    print_table(f"imported {folder.name}", (), model_facts(folder))
    if not quiet:
        typer.echo(f"talk to it: edgeduet-client llm chat {folder.name}")


@llm_app.command("list")
def list_(models: ModelsOption = None, json: JsonOption = False) -> None:
    """List the imported models.

    Example: `edgeduet-client llm list`
    """
    from edgeduet_client.llm.model_folder import list_models, models_root
    from edgeduet_client.llm.model_tables import LIST_HEAD, list_row

    usable, broken = list_models(models)
    if json:
        print_json([folder.manifest.model_dump(mode="json") for folder in usable])
    elif usable:
        print_table(f"models in {models or models_root()}", LIST_HEAD, [list_row(folder) for folder in usable])
    else:
        typer.echo(f"no model in {models or models_root()}; try: edgeduet-client llm import smollm2-135m")
    for line in broken:
        typer.echo(f"not usable: {line}", err=True)


@llm_app.command()
def show(model: ModelArgument, models: ModelsOption = None, json: JsonOption = False) -> None:
    """Show what is known about a model: origin, size, checks, gate.

    Example: `edgeduet-client llm show smollm2-135m`
    """
    from edgeduet_client.llm.model_folder import ModelFolder
    from edgeduet_client.llm.model_tables import model_facts

    folder = ModelFolder.open(model, models)
    if json:
        typer.echo(folder.manifest.model_dump_json(indent=2))
    else:
        print_table(folder.name, (), model_facts(folder))


@llm_app.command()
def verify(model: ModelArgument, models: ModelsOption = None, quiet: QuietOption = False) -> None:
    """Compare every file of a model with the checksum it had when it was imported.

    Example: `edgeduet-client llm verify smollm2-135m`
    """
    from edgeduet_client.llm.model_folder import ModelFolder
    from edgeduet_client.llm.step_progress import StepProgress

    folder = ModelFolder.open(model, models)
    with StepProgress(shown=not quiet) as progress:
        folder.verify(lambda done, total: progress("checksums", done, total))
    typer.echo(f"{folder.name}: {len(folder.manifest.files)} files as imported")


@llm_app.command()
def remove(
    model: ModelArgument,
    models: ModelsOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model.

    Example: `edgeduet-client llm remove smollm2-135m`
    """
    from edgeduet_client.llm.model_folder import ModelFolder

    folder = ModelFolder.open(model, models)
    if not yes and not typer.confirm(f"delete {folder.path}?"):
        raise typer.Exit(1)
    folder.remove()
    typer.echo(f"deleted {folder.path}")


@llm_app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Argument(help="Text to go on with; '-' reads it from standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message to answer.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    sampler: SamplerOption = None,
    temperature: TemperatureOption = None,
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = None,
    gate: GateOption = "auto",
    set_: SetOption = [],  # noqa: B006 - typer needs a list and copies it
    speculate: SpeculateOption = None,
    drafter: DrafterOption = [],  # noqa: B006 - typer needs a list and copies it
    selector: SelectorOption = None,
    speculation: SpeculationOption = [],  # noqa: B006
    threads: ThreadsOption = None,
    models: ModelsOption = None,
    json: JsonOption = False,
) -> None:
    """Go on with a text, or answer one message.

    Examples:

    * `edgeduet-client llm generate smollm2-135m "Once upon a time" -n 60`
    * `edgeduet-client llm generate smollm2-135m --chat "What is a lighthouse?" --seed 1`
    * `git diff | edgeduet-client llm generate assistant - --system "Write a commit message."`
    * `edgeduet-client llm generate assistant --chat "A person, as JSON" --set 'json_schema={"type":"object"}' --json`
    * `edgeduet-client llm generate assistant - --speculate fast --drafter ngram < report.txt`
    """
    from edgeduet_client.llm.settings import settings_from
    from edgeduet_client.llm.single_answer import answer_once
    from edgeduet_client.llm.speculation.options import options_from_command_line

    settings = settings_from(
        set_, sampler=sampler, temperature=temperature, max_tokens=max_tokens, seed=seed, gate=gate
    )
    text = _standard_input() if prompt == "-" else prompt
    result = answer_once(
        model,
        text,
        settings,
        chat=chat or system is not None,
        system=system,
        root=models,
        threads=threads,
        show=None if json else print_piece,
        speculation=options_from_command_line(speculate, drafter, selector, speculation),
    )
    if json:
        print_json(result)
    else:
        typer.echo()
        for line in result.get("speculation_messages", ()):
            typer.echo(line, err=True)
    if result["finish"] == "cancelled":
        raise typer.Exit(130)


@llm_app.command()
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    sampler: SamplerOption = None,
    temperature: TemperatureOption = None,
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = None,
    gate: GateOption = "auto",
    set_: SetOption = [],  # noqa: B006 - typer needs a list and copies it
    speculate: SpeculateOption = None,
    drafter: DrafterOption = [],  # noqa: B006 - typer needs a list and copies it
    selector: SelectorOption = None,
    speculation: SpeculationOption = [],  # noqa: B006
    threads: ThreadsOption = None,
    models: ModelsOption = None,
) -> None:
    """Talk to a model. Ctrl-C stops an answer, /exit or Ctrl-D ends; /help lists the commands.

    With standard input from a pipe, every line is a message and the answers go to standard output.

    Examples:

    * `edgeduet-client llm chat smollm2-135m`
    * `edgeduet-client llm chat smollm2-135m --system "Answer in one sentence." -t 0.7`
    * `printf 'Hello!\\nAnd in French?\\n' | edgeduet-client llm chat smollm2-135m`
    """
    from edgeduet_client.llm.chat_terminal import run_chat
    from edgeduet_client.llm.settings import settings_from
    from edgeduet_client.llm.speculation.options import options_from_command_line

    settings = settings_from(
        set_, sampler=sampler, temperature=temperature, max_tokens=max_tokens, seed=seed, gate=gate
    )
    speculating = options_from_command_line(speculate, drafter, selector, speculation)
    run_chat(model, settings, system=system, root=models, threads=threads, speculation=speculating)


@llm_app.command()
def serve(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Names of imported models, or model folders.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; any but this machine's own needs a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port for HTTP; 0 = any free one.")] = 8217,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="Port for gRPC; 0 = any free one.")] = 8218,
    no_grpc: Annotated[bool, typer.Option("--no-grpc", help="Serve HTTP only.")] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Holds the token callers must show.  [default: $EDGEDUET_LLM_TOKEN, if set]"),
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option(metavar="PEM", help="TLS certificate (chain); goes with --key.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="PEM", help="Key of the certificate.")] = None,
    queue: Annotated[int, typer.Option(min=0, help="Requests of a model that may wait; more get HTTP 429.")] = 64,
    max_body: Annotated[int, typer.Option(min=1024, help="Bytes of one request.")] = 1 << 20,
    max_prompt: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one prompt.  [default: the model's context]")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one answer.  [default: the model's context]")
    ] = None,
    default_max_tokens: Annotated[int, typer.Option(min=1, help="The same, where a request does not say.")] = 512,
    max_choices: Annotated[int, typer.Option(min=1, help="Answers of one request: prompts times n.")] = 16,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds from a request's arrival to its last token.")] = 600,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that accepted requests have left after SIGTERM.")] = 30,
    cache_mb: Annotated[int, typer.Option(min=0, help="MB of caches kept per model for going on with a chat.")] = 256,
    speculate: SpeculateOption = None,
    drafter: DrafterOption = [],  # noqa: B006 - typer needs a list and copies it
    selector: SelectorOption = None,
    speculation: SpeculationOption = [],  # noqa: B006
    threads: ThreadsOption = None,
    models: ModelsOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every request (never its text).")] = False,
) -> None:
    """Serve models to other programs: OpenAI's API over HTTP, and gRPC.

    SIGTERM or Ctrl-C: what was accepted is answered, new requests are refused, then it ends; once more: at once.

    Examples:

    * `edgeduet-client llm serve smollm2-135m`
    * `edgeduet-client llm serve assistant --port 8000 --no-grpc --queue 8`
    * `edgeduet-client llm serve assistant --host 0.0.0.0 --token-file token --certificate c.pem --key k.pem`
    """
    from edgeduet_client.llm.serving.limits import ServingLimits
    from edgeduet_client.llm.serving.start import serve_models
    from edgeduet_client.llm.speculation.options import options_from_command_line

    limits = ServingLimits(
        queue=queue,
        body_bytes=max_body,
        prompt_tokens=max_prompt,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        choices=max_choices,
        timeout_s=timeout,
        drain_s=drain,
        cache_bytes=cache_mb * 1_000_000,
    )
    code = serve_models(
        model,
        limits,
        host=host,
        http_port=port,
        grpc_port=None if no_grpc else grpc_port,
        token_file=token_file,
        certificate=certificate,
        key=key,
        root=models,
        threads=threads,
        speculation=options_from_command_line(speculate, drafter, selector, speculation),
        verbose=verbose,
    )
    raise typer.Exit(code)


@llm_app.command()
def bench(
    model: ModelArgument,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds, after one to warm up.")] = 5,
    sampler: SamplerOption = None,
    temperature: TemperatureOption = None,
    gate: GateOption = "auto",
    set_: SetOption = [],  # noqa: B006 - typer needs a list and copies it
    speculate: SpeculateOption = None,
    drafter: DrafterOption = [],  # noqa: B006 - typer needs a list and copies it
    selector: SelectorOption = None,
    speculation: SpeculationOption = [],  # noqa: B006
    threads: ThreadsOption = None,
    models: ModelsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure a model on this machine: reading, time to the first token, writing, memory.

    Examples:

    * `edgeduet-client llm bench smollm2-135m`
    * `edgeduet-client llm bench smollm2-135m --threads 1 --sampler greedy --json`
    * `edgeduet-client llm bench smollm2-135m --sampler greedy --speculate fast`
    """
    from edgeduet_client.llm.bench import bench_model, bench_rows
    from edgeduet_client.llm.settings import settings_from
    from edgeduet_client.llm.speculation.options import options_from_command_line
    from edgeduet_client.llm.step_progress import StepProgress

    settings = settings_from(set_, sampler=sampler, temperature=temperature, gate=gate)
    with StepProgress(shown=not quiet) as progress:
        result = bench_model(
            model,
            settings,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            rounds=rounds,
            root=models,
            threads=threads,
            speculation=options_from_command_line(speculate, drafter, selector, speculation),
            progress=progress,
        )
    if json:
        print_json(result)
    else:
        print_table(f"{result['model']}, {result['threads']} threads", ("what", "median", "range"), bench_rows(result))
        if (speculated := result.get("speculation")) is not None:
            _print_speculation(speculated)


def _print_speculation(result: dict[str, Any]) -> None:
    from edgeduet_client.llm.speculation.bench import SPECULATION_HEAD, speculation_rows

    costs = ", ".join(f"{rows}: {cost:.2f}" for rows, cost in enumerate(result["step_costs"], 1))
    print_table(f"speculation, {result['mode']} mode; * fastest fixed arm", SPECULATION_HEAD, speculation_rows(result))
    typer.echo(f"selector / fastest fixed arm: {result['selector_share']:.3f}")
    typer.echo(f"time of a step of m rows over one of one row: {costs}")


@llm_app.command("eval")
def eval_(
    model: ModelArgument,
    texts: Annotated[list[Path], typer.Option("--texts", metavar="FILE", help="Text to predict, UTF-8; repeatable.")],
    window: Annotated[
        int, typer.Option(min=2, help="Tokens read in one context; longer texts are cut into windows.")
    ] = 1024,
    threads: ThreadsOption = None,
    models: ModelsOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure how well a model predicts a text: its perplexity, lower is better.

    Comparable only between models of the same tokenizer; bits per byte are comparable between all.

    Example: `edgeduet-client llm eval smollm2-135m --texts notes.txt`
    """
    from edgeduet_client.llm.evaluation import EVAL_HEAD, eval_row, evaluate_texts
    from edgeduet_client.llm.step_progress import StepProgress

    with StepProgress(shown=not quiet) as progress:
        results = evaluate_texts(model, texts, window=window, root=models, threads=threads, progress=progress)
    if json:
        print_json(results)
    else:
        print_table(f"perplexity, windows of {window} tokens", EVAL_HEAD, [eval_row(result) for result in results])


def _standard_input() -> str:
    from edgeduet_client.llm.errors import RequestError

    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not valid UTF-8 at byte {error.start}", "prompt") from error
