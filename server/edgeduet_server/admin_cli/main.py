"""``edgeduet-admin``: run, watch and change a federation from anywhere.

Commands import what they need when they run, so that ``--help`` and shell completion are quick. Stages and rounds
count from 1 on the screen and in options, from 0 in JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgeduet_shared.command_line import run_command_line
from edgeduet_shared.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType

_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
app = typer.Typer(name="edgeduet-admin", help="Run, watch and change a federation.", **_SETTINGS)
runs_app = typer.Typer(help="Training runs.", **_SETTINGS)
clients_app = typer.Typer(help="Devices: who may take part, who does.", **_SETTINGS)
models_app = typer.Typer(help="The global model after each stage.", **_SETTINGS)
config_app = typer.Typer(help="Settings of a run.", **_SETTINGS)
tokens_app = typer.Typer(help="Who may use this command, and for what.", **_SETTINGS)
for _name, _app in (
    ("runs", runs_app),
    ("clients", clients_app),
    ("models", models_app),
    ("config", config_app),
    ("tokens", tokens_app),
):
    app.add_typer(_app, name=_name)


def _complete_run(incomplete: str) -> list[str]:
    from edgeduet_server.admin_cli.connection import complete
    from edgeduet_shared.admin_api import admin_pb2 as pb

    answer = complete("ListRuns", pb.ListRunsRequest())
    return [run.name for run in answer.runs if run.name.startswith(incomplete)] if answer else []


def _complete_device(incomplete: str) -> list[str]:
    from edgeduet_server.admin_cli.connection import complete
    from edgeduet_shared.admin_api import admin_pb2 as pb

    answer = complete("ListClients", pb.ListClientsRequest())
    return [c.name for c in answer.clients if c.name and c.name.startswith(incomplete)] if answer else []


def _complete_setting(incomplete: str) -> list[str]:
    from edgeduet_server.orders import SETTABLE

    return [f"{key}=" for key in SETTABLE if key.startswith(incomplete)]


JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
WatchOption = Annotated[
    float, typer.Option("--watch", "-w", metavar="SECONDS", min=0, help="Again and again, until Ctrl-C.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="Name of a run; nothing = the newest.", autocompletion=_complete_run)
]
DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE", help="Its name.", autocompletion=_complete_device)]
RunOption = Annotated[
    str, typer.Option("--run", metavar="RUN", help="Name of a run; nothing = the newest.", autocompletion=_complete_run)
]
StageOption = Annotated[int | None, typer.Option("--stage", min=1, help="Which stage's.  [default: the newest]")]


@app.command()
def login(
    server: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="The admin service.")],
    ca: Annotated[Path, typer.Option(metavar="FILE", help="ca.crt of the server, from its pki folder.")],
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the token from a file instead of asking.")
    ] = None,
) -> None:
    """Keep address, authority and token of a server for the commands that follow.

    The token is asked for, or read from standard input or a file: on a command line every user could read it.

    Example: `edgeduet-admin login --server fl.example.org:9445 --ca ca.crt`
    """
    from edgeduet_server.admin_cli.connection import AdminClient, Profile, parse_server, save_profile
    from edgeduet_shared.admin_api import admin_pb2 as pb

    try:
        authority = ca.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ca {ca}: cannot be read ({error}); copy pki/ca.crt from the server") from error
    if "BEGIN CERTIFICATE" not in authority or "PRIVATE KEY" in authority:
        raise ConfigError(f"--ca {ca}: is not a certificate in PEM form; copy pki/ca.crt (not ca.key) from the server")
    profile = Profile(parse_server(server), authority, _read_token(token_file))
    with AdminClient(profile) as client:
        status = client.call("Status", pb.StatusRequest())
    path = save_profile(profile)
    typer.echo(f"logged in to {profile.server} as '{status.token}' ({status.role}); kept in {path}")


@app.command()
def logout() -> None:
    """Forget server and token. (The token stays good: `tokens revoke` ends it.)"""
    from edgeduet_server.admin_cli.connection import profile_path

    profile_path().unlink(missing_ok=True)
    typer.echo("forgotten")


@app.command()
def status(json: JsonOption = False, watch: WatchOption = 0) -> None:
    """How everything stands, and what is wrong.

    Example: `edgeduet-admin status --watch 5`
    """
    from edgeduet_server.admin_cli.views import status_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("Status", pb.StatusRequest(), status_view, json, watch)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Check the server, and the way to it; exit code 1 if something is wrong.

    Example: `edgeduet-admin doctor`
    """
    from datetime import UTC, datetime

    from edgeduet_server.admin_cli import screen
    from edgeduet_shared.admin_api import admin_pb2 as pb

    before = datetime.now(UTC)
    found = _ask("Doctor", pb.DoctorRequest())
    # The answer was begun somewhere in between; only what lies outside is a difference.
    there = datetime.fromisoformat(found["time"])
    skew = max((before - there).total_seconds(), (there - datetime.now(UTC)).total_seconds(), 0)
    fine = skew <= 5
    remedy = "" if fine else "; set both clocks by NTP, devices tolerate 5 s"
    found["checks"].append({"what": "clocks", "ok": fine, "text": f"differ by at most {skew:.0f} s{remedy}"})
    rows = [("ok" if check["ok"] else "BAD", check["what"], check["text"]) for check in found["checks"]]
    screen.show(lambda: found, lambda _: screen.table(rows, ()), as_json=json, watch=0)
    if not all(check["ok"] for check in found["checks"]):
        raise typer.Exit(1)


