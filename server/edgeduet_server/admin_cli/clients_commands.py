"""``edgeduet-admin clients``: devices, who may take part and who does."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edgeduet_server.admin_cli.asking import (
    ask,
    confirm,
    needs_terminal,
    show,
    tell,
)
from edgeduet_server.admin_cli.options import (
    TYPER_SETTINGS,
    DeviceArgument,
    JsonOption,
    RunOption,
    WatchOption,
    YesOption,
)

clients_app = typer.Typer(help="Devices: who may take part, who does.", **TYPER_SETTINGS)


@clients_app.command("list")
def clients_list(json: JsonOption = False, watch: WatchOption = 0) -> None:
    """List devices: enrolled, seen, excluded.

    Example: `edgeduet-admin clients list --watch 10`
    """
    from edgeduet_server.admin_cli.views import clients_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    show("ListClients", pb.ListClientsRequest(), clients_view, json, watch)


@clients_app.command("show")
def clients_show(name: DeviceArgument, json: JsonOption = False) -> None:
    """Show a device.

    Example: `edgeduet-admin clients show edge-1`
    """
    from edgeduet_server.admin_cli.views import client_view
    from edgeduet_shared.admin_api import admin_pb2 as pb

    show("GetClient", pb.ClientRequest(name=name), client_view, json)


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
        needs_terminal("--code")
        typer.echo(f"device '{asked.name}', key {asked.fingerprint[:16]}..., made {asked.created:%Y-%m-%d %H:%M} UTC")
        code = typer.prompt("code that the device shows")
    done = ask("ApproveClient", pb.ApproveClientRequest(request=line, code=code))
    tell(done, json, f"device {done['name']} may connect now (node {done['node_id']})")


@clients_app.command("revoke")
def clients_revoke(name: DeviceArgument, yes: YesOption = False, json: JsonOption = False) -> None:
    """Lock a device out. **This is permanent**: its key can never be used again, it must enrol with a new one.

    To leave a device out of a run for a while: `clients exclude`.

    Example: `edgeduet-admin clients revoke edge-1`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    confirm(
        f"Revoke device '{name}'? This is permanent: its key can never be registered again, and it must enrol anew "
        "(to leave it out for a while: clients exclude).",
        yes,
    )
    done = ask("RevokeClient", pb.ClientRequest(name=name))
    tell(done, json, f"device {done['name']} is locked out for ever")


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

    done = ask("ExcludeClient", pb.RunClientRequest(run=run, client=client))
    tell(done, json, f"run {done['name']}: {client} is left out from the next round on")


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

    done = ask("IncludeClient", pb.RunClientRequest(run=run, client=client))
    tell(done, json, f"run {done['name']}: {client} takes part from the next round on")
