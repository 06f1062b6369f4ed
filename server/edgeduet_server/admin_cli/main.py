"""``edgeduet-admin``: run, watch and change a federation from anywhere.

Commands import what they need when they run, so that ``--help`` and shell completion are quick. Stages and rounds
count from 1 on the screen and in options, from 0 in JSON.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from edgeduet_server.admin_cli.asking import (
    admin_client,
    ask,
    confirm,
    show,
    tell,
)
from edgeduet_server.admin_cli.clients_commands import clients_app
from edgeduet_server.admin_cli.config_commands import config_app
from edgeduet_server.admin_cli.models_commands import models_app
from edgeduet_server.admin_cli.options import (
    TYPER_SETTINGS,
    JsonOption,
    RunArgument,
    WatchOption,
    YesOption,
)
from edgeduet_server.admin_cli.runs_commands import runs_app
from edgeduet_server.admin_cli.tokens_commands import tokens_app
from edgeduet_shared.command_line import run_command_line
from edgeduet_shared.errors import ConfigError

app = typer.Typer(name="edgeduet-admin", help="Run, watch and change a federation.", **TYPER_SETTINGS)
for _name, _app in (
    ("runs", runs_app),
    ("clients", clients_app),
    ("models", models_app),
    ("config", config_app),
    ("tokens", tokens_app),
):
    app.add_typer(_app, name=_name)


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

    show("Status", pb.StatusRequest(), status_view, json, watch)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Check the server, and the way to it; exit code 1 if something is wrong.

    Example: `edgeduet-admin doctor`
    """
    from datetime import UTC, datetime

    from edgeduet_server.admin_cli import screen
    from edgeduet_shared.admin_api import admin_pb2 as pb

    before = datetime.now(UTC)
    found = ask("Doctor", pb.DoctorRequest())
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

    show("ListRounds", pb.ListRoundsRequest(run=run, limit=limit), rounds_view, json, watch)


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
        found = ask("GetMetrics", pb.RunRequest(run=run))
        panels = {"global model": found["global_matrix"], "personal models": found["personal_matrix"]}
        panels = {title: rows for title, rows in panels.items() if rows}
        if not panels:
            raise ConfigError(f"run '{found['run']}' has no evaluated stage yet; there is nothing to draw")
        screen.matrix_png(panels, found["tasks"], png)
        typer.echo(f"written: {png}", err=True)
    show("GetMetrics", pb.RunRequest(run=run), metrics_view, json, watch)


@app.command()
def prompts(run: RunArgument = "", json: JsonOption = False) -> None:
    """Which prompts of the pool are used, and which client got which.

    Example: `edgeduet-admin prompts`
    """
    from edgeduet_server.admin_cli.views import prompts_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    show("GetPrompts", pb.RunRequest(run=run), prompts_view, json)


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

    show("ListAudit", pb.ListAuditRequest(limit=limit), audit_view, json)


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
        show("ListBackups", pb.ListBackupsRequest(), backups_view, json)
        return
    made = ask("Backup", pb.BackupRequest())
    if out is not None:
        with admin_client() as client:
            _, content = client.download("DownloadBackup", pb.BackupName(name=made["name"]))
        atomic_write_bytes(out, content)
    tell(made, json, f"backup {made['name']} made{f', and brought to {out}' if out else ''}")


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

    confirm(f"Replace what the registry holds about runs by backup '{name}'?", yes)
    done = ask("Restore", pb.BackupName(name=name))
    tell(done, json, f"restored ({done['rows']} rows); what was there before is in {done['saved_as']}")


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


def main() -> None:
    """Run the command line; a problem the user can fix is one line and exit code 2."""
    # gRPC writes about failed handshakes by itself; what matters is said in our words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    run_command_line(app, extra="server", extras={"matplotlib": "sim"})


if __name__ == "__main__":
    main()