@app.command()
def rounds(
    run: RunArgument = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="The newest so many.")] = 20,
    json: JsonOption = False,
    watch: WatchOption = 0,
) -> None:
    """The rounds of a run: who was asked, who answered, what failed.

    Example: `edgeduet-admin rounds --watch 10`
    """
    from edgeduet_server.admin_cli.views import rounds_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("ListRounds", pb.ListRoundsRequest(run=run, limit=limit), rounds_view, json, watch)


@app.command()
def metrics(
    run: RunArgument = "",
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the matrices into a PNG file.")] = None,
    json: JsonOption = False,
    watch: WatchOption = 0,
) -> None:
    """Accuracy matrix, forgetting and the like, and each client's accuracy.

    Examples:

    * `edgeduet-admin metrics`
    * `edgeduet-admin metrics night-1 --png matrix.png`
    """
    from edgeduet_server.admin_cli import screen
    from edgeduet_server.admin_cli.views import metrics_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    if png is not None:
        found = _ask("GetMetrics", pb.RunRequest(run=run))
        panels = {"global model": found["global_matrix"], "personal models": found["personal_matrix"]}
        panels = {title: rows for title, rows in panels.items() if rows}
        if not panels:
            raise ConfigError(f"run '{found['run']}' has no evaluated stage yet; there is nothing to draw")
        screen.matrix_png(panels, found["tasks"], png)
        typer.echo(f"written: {png}", err=True)
    _show("GetMetrics", pb.RunRequest(run=run), metrics_view, json, watch)


@app.command()
def prompts(run: RunArgument = "", json: JsonOption = False) -> None:
    """Which prompts of the pool are used, and which client got which.

    Example: `edgeduet-admin prompts`
    """
    from edgeduet_server.admin_cli.views import prompts_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("GetPrompts", pb.RunRequest(run=run), prompts_view, json)


@app.command()
def audit(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="The newest so many.")] = 50,
    json: JsonOption = False,
) -> None:
    """Who changed what, or tried to.

    Example: `edgeduet-admin audit -n 20`
    """
    from edgeduet_server.admin_cli.views import audit_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("ListAudit", pb.ListAuditRequest(limit=limit), audit_view, json)


