"""The admin service of a server home: gRPC over TLS with the server's certificate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer
from grpc_reflection.v1alpha import reflection

from edgeduet_server.admin.attempts import Attempts
from edgeduet_server.admin.backup_calls import BackupCalls
from edgeduet_server.admin.client_calls import ClientCalls
from edgeduet_server.admin.dispatch import SERVICE, Dispatcher
from edgeduet_server.admin.flower_view import Flower, FlowerView
from edgeduet_server.admin.metric_calls import MetricCalls
from edgeduet_server.admin.model_calls import ModelCalls
from edgeduet_server.admin.run_calls import RunCalls
from edgeduet_server.admin.status_calls import StatusCalls
from edgeduet_server.admin.token_calls import TokenCalls
from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.registry.listener import utc_now
from edgeduet_server.registry.store import Registry
from edgeduet_shared.errors import ConfigError

log = logging.getLogger("edgeduet.admin")

LARGEST_MESSAGE = 1_000_000
LARGEST_METADATA = 8 * 1024
_THREADS = 8
_CALLS_AT_ONCE = 32


class AdminServer:
    """A started admin service; ``port`` is the one it listens on.

    Args:
        config: of the server home.
        registry: the open registry; closed by whoever opened it.
        flower: starts and stops runs, lets devices in and out.
        now: the clock of tokens and rows.
        attempts: counts wrong tokens.

    Raises:
        ConfigError: the address is taken or not of this machine, or the certificate cannot be read.
    """

    def __init__(
        self,
        config: ServerConfig,
        registry: Registry,
        flower: Flower,
        *,
        now: Callable[[], datetime] = utc_now,
        attempts: Attempts | None = None,
    ) -> None:
        view = FlowerView(flower)
        runs = RunCalls(registry, config.folder("runs"), flower, view, now)
        calls = [
            runs,
            StatusCalls(registry, config, runs, view, now),
            ClientCalls(registry, config, flower, view, now),
            MetricCalls(registry, now),
            ModelCalls(registry, config.home, now),
            TokenCalls(registry, now),
            BackupCalls(registry, config.folder("backups"), now),
        ]
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, thread_name_prefix="admin"),
            options=[
                ("grpc.max_receive_message_length", LARGEST_MESSAGE),
                ("grpc.max_metadata_size", LARGEST_METADATA),
                ("grpc.so_reuseport", 0),
                # Connections that say nothing are not kept for ever.
                ("grpc.max_connection_idle_ms", 300_000),
            ],
            maximum_concurrent_rpcs=_CALLS_AT_ONCE,
        )
        self._server.add_generic_rpc_handlers([Dispatcher(calls, registry, attempts or Attempts(), now).handler()])
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if config.network.admin_reflection:
            reflection.enable_server_reflection((SERVICE.full_name, reflection.SERVICE_NAME), self._server)
        self.port = self._listen(config)

    def _listen(self, config: ServerConfig) -> int:
        pki, network = Pki(config.folder("pki")), config.network
        try:
            pair = (pki.key.read_bytes(), pki.certificate.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot be read ({error.strerror}); run `edgeduet-server check`"
            ) from error
        host = f"[{network.admin_host}]" if ":" in network.admin_host else network.admin_host
        try:
            return self._server.add_secure_port(f"{host}:{network.admin_port}", grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {network.admin_host} port {network.admin_port}; choose another "
                "[network] admin_port in server.toml"
            ) from error

    def start(self) -> None:
        """Begin to answer."""
        self._server.start()
        for service in ("", SERVICE.full_name):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        log.info("admin service listens on port %d", self.port)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Finish what is being answered and close."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_seconds).wait()
