"""Give a device its identity: a key pair, the server's authority, and the line the operator approves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeduet_client.device.device_config import (
    CONFIG_FILE,
    DataSection,
    DeviceConfig,
    ServerSection,
    load_device_config,
    write_device_config,
)
from edgeduet_shared.atomic_files import atomic_output, atomic_write_bytes, atomic_write_text, write_failure
from edgeduet_shared.config import parse
from edgeduet_shared.enrolment import make_request, public_key_text, request_code
from edgeduet_shared.errors import ConfigError, StateError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

NODE_KEY = "identity/node_key"
PUBLIC_KEY = "identity/node_key.pub"
AUTHORITY = "identity/ca.crt"


@dataclass(frozen=True)
class Enrolment:
    """What the operator needs: the request by one way, the code by another."""

    name: str
    public_key: str
    request: str
    code: str


def enrol(home: Path, server: str, ca: Path, name: str, *, partition: int = 0, partitions: int = 1) -> Enrolment:
    """Make a device home with a new identity.

    Raises:
        ConfigError: it has an identity already, a value cannot be used, or ``ca`` is no authority's certificate.
        EdgeDuetError: the folder cannot be written.
    """
    home = home.expanduser().resolve()
    if (home / NODE_KEY).exists() or (home / CONFIG_FILE).exists():
        raise ConfigError(
            f"{home} has an identity already; `edgeduet-client enroll {home} --again` makes another request with it, "
            f"`edgeduet-client reset {home} --identity` removes it"
        )
    config = DeviceConfig(
        server=parse(ServerSection, {"name": name, "address": server}, "enroll"),
        data=parse(DataSection, {"partition": partition, "partitions": partitions}, "enroll"),
        home=home,
    )
    authority = read_authority(ca)
    try:
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
    except OSError as error:
        raise write_failure(home, error) from error
    key = _make_key(home)
    atomic_write_bytes(home / AUTHORITY, authority)
    # Last, since this file makes the folder a home: an interrupted enrolment leaves a key that nobody knows.
    write_device_config(config, home / CONFIG_FILE)
    return _request(config, key)


def enrol_again(home: Path) -> Enrolment:
    """Make a new request with the identity a device has: the one before was too old, or got lost.

    Raises:
        ConfigError: there is no device.
        StateError: its key is missing or damaged.
    """
    config = load_device_config(home)
    return _request(config, read_key(config.home))


def read_key(home: Path) -> EllipticCurvePrivateKey:
    """Return the private key of a device.

    Raises:
        StateError: it is missing, damaged, or not NIST P-384.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    path = home / NODE_KEY
    anew = f"`edgeduet-client reset {home} --identity` and enrol anew, or put the key back from a backup"
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise StateError(f"{path}: the device's key cannot be read ({error.strerror}); {anew}") from error
    except ValueError as error:
        raise StateError(f"{path}: the device's key is damaged ({error}); {anew}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise StateError(f"{path}: the device's key is not NIST P-384; {anew}")
    return key


def read_authority(path: Path) -> bytes:
    """Return a file that holds the certificate of an authority.

    Raises:
        ConfigError: it cannot be read, is no certificate, or one of a server.
    """
    from cryptography import x509

    try:
        content = path.expanduser().read_bytes()
        certificate = x509.load_pem_x509_certificate(content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the server's pki/ca.crt") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is no certificate ({error}); give the server's pki/ca.crt") from error
    try:
        authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        authority = False
    if not authority:
        raise ConfigError(f"{path}: is not the certificate of an authority; give the server's pki/ca.crt")
    return content


def _make_key(home: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP384R1())
    content = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    with atomic_output(home / NODE_KEY) as temporary:
        temporary.parent.chmod(0o700)
        # Nobody else may read the key even for the moment before its mode is set.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    atomic_write_text(home / PUBLIC_KEY, public_key_text(key.public_key()) + "\n")
    return key


def _request(config: DeviceConfig, key: EllipticCurvePrivateKey) -> Enrolment:
    request = make_request(key, name=config.server.name, server=config.server.address)
    return Enrolment(config.server.name, public_key_text(key.public_key()), request, request_code(request))
