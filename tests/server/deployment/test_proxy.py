"""The real nginx, and Caddy, in front of a real TLS server let the Fleet interface through and nothing else."""

from __future__ import annotations

import http.client
import http.server
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeduet_server.deployment.home import create_home
from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.proxy import proxy_command
from edgeduet_server.deployment.server_config import ServerConfig
from write_deploy import SERVER_HOME

CADDYFILE = Path(__file__).resolve().parents[3] / "deploy/proxy/Caddyfile"
NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Upstream(http.server.BaseHTTPRequestHandler):
    """Answers 200 to everything, with the path it was asked for."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = self.path.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def caddy_command(config: ServerConfig) -> list[str]:
    """Write the example of deploy/proxy for this home and return the command that runs it."""
    changes = {
        str(SERVER_HOME): str(config.home),
        "https://fl.example.org:9443": f"https://localhost:{config.network.public_port}",
        "127.0.0.1:9444": f"127.0.0.1:{config.network.superlink_port}",
        "16MB": f"{config.limits.max_request_bytes // 10**6}MB",
    }
    text = CADDYFILE.read_text()
    for example, here in changes.items():
        assert example in text
        text = text.replace(example, here)
    path = config.home / "Caddyfile"
    path.write_text(text)
    return ["caddy", "run", "--adapter", "caddyfile", "--config", str(path)]


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerConfig]:
    """A proxy in front of an upstream that would answer everything."""
    if request.param == "nginx" and NGINX is None:
        pytest.skip("nginx is not installed (apt install nginx-light)")
    if request.param == "caddy" and shutil.which("caddy") is None:
        pytest.skip("caddy is not installed (apt install caddy)")
    config = create_home(tmp_path_factory.mktemp("home"), ["localhost"])
    network = config.network.model_copy(update={"public_port": free_port(), "superlink_port": free_port()})
    limits = config.limits.model_copy(update={"max_request_bytes": 6_000_000})
    config = config.model_copy(update={"network": network, "limits": limits})
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", network.superlink_port), Upstream)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pki = Pki(config.folder("pki"))
    context.load_cert_chain(pki.certificate, pki.key)
    upstream.socket = context.wrap_socket(upstream.socket, server_side=True)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    command = proxy_command if request.param == "nginx" else caddy_command
    home = {"HOME": str(config.home), "XDG_DATA_HOME": str(config.home), "XDG_CONFIG_HOME": str(config.home)}
    with (config.home / "proxy.log").open("wb") as log:
        process = subprocess.Popen(command(config), stderr=log, env={**os.environ, **home})
    deadline = time.monotonic() + 20
    while socket.socket().connect_ex(("127.0.0.1", network.public_port)) and time.monotonic() < deadline:
        assert process.poll() is None, (config.home / "proxy.log").read_text()
        time.sleep(0.05)
    yield config
    process.terminate()
    process.wait(timeout=10)
    upstream.shutdown()


def ask(config: ServerConfig, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, str]:
    trust = ssl.create_default_context(cafile=str(config.folder("pki") / "ca.crt"))
    connection = http.client.HTTPSConnection("localhost", config.network.public_port, context=trust, timeout=20)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def test_what_devices_need_passes_unchanged(server: ServerConfig) -> None:
    assert ask(server, "/v1/fleet/pull-messages?x=1", b"message") == (200, "/v1/fleet/pull-messages?x=1")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/docs",
        "/openapi.json",
        "/health",
        "/v1/fleet",
        "/v1/fleetx/a",
        "/V1/FLEET/a",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/control/../fleet/pull-messages",
        "//v1/fleet/a",
        "/v1/fleet//control",
        "/v1/fleet/..\\control",
        "/v1/./control/start-run",
    ],
)
def test_everything_else_is_not_there(server: ServerConfig, path: str) -> None:
    status, body = ask(server, path)
    assert status in (400, 404)
    assert "control" not in body and "runtime" not in body


def test_a_request_larger_than_the_limit_is_refused(server: ServerConfig) -> None:
    assert ask(server, "/v1/fleet/push-object", bytes(5_900_000))[0] == 200
    status, _ = ask(server, "/v1/fleet/push-object", bytes(6_100_000))
    assert status == 413


def test_plain_text_gets_no_answer_from_upstream(server: ServerConfig) -> None:
    connection = http.client.HTTPConnection("localhost", server.network.public_port, timeout=20)
    connection.request("POST", "/v1/fleet/a")
    assert connection.getresponse().status == 400
    connection.close()
