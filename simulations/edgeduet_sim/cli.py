"""``edgeduet-sim``: run methods on scenarios, compare them, report.

Commands import what they need when they run, so that ``--help`` and shell completion are quick and
work where torch is not installed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeduet_shared.command_line import run_command_line
from edgeduet_sim.scenario_files import scenario_names

app = typer.Typer(
    name="edgeduet-sim",
    help="Federated continual learning of a frozen CLIP, simulated: run, compare, report.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
backbone_app = typer.Typer(
    name="backbone",
    help="The backbones that come with the package.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.add_typer(backbone_app)


def _complete_scenario(incomplete: str) -> list[str]:
    return [name for name in scenario_names() if name.startswith(incomplete)]


def _complete_method(incomplete: str) -> list[str]:
    from edgeduet_sim.methods import method_names

    return [name for name in method_names() if name.startswith(incomplete)]


def _complete_key(incomplete: str) -> list[str]:
    from edgeduet_shared.config import Scenario, known_keys

    return [f"{key}=" for key in known_keys(Scenario) if key.startswith(incomplete)]


def _print_version(wanted: bool) -> None:
    if wanted:
        from edgeduet_sim.versions import package_version

        typer.echo(f"edgeduet-sim {package_version('edgeduet')}")
        raise typer.Exit


ScenarioArgument = Annotated[
    str,
    typer.Argument(help="Name of a scenario, or a TOML file.", autocompletion=_complete_scenario, show_default=False),
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of the scenario; repeatable. 'describe' lists them.",
        autocompletion=_complete_key,
        show_default=False,
    ),
]
DataOption = Annotated[
    str | None,
    typer.Option(
        metavar="PATH|hub:NAME|world", help="Use these images: a folder root/[domain/]class/*.jpg, or hub:NAME."
    ),
]
SkipCorruptOption = Annotated[
    bool, typer.Option("--skip-corrupt", help="Leave out images that cannot be read (counted) instead of stopping.")
]
EngineOption = Annotated[str, typer.Option(metavar="in-process|ray", help="What runs the clients; same numbers.")]
BlockOption = Annotated[
    int, typer.Option(min=0, help="Train this many clients as one block; 0 = as many as fit, 1 = one at a time.")
]
WorkersOption = Annotated[
    int, typer.Option(min=0, help="Worker processes for the clients; 0 = none (or Ray's choice).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Events as JSON lines on stdout, everything else on stderr.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the result.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder for the runs.  [default: runs/SCENARIO]", show_default=False)
]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def run(
    scenario: ScenarioArgument,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="Method, with options after ':'.  [default: fed-duet; drafter-pool where drafters are trained]",
            autocompletion=_complete_method,
            show_default=False,
        ),
    ] = None,
    set_: SetOption = [],  # noqa: B006 - typer needs a list and copies it
    data: DataOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    out: OutOption = None,
    engine: EngineOption = "in-process",
    block: BlockOption = 0,
    workers: WorkersOption = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    skip_corrupt: SkipCorruptOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run one method on one scenario.

    Examples:

    * `edgeduet-sim run demo`
    * `edgeduet-sim run demo --method fed-duet:fusion=false+dispatch=random --seed 1`
    * `edgeduet-sim run pacs-domain-beta05 --data ~/images/pacs --set train.lr=3e-4`
    * `edgeduet-sim run demo --resume` goes on after a kill
    """
    from edgeduet_shared.method_spec import MethodSpec
    from edgeduet_sim import runner
    from edgeduet_sim.methods import default_method
    from edgeduet_sim.progress import make_narrator, warnings_shown

    narrator = make_narrator(as_json=json, quiet=quiet)
    setup = _engine_setup(engine, block, workers)
    resolved = _open(scenario, set_, data, skip_corrupt)
    spec = MethodSpec.parse(method or default_method(resolved))
    job = runner.make_job(resolved, spec, seed, _out(out, scenario))
    narrator.message(runner.notice(job.scenario))
    with warnings_shown(narrator), _resumable(f"the same command with --resume goes on ({job.folder})"):
        result = runner.run_one(job, setup, narrator, resume=resume, command=_command())
    if not json:
        typer.echo(runner.summary_text(result))
        typer.echo(f"run: {result.folder}\nreport: edgeduet-sim report {result.folder}")


