"""How a device asks to be let in: one line of text, signed with its key, good once and for a day.

A request reads ``edgeduet-enrol-1.BODY.SIGNATURE``: BODY is base64url of JSON (name, public key in OpenSSH form,
the server it is meant for, a nonce, the time), SIGNATURE is base64url of an ECDSA signature (P-384, SHA-384) over
everything before it, made with the private half of that key. So a request proves that its sender holds the
key (nobody can enrol the key of another), and cannot be changed on its way.

It can still be *exchanged* for another whole request on its way to the operator. Against that the device shows a short
code of it, which the operator is told over another channel (by voice, on a sticker) and gives with the request.
The code is 60 bits of SHA-256: whoever wants a different request with the same code tries 10^18 keys.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from edgeduet_shared.errors import EdgeDuetError
from edgeduet_shared.names import check_name

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

PREFIX = "edgeduet-enrol-1"
VALID_FOR = timedelta(hours=24)
# How far the clock of a device may be ahead: what Flower itself tolerates is seconds, but that is checked later.
CLOCK_AHEAD = timedelta(minutes=5)
LONGEST_REQUEST = 4096
_FIELDS = {"name", "public_key", "server", "nonce", "created"}
_CODE_LENGTH = 12


class EnrolmentError(EdgeDuetError):
    """A request for enrolment that cannot be accepted."""


@dataclass(frozen=True)
class EnrolmentRequest:
    """What a verified request says.

    Attributes:
        name: of the device.
        public_key: ``ecdsa-sha2-nistp384 BASE64``, without comment.
        server: ``HOST:PORT`` the device is going to connect to.
        nonce: 32 hex digits, different in every request.
        created: when, by the device's clock.
        fingerprint: SHA-256 of the key, 64 hex digits.
        code: what the device showed, ``XXXX-XXXX-XXXX``.
    """

    name: str
    public_key: str
    server: str
    nonce: str
    created: datetime
    fingerprint: str
    code: str


def make_request(key: EllipticCurvePrivateKey, *, name: str, server: str, now: datetime | None = None) -> str:
    """Return a signed request; each call makes another one.

    Args:
        key: the device's private key, NIST P-384.
        name: of the device.
        server: ``HOST:PORT`` it will connect to.
        now: the time.

    Raises:
        EnrolmentError: the key is on another curve.
        ConfigError: the name is none.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    if not isinstance(key.curve, ec.SECP384R1):
        raise EnrolmentError(f"the device's key is on {key.curve.name}; Flower and we need NIST P-384: make a new one")
    body = {
        "name": check_name(name, "device name"),
        "public_key": public_key_text(key.public_key()),
        "server": server,
        "nonce": secrets.token_hex(16),
        "created": (now or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds"),
    }
    signed = f"{PREFIX}.{_encode(json.dumps(body, sort_keys=True, separators=(',', ':')).encode())}"
    return f"{signed}.{_encode(key.sign(signed.encode(), ec.ECDSA(hashes.SHA384())))}"


def read_request(text: str, *, now: datetime | None = None) -> EnrolmentRequest:
    """Check a request and return what it says. Whether its nonce is new, only the registry knows.

    Args:
        text: the line; blanks and line ends around and inside (from copying) are ignored.
        now: the time.

    Raises:
        EnrolmentError: malformed, altered, signed with another key, too old, or from the future.
    """
    line = "".join(text.split())
    if len(line) > LONGEST_REQUEST:
        raise EnrolmentError(f"the enrolment request has {len(line)} characters, more than any real one; copy it again")
    prefix, _, rest = line.partition(".")
    body_text, dot, signature_text = rest.partition(".")
    if prefix != PREFIX or not dot:
        raise EnrolmentError(
            f"this is no enrolment request of this version (it begins with '{PREFIX}.'); copy the whole line that "
            "`edgeduet-client enroll` printed"
        )
    body = _body(body_text)
    key = _public_key(str(body["public_key"]))
    _verify(key, f"{PREFIX}.{body_text}", _decode(signature_text))
    created = _created(str(body["created"]), now or datetime.now(UTC))
    canonical = public_key_text(key)
    nonce = str(body["nonce"])
    if len(nonce) != 32 or not set(nonce) <= set("0123456789abcdef"):
        raise EnrolmentError("the enrolment request has no proper nonce; make a new one on the device")
    server = str(body["server"])
    if not server.isprintable() or not server.isascii() or not 0 < len(server) <= 270:
        raise EnrolmentError("the enrolment request names no proper server; make a new one on the device")
    return EnrolmentRequest(
        name=check_name(str(body["name"]), "device name in the request"),
        public_key=canonical,
        server=server,
        nonce=nonce,
        created=created,
        fingerprint=fingerprint(canonical),
        code=request_code(line),
    )


def request_code(text: str) -> str:
    """Return the short code of a request, ``XXXX-XXXX-XXXX``: letters A-Z and digits 2-7."""
    digest = hashlib.sha256("".join(text.split()).encode()).digest()
    letters = base64.b32encode(digest).decode()[:_CODE_LENGTH]
    return "-".join(letters[start : start + 4] for start in range(0, _CODE_LENGTH, 4))


def same_code(given: str, expected: str) -> bool:
    """Whether two codes are the same, however they were typed; in time that does not tell how much is right."""
    return hmac.compare_digest(_letters(given), _letters(expected))


def public_key_text(key: EllipticCurvePublicKey) -> str:
    """Return a public key in OpenSSH form, without comment."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


def fingerprint(public_key: str) -> str:
    """Return SHA-256 of a public key in OpenSSH form, 64 hex digits; its comment does not count."""
    return hashlib.sha256(" ".join(public_key.split()[:2]).encode()).hexdigest()


def _letters(code: str) -> bytes:
    return "".join(c for c in code.upper() if c.isalnum()).encode("utf-8", "replace")


def _encode(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    try:
        content = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError) as error:
        raise EnrolmentError("the enrolment request is damaged; copy the whole line again") from error
    if _encode(content) != text:  # one content has one form: the bits that base64 leaves unused are zero
        raise EnrolmentError("the enrolment request is damaged; copy the whole line again")
    return content


def _body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(_decode(text))
    except (ValueError, RecursionError) as error:
        raise EnrolmentError("the enrolment request is damaged; copy the whole line again") from error
    if not isinstance(body, dict) or set(body) != _FIELDS or not all(isinstance(v, str) for v in body.values()):
        raise EnrolmentError("the enrolment request has other fields than this version knows; update the device")
    return body


def _public_key(text: str) -> EllipticCurvePublicKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(text.encode("ascii"))
    except (ValueError, UnsupportedAlgorithm) as error:
        raise EnrolmentError("the enrolment request holds no public key in OpenSSH form") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise EnrolmentError("the enrolment request holds a key that is not NIST P-384; make a new one on the device")
    return key


def _verify(key: EllipticCurvePublicKey, signed: str, signature: bytes) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key.verify(signature, signed.encode(), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature as error:
        raise EnrolmentError(
            "the enrolment request was altered or not signed with the key it holds; copy it again"
        ) from error


def _created(text: str, now: datetime) -> datetime:
    try:
        created = datetime.fromisoformat(text)
        if created.tzinfo is None:
            raise ValueError("no time zone")
    except ValueError as error:
        raise EnrolmentError("the enrolment request holds no time; make a new one on the device") from error
    if created > now + CLOCK_AHEAD:
        raise EnrolmentError(
            f"the enrolment request is from the future ({created:%Y-%m-%d %H:%M} UTC, here it is "
            f"{now:%Y-%m-%d %H:%M}); set the device's clock (NTP), and make a new one"
        )
    if created < now - VALID_FOR:
        raise EnrolmentError(
            f"the enrolment request is from {created:%Y-%m-%d %H:%M} UTC and was good for 24 hours; make a new one "
            "on the device (edgeduet-client enroll)"
        )
    return created.astimezone(UTC)
