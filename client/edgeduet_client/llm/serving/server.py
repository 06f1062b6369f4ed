"""The life of a server: listen, serve HTTP and gRPC on one event loop, drain on the first signal, stop on the second.

While it drains it still listens, so that who asks is told (503) instead of finding a closed door; what was accepted,
running or waiting, is answered. Then it closes and exits with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from edgeduet_client.llm.serving.access import Access
from edgeduet_client.llm.serving.engine import Engine
from edgeduet_client.llm.serving.event_log import event
from edgeduet_client.llm.serving.http_api import make_app
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.metrics import Metrics
from edgeduet_shared.errors import EdgeDuetError

log = logging.getLogger(__name__)
_LAST_WORDS_S = 5  # for answers that are complete to reach slow readers


class AddressError(EdgeDuetError):
    """An address that cannot be listened on."""


@dataclass(frozen=True)
class Certificate:
    """Files of a TLS certificate chain and its key, both PEM."""

    chain: Path
    key: Path


@dataclass(frozen=True)
class Address:
    """Where to listen; a port of 0 lets the system choose, ``None`` = no gRPC."""

    host: str
    http_port: int
    grpc_port: int | None


class Server:
    """Engines, and the two ways to reach them.

    Args:
        engines: loaded models by name; stopped when the server ends.
        announce: called once with the addresses when the server is ready.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        address: Address,
        access: Access,
        limits: ServingLimits,
        metrics: Metrics,
        *,
        certificate: Certificate | None = None,
        announce: Callable[[dict[str, str]], None] = lambda addresses: None,
    ) -> None:
        self.engines = engines
        self.address = address
        self.access = access
        self.limits = limits
        self.metrics = metrics
        self.certificate = certificate
        self.announce = announce
        self._drain = asyncio.Event()
        self._stop = asyncio.Event()

    def run(self) -> int:
        """Serve until a signal; return the exit code: 0 after a drain, 1 where accepted requests were dropped."""
        return asyncio.run(self._run())

    async def _run(self) -> int:
        with contextlib.closing(listen(self.address.host, self.address.http_port)) as door:
            http = _Uvicorn(self._uvicorn_config())
            serving = asyncio.create_task(http.serve(sockets=[door]))
            grpc = await self._start_grpc()
            while not http.started and not serving.done():
                await asyncio.sleep(0.01)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_signal)
            addresses = self._addresses(door, grpc)
            event(log, "ready", models=list(self.engines), **addresses)
            self.announce(addresses)
            try:
                await self._drain.wait()
                finished = await self._finish_accepted(grpc)
            finally:
                for engine in self.engines.values():
                    # Answers that are cut off still tell their readers so, which takes the loop.
                    await asyncio.to_thread(engine.queue.stop)
                http.should_exit = True
                http.force_exit = self._stop.is_set()
                if grpc is not None:
                    await grpc.stop(_LAST_WORDS_S)
                await serving
        event(log, "stopped", dropped=not finished)
        return 0 if finished else 1

    def _on_signal(self) -> None:
        if self._drain.is_set():
            self._stop.set()
        self._drain.set()

    async def _finish_accepted(self, grpc: Any) -> bool:
        """Refuse what is new, wait for what was accepted; return whether all of it was answered."""
        waiting = sum(engine.queue.waiting + engine.queue.running for engine in self.engines.values())
        event(log, "draining", accepted=waiting, seconds=self.limits.drain_s)
        for engine in self.engines.values():
            engine.queue.drain()
        if grpc is not None:
            await grpc.say_not_serving()
        idle = [asyncio.to_thread(engine.queue.wait_idle, self.limits.drain_s) for engine in self.engines.values()]
        answered = asyncio.ensure_future(asyncio.gather(*idle))
        stopped = asyncio.ensure_future(self._stop.wait())
        both: set[asyncio.Future[Any]] = {answered, stopped}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        return answered.done() and all(answered.result())

    async def _start_grpc(self) -> Any:
        if self.address.grpc_port is None:
            return None
        from edgeduet_client.llm.serving.grpc_api import GrpcServer

        return await GrpcServer.start(
            self.engines, self.access, self.limits, self.address.host, self.address.grpc_port, self.certificate
        )

    def _uvicorn_config(self) -> uvicorn.Config:
        certificate = self.certificate
        return uvicorn.Config(
            make_app(self.engines, self.access, self.limits, self.metrics),
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
            ssl_certfile=None if certificate is None else str(certificate.chain),
            ssl_keyfile=None if certificate is None else str(certificate.key),
        )

    def _addresses(self, door: socket.socket, grpc: Any) -> dict[str, str]:
        host = f"[{self.address.host}]" if ":" in self.address.host else self.address.host
        scheme = "http" if self.certificate is None else "https"
        addresses = {"http": f"{scheme}://{host}:{door.getsockname()[1]}"}
        if grpc is not None:
            addresses["grpc"] = f"{host}:{grpc.port}"
        return addresses


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port``.

    Raises:
        AddressError: the address is taken, not of this machine, or not allowed.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        door = socket.socket(family, socket.SOCK_STREAM)
        try:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind(where)
            door.listen(2048)
        except BaseException:
            door.close()
            raise
    except OSError as error:
        raise AddressError(f"cannot listen on {host} port {port}: {error.strerror or error}; choose another") from error
    door.setblocking(False)
    return door
