"""``edgeduet-server``: make, run and look after a coordinator on this machine.

The administration of runs and devices is ``edgeduet-admin``'s, which may run anywhere.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeduet_shared.command_line import run_command_line

if TYPE_CHECKING:
    from edgeduet_server.deployment.server_config import ServerConfig

app = typer.Typer(
    name="edgeduet-server",
    help="A coordinator that devices reach: made with `init`, kept running with `start`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
certificate_app = typer.Typer(help="The server's certificate.", no_args_is_help=True)
app.add_typer(certificate_app, name="certificate")

Home = Annotated[Path, typer.Argument(help="Folder of the server, made by `edgeduet-server init`.")]


@app.command(epilog="Example: edgeduet-server init /srv/edgeduet --name fl.example.org --name 203.0.113.7")
def init(
    home: Annotated[Path, typer.Argument(help="Folder to make the server in.")],
    name: Annotated[
        list[str] | None,
        typer.Option("--name", "-n", help="Name or IP address by which devices reach this server; repeatable."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port for devices; the three ports after it are used on loopback.", min=1)
    ] = None,
) -> None:
    """Make a server: documented server.toml, certificate authority, server certificate, registry."""
    from edgeduet_server.deployment.home import create_home

    names = name or _ask_for_names()
    config = create_home(home, names, public_port=port)
    network = config.network
    print(f"server made in {config.home}")
    print(f"  devices will connect to   {names[0]}:{network.public_port}")
    print(f"  give devices              {config.folder('pki') / 'ca.crt'}")
    print(f"  settings                  {config.home / 'server.toml'}")
    print(f"next: edgeduet-server start {config.home}")
    print(f"then: edgeduet-admin tokens create NAME --role admin --home {config.home}     (a token for edgeduet-admin)")


@app.command(
    epilog="Example: edgeduet-server start /srv/edgeduet        (systemd: deploy/systemd/edgeduet-server.service)"
)
def start(home: Home) -> None:
    """Run the server in the foreground until Ctrl-C or SIGTERM; restarts what dies, resumes interrupted training."""
    from edgeduet_server.deployment.endpoint import start_endpoint
    from edgeduet_server.deployment.interrupted_runs import resume_interrupted
    from edgeduet_server.deployment.supervisor import Supervisor
    from edgeduet_shared.supervision.log_files import start_logging

    config = _config(home)
    _refuse_problems(config)
    start_logging(config.folder("logs"), "server", config.logs)
    supervisor = Supervisor(config, lambda client, runs: resume_interrupted(config, client, runs))
    signal.signal(signal.SIGTERM, supervisor.stop)
    signal.signal(signal.SIGINT, supervisor.stop)
    endpoint = start_endpoint(config.network.metrics_port, supervisor.health)
    try:
        supervisor.run()
    finally:
        endpoint.shutdown()


@app.command(epilog="Example: edgeduet-server status /srv/edgeduet --json")
def status(home: Home, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say whether the server runs and what is wrong; exit code 1 if it does not run or is not ready."""
    from edgeduet_server.deployment.supervisor import read_state

    config = _config(home)
    state = read_state(config.home)
    if as_json:
        print(json.dumps({"running": state is not None, **(state or {})}))
    elif state is None:
        print(f"no server runs in {config.home}; start it with: edgeduet-server start {config.home}")
    else:
        print(f"{'ready' if state['ready'] else 'NOT ready'}, pid {state['pid']}")
        for name, facts in state["programs"].items():
            condition = f"pid {facts['pid']}" if facts["pid"] else f"down, last exit code {facts['last_exit']}"
            print(f"  {name:<10} {condition}, {facts['restarts']} restarts; log: {config.folder('logs') / name}.log")
        for complaint in state["complaints"]:
            print(f"  ! {complaint}")
    if state is None or not state["ready"]:
        raise typer.Exit(1)


@app.command(epilog="Example: edgeduet-server stop /srv/edgeduet")
def stop(home: Home) -> None:
    """Stop the server that runs in HOME. A training run is resumed at the next start."""
    from edgeduet_server.deployment.supervisor import stop_running

    config = _config(home)
    print("stopped" if stop_running(config.home) else f"no server runs in {config.home}")


@app.command(epilog="Example: edgeduet-server check /srv/edgeduet")
def check(home: Home) -> None:
    """Check settings, certificate, registry and programs without starting anything; exit code 2 on a problem."""
    config = _config(home)
    from edgeduet_server.deployment.home import check_home

    findings = check_home(config)
    for finding in findings:
        print(f"{'problem' if finding.problem else 'ok':<8} {finding.what}  {finding.problem}".rstrip())
    if any(finding.problem for finding in findings):
        raise typer.Exit(2)


@certificate_app.command("show", epilog="Example: edgeduet-server certificate show /srv/edgeduet")
def certificate_show(home: Home) -> None:
    """Show for which names the certificate is and when it ends."""
    from edgeduet_server.deployment.pki import Pki

    pki = Pki(_config(home).folder("pki"))
    print(f"names  {', '.join(pki.names())}\nends   {pki.expires():%Y-%m-%d}")


@certificate_app.command("renew", epilog="Example: edgeduet-server certificate renew /srv/edgeduet")
def certificate_renew(home: Home) -> None:
    """Make a new key and certificate for the names in server.toml. Devices notice nothing."""
    from edgeduet_server.deployment.home import certificate_names
    from edgeduet_server.deployment.pki import Pki

    config = _config(home)
    pki = Pki(config.folder("pki"))
    pki.renew(certificate_names(config))
    print(f"new certificate for {', '.join(pki.names())}, ends {pki.expires():%Y-%m-%d}")
    print(f"it is used after: edgeduet-server stop {config.home} && edgeduet-server start {config.home}")


def _config(home: Path) -> ServerConfig:
    from edgeduet_server.deployment.server_config import load_server_config

    return load_server_config(home)


def _refuse_problems(config: ServerConfig) -> None:
    from edgeduet_server.deployment.home import check_home
    from edgeduet_shared.errors import ConfigError

    for finding in check_home(config):
        if finding.problem:
            raise ConfigError(f"{finding.what}: {finding.problem}")


def _ask_for_names() -> list[str]:
    from edgeduet_shared.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError("--name is missing: give the name or IP address by which devices reach this server")
    answer = typer.prompt("Name or IP address by which devices reach this server (several: separate with spaces)")
    return str(answer).split()


def main() -> None:
    """Run the command line; a problem the user can fix is one line and exit code 2."""
    run_command_line(app, extra="server")
