"""A server home: documented configuration, certificates that TLS accepts, and clear refusals."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_server.deployment.home import check_home, create_home
from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.server_config import (
    CONFIG_FILE,
    NetworkConfig,
    ServerConfig,
    TrainingConfig,
    load_server_config,
    write_server_config,
)
from edgeduet_shared.errors import ConfigError


def test_init_makes_a_home_that_check_finds_in_order(tmp_path: Path) -> None:
    config = create_home(tmp_path / "home", ["fl.example.org", "127.0.0.1"], public_port=20001)
    assert load_server_config(config.home) == config
    found = {finding.what: finding.problem for finding in check_home(config)}
    assert found["certificate"] == "" and found["registry"] == ""


def test_keys_and_registry_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    home = create_home(tmp_path / "home", ["localhost"]).home
    for name in ("pki/ca.key", "pki/server.key", "registry.db"):
        assert stat.S_IMODE((home / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_a_home_is_not_made_twice(tmp_path: Path) -> None:
    create_home(tmp_path, ["localhost"])
    authority = (tmp_path / "pki" / "ca.crt").read_bytes()
    with pytest.raises(ConfigError, match="a server home already"):
        create_home(tmp_path, ["localhost"])
    assert (tmp_path / "pki" / "ca.crt").read_bytes() == authority


@pytest.mark.parametrize("name", ["", "a b", "x/../y", "-a.example", "a" * 64, "ünïcode.example", "a\nb"])
def test_a_name_that_is_no_host_name_is_refused_before_anything_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        create_home(tmp_path / "home", [name])
    assert not (tmp_path / "home").exists()


def test_a_folder_without_configuration_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="edgeduet-server init"):
        load_server_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[network]\npublic_prot = 1", "public_port"),
        ("[network]\npublic_port = 70000", "public_port"),
        ("[network]\npublic_port = 9444", "must differ"),
        ("[training]\nresume = 'maybe'", "resume"),
        ("home = '/elsewhere'", "cannot be set"),
        ("[network", "cannot be read"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_server_config(tmp_path)
    assert "\n" not in str(caught.value)


@given(
    names=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), min_size=1, max_size=3),
    port=st.integers(1, 9000),
    resume=st.sampled_from(["auto", "ask", "never"]),
)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], port: int, resume: str
) -> None:
    home = tmp_path_factory.mktemp("home")
    config = ServerConfig(
        network=NetworkConfig(public_names=names, public_port=port),
        training=TrainingConfig.model_validate({"resume": resume}),
        home=home,
    )
    write_server_config(config, home / CONFIG_FILE)
    assert load_server_config(home) == config


def test_every_setting_is_in_the_file_under_a_comment(tmp_path: Path) -> None:
    write_server_config(ServerConfig(), tmp_path / CONFIG_FILE)
    lines = (tmp_path / CONFIG_FILE).read_text().splitlines()
    stated = tomllib.loads("\n".join(lines))
    assert set(stated) == set(ServerConfig.model_fields) - {"home"}
    for number, line in enumerate(lines):
        if " = " in line and not line.startswith("#"):
            assert lines[number - 1].startswith("# ")


def handshake(pki: Pki, host: str, trust: Path) -> None:
    """Connect over TLS to a server that shows the certificate, as ``host``, trusting ``trust``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pki.certificate, pki.key)
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)

    def serve() -> None:
        try:
            context.wrap_socket(theirs, server_side=True).close()
        except (ssl.SSLError, OSError):
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client = ssl.create_default_context(cafile=str(trust))
        client.wrap_socket(ours, server_hostname=host).close()
    finally:
        ours.close()
        thread.join(timeout=10)


def test_tls_accepts_the_certificate_for_its_names_only(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.create(["fl.example.org", "192.0.2.7"])
    handshake(pki, "fl.example.org", pki.ca_certificate)
    handshake(pki, "192.0.2.7", pki.ca_certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(pki, "other.example.org", pki.ca_certificate)


def test_a_device_that_trusts_another_authority_refuses_the_server(tmp_path: Path) -> None:
    ours, other = Pki(tmp_path / "ours"), Pki(tmp_path / "other")
    ours.create(["localhost"])
    other.create(["localhost"])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(ours, "localhost", other.ca_certificate)


def test_a_renewed_certificate_is_trusted_by_devices_that_know_the_authority(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.create(["old.example.org"], now=datetime.now(UTC) - timedelta(days=390))
    authority, key = pki.ca_certificate.read_bytes(), pki.key.read_bytes()
    pki.renew(["new.example.org"])
    assert pki.ca_certificate.read_bytes() == authority
    assert pki.key.read_bytes() != key
    assert pki.names() == ["new.example.org"]
    handshake(pki, "new.example.org", tmp_path / "ca.crt")


def test_a_certificate_that_ends_soon_or_lacks_a_name_is_a_problem_with_its_remedy(tmp_path: Path) -> None:
    config = create_home(tmp_path, ["a.example.org"])
    later = datetime.now(UTC) + timedelta(days=380)
    assert "certificate renew" in next(f.problem for f in check_home(config, now=later) if f.what == "certificate")
    network = config.network.model_copy(update={"public_names": ["a.example.org", "b.example.org"]})
    more = config.model_copy(update={"network": network})
    assert "b.example.org" in next(f.problem for f in check_home(more) if f.what == "certificate")


def test_renewal_without_the_authoritys_key_says_so(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    pki.create(["localhost"])
    pki.ca_key.unlink()
    with pytest.raises(ConfigError, match="put the authority's key back"):
        pki.renew(["localhost"])
    other = Pki(tmp_path / "other")
    other.create(["localhost"])
    pki.ca_key.write_bytes(other.ca_key.read_bytes())
    with pytest.raises(ConfigError, match="does not belong"):
        pki.renew(["localhost"])
