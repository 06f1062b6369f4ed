"""A server home with a running admin service for tests: real TLS, real registry; only Flower is stood in for."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from edgeduet_server.admin.attempts import Attempts
from edgeduet_server.admin.dispatch import SERVICE
from edgeduet_server.admin.roles import Role
from edgeduet_server.admin.server import AdminServer
from edgeduet_server.admin.tokens import create_token
from edgeduet_server.deployment.home import create_home
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.deployment.superlink_client import FlowerNode, FlowerRun
from edgeduet_server.registry.store import Registry
from edgeduet_shared.errors import FederationError
from edgeduet_shared.run_config import RunConfig

NODE = "9223372036854775809"


@dataclass
class RecordedFlower:
    """Flower's answers as ``SuperLinkClient`` gives them, and what it was asked."""

    asked: list[tuple[Any, ...]] = field(default_factory=list)
    runs: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    problem: str = ""

    def _answer(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.problem:
            raise FederationError(self.problem)

    def start_run(self, config: RunConfig) -> str:
        self._answer("start", config)
        run_id = str(2**63 + 1000 + len(self.runs))
        self.runs[run_id] = "pending"
        return run_id

    def stop_run(self, run_id: str) -> None:
        self._answer("stop", run_id)
        self.runs[run_id] = "finished:stopped"

    def list_runs(self) -> list[FlowerRun]:
        self._answer("runs")
        return [FlowerRun(run_id, status, {}) for run_id, status in self.runs.items()]

    def register_node(self, public_key: str, name: str) -> str:
        self._answer("register", public_key, name)
        if public_key in self.keys:
            raise FederationError("Public key already in use")
        self.keys.add(public_key)
        node = str(int(NODE) + len(self.keys))
        self.nodes[node] = "registered"
        return node

    def unregister_node(self, node_id: str) -> None:
        self._answer("unregister", node_id)
        self.nodes[node_id] = "unregistered"

    def list_nodes(self) -> list[FlowerNode]:
        self._answer("nodes")
        return [FlowerNode(node, status, {}) for node, status in self.nodes.items()]


@dataclass
class Clock:
    """A clock that tests turn."""

    time: datetime = field(default_factory=lambda: datetime.now(UTC).replace(microsecond=0))
    seconds: float = 0.0

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return self.seconds

    def pass_(self, **much: float) -> None:
        step = timedelta(**much)
        self.time += step
        self.seconds += step.total_seconds()


@dataclass
class AdminHome:
    """What tests work with."""

    config: ServerConfig
    registry: Registry
    flower: RecordedFlower
    clock: Clock
    port: int
    channel: grpc.Channel

    @property
    def home(self) -> Path:
        return self.config.home

    @property
    def ca(self) -> Path:
        return self.home / "pki" / "ca.crt"

    def token(self, role: str = "admin", name: str = "", days: int = 1) -> str:
        """Make a token; return its text."""
        with self.registry.writing() as session:
            name = name or f"{role}-{secrets.token_hex(4)}"
            return create_token(session, name, Role.parse(role), days=days, by="test", now=self.clock.now())[1]

    def call(self, method: str, request: Message | bytes, token: str | None = None, **metadata: str) -> Any:
        """Call the service; ``token`` None: one of an administrator's."""
        return self.raw(method, request, f"Bearer {self.token() if token is None else token}", **metadata)

    def raw(self, method: str, request: Message | bytes, authorization: str | None, **metadata: str) -> Any:
        """Call the service with any authorization, or none."""
        described = SERVICE.methods_by_name[method]
        answer = GetMessageClass(described.output_type)
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        headers = [*metadata.items(), *([("authorization", authorization)] if authorization is not None else [])]
        path = f"/{SERVICE.full_name}/{method}"
        if described.server_streaming:
            stream = self.channel.unary_stream(path, response_deserializer=answer.FromString)
            return list(stream(payload, metadata=headers, timeout=60))
        return self.channel.unary_unary(path, response_deserializer=answer.FromString)(
            payload, metadata=headers, timeout=60
        )


@contextmanager
def admin_home(folder: Path, registry_url: str = "", **network: Any) -> Iterator[AdminHome]:
    """Make a server home in ``folder`` and run its admin service on a free port of loopback."""
    config = create_home(folder, ["localhost", "fl.example.org"])
    config = config.model_copy(
        update={
            "network": config.network.model_copy(update={"admin_port": 0, **network}),
            "registry": config.registry.model_copy(update={"url": registry_url}),
        }
    )
    registry = Registry.open(config.registry_url)
    flower, clock = RecordedFlower(), Clock()
    server = AdminServer(config, registry, flower, now=clock.now, attempts=Attempts(clock=clock.monotonic))
    server.start()
    credentials = grpc.ssl_channel_credentials((config.home / "pki" / "ca.crt").read_bytes())
    channel = grpc.secure_channel(f"localhost:{server.port}", credentials)
    try:
        yield AdminHome(config, registry, flower, clock, server.port, channel)
    finally:
        channel.close()
        server.stop(0)
        registry.close()
