"""What a server counts, for Prometheus. A registry of its own: two servers in one process do not mix."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS_PER_SECOND = (1, 2.5, 5, 10, 20, 40, 60, 80, 100, 150, 200, 400)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The counters of one server; every one carries the name of the model."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix, registry = "edgeduet_llm_", self.registry
        self.requests = Counter(
            f"{prefix}requests", "Requests by how they ended.", ("model", "call", "outcome"), registry=registry
        )
        self.tokens = Counter(
            f"{prefix}tokens",
            "Tokens: of prompts computed, of prompts found in a cache, of answers.",
            ("model", "kind"),
            registry=registry,
        )
        self.gate_interventions = Counter(
            f"{prefix}gate_interventions",
            "Tokens at which the language confusion gate removed a family.",
            ("model",),
            registry=registry,
        )
        self.draft_tokens = Counter(
            f"{prefix}draft_tokens",
            "Tokens that drafters proposed: accepted, rejected, or behind a rejection and never looked at.",
            ("model", "verdict"),
            registry=registry,
        )
        self.first_token = Histogram(
            f"{prefix}time_to_first_token_seconds",
            "From the arrival of a request to its first token, waiting included.",
            ("model",),
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self.waited = Histogram(
            f"{prefix}queue_wait_seconds",
            "From the arrival of a request to its turn.",
            ("model",),
            buckets=(0.001, 0.01, *_FIRST_TOKEN_S),
            registry=registry,
        )
        self.tokens_per_second = Histogram(
            f"{prefix}tokens_per_second",
            "Tokens of an answer over the seconds of its decoding.",
            ("model",),
            buckets=_TOKENS_PER_SECOND,
            registry=registry,
        )
        self._queue_depth = Gauge(
            f"{prefix}queue_depth", "Requests that wait for their turn.", ("model",), registry=registry
        )
        self._running = Gauge(f"{prefix}running", "Requests at work, 0 or 1.", ("model",), registry=registry)
        self._caches = Gauge(
            f"{prefix}kept_caches", "Key-value caches kept for going on.", ("model",), registry=registry
        )
        self._cache_bytes = Gauge(
            f"{prefix}kept_cache_bytes", "Bytes of the kept key-value caches.", ("model",), registry=registry
        )

    def watch(
        self,
        model: str,
        *,
        queue_depth: Callable[[], float],
        running: Callable[[], float],
        caches: Callable[[], float],
        cache_bytes: Callable[[], float],
    ) -> None:
        """Read these gauges of ``model`` whenever somebody looks."""
        self._queue_depth.labels(model).set_function(queue_depth)
        self._running.labels(model).set_function(running)
        self._caches.labels(model).set_function(caches)
        self._cache_bytes.labels(model).set_function(cache_bytes)

    def text(self) -> bytes:
        """Return all of it as Prometheus reads it; its type is :data:`CONTENT_TYPE`."""
        return generate_latest(self.registry)
