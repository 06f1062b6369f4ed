"""A real `edgeduet-client llm serve` process for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

COMMAND = (sys.executable, "-c", "from edgeduet_client.cli import main; main()")


@dataclass
class ServerProcess:
    """A server that said it is ready.

    Attributes:
        http: its base URL.
        grpc: its gRPC address, if it has one.
    """

    process: subprocess.Popen[str]
    http: str
    grpc: str
    token: str | None = None
    _log: list[str] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """What a caller who knows the token sends."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}

    def events(self) -> list[dict[str, Any]]:
        """What the server has logged so far."""
        return [json.loads(line) for line in self._log]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one of its counters, 0 where it does not exist yet."""
        from prometheus_client.parser import text_string_to_metric_families

        text = httpx.get(f"{self.http}/metrics", headers=self.headers).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"edgeduet_llm_{name}" and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return 0.0

    def wait_for(self, name: str, value: float, *, seconds: float = 10.0, **labels: str) -> float:
        """Wait until a metric has ``value``; return the seconds it took."""
        started = time.monotonic()
        while self.metric(name, **labels) != value:
            assert time.monotonic() - started < seconds, f"{name} did not become {value}"
            time.sleep(0.01)
        return time.monotonic() - started

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, seconds: float = 20.0) -> int:
        """Wait for the end; return the exit code."""
        return self.process.wait(seconds)


def start(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start `edgeduet-client` with ``arguments``."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


@contextmanager
def serving(
    *arguments: str | Path, environment: Mapping[str, str] | None = None, token: str | None = None
) -> Iterator[ServerProcess]:
    """Run `llm serve` on free ports until the body ends; a server that still runs then is killed."""
    ports = ("--port", "0", "--threads", "1", *(() if "--no-grpc" in arguments else ("--grpc-port", "0")))
    process = start("llm", "serve", *arguments, *ports, environment=environment)
    log: list[str] = []
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        first = process.stdout.readline()
        assert first, f"the server did not start: {process.wait(10)} {''.join(log)}"
        ready = json.loads(first)
        yield ServerProcess(process, ready["http"], ready.get("grpc", ""), token, log)
    finally:
        process.kill()
        process.wait()
        reader.join(5)
        process.stdout.close()
        process.stderr.close()
        if process.stdin is not None:
            process.stdin.close()
