"""Options and arguments that several commands have, and how the shell completes them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

TYPER_SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Of every group of commands."""


def complete_run(incomplete: str) -> list[str]:
    """Return the names of runs that begin like this."""
    from edgeduet_server.admin_cli.connection import complete
    from edgeduet_shared.admin_api import admin_pb2 as pb

    answer = complete("ListRuns", pb.ListRunsRequest())
    return [run.name for run in answer.runs if run.name.startswith(incomplete)] if answer else []


def complete_device(incomplete: str) -> list[str]:
    """Return the names of devices that begin like this."""
    from edgeduet_server.admin_cli.connection import complete
    from edgeduet_shared.admin_api import admin_pb2 as pb

    answer = complete("ListClients", pb.ListClientsRequest())
    return [c.name for c in answer.clients if c.name and c.name.startswith(incomplete)] if answer else []


def complete_setting(incomplete: str) -> list[str]:
    """Return the settings that begin like this."""
    from edgeduet_server.orders import SETTABLE

    return [f"{key}=" for key in SETTABLE if key.startswith(incomplete)]


JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
WatchOption = Annotated[
    float, typer.Option("--watch", "-w", metavar="SECONDS", min=0, help="Again and again, until Ctrl-C.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="Name of a run; nothing = the newest.", autocompletion=complete_run)
]
DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE", help="Its name.", autocompletion=complete_device)]
RunOption = Annotated[
    str, typer.Option("--run", metavar="RUN", help="Name of a run; nothing = the newest.", autocompletion=complete_run)
]
StageOption = Annotated[int | None, typer.Option("--stage", min=1, help="Which stage's.  [default: the newest]")]
