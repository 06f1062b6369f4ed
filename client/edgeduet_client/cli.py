"""``edgeduet-client``: what runs on an edge device.

Commands import what they need when they run, so that ``--help`` and shell completion are quick and work where
neither onnxruntime nor torch is installed.
"""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from edgeduet_client.device.commands import device_app
from edgeduet_client.llm.commands import llm_app
from edgeduet_shared.command_line import run_command_line

app = typer.Typer(
    name="edgeduet-client",
    help="What runs on an edge device: federated training, the personal classifier, the private language model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "onnx", "gguf"), "export"),
    **dict.fromkeys(("cryptography", "flwr"), "device"),
}
"""Which extra brings a package that may be missing."""

app.add_typer(device_app)
app.add_typer(llm_app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"edgeduet-client {version('edgeduet')}")
        except PackageNotFoundError:
            typer.echo("edgeduet-client, not installed as a package")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; a problem the user can fix is one line and exit code 2."""
    # What stops a service stops a command as Ctrl-C does: cleaned up, and with a word on how things stand.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_command_line(app, extra="llm", extras=_EXTRAS)
