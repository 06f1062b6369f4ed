"""Readiness and metrics of a running server, over HTTP on loopback.

``GET /ready`` answers 200 or 503 with JSON; ``GET /metrics`` in Prometheus' text format.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgeduet_server.deployment.supervisor import Health
from edgeduet_shared.errors import ConfigError


class HealthCollector(Collector):
    """Turns the supervisor's view into metrics, at the moment they are asked for."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics(self._health())

    def _metrics(self, health: Health) -> Iterator[Metric]:
        yield GaugeMetricFamily("edgeduet_server_ready", "Whether every program of the server runs", health.ready)
        yield GaugeMetricFamily("edgeduet_server_complaints", "Things that are not in order", len(health.complaints))
        up = GaugeMetricFamily("edgeduet_program_up", "Whether a program runs", labels=["program"])
        restarts = GaugeMetricFamily("edgeduet_program_restarts", "Restarts since the start", labels=["program"])
        for name, facts in health.programs.items():
            up.add_metric([name], float(facts["pid"] is not None))
            restarts.add_metric([name], facts["restarts"])
        yield up
        yield restarts


def start_endpoint(port: int, health: Callable[[], Health], *more: Collector) -> ThreadingHTTPServer:
    """Serve until the returned server is shut down.

    Args:
        more: further sources of metrics.

    Raises:
        ConfigError: the port is taken.
    """
    registry = CollectorRegistry()
    for collector in (HealthCollector(health), *more):
        registry.register(collector)
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), _handler(registry, health))
    except OSError as error:
        raise ConfigError(
            f"[network] metrics_port = {port} cannot be used ({error.strerror}); choose another in server.toml"
        ) from error
    threading.Thread(target=server.serve_forever, name="endpoint", daemon=True).start()
    return server


def _handler(registry: CollectorRegistry, health: Callable[[], Health]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
            elif self.path == "/ready":
                found = health()
                body = json.dumps(found.as_json()).encode()
                self._answer(200 if found.ready else 503, "application/json", body)
            else:
                self._answer(404, "text/plain", b"not found; try /ready or /metrics\n")

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: scrapes come every few seconds."""

    return Handler
