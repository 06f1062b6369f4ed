"""What Flower says about runs and devices, asked at most every few seconds (each question costs a process)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from edgeduet_server.deployment.superlink_client import FlowerNode, FlowerRun
from edgeduet_shared.errors import FederationError
from edgeduet_shared.run_config import RunConfig

FRESH_SECONDS = 5.0
T = TypeVar("T")


class Flower(Protocol):
    """What the control plane asks of Flower (``deployment.superlink_client.SuperLinkClient``)."""

    def start_run(self, config: RunConfig) -> str:
        """Start a run; return Flower's id of it."""
        ...

    def stop_run(self, run_id: str) -> None:
        """Stop a run at once."""
        ...

    def list_runs(self) -> list[FlowerRun]:
        """Return all runs."""
        ...

    def register_node(self, public_key: str, name: str) -> str:
        """Let a device in; return its node id."""
        ...

    def unregister_node(self, node_id: str) -> None:
        """Lock a device out for ever."""
        ...

    def list_nodes(self) -> list[FlowerNode]:
        """Return the devices."""
        ...


class FlowerView:
    """Answers of Flower that may be a few seconds old; a problem is part of the answer.

    Args:
        flower: whom to ask.
        clock: a clock that never runs backwards.
    """

    def __init__(self, flower: Flower, clock: Callable[[], float] = time.monotonic) -> None:
        self._flower = flower
        self._clock = clock
        self._lock = threading.Lock()
        self._nodes: tuple[float, list[FlowerNode], str] | None = None
        self._runs: tuple[float, list[FlowerRun], str] | None = None

    def nodes(self) -> tuple[list[FlowerNode], str]:
        """Return the devices, or none and why."""
        with self._lock:
            self._nodes = self._fresh(self._nodes, self._flower.list_nodes)
            return self._nodes[1], self._nodes[2]

    def runs(self) -> tuple[list[FlowerRun], str]:
        """Return the runs, or none and why."""
        with self._lock:
            self._runs = self._fresh(self._runs, self._flower.list_runs)
            return self._runs[1], self._runs[2]

    def forget(self) -> None:
        """Ask anew next time: something was changed."""
        with self._lock:
            self._nodes = self._runs = None

    def _fresh(
        self, known: tuple[float, list[T], str] | None, ask: Callable[[], list[T]]
    ) -> tuple[float, list[T], str]:
        if known is not None and self._clock() - known[0] < FRESH_SECONDS:
            return known
        try:
            found, problem = ask(), ""
        except FederationError as error:
            found, problem = [], str(error)
        return self._clock(), found, problem