@app.command()
def backup(
    list_: Annotated[bool, typer.Option("--list", help="List the backups instead.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also bring it here.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Back up the registry into backups/ of the server, while everything goes on.

    Examples:

    * `edgeduet-admin backup --out registry.jsonl.gz`
    * `edgeduet-admin backup --list`
    """
    from edgeduet_server.admin_cli.views import backups_view
    from edgeduet_shared.admin_api import admin_pb2 as pb
    from edgeduet_shared.atomic_files import atomic_write_bytes

    if list_:
        _show("ListBackups", pb.ListBackupsRequest(), backups_view, json)
        return
    made = _ask("Backup", pb.BackupRequest())
    if out is not None:
        with _client() as client:
            _, content = client.download("DownloadBackup", pb.BackupName(name=made["name"]))
        atomic_write_bytes(out, content)
    _tell(made, json, f"backup {made['name']} made{f', and brought to {out}' if out else ''}")


@app.command()
def restore(
    name: Annotated[str, typer.Argument(help="Name of a backup; see `backup --list`.")],
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Bring the registry back to a backup. No run may go on; what is there now is backed up first.

    Runs are as they were then. Tokens, devices and the audit log of now stay; what is missing is added.

    Example: `edgeduet-admin restore registry-0001-20261201T040000000000Z.jsonl.gz`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _confirm(f"Replace what the registry holds about runs by backup '{name}'?", yes)
    done = _ask("Restore", pb.BackupName(name=name))
    _tell(done, json, f"restored ({done['rows']} rows); what was there before is in {done['saved_as']}")


# -- runs ------------------------------------------------------------------------------------------------


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

    _show("ListRuns", pb.ListRunsRequest(limit=limit), runs_view, json, watch)


@runs_app.command("show")
def runs_show(run: RunArgument = "", json: JsonOption = False, watch: WatchOption = 0) -> None:
    """Show a run.

    Example: `edgeduet-admin runs show night-1`
    """
    from edgeduet_server.admin_cli.views import run_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("GetRun", pb.RunRequest(run=run), run_view, json, watch)


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
        options_json=_compact(dict(spec.options)),
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
    run = _ask("StartRun", request)
    _tell(run, json, f"run {run['name']} started; watch it with: edgeduet-admin status --watch 5")


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

    _confirm(f"Stop {_named(run)}{' in the middle of its round' if now else ' after its present round'}?", yes)
    done = _ask("StopRun", pb.StopRunRequest(run=run, now=now))
    _tell(done, json, f"run {done['name']}: {'stopped' if done['state'] == 'stopped' else 'stops after this round'}")


@runs_app.command("resume")
def runs_resume(run: RunArgument = "", json: JsonOption = False) -> None:
    """Go on with a stopped or failed run from its last checkpoint.

    Example: `edgeduet-admin runs resume night-1`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = _ask("ResumeRun", pb.RunRequest(run=run))
    _tell(done, json, f"run {done['name']} goes on")


@runs_app.command("pause")
def runs_pause(run: RunArgument = "", json: JsonOption = False) -> None:
    """Let a run wait before its next round; it stays ready.

    Example: `edgeduet-admin runs pause`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = _ask("PauseRun", pb.RunRequest(run=run))
    _tell(done, json, f"run {done['name']} pauses before its next round")


@runs_app.command("unpause")
def runs_unpause(run: RunArgument = "", json: JsonOption = False) -> None:
    """Let a paused run go on.

    Example: `edgeduet-admin runs unpause`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = _ask("UnpauseRun", pb.RunRequest(run=run))
    _tell(done, json, f"run {done['name']} goes on")


# -- clients ---------------------------------------------------------------------------------------------


@clients_app.command("list")
def clients_list(json: JsonOption = False, watch: WatchOption = 0) -> None:
    """List devices: enrolled, seen, excluded.

    Example: `edgeduet-admin clients list --watch 10`
    """
    from edgeduet_server.admin_cli.views import clients_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("ListClients", pb.ListClientsRequest(), clients_view, json, watch)


@clients_app.command("show")
def clients_show(name: DeviceArgument, json: JsonOption = False) -> None:
    """Show a device.

    Example: `edgeduet-admin clients show edge-1`
    """
    from edgeduet_server.admin_cli.views import client_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("GetClient", pb.ClientRequest(name=name), client_view, json)


@clients_app.command("approve")
def clients_approve(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The line that `edgeduet-client enroll` printed, or - to read it.")
    ],
    code: Annotated[
        str, typer.Option(metavar="XXXX-XXXX-XXXX", help="The code that the device showed, learnt another way.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """Let a device in. Its code tells that nobody exchanged the request on its way.

    Example: `edgeduet-admin clients approve edgeduet-enrol-1.eyJ... --code ABCD-EFGH-JKLM`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb
    from edgeduet_shared.enrolment import read_request

    line = sys.stdin.read() if request == "-" else request
    asked = read_request(line)
    if not code:
        _needs_terminal("--code")
        typer.echo(f"device '{asked.name}', key {asked.fingerprint[:16]}..., made {asked.created:%Y-%m-%d %H:%M} UTC")
        code = typer.prompt("code that the device shows")
    done = _ask("ApproveClient", pb.ApproveClientRequest(request=line, code=code))
    _tell(done, json, f"device {done['name']} may connect now (node {done['node_id']})")


@clients_app.command("revoke")
def clients_revoke(name: DeviceArgument, yes: YesOption = False, json: JsonOption = False) -> None:
    """Lock a device out. **This is permanent**: its key can never be used again, it must enrol with a new one.

    To leave a device out of a run for a while: `clients exclude`.

    Example: `edgeduet-admin clients revoke edge-1`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _confirm(
        f"Revoke device '{name}'? This is permanent: its key can never be registered again, and it must enrol anew "
        "(to leave it out for a while: clients exclude).",
        yes,
    )
    done = _ask("RevokeClient", pb.ClientRequest(name=name))
    _tell(done, json, f"device {done['name']} is locked out for ever")


@clients_app.command("exclude")
def clients_exclude(
    client: Annotated[str, typer.Argument(help="Name of a device, or number of a client.")],
    run: RunOption = "",
    json: JsonOption = False,
) -> None:
    """Leave a client out of a run from the next round on.

    Example: `edgeduet-admin clients exclude edge-1`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = _ask("ExcludeClient", pb.RunClientRequest(run=run, client=client))
    _tell(done, json, f"run {done['name']}: {client} is left out from the next round on")


@clients_app.command("include")
def clients_include(
    client: Annotated[str, typer.Argument(help="Name of a device, or number of a client.")],
    run: RunOption = "",
    json: JsonOption = False,
) -> None:
    """Ask an excluded client again from the next round on.

    Example: `edgeduet-admin clients include edge-1`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    done = _ask("IncludeClient", pb.RunClientRequest(run=run, client=client))
    _tell(done, json, f"run {done['name']}: {client} takes part from the next round on")


# -- models, settings, tokens ----------------------------------------------------------------------------


@models_app.command("list")
def models_list(run: RunArgument = "", json: JsonOption = False) -> None:
    """List models; without a run, those of all runs.

    Example: `edgeduet-admin models list`
    """
    from edgeduet_server.admin_cli.views import models_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("ListModels", pb.ListModelsRequest(run=run), models_view, json)


@models_app.command("export")
def models_export(
    run: RunArgument = "",
    stage: StageOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to.  [default: RUN-stage-NNN.safetensors here]")
    ] = None,
) -> None:
    """Bring a model here, as safetensors; its metadata says what it is.

    Example: `edgeduet-admin models export night-1 --stage 2 --out model.safetensors`
    """
    from edgeduet_shared.atomic_files import atomic_write_bytes
    from edgeduet_shared.names import check_name

    with _client() as client:
        name, content = client.download("ExportModel", _model(run, stage))
    target = out or Path(check_name(name[:100], "file name from the server"))
    atomic_write_bytes(target, content)
    typer.echo(f"written: {target} ({len(content)} bytes)")


@models_app.command("promote")
def models_promote(run: RunArgument = "", stage: StageOption = None, json: JsonOption = False) -> None:
    """Make a model the one that is used (models/current.safetensors on the server).

    Example: `edgeduet-admin models promote night-1`
    """
    done = _ask("PromoteModel", _model(run, stage))
    _tell(done, json, f"promoted: run {done['run']}, stage {done['stage'] + 1}")


@models_app.command("rollback")
def models_rollback(yes: YesOption = False, json: JsonOption = False) -> None:
    """Go back to the model that was promoted before.

    Example: `edgeduet-admin models rollback`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _confirm("Put the model that was promoted before back in place?", yes)
    done = _ask("RollbackModel", pb.RollbackModelRequest())
    now = done["promoted"]
    _tell(done, json, f"in use now: run {now['run']}, stage {now['stage'] + 1}" if now else "no model is promoted now")


@config_app.command("get")
def config_get(
    key: Annotated[
        str, typer.Argument(metavar="[KEY]", help="A setting or the beginning of some; nothing = all.")
    ] = "",
    run: RunOption = "",
    json: JsonOption = False,
) -> None:
    """Show settings of a run, and which can be changed while it goes on.

    Example: `edgeduet-admin config get train`
    """
    from edgeduet_server.admin_cli import screen
    from edgeduet_server.admin_cli.views import config_view
    from edgeduet_shared.admin_api import admin_pb2 as pb
    from edgeduet_shared.errors import nearest

    found = _ask("GetConfig", pb.RunRequest(run=run))
    chosen = [entry for entry in found["settings"] if entry["key"].startswith(key)]
    if not chosen:
        raise ConfigError(f"no setting '{key}'{nearest(key, [entry['key'] for entry in found['settings']])}")
    screen.show(lambda: {**found, "settings": chosen}, config_view, as_json=json, watch=0)


@config_app.command("set")
def config_set(
    setting: Annotated[
        str, typer.Argument(metavar="KEY=VALUE", help="KEY= takes a change back.", autocompletion=_complete_setting)
    ],
    run: RunOption = "",
    json: JsonOption = False,
) -> None:
    """Change a setting of a run from the next round on.

    Examples:

    * `edgeduet-admin config set train.lr=0.0005`
    * `edgeduet-admin config set train.lr=`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    key, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"config set {setting}: expected KEY=VALUE, for example train.lr=0.0005")
    request = pb.SetConfigRequest(run=run, key=key, value_json=_compact(_toml_value(text)) if text else "")
    found = _ask("SetConfig", request)
    value = next(_compact(entry["value"]) for entry in found["settings"] if entry["key"] == key)
    _tell(found, json, f"run {found['run']}: {key} = {value} from the next round on")


@tokens_app.command("create")
def tokens_create(
    name: Annotated[str, typer.Argument(help="Whose token it will be.")],
    role: Annotated[str, typer.Option(metavar="viewer|operator|admin", help="What it may do.")] = "viewer",
    days: Annotated[int, typer.Option(min=1, max=730, help="How long it is good.")] = 90,
    home: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="On the server itself: make it in this home, without logging in. For the first token."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Make a token. It is shown this once.

    Examples:

    * `edgeduet-admin tokens create ana --role operator --days 30`
    * `edgeduet-admin tokens create first --role admin --home /srv/edgeduet` on the server
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    if home is not None:
        from edgeduet_server.admin.first_token import make_local_token

        made = make_local_token(home, name, role, days)
    else:
        made = _ask("CreateToken", pb.CreateTokenRequest(name=name, role=role, days=days))
    if json:
        typer.echo(_compact(made))
        return
    typer.echo(f"token of '{name}' ({role}), good until {made['token']['expires_at'][:10]}; shown this once:", err=True)
    typer.echo(made["secret"])


@tokens_app.command("list")
def tokens_list(json: JsonOption = False) -> None:
    """List tokens.

    Example: `edgeduet-admin tokens list`
    """
    from edgeduet_server.admin_cli.views import tokens_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _show("ListTokens", pb.ListTokensRequest(), tokens_view, json)


@tokens_app.command("revoke")
def tokens_revoke(
    token: Annotated[str, typer.Argument(help="Its name or id.")], yes: YesOption = False, json: JsonOption = False
) -> None:
    """Make a token open nothing any more, from the next call on.

    Example: `edgeduet-admin tokens revoke ana`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    _confirm(f"Revoke token '{token}'?", yes)
    done = _ask("RevokeToken", pb.TokenRequest(token=token))
    _tell(done, json, f"token {done['name']} is revoked")


# -- pieces ----------------------------------------------------------------------------------------------


def _client() -> Any:
    from edgeduet_server.admin_cli.connection import AdminClient, load_profile

    return AdminClient(load_profile())


def _ask(method: str, request: Message) -> dict[str, Any]:
    from edgeduet_shared.admin_api.as_json import as_json

    with _client() as client:
        return as_json(client.call(method, request))


def _show(
    method: str,
    request: Message,
    draw: Any,
    as_json: bool,
    watch: float = 0,
) -> None:
    from edgeduet_server.admin_cli import screen
    from edgeduet_shared.admin_api.as_json import as_json as values

    drawn: RenderableType = draw
    with _client() as client:
        screen.show(lambda: values(client.call(method, request)), drawn, as_json=as_json, watch=watch)  # type: ignore[arg-type]


def _tell(values: dict[str, Any], as_json: bool, text: str) -> None:
    from edgeduet_shared.names import printable

    typer.echo(json.dumps(values, indent=2, ensure_ascii=False) if as_json else printable(text))


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    _needs_terminal("--yes")
    typer.confirm(question, abort=True)


def _needs_terminal(option: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigError(f"there is nobody to ask; give {option}")


def _read_token(file: Path | None) -> str:
    if file is not None:
        try:
            token = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {file}: cannot be read ({error})") from error
    elif sys.stdin.isatty():
        token = typer.prompt("token", hide_input=True)
    else:
        token = sys.stdin.readline()
    token = token.strip()
    if not token.startswith("edt_") or not token.isascii() or not token.isprintable():
        raise ConfigError("this is no token; it begins with 'edt_' (an administrator makes one with: tokens create)")
    return token


def _model(run: str, stage: int | None) -> Any:
    from edgeduet_shared.admin_api import admin_pb2 as pb

    return pb.ModelRequest(run=run, stage=None if stage is None else stage - 1)


def _named(run: str) -> str:
    return f"run '{run}'" if run else "the newest run"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _toml_value(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def main() -> None:
    """Run the command line; a problem the user can fix is one line and exit code 2."""
    # gRPC writes about failed handshakes by itself; what matters is said in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    run_command_line(app, extra="server", extras={"matplotlib": "sim"})


if __name__ == "__main__":
    main()
