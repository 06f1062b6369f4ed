"""``edgeduet-admin tokens``: who may use the command, and for what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgeduet_server.admin_cli.asking import (
    ask,
    compact,
    confirm,
    show,
    tell,
)
from edgeduet_server.admin_cli.options import (
    TYPER_SETTINGS,
    JsonOption,
    YesOption,
)

tokens_app = typer.Typer(help="Who may use this command, and for what.", **TYPER_SETTINGS)


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
        made = ask("CreateToken", pb.CreateTokenRequest(name=name, role=role, days=days))
    if json:
        typer.echo(compact(made))
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

    show("ListTokens", pb.ListTokensRequest(), tokens_view, json)


@tokens_app.command("revoke")
def tokens_revoke(
    token: Annotated[str, typer.Argument(help="Its name or id.")], yes: YesOption = False, json: JsonOption = False
) -> None:
    """Make a token open nothing any more, from the next call on.

    Example: `edgeduet-admin tokens revoke ana`
    """
    from edgeduet_shared.admin_api import admin_pb2 as pb

    confirm(f"Revoke token '{token}'?", yes)
    done = ask("RevokeToken", pb.TokenRequest(token=token))
    tell(done, json, f"token {done['name']} is revoked")
