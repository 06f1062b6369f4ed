"""Certificates of a server: an authority of its own, and a server certificate signed by it.

Devices are given the authority's certificate (``ca.crt``) and trust nothing else, so no public authority is
needed and no device follows a stranger's certificate. Keys are NIST P-384, files with keys have mode 0600.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgeduet_shared.atomic_files import atomic_output
from edgeduet_shared.errors import ConfigError

AUTHORITY_YEARS = 10
# What browsers and TLS libraries accept at most for a server.
SERVER_DAYS = 397
# A device's clock may be a little behind when the certificate is new.
_BACKDATED = timedelta(hours=1)


@dataclass(frozen=True)
class Pki:
    """The certificate files of a server home."""

    folder: Path

    @property
    def ca_certificate(self) -> Path:
        """What devices trust."""
        return self.folder / "ca.crt"

    @property
    def ca_key(self) -> Path:
        """Signs server certificates; needed for renewal only, and may be kept elsewhere between renewals."""
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        """What the server shows: its certificate, then the authority's."""
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        """The server's key."""
        return self.folder / "server.key"

    def create(self, names: Sequence[str], *, now: datetime | None = None) -> None:
        """Make authority and server certificate.

        Args:
            names: DNS names and IP addresses of the server.

        Raises:
            ConfigError: there is an authority already (devices trust it: it is not replaced by accident).
            EdgeDuetError: the folder cannot be written.
        """
        if self.ca_certificate.exists() or self.ca_key.exists():
            raise ConfigError(
                f"{self.folder} holds an authority already; renew the server's certificate with "
                "`edgeduet-server certificate renew`, or move the folder away (devices must then enrol anew)"
            )
        now = now or datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"edgeduet authority of {names[0]}"[:64])])
        usage = x509.KeyUsage(
            key_cert_sign=True,
            crl_sign=True,
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(now + timedelta(days=365 * AUTHORITY_YEARS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA384())
        )
        _write_key(self.ca_key, key)
        _write(self.ca_certificate, certificate.public_bytes(serialization.Encoding.PEM))
        self.renew(names, now=now)

    def renew(self, names: Sequence[str], *, now: datetime | None = None) -> None:
        """Make a new key and certificate of the server; devices notice nothing, since the authority stays.

        Raises:
            ConfigError: the authority's key is not here, or does not belong to its certificate.
        """
        now = now or datetime.now(UTC)
        authority, authority_key = self._authority()
        key = ec.generate_private_key(ec.SECP384R1())
        ends = min(now + timedelta(days=SERVER_DAYS), authority.not_valid_after_utc)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _BACKDATED)
            .not_valid_after(ends)
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
            .sign(authority_key, hashes.SHA384())
        )
        pem = serialization.Encoding.PEM
        # Certificate and key are replaced one after the other: both first exist beside the old pair.
        _write_key(self.key, key)
        _write(self.certificate, certificate.public_bytes(pem) + authority.public_bytes(pem))

    def expires(self) -> datetime:
        """Return when the server's certificate ends.

        Raises:
            ConfigError: there is none.
        """
        return _read_certificate(self.certificate).not_valid_after_utc

    def names(self) -> list[str]:
        """Return the names and addresses the server's certificate is for."""
        extension = _read_certificate(self.certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
        addresses = [str(address) for address in extension.value.get_values_for_type(x509.IPAddress)]
        return [*extension.value.get_values_for_type(x509.DNSName), *addresses]

    def _authority(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        certificate = _read_certificate(self.ca_certificate)
        try:
            key = serialization.load_pem_private_key(self.ca_key.read_bytes(), password=None)
        except FileNotFoundError:
            raise ConfigError(
                f"{self.ca_key} is not here; put the authority's key back to sign a certificate"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{self.ca_key} is no key ({error}); put the authority's key back") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise ConfigError(f"{self.ca_key} does not belong to {self.ca_certificate}; put the right key back")
        return certificate, key


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there; run `edgeduet-server init`") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no certificate ({error}); make it anew") from error


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    content = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _write(path, content, mode=0o600)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    with atomic_output(path) as temporary:
        # Nobody else may read a key even for the moment before its mode is set.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
