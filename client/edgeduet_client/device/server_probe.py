"""Ask the server's proxy for nothing in particular: certificate, time of day and versions show on the way.

The SuperNode says little on why it is not connected, and tries for ever; this says why.
"""

from __future__ import annotations

import http.client
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from edgeduet_client.device.device_config import DeviceConfig
from edgeduet_client.device.enrolment import AUTHORITY
from edgeduet_client.device.exit_reasons import UNREACHABLE, ExitReason, explain_exit
from edgeduet_shared.errors import FederationError, StateError
from edgeduet_shared.versions import HEADER, parse_versions

# Flower accepts signatures whose time is between 5 s ahead of its clock and 305 s behind it.
MOST_AHEAD = 4.0
MOST_BEHIND = 240.0
_CONNECT_S = 10.0


@dataclass(frozen=True)
class ServerAnswer:
    """What the server's proxy says to a device, before any login.

    Attributes:
        certificate_ends: of the server's certificate.
        skew: seconds by which this device's clock is ahead of the server's.
        versions: of the server's packages; empty where it does not say.
    """

    certificate_ends: datetime
    skew: float
    versions: dict[str, str]


def ask_server(config: DeviceConfig) -> ServerAnswer:
    """Ask the server's proxy for nothing in particular, over TLS as the SuperNode does.

    Raises:
        FederationError: it cannot be reached, or TLS fails; says why and what to do.
    """
    context = ssl.create_default_context(cafile=str(config.home / AUTHORITY))
    try:
        headers, ends, skew = _head(config, context)
    except (OSError, http.client.HTTPException) as error:
        reason = explain_exit(str(error))
        remedy = reason.line if reason else "check [server] address, the network and the server"
        raise FederationError(f"{config.server.address}: {error}; {remedy}") from error
    assert ends is not None
    if skew is None:
        raise FederationError(f"{config.server.address} gives no time of day; is it an edgeduet server?")
    return ServerAnswer(ends, skew, parse_versions(headers.get(HEADER, "")))


def unverified_skew(config: DeviceConfig) -> float | None:
    """Return the seconds this clock is ahead of whoever answers there, ``None`` where nobody does.

    Unlike :func:`ask_server` it trusts anybody, since a wrong clock is one reason for TLS to fail.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        return _head(config, context)[2]
    except (OSError, http.client.HTTPException):
        return None


def _head(
    config: DeviceConfig, context: ssl.SSLContext
) -> tuple[http.client.HTTPMessage, datetime | None, float | None]:
    """Return headers, end of the certificate (where it was verified) and clock skew of a request for ``/``."""
    connection = http.client.HTTPSConnection(
        config.server.host, config.server.port, timeout=_CONNECT_S, context=context
    )
    try:
        connection.connect()
        assert isinstance(connection.sock, ssl.SSLSocket)
        shown = connection.sock.getpeercert() or {}
        before = time.time()
        connection.request("HEAD", "/")
        response = connection.getresponse()
        after = time.time()
        response.read()
    finally:
        connection.close()
    text = response.headers.get("Date")
    # The header has whole seconds: on average it is half a second older than the moment it speaks of.
    skew = (before + after) / 2 - parsedate_to_datetime(text).timestamp() - 0.5 if text else None
    ends = shown.get("notAfter")
    return (
        response.headers,
        datetime.fromtimestamp(ssl.cert_time_to_seconds(str(ends)), UTC) if ends else None,
        skew,
    )


def judge_clock(skew: float) -> str:
    """Return how far the clock is off, where Flower accepts that.

    Args:
        skew: seconds ahead of the server.

    Raises:
        StateError: signatures would be refused.
    """
    if skew > MOST_AHEAD or skew < -MOST_BEHIND:
        direction = "ahead of" if skew > 0 else "behind"
        raise StateError(
            f"this device's clock is {abs(skew):.0f} s {direction} the server's, whose limit is 5 s ahead or 300 s "
            "behind; set it with NTP (`timedatectl set-ntp true`)"
        )
    return f"{skew:+.1f} s from the server's"


def diagnose(config: DeviceConfig) -> ExitReason | None:
    """Return why a SuperNode cannot connect, ``None`` where the way to the server is in order."""
    try:
        skew: float | None = ask_server(config).skew
        fault = None
    except FederationError as error:
        skew, fault = unverified_skew(config), explain_exit(str(error.__cause__ or error)) or UNREACHABLE
    if skew is not None:
        try:
            judge_clock(skew)
        except StateError as error:
            return ExitReason("clock", str(error))
    return fault
