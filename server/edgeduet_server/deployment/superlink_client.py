"""What the control plane asks of Flower: runs and nodes of the SuperLink of one server home."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeduet_server.deployment.flower_programs import (
    FlowerApp,
    FlowerCommands,
    write_app_folder,
    write_connection,
)
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.errors import FederationError
from edgeduet_shared.run_config import DEFAULTS, RunConfig
from edgeduet_shared.supervision.programs import environment
from edgeduet_shared.toml_output import toml_lines

CONNECTION = "edgeduet"


@dataclass(frozen=True)
class FlowerRun:
    """A run as Flower sees it: ``status`` is ``pending``, ``starting``, ``running`` or ``finished:HOW``."""

    run_id: str
    status: str
    raw: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether it is over, however it ended."""
        return self.status.startswith("finished")


@dataclass(frozen=True)
class FlowerNode:
    """A registered device as Flower sees it; ``status``: ``registered``, ``online``, ``offline``, ``unregistered``."""

    node_id: str
    status: str
    raw: dict[str, Any]


class SuperLinkClient:
    """Speaks to the SuperLink on loopback through Flower's command line; each call takes a second or two.

    Args:
        config: of the server home.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        home = config.folder("flwr")
        home.mkdir(parents=True, exist_ok=True)
        write_connection(
            home,
            CONNECTION,
            f"127.0.0.1:{config.network.superlink_port}",
            root_certificates=config.folder("pki") / "ca.crt",
        )
        self._commands = FlowerCommands(CONNECTION, environment(home), home)

    def start_run(self, config: RunConfig) -> str:
        """Start a training run; return Flower's run id.

        Raises:
            FederationError: Flower refused, or the server is not running.
        """
        app = write_app_folder(self._config.folder("app"), FlowerApp(), DEFAULTS)
        with tempfile.TemporaryDirectory(prefix="edgeduet-run-") as scratch:
            overrides = Path(scratch) / "overrides.toml"
            atomic_write_text(overrides, toml_lines(config.to_flower()) + "\n")
            answer = self._commands.ask("run", str(app), CONNECTION, "--run-config", str(overrides))
        run_id = answer.get("run-id")
        if not run_id:
            raise FederationError(f"Flower gave no run id: {answer}")
        return str(run_id)

    def stop_run(self, run_id: str) -> None:
        """Stop a run. Devices at work finish what they do; their replies are dropped."""
        self._commands.ask("stop", run_id, CONNECTION)

    def list_runs(self) -> list[FlowerRun]:
        """Return all runs that Flower remembers."""
        answer = self._commands.ask("list", CONNECTION)
        return [FlowerRun(str(run["run-id"]), str(run["status"]), run) for run in answer.get("runs", [])]

    def register_node(self, public_key: str, name: str) -> str:
        """Let the device that holds the key of ``public_key`` (OpenSSH form) connect; return its node id.

        Raises:
            FederationError: the key was registered before (also one that was revoked), or is not NIST P-384.
        """
        with tempfile.TemporaryDirectory(prefix="edgeduet-key-") as scratch:
            path = Path(scratch) / "node.pub"
            atomic_write_text(path, public_key.strip() + "\n")
            answer = self._commands.ask("supernode", "register", str(path), CONNECTION, "--name", name)
        node = answer.get("node-id")
        if not node:
            raise FederationError(f"Flower gave no node id: {answer}")
        return str(node)

    def unregister_node(self, node_id: str) -> None:
        """Lock a device out. Its key can never be registered again: it would have to enrol with a new one."""
        self._commands.ask("supernode", "unregister", node_id, CONNECTION)

    def list_nodes(self) -> list[FlowerNode]:
        """Return the registered devices."""
        answer = self._commands.ask("supernode", "list", CONNECTION)
        return [FlowerNode(str(node["node-id"]), str(node["status"]), node) for node in answer.get("nodes", [])]
