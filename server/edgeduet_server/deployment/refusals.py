"""Who is turned away at the door: devices whose key or clock is wrong, and those that do not trust this server.

Flower answers such devices with 401 or 412 and says nothing to anybody else; who does not accept the server's
certificate never gets as far as a request. The proxy writes a line about either (``proxy.py``), and this reads
them, so that an operator learns of a device that cannot come in from the server, where there is a registry
to say which device it is.

What the lines hold is hearsay: the key and the time are what somebody claimed, before any check.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from edgeduet_shared.enrolment import fingerprint, public_key_text

LOG = "proxy.log"
LOG_FORMAT = (
    'refused status=$status from=$remote_addr at=$msec signed="$http_flwr_timestamp" key="$http_flwr_public_key"'
)
"""Of nginx: a line about each request of a device that was refused."""

# A night of knocks at one a minute per device; the newest lines are what counts.
_TAIL_BYTES = 1_000_000
_REQUEST = re.compile(
    r'refused status=(\d{3}) from=(\S+) at=(\d+\.\d+) signed="([^"]*)" key="([A-Za-z0-9+/=]+)"',
)
_HANDSHAKE = re.compile(
    r"(\d{4}/\d\d/\d\d \d\d:\d\d:\d\d) \[\w+\] .*SSL_do_handshake\(\) failed .*alert (unknown ca|bad certificate|"
    r"certificate expired|certificate unknown|unsupported certificate)[ :].*client: ([0-9A-Fa-f.:]+)"
)


@dataclass(frozen=True)
class Refusal:
    """Somebody who was turned away, once or more.

    Attributes:
        address: where from.
        fingerprint: of the key that was shown, as the registry writes it; empty where none was shown.
        status: HTTP status of the last refusal; 0 where the other side did not accept the certificate.
        alert: what it said of the certificate.
        skew: seconds by which its clock was ahead of this one's when it was last refused; ``None`` if not known.
        count: how often.
        last: when last.
    """

    address: str
    fingerprint: str
    status: int
    alert: str
    skew: float | None
    count: int
    last: datetime


def read_refusals(logs: Path, *, since: datetime) -> list[Refusal]:
    """Return who was turned away since a moment, the latest last; nobody where the proxy is not ours.

    Args:
        logs: the folder of logs of a server home.
    """
    found: dict[tuple[str, str], Refusal] = {}
    for refusal in _parsed(_last_lines(logs / LOG)):
        if refusal.last < since:
            continue
        # One device has one key, wherever it is; who showed none is known by its address only.
        who = (refusal.fingerprint, "" if refusal.fingerprint else refusal.address)
        before = found.pop(who, None)
        found[who] = replace(refusal, count=1 if before is None else before.count + 1)
    return list(found.values())


def _last_lines(file: Path) -> Iterator[str]:
    for path in (file.with_name(f"{file.name}.1"), file):
        try:
            with path.open("rb") as stream:
                size = stream.seek(0, 2)
                stream.seek(max(0, size - _TAIL_BYTES))
                yield from stream.read().decode("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue


def _parsed(lines: Iterable[str]) -> Iterator[Refusal]:
    for line in lines:
        request = _REQUEST.search(line)
        if request is not None:
            status, address, at, signed, key = request.groups()
            print_of_key = _fingerprint(key)
            if print_of_key:
                moment = datetime.fromtimestamp(float(at), UTC)
                yield Refusal(address, print_of_key, int(status), "", _skew(signed, moment), 1, moment)
            continue
        handshake = _HANDSHAKE.search(line)
        if handshake is not None:
            local, alert, address = handshake.groups()
            moment = datetime.fromtimestamp(time.mktime(time.strptime(local, "%Y/%m/%d %H:%M:%S")), UTC)
            yield Refusal(address, "", 0, alert, None, 1, moment)


def _skew(signed: str, moment: datetime) -> float | None:
    try:
        return (datetime.fromisoformat(signed) - moment).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None


def _fingerprint(header: str) -> str:
    """Return the fingerprint of the key in Flower's header; empty for what is no key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(base64.b64decode(header, validate=True))
    except (binascii.Error, ValueError, UnsupportedAlgorithm):
        return ""
    return fingerprint(public_key_text(key)) if isinstance(key, EllipticCurvePublicKey) else ""
