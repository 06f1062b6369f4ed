"""``edgeduet-admin runs``: training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeduet_server.admin_cli.asking import (
    ask,
    compact,
    confirm,
    named_run,
    show,
    tell,
)
from edgeduet_server.admin_cli.options import (
    TYPER_SETTINGS,
    JsonOption,
    RunArgument,
    WatchOption,
    YesOption,
)
from edgeduet_shared.errors import ConfigError

runs_app = typer.Typer(help="Training runs.", **TYPER_SETTINGS)


@runs_app.command("list")
def runs_list(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="The newest so many.")] = 50,
    json: JsonOption = False,
    watch: WatchOption = 0,
) -> None:
    """List runs, newest first.

    Example: `edgeduet-admin runs list`
    """
    from edgeduet_server.admin_cli.views import runs_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    show("ListRuns", pb.ListRunsRequest(limit=limit), runs_view, json, watch)


@runs_app.command("show")
def runs_show(run: RunArgument = "", json: JsonOption = False, watch: WatchOption = 0) -> None:
    """Show a run.

    Example: `edgeduet-admin runs show night-1`
    """
    from edgeduet_server.admin_cli.views import run_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    show("GetRun", pb.RunRequest(run=run), run_view, json, watch)


@runs_app.command("start")
def runs_start(
    scenario: Annotated[str, typer.Argument(help="A TOML file, as for the simulation, or a scenario's name.")],
    method: Annotated[
        str, typer.Option("--method", "-m", help="Method; options after ':', as for the simulation.")
    ] = "fed-duet",
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the scenario; repeatable.")
    ] = [],  # noqa: B006 - typer needs a list and copies it
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything random.")] = 0,
    name: Annotated[str, typer.Option(help="Name of the run.  [default: made from scenario, method, seed]")] = "",
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Rounds between checkpoints.")] = 1,
    json: JsonOption = False,
) -> None:
    """Start a training run on the devices.

    Examples:

    * `edgeduet-admin runs start cameras.toml --name night-1`
    * `edgeduet-admin runs start demo --method fed-duet:fusion=false --seed 1 --set federation.rounds=3`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb
    from edgeduet_shared.method_spec import MethodSpec

    spec = MethodSpec.parse(method)
    request = pb.StartRunRequest(
        name=name,
        set=set_,
        method=spec.name,
        options_json=compact(dict(spec.options)),
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    if scenario.endswith(".toml"):
        try:
            request.scenario_toml = Path(scenario).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{scenario}: cannot be read ({error})") from error
    else:
        request.scenario = scenario
    run = ask("StartRun", request)
    tell(run, json, f"run {run['name']} started; watch it with: edgeduet-admin status --watch 5")


@runs_app.command("stop")
def runs_stop(
    run: RunArgument = "",
    now: Annotated[bool, typer.Option("--now", help="At once: what devices compute now is lost.")] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Stop a run after the present round; `runs resume` goes on from there.

    Example: `edgeduet-admin runs stop night-1`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    confirm(f"Stop {named_run(run)}{' in the middle of its round' if now else ' after its present round'}?", yes)
    done = ask("StopRun", pb.StopRunRequest(run=run, now=now))
    tell(done, json, f"run {done['name']}: {'stopped' if done['state'] == 'stopped' else 'stops after this round'}")


@runs_app.command("resume")
def runs_resume(run: RunArgument = "", json: JsonOption = False) -> None:
    """Go on with a stopped or failed run from its last checkpoint.

    Example: `edgeduet-admin runs resume night-1`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = ask("ResumeRun", pb.RunRequest(run=run))
    tell(done, json, f"run {done['name']} goes on")


@runs_app.command("pause")
def runs_pause(run: RunArgument = "", json: JsonOption = False) -> None:
    """Let a run wait before its next round; it stays ready.

    Example: `edgeduet-admin runs pause`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = ask("PauseRun", pb.RunRequest(run=run))
    tell(done, json, f"run {done['name']} pauses before its next round")


@runs_app.command("unpause")
def runs_unpause(run: RunArgument = "", json: JsonOption = False) -> None:
    """Let a paused run go on.

    Example: `edgeduet-admin runs unpause`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = ask("UnpauseRun", pb.RunRequest(run=run))
    tell(done, json, f"run {done['name']} goes on")