@app.command()
def compare(
    scenario: ScenarioArgument,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods by comma, or 'all'; options after ':'.  [default: reference, controls and ours]",
            autocompletion=_complete_method,
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 0, 1, ...")] = 3,
    set_: SetOption = [],  # noqa: B006 - typer needs a list and copies it
    data: DataOption = None,
    out: OutOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time, one process and one thread each.")] = 1,
    ablate: Annotated[bool, typer.Option("--ablate", help="Add fed-duet with each of its parts taken away.")] = False,
    engine: EngineOption = "in-process",
    block: BlockOption = 0,
    workers: WorkersOption = 0,
    skip_corrupt: SkipCorruptOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Run several methods on the same split with the same seeds, and write a report.

    Finished runs are kept, interrupted ones go on: repeat the command after a kill, or with more methods or seeds.

    Examples:

    * `edgeduet-sim compare demo`
    * `edgeduet-sim compare pacs-domain-beta05 --methods zero-shot,local,joint,fed-duet --seeds 3 --jobs 2`
    * `edgeduet-sim compare pacs-domain-beta05 --methods all,fedavg-adapter:prior=1.0 --ablate`
    """
    from edgeduet_shared.method_spec import parse_methods
    from edgeduet_sim import runner
    from edgeduet_sim.methods import default_methods, spell_out
    from edgeduet_sim.progress import make_narrator, warnings_shown
    from edgeduet_sim.report import write_report

    resolved, folder = _open(scenario, set_, data, skip_corrupt), _out(out, scenario)
    specs = parse_methods(spell_out(methods or default_methods(resolved), resolved))
    if ablate:
        specs = runner.with_ablations(specs)
    work = [runner.make_job(resolved, spec, seed, folder) for seed in range(seeds) for spec in specs]
    narrator = make_narrator(as_json=json, quiet=quiet)
    narrator.message(runner.notice(resolved))
    with warnings_shown(narrator), _resumable("the same command goes on with what is left"):
        outcome = runner.run_all(
            work, _engine_setup(engine, block, workers), narrator, processes=jobs, command=_command()
        )
    if outcome.runs:
        files = write_report(outcome.runs, folder)
        if not json:
            typer.echo(files.markdown.read_text(encoding="utf-8"))
        typer.echo(f"report: {files.html}", err=json)
    outcome.raise_failures()


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders with runs in them.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where to write.  [default: the first folder given]", show_default=False),
    ] = None,
) -> None:
    """Write a report on runs: one self-contained HTML file, figures as PNG, tables as Markdown and CSV.

    Examples:

    * `edgeduet-sim report runs/demo`
    * `edgeduet-sim report runs/pacs-domain-iid runs/pacs-domain-beta01 --out reports/pacs`
    """
    from edgeduet_sim.report import write_report
    from edgeduet_sim.results import find_runs

    files = write_report(find_runs(runs), out or runs[0])
    typer.echo(files.markdown.read_text(encoding="utf-8"))
    typer.echo(f"report: {files.html}")


@app.command("list")
def list_() -> None:
    """List scenarios and methods.

    Example: `edgeduet-sim list`
    """
    from edgeduet_shared.config import load_scenario
    from edgeduet_sim.methods import method_lines
    from edgeduet_sim.scenario_files import scenario_path

    _table("scenarios", [(name, load_scenario(scenario_path(name)).purpose) for name in scenario_names()])
    _table("methods", method_lines())


@app.command()
def describe(
    name: Annotated[
        str | None, typer.Argument(metavar="[SCENARIO|METHOD|KEY]", help="What to describe; nothing = all settings.")
    ] = None,
) -> None:
    """Describe a scenario, a method with its options, a setting, or all settings.

    Examples:

    * `edgeduet-sim describe demo`
    * `edgeduet-sim describe fed-duet`
    * `edgeduet-sim describe train.lr`
    """
    from edgeduet_shared.config import Scenario, load_scenario
    from edgeduet_sim.describe import find_settings, settings, unknown, value_of
    from edgeduet_sim.methods import method_names, method_text, option_settings
    from edgeduet_sim.scenario_files import scenario_path

    head = ("setting", "value", "kind", "meaning")
    if name is None:
        _table("settings", [(s.key, s.default, s.kind, s.meaning) for s in settings(Scenario)], head)
    elif name in scenario_names() or name.endswith(".toml"):
        chosen = load_scenario(scenario_path(name))
        values = chosen.model_dump(mode="json")
        typer.echo(f"{chosen.name}: {chosen.purpose}")
        shown = [s for s in settings(Scenario) if s.key.partition(".")[0] in values]
        rows = [(s.key, _json(value_of(values, s.key)), s.kind, s.meaning) for s in shown]
        _table("settings", [row for row in rows if row[0] not in ("name", "purpose")], head)
    elif name.partition(":")[0] in method_names():
        typer.echo(method_text(name.partition(":")[0]))
        _table(
            "options", [(s.key, s.default, s.kind, s.meaning) for s in option_settings(name.partition(":")[0])], head
        )
    elif found := find_settings(name):
        _table("settings", [(s.key, s.default, s.kind, s.meaning) for s in found], head)
    else:
        raise unknown(name, scenario_names(), method_names())


@app.command()
def doctor() -> None:
    """Check what this machine can run.

    Example: `edgeduet-sim doctor`
    """
    from edgeduet_sim.doctor import check_machine

    checks = check_machine()
    for check in checks:
        typer.echo(check.line())
    if any(check.verdict == "bad" for check in checks):
        raise typer.Exit(1)


@app.command()
def cache(
    prune: Annotated[bool, typer.Option("--prune", help="Remove what was not used lately; asks first.")] = False,
    days: Annotated[int, typer.Option(min=1, help="With --prune: days without use before something goes.")] = 30,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --prune: do not ask.")] = False,
) -> None:
    """Show what the cache folder holds and how large it is, or remove what nothing uses any more.

    Whatever is removed is made again when it is needed. Features that a running process reads or writes stay.

    Examples:

    * `edgeduet-sim cache`
    * `edgeduet-sim cache --prune --days 7`
    """
    from edgeduet_shared.errors import ConfigError
    from edgeduet_sim.cache_entries import find_entries, remove_entries, summary_rows, unused_for

    entries = find_entries()
    if not prune:
        _table("cache", summary_rows(entries), ("what", "folder", "entries", "size", "last used"))
        return
    old = unused_for(entries, days)
    size = sum(entry.size for entry in old)
    if not old:
        typer.echo(f"nothing to remove: everything was used in the last {days} days")
        return
    question = f"remove {len(old)} of {len(entries)} entries ({size / 1e6:.1f} MB) not used for {days} days?"
    if not yes and not sys.stdin.isatty():
        raise ConfigError(f"{question} Nobody can be asked here: add --yes")
    if not yes and not typer.confirm(question):
        raise typer.Exit(1)
    gone = remove_entries(old)
    kept = f"; {len(old) - len(gone)} in use or not removable, kept" if len(gone) < len(old) else ""
    typer.echo(f"removed {len(gone)} entries, {sum(entry.size for entry in gone) / 1e6:.1f} MB{kept}")


@backbone_app.command("build")
def backbone_build(
    name: Annotated[str, typer.Argument(help="clip-world or clip-lite0.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to build into.", show_default=False)],
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="Train for at most this long.  [default: what the shipped one took]")
    ] = None,
) -> None:
    """Build a shipped backbone again from its ingredients.

    Example: `edgeduet-sim backbone build clip-world --out build/clip-world`
    """
    from edgeduet_sim.backbone_build import commands

    commands.build(name, out, minutes=minutes)


@backbone_app.command("choices")
def backbone_choices(
    name: Annotated[str, typer.Argument(help="clip-lite0.")] = "clip-lite0",
) -> None:
    """Measure again what the choices of a build were made on (emoji against their names).

    Example: `edgeduet-sim backbone choices clip-lite0`
    """
    from edgeduet_sim.backbone_build import commands

    commands.choices(name)


@backbone_app.command("list")
def backbone_list() -> None:
    """List the shipped backbones.

    Example: `edgeduet-sim backbone list`
    """
    from edgeduet_sim.backbone_build import commands

    rows = [
        (card.name, f"{card.bytes / 1e6:.1f} MB", f"{card.image_size} px", card.summary)
        for card in commands.list_cards()
    ]
    _table("backbones", rows, ("name", "size", "input", "what it is"))


@backbone_app.command("show")
def backbone_show(
    name: Annotated[str, typer.Argument(help="clip-world or clip-lite0.")],
    data: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder with pacs/ and caltech101/ to measure on.")
    ] = None,
) -> None:
    """Show a backbone's card and measure its zero-shot accuracy.

    Example: `edgeduet-sim backbone show clip-lite0 --data ../shared/data`
    """
    from edgeduet_sim.backbone_build import commands

    commands.show(name, data=data)


# --- pieces -------------------------------------------------------------------------------------------


def _open(scenario: str, overrides: list[str], data: str | None, skip_corrupt: bool) -> Any:
    from edgeduet_sim.scenario_files import open_scenario

    return open_scenario(scenario, [*overrides, *(["data.skip_corrupt=true"] if skip_corrupt else [])], data)


def _out(out: Path | None, scenario: str) -> Path:
    return out if out is not None else Path("runs") / Path(scenario).stem


def _engine_setup(engine: str, block: int, workers: int) -> Any:
    from edgeduet_sim.runner import EngineSetup

    return EngineSetup.parse(engine, block=block, workers=workers)


def _command() -> list[str]:
    return ["edgeduet-sim", *sys.argv[1:]]


@contextmanager
def _resumable(how: str) -> Iterator[None]:
    """On Ctrl-C, say how to go on and leave with the shell's exit code for an interrupt."""
    from edgeduet_shared.errors import RunStopped

    try:
        yield
    except (KeyboardInterrupt, RunStopped) as stop:
        typer.echo(f"interrupted: {str(stop) or how}", err=True)
        raise typer.Exit(130) from stop


def _table(title: str, rows: Sequence[Sequence[object]], head: tuple[str, ...] = ()) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        # Whoever greps wants one line per entry.
        console = Console(width=max(120, *(sum(len(str(cell)) + 3 for cell in row) for row in rows)))
    table = Table(*head, title=title, title_justify="left", box=box.SIMPLE, show_header=bool(head), pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)


def _json(value: Any) -> str:
    import json

    return json.dumps(value)


def main() -> None:
    """Run the command line; a problem the user can fix is one line and exit code 2."""
    # One thread: more cost more than they gain on few cores, and one is what makes runs repeatable.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, value in (
        ("FLWR_TELEMETRY_ENABLED", "0"),
        ("FLWR_DISABLE_UPDATE_CHECK", "1"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
    ):
        os.environ.setdefault(name, value)
    # What stops a service stops a run as Ctrl-C does: saved, and with a word on how to go on.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_command_line(app, extra="sim")
