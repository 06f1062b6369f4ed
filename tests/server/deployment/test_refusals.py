"""Whom the real nginx turned away, as an operator learns of it."""

from __future__ import annotations

import base64
import http.client
import http.server
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from edgeduet_server.admin.refused_devices import refusal_lines, refused_devices
from edgeduet_server.deployment.home import create_home
from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.proxy import proxy_command
from edgeduet_server.deployment.refusals import LOG, LOG_FORMAT, read_refusals
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.registry.models import Device
from edgeduet_server.registry.store import Registry
from edgeduet_shared.enrolment import fingerprint, public_key_text
from edgeduet_shared.supervision.child import Child, Program

PATIENCE = 60.0
Key = ec.EllipticCurvePrivateKey


class Flower(http.server.BaseHTTPRequestHandler):
    """Answers each path with the status in its last part, as SuperLink would."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.send_response(int(self.path.rpartition("/")[2]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerConfig]:
    """nginx as the supervisor runs it, its log where the supervisor keeps it."""
    if shutil.which("nginx") is None and not Path("/usr/sbin/nginx").is_file():
        pytest.skip("nginx is not installed (apt install nginx-light)")
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        ports = {"public_port": a.getsockname()[1], "superlink_port": b.getsockname()[1]}
    config = create_home(tmp_path_factory.mktemp("home"), ["localhost"])
    config = config.model_copy(update={"network": config.network.model_copy(update=ports)})
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", config.network.superlink_port), Flower)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pki = Pki(config.folder("pki"))
    context.load_cert_chain(pki.certificate, pki.key)
    upstream.socket = context.wrap_socket(upstream.socket, server_side=True)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    proxy = Child(Program("proxy", lambda: proxy_command(config), {}, config.home), config.folder("logs"), config.logs)
    proxy.tend()
    wait(lambda: socket.socket().connect_ex(("127.0.0.1", config.network.public_port)) == 0)
    yield config
    proxy.end()
    upstream.shutdown()


def wait(until: object) -> None:
    deadline = time.monotonic() + PATIENCE
    while not until():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def knock(server: ServerConfig, status: int, key: Key | None = None, signed: str | None = None) -> None:
    """Ask as a device does; the server answers with ``status``."""
    trust = ssl.create_default_context(cafile=str(server.folder("pki") / "ca.crt"))
    connection = http.client.HTTPSConnection("localhost", server.network.public_port, context=trust, timeout=20)
    headers = {TIMESTAMP_HEADER: signed or datetime.now(UTC).isoformat()}
    if key is not None:
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = base64.b64encode(pem).decode()
    connection.request("POST", f"/v1/fleet/activate-node/{status}", headers=headers)
    assert connection.getresponse().status == status
    connection.close()


def print_of(key: Key) -> str:
    return fingerprint(public_key_text(key.public_key()))


def refused(server: ServerConfig, since: datetime, count: int = 1) -> list[tuple[str, int, int]]:
    """Wait for ``count`` to be there: nginx writes, and the supervisor copies."""
    wait(lambda: len(read_refusals(server.folder("logs"), since=since)) >= count)
    return [(r.fingerprint, r.status, r.count) for r in read_refusals(server.folder("logs"), since=since)]


def test_who_is_refused_is_known_by_the_key_and_who_gets_in_is_not_noted(server: ServerConfig) -> None:
    since, keys = datetime.now(UTC), [ec.generate_private_key(ec.SECP384R1()) for _ in range(3)]
    knock(server, 200, keys[0])
    knock(server, 502, keys[0])
    knock(server, 401, keys[1])
    knock(server, 412, keys[2])
    knock(server, 401, keys[1])
    wait(lambda: (print_of(keys[1]), 401, 2) in refused(server, since))
    assert sorted(refused(server, since, 2)) == sorted([(print_of(keys[2]), 412, 1), (print_of(keys[1]), 401, 2)])
    assert not read_refusals(server.folder("logs"), since=datetime.now(UTC) + timedelta(seconds=1))


def test_the_claimed_time_tells_how_far_the_clock_is_off(server: ServerConfig) -> None:
    since, key = datetime.now(UTC), ec.generate_private_key(ec.SECP384R1())
    knock(server, 401, key, (datetime.now(UTC) + timedelta(seconds=90)).isoformat())
    refused(server, since)
    (found,) = read_refusals(server.folder("logs"), since=since)
    assert found.skew == pytest.approx(90, abs=PATIENCE)
    knock(server, 401, key, "yesterday")
    wait(lambda: read_refusals(server.folder("logs"), since=since)[0].count == 2)
    assert read_refusals(server.folder("logs"), since=since)[0].skew is None


@pytest.mark.parametrize("header", ["nonsense", 'x" key="', "AAAA", base64.b64encode(b"-----BEGIN").decode()])
def test_a_key_that_is_none_is_nobody(server: ServerConfig, header: str) -> None:
    since = datetime.now(UTC)
    trust = ssl.create_default_context(cafile=str(server.folder("pki") / "ca.crt"))
    connection = http.client.HTTPSConnection("localhost", server.network.public_port, context=trust, timeout=20)
    connection.request("POST", "/v1/fleet/a/401", headers={FLEET_HTTP_PUBLIC_KEY_HEADER: header})
    assert connection.getresponse().status == 401
    connection.close()
    key = ec.generate_private_key(ec.SECP384R1())
    knock(server, 401, key)
    assert refused(server, since) == [(print_of(key), 401, 1)]


def test_who_does_not_trust_the_certificate_is_known_by_the_address(server: ServerConfig, tmp_path: Path) -> None:
    since = datetime.now(UTC).replace(microsecond=0)
    stranger = Pki(tmp_path / "pki")
    stranger.create(["localhost"])
    trust = ssl.create_default_context(cafile=str(stranger.ca_certificate))
    connection = http.client.HTTPSConnection("localhost", server.network.public_port, context=trust, timeout=20)
    with pytest.raises(ssl.SSLCertVerificationError):
        connection.connect()
    wait(lambda: any(r.alert for r in read_refusals(server.folder("logs"), since=since)))
    found = [r for r in read_refusals(server.folder("logs"), since=since) if r.alert]
    assert [(r.address, r.fingerprint, r.alert) for r in found] == [("127.0.0.1", "", "unknown ca")]


def write_log(folder: Path, *lines: tuple[Key, int, float, datetime]) -> Path:
    """Write what nginx would: key, status, seconds its clock is ahead, when."""
    folder.mkdir(exist_ok=True)
    text = ""
    for key, status, ahead, at in lines:
        pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        line = LOG_FORMAT.replace("$status", str(status)).replace("$remote_addr", "203.0.113.7")
        line = line.replace("$msec", f"{at.timestamp():.3f}")
        line = line.replace("$http_flwr_timestamp", (at + timedelta(seconds=ahead)).isoformat())
        text += f"2026-12-01 07:00:00,000 {line.replace('$http_flwr_public_key', base64.b64encode(pem).decode())}\n"
    (folder / LOG).write_text(text)
    return folder


def test_an_operator_reads_the_name_the_cause_and_the_remedy(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    names = ("fast", "slow", "gone", "twice", "back", "other")
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    lines = [(keys["fast"], 401, 61.0, now), (keys["slow"], 401, -900.0, now), (keys["gone"], 412, 0.0, now)]
    lines += [(keys["twice"], 412, 0.0, now), (keys["back"], 412, 0.0, now - timedelta(minutes=2))]
    lines += [(keys["other"], 412, 0.0, now), (keys["fast"], 401, 61.0, now - timedelta(hours=1))]
    logs = write_log(tmp_path / "logs", *lines)
    registry = Registry.open(f"sqlite:///{tmp_path / 'registry.db'}")
    with registry.writing() as session:
        for name in names[:-1]:
            revoked = name == "gone"
            approved = now - timedelta(minutes=1) if name == "back" else now - timedelta(days=1)
            session.add(
                Device(
                    name=name,
                    public_key="",
                    fingerprint=print_of(keys[name]),
                    nonce=name,
                    status="revoked" if revoked else "approved",
                    node_id=name,
                    created_at=approved,
                    approved_at=approved,
                    revoked_at=now if revoked else None,
                )
            )
    with registry.reading() as session:
        said = "\n".join(refusal_lines(session, logs, now))
        by_key = refused_devices(session, logs, now)
    registry.close()
    assert "device fast at 203.0.113.7 is refused: its clock is 61 s ahead of this server's; set it there" in said
    assert "device slow at 203.0.113.7 is refused: its clock is 900 s behind" in said
    assert "device gone at 203.0.113.7 is refused: it was revoked" in said
    assert "device twice at 203.0.113.7 is refused: Flower takes it for connected already" in said
    assert "a device that was never let in tries to connect from 203.0.113.7 (1 time(s)" in said
    # It was let in since.
    assert "back" not in said
    assert said.count("\n") == 4
    assert set(by_key) == {print_of(keys[name]) for name in ("fast", "slow", "gone", "twice")}
