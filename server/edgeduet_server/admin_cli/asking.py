"""Ask the admin service, and show what it says: what all commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from edgeduet_shared.errors import ConfigError

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType


def admin_client() -> Any:
    """Return a client of the admin service that was logged in to."""
    from edgeduet_server.admin_cli.connection import AdminClient, load_profile

    return AdminClient(load_profile())


def ask(method: str, request: Message) -> dict[str, Any]:
    """Ask the admin service; return its answer as plain values."""
    from edgeduet_shared.admin_api.as_json import as_json

    with admin_client() as client:
        return as_json(client.call(method, request))


def show(
    method: str,
    request: Message,
    draw: Callable[[Mapping[str, Any]], RenderableType],
    as_json: bool,
    watch: float = 0,
) -> None:
    """Show an answer of the admin service: drawn, as JSON, or again and again."""
    from edgeduet_server.admin_cli import screen
    from edgeduet_shared.admin_api.as_json import as_json as values

    with admin_client() as client:
        screen.show(lambda: values(client.call(method, request)), draw, as_json=as_json, watch=watch)


def tell(values: dict[str, Any], as_json: bool, text: str) -> None:
    """Print what was done: the answer as JSON, or a line."""
    from edgeduet_shared.names import printable

    typer.echo(json.dumps(values, indent=2, ensure_ascii=False) if as_json else printable(text))


def confirm(question: str, yes: bool) -> None:
    """Ask before something that cannot be undone; no answer or a no ends the command."""
    if yes:
        return
    needs_terminal("--yes")
    typer.confirm(question, abort=True)


def needs_terminal(option: str) -> None:
    """Refuse to ask where nobody can answer, naming the option that answers."""
    if not sys.stdin.isatty():
        raise ConfigError(f"there is nobody to ask; give {option}")


def named_run(run: str) -> str:
    """Return how to speak of a run."""
    return f"run '{run}'" if run else "the newest run"


def compact(value: Any) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(value, separators=(",", ":"))
