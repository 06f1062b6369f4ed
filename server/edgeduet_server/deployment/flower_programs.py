"""Flower's own programs: where they are, how they must be started, and what they answer.

Everything that goes through Flower's command line is here, for the Ray engine of a simulation and for a
deployed server alike. What ``methods/flower.md`` found, and what follows:

* what goes to the network is switched off (``edgeduet_shared.supervision.programs``),
* the app folder holds nothing but a ``pyproject.toml`` that names installed packages, so that nobody runs
  code that travels,
* answers are read as JSON; the exit code of ``flwr run`` says nothing about how a run ended.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.errors import FederationError
from edgeduet_shared.run_config import FlowerConfig
from edgeduet_shared.supervision.programs import program
from edgeduet_shared.toml_output import toml_lines

# Seconds after which a command of Flower's that should answer at once is given up.
COMMAND_LIMIT = 120.0


@dataclass(frozen=True)
class FlowerApp:
    """Where the two apps are, as ``module:attribute`` of installed packages."""

    server: str = "edgeduet_server.app:app"
    client: str = "edgeduet_client.app:app"


def write_app_folder(folder: Path, app: FlowerApp, run_config: FlowerConfig) -> Path:
    """Write the folder that ``flwr run`` takes: one ``pyproject.toml``."""
    text = f"""[project]
name = "edgeduet"
version = "0.1.0"

[tool.flwr.app]
publisher = "edgeduet"

[tool.flwr.app.components]
serverapp = "{app.server}"
clientapp = "{app.client}"

[tool.flwr.app.config]
{toml_lines(run_config)}
"""
    atomic_write_text(folder / "pyproject.toml", text)
    return folder


def write_connection(home: Path, name: str, address: str, *, root_certificates: Path | None = None) -> None:
    """Tell Flower's command line in ``home`` how to reach a SuperLink, under ``name``, and make it the default."""
    trust = (
        "insecure = true" if root_certificates is None else f"root-certificates = {json.dumps(str(root_certificates))}"
    )
    atomic_write_text(
        home / "config.toml",
        f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\n{trust}\n',
    )


@dataclass(frozen=True)
class FlowerCommands:
    """Flower's command line, speaking to one SuperLink.

    Attributes:
        name: of the connection in ``FLWR_HOME/config.toml`` (:func:`write_connection`).
        environment: see :func:`environment`.
        folder: where commands run; a neutral one, since Flower puts it on the import path.
    """

    name: str
    environment: Mapping[str, str] = field(repr=False)
    folder: Path

    def ask(self, *arguments: str) -> dict[str, Any]:
        """Run a ``flwr`` command with ``--format json``; return its answer.

        Raises:
            FederationError: no answer, or one that says what went wrong.
        """
        done = self._run(*arguments, "--format", "json")
        try:
            answer = dict(json.loads(done.stdout))
        except ValueError as error:
            raise FederationError(
                f"'flwr {arguments[0]}' failed with exit code {done.returncode}: {_last_line(done)}"
            ) from error
        if answer.get("success") is False:
            lines = [line.strip() for line in str(answer.get("error-message", answer)).splitlines() if line.strip()]
            raise FederationError(f"'flwr {arguments[0]}' was refused: {lines[-1]}")
        return answer

    def text(self, *arguments: str) -> str:
        """Run a ``flwr`` command; return what it prints."""
        return self._run(*arguments).stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [program("flwr"), *arguments],
                cwd=self.folder,
                env=dict(self.environment),
                capture_output=True,
                text=True,
                timeout=COMMAND_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise FederationError(
                f"'flwr {arguments[0]}' gave no answer within {COMMAND_LIMIT:.0f} s; is the server running?"
            ) from error


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip(" │╭╰─╮╯") for line in (done.stderr or done.stdout).splitlines()]
    return next((line for line in reversed(lines) if line), "no message")
