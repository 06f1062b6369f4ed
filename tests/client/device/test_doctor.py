"""Every problem of a device is found and comes with its remedy; a real TLS server stands for the proxy."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgeduet_client.cli import app
from edgeduet_client.device.device_config import (
    CONFIG_FILE,
    DeviceConfig,
    LimitsSection,
    ServerSection,
    load_device_config,
)
from edgeduet_client.device.device_config import write_device_config as write
from edgeduet_client.device.doctor import Finding, examine, judge_versions
from edgeduet_client.device.enrolment import NODE_KEY, PUBLIC_KEY, enrol
from edgeduet_client.device.server_probe import ask_server, diagnose, judge_clock
from edgeduet_server.deployment.pki import Pki
from edgeduet_shared.errors import FederationError, StateError
from edgeduet_shared.versions import HEADER, installed_versions, parse_versions, versions_text
from own_image_folders import write_images


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.create(["localhost"])
    return made


@contextmanager
def proxy(pki: Pki, *, ahead: float = 0.0, versions: str = "") -> Iterator[int]:
    """A TLS server that answers 404 with a Date header, ``ahead`` seconds ahead; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(404)
            self.send_header("Date", format_datetime(datetime.now(UTC) + timedelta(seconds=ahead), usegmt=True))
            if versions:
                self.send_header(HEADER, versions)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.certificate, pki.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def device(tmp_path: Path, pki: Pki) -> Callable[..., DeviceConfig]:
    """Makes the one device of the test; it does not train, so that no SuperNode is started."""

    def make(port: int, host: str = "localhost") -> DeviceConfig:
        enrol(tmp_path / "d", f"{host}:{port}", pki.ca_certificate, "edge-1")
        config = DeviceConfig(
            server=ServerSection(name="edge-1", address=f"{host}:{port}"),
            limits=LimitsSection(train=False),
            home=tmp_path / "d",
        )
        write(config, tmp_path / "d" / CONFIG_FILE)
        return config

    return make


def problems(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.problem for finding in findings if finding.problem}


def test_a_device_in_order_has_no_problem(device: Callable[..., DeviceConfig], pki: Pki) -> None:
    with proxy(pki, versions=versions_text(installed_versions())) as port:
        config = device(port)
        findings = examine(config)
        assert diagnose(config) is None
    assert problems(findings) == {}
    assert [finding.what for finding in findings][-4:] == ["server", "server certificate", "clock", "versions"]


@pytest.mark.parametrize("ahead", [-10.0, 400.0])
def test_a_skewed_clock_is_measured_against_the_server(
    device: Callable[..., DeviceConfig], pki: Pki, ahead: float
) -> None:
    with proxy(pki, ahead=ahead) as port:
        home = device(port).home
        answer = ask_server(load_device_config(home))
        assert (reason := diagnose(load_device_config(home))) is not None and reason.word == "clock"
    assert answer.skew == pytest.approx(-ahead, abs=2)
    with pytest.raises(StateError, match="NTP"):
        judge_clock(answer.skew)


def test_what_flower_tolerates_is_no_problem() -> None:
    for skew in (0.0, 3.9, -200.0):
        judge_clock(skew)
    for skew in (5.0, -305.0):
        with pytest.raises(StateError):
            judge_clock(skew)


def test_a_server_of_another_authority_is_told_from_one_that_is_down(
    device: Callable[..., DeviceConfig], tmp_path: Path
) -> None:
    other = Pki(tmp_path / "other")
    other.create(["localhost"])
    with proxy(other) as port:
        config = device(port)
        found = problems(examine(config))
        assert (reason := diagnose(config)) is not None and reason.word == "wrong-ca"
    assert set(found) == {"server"}
    assert "pki/ca.crt" in found["server"]
    assert (reason := diagnose(config)) is not None and reason.word == "unreachable"
    with pytest.raises(FederationError, match="cannot be reached"):
        ask_server(config)


def test_a_name_that_is_not_in_the_certificate_is_said(
    device: Callable[..., DeviceConfig], tmp_path: Path, pki: Pki
) -> None:
    narrow = Pki(tmp_path / "narrow")
    for source in (pki.ca_certificate, pki.ca_key):
        (tmp_path / "narrow").mkdir(exist_ok=True)
        (tmp_path / "narrow" / source.name).write_bytes(source.read_bytes())
    narrow.renew(["fl.example.org"])
    with proxy(narrow) as port, pytest.raises(FederationError, match="public_names"):
        ask_server(device(port))


def test_another_release_on_the_server_is_a_problem() -> None:
    assert "flwr" in judge_versions(installed_versions())
    with pytest.raises(StateError, match=r"flwr is .* here and 1\.9\.0 there"):
        judge_versions({"flwr": "1.9.0"})
    assert parse_versions(versions_text({"edgeduet": "0.1.0", "flwr": "1.42.0"})) == {
        "edgeduet": "0.1.0",
        "flwr": "1.42.0",
    }


def test_an_identity_that_others_can_read_or_that_does_not_fit_is_found(
    device: Callable[..., DeviceConfig], pki: Pki
) -> None:
    with proxy(pki) as port:
        config = device(port)
        (config.home / NODE_KEY).chmod(0o644)
        assert "chmod 600" in problems(examine(config))["identity"]
        (config.home / NODE_KEY).chmod(0o600)
        (config.home / PUBLIC_KEY).write_text("ecdsa-sha2-nistp384 AAAA\n")
        assert "ssh-keygen" in problems(examine(config))["identity"]


def test_a_folder_that_cannot_be_written_is_found(device: Callable[..., DeviceConfig], pki: Pki) -> None:
    with proxy(pki) as port:
        config = device(port)
        (config.home / "personal").write_text("in the way")
        assert "a part of the path is a file" in problems(examine(config))["state folder"]


def test_the_command_exits_with_2_and_names_every_finding(device: Callable[..., DeviceConfig], pki: Pki) -> None:
    with proxy(pki) as port:
        home = device(port).home
        good = CliRunner().invoke(app, ["doctor", str(home)])
        assert good.exit_code == 0, good.output
    bad = CliRunner().invoke(app, ["doctor", str(home), "--json"])
    assert bad.exit_code == 2
    assert [entry["what"] for entry in json.loads(bad.output) if entry["problem"]] == ["server"]


def test_the_devices_own_images_are_counted_and_a_missing_folder_is_named(
    device: Callable[..., DeviceConfig], tmp_path: Path
) -> None:
    config = device(1)

    def found(images: str) -> Finding:
        changed = config.model_copy(update={"data": config.data.model_copy(update={"images": images})})
        return next(finding for finding in examine(changed) if finding.what == "own images")

    write_images(tmp_path / "pictures", {"circle": 3, "star": 2})
    assert found("").detail.startswith("none")
    assert found(str(tmp_path / "pictures")).detail.endswith("circle (3), star (2)")
    assert "no such folder" in found(str(tmp_path / "gone")).problem
