"""Devices that were turned away at the proxy, with the name the registry has for them and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.deployment.refusals import Refusal, read_refusals
from edgeduet_server.registry.models import Device
from edgeduet_shared.names import printable

RECENT = timedelta(minutes=10)
"""A device that cannot come in tries at least once a minute; after this silence it does so no more."""

# Flower accepts what was signed up to 5 s ahead of its clock and up to 305 s behind it.
_MOST_AHEAD, _MOST_BEHIND = 5.0, 305.0
_UNAUTHORISED, _NOT_ACTIVATED = 401, 412


def refused_devices(session: Session, logs: Path, now: datetime) -> dict[str, str]:
    """Return for each enrolled device that was turned away of late, by fingerprint, why and what to do."""
    devices = {device.fingerprint: device for device in session.scalars(select(Device))}
    return {
        refusal.fingerprint: _why(devices[refusal.fingerprint], refusal)
        for refusal in read_refusals(logs, since=now - RECENT)
        if refusal.fingerprint in devices and not _came_in(devices[refusal.fingerprint], refusal)
    }


def refusal_lines(session: Session, logs: Path, now: datetime) -> Sequence[str]:
    """Return a line for each device that was turned away of late, also those nobody knows."""
    known = refused_devices(session, logs, now)
    names = dict(session.execute(select(Device.fingerprint, Device.name)).all())
    lines = []
    for refusal in read_refusals(logs, since=now - RECENT):
        if refusal.fingerprint in names:
            if refusal.fingerprint in known:
                lines.append(f"device {names[refusal.fingerprint]} {known[refusal.fingerprint]}")
        else:
            lines.append(_stranger(refusal))
    return lines


def _came_in(device: Device, refusal: Refusal) -> bool:
    """Whether it was let in after it was turned away."""
    return device.approved_at is not None and device.revoked_at is None and device.approved_at > refusal.last


def _why(device: Device, refusal: Refusal) -> str:
    where = f"at {printable(refusal.address)}"
    if device.status == "revoked":
        return f"{where} is refused: it was revoked; stop it there, or enrol it again with a new key"
    skew = refusal.skew
    if refusal.status == _UNAUTHORISED and skew is not None and not -_MOST_BEHIND < skew < _MOST_AHEAD:
        direction = "ahead of" if skew > 0 else "behind"
        return f"{where} is refused: its clock is {abs(skew):.0f} s {direction} this server's; set it there with NTP"
    if refusal.status == _NOT_ACTIVATED:
        return (
            f"{where} is refused: Flower takes it for connected already, or does not know it; for a minute after a "
            "crash that is normal, else see `edgeduet-client doctor` there"
        )
    return f"{where} is refused (HTTP {refusal.status}); see `edgeduet-client doctor` there"


def _stranger(refusal: Refusal) -> str:
    where, times = printable(refusal.address), f"{refusal.count} time(s), last at {refusal.last:%H:%M} UTC"
    if refusal.alert:
        return (
            f"somebody at {where} does not accept this server's certificate ({refusal.alert}; {times}): a device there "
            "has another ca.crt, another name for this server, or a wrong clock; `edgeduet-client doctor` says which"
        )
    return (
        f"a device that was never let in tries to connect from {where} ({times}): let it in with `edgeduet-admin "
        "clients approve`, or find out who it is"
    )
