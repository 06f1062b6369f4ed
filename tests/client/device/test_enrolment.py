"""A device gets one identity, readable by its owner only, and a request that the server's side accepts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from typer.testing import CliRunner

from edgeduet_client.cli import app
from edgeduet_client.device.device_config import load_device_config
from edgeduet_client.device.enrolment import AUTHORITY, NODE_KEY, PUBLIC_KEY, enrol, enrol_again, read_key
from edgeduet_server.deployment.pki import Pki
from edgeduet_shared.enrolment import read_request
from edgeduet_shared.errors import ConfigError, StateError


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.create(["localhost"])
    return made


def test_the_request_proves_the_key_that_lies_on_the_device(tmp_path: Path, pki: Pki) -> None:
    made = enrol(tmp_path / "d", "localhost:9443", pki.ca_certificate, "edge-1", partition=1, partitions=3)
    said = read_request(made.request)
    assert (said.name, said.server, said.code) == ("edge-1", "localhost:9443", made.code)
    assert said.public_key == made.public_key == (tmp_path / "d" / PUBLIC_KEY).read_text().strip()
    public = load_ssh_public_key(made.public_key.encode())
    assert read_key(tmp_path / "d").public_key() == public
    config = load_device_config(tmp_path / "d")
    assert (config.data.partition, config.data.partitions) == (1, 3)


def test_the_key_is_readable_by_its_owner_only_and_in_openssh_form(tmp_path: Path, pki: Pki) -> None:
    enrol(tmp_path, "localhost:9443", pki.ca_certificate, "edge-1")
    assert stat.S_IMODE((tmp_path / NODE_KEY).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / NODE_KEY).parent.stat().st_mode) == 0o700
    assert (tmp_path / NODE_KEY).read_bytes().startswith(b"-----BEGIN OPENSSH PRIVATE KEY-----")
    assert (tmp_path / AUTHORITY).read_bytes() == pki.ca_certificate.read_bytes()


def test_an_identity_is_never_overwritten_and_may_ask_again(tmp_path: Path, pki: Pki) -> None:
    first = enrol(tmp_path, "localhost:9443", pki.ca_certificate, "edge-1")
    key = (tmp_path / NODE_KEY).read_bytes()
    with pytest.raises(ConfigError, match="has an identity already"):
        enrol(tmp_path, "localhost:9443", pki.ca_certificate, "edge-1")
    again = enrol_again(tmp_path)
    assert (tmp_path / NODE_KEY).read_bytes() == key
    assert again.public_key == first.public_key
    assert read_request(again.request).nonce != read_request(first.request).nonce


@pytest.mark.parametrize("which", ["missing", "text", "server"])
def test_only_the_certificate_of_an_authority_is_taken(tmp_path: Path, pki: Pki, which: str) -> None:
    other = tmp_path / "other.crt"
    if which == "text":
        other.write_text("hello")
    if which == "server":
        other = pki.certificate
    with pytest.raises(ConfigError, match=r"pki/ca\.crt"):
        enrol(tmp_path / "d", "localhost:9443", other, "edge-1")
    assert not (tmp_path / "d").exists()


def test_a_damaged_key_is_said_with_the_way_out(tmp_path: Path, pki: Pki) -> None:
    enrol(tmp_path, "localhost:9443", pki.ca_certificate, "edge-1")
    (tmp_path / NODE_KEY).write_text("nonsense")
    with pytest.raises(StateError, match="reset"):
        read_key(tmp_path)
    (tmp_path / NODE_KEY).unlink()
    with pytest.raises(StateError, match="reset"):
        enrol_again(tmp_path)


def test_the_command_prints_key_request_and_code(tmp_path: Path, pki: Pki) -> None:
    home = str(tmp_path / "d")
    arguments = ["enroll", home, "--server", "localhost:9443", "--ca", str(pki.ca_certificate), "--name", "edge-1"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    (request,) = [line for line in shown.output.splitlines() if line.startswith("edgeduet-enrol-1.")]
    said = read_request(request)
    assert said.code in shown.output and said.public_key in shown.output
    assert "PRIVATE" not in shown.output
    again = CliRunner().invoke(app, ["enroll", home, "--again", "--json"])
    assert read_request(json.loads(again.output)["request"]).public_key == said.public_key


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["enroll", str(tmp_path / "d"), "--name", "edge-1"])
    assert isinstance(refused.exception, ConfigError)
    assert "--server, --ca" in str(refused.exception)
