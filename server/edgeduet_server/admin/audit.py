"""The audit log: one row per call that changes something, with what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from google.protobuf.message import Message
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.registry.models import AuditEntry
from edgeduet_shared.admin_api.as_json import as_json
from edgeduet_shared.names import printable

_LONGEST_TEXT = 300
_TARGETS = ("name", "client", "run", "token", "key")


def note(
    session: Session,
    *,
    now: datetime,
    token: str,
    role: str,
    peer: str,
    action: str,
    request: Message | None,
    outcome: str,
) -> None:
    """Add a row; what callers sent is shortened and freed of control characters."""
    detail = _shortened(as_json(request)) if request is not None else {}
    target = next((str(detail[field]) for field in _TARGETS if detail.get(field)), "")
    session.add(
        AuditEntry(
            time=now,
            token=token[:100],
            role=role,
            peer=printable(peer)[:100],
            action=action,
            target=target[:200],
            detail=detail,
            outcome=printable(outcome)[:1000],
        )
    )


def newest(session: Session, limit: int) -> Sequence[AuditEntry]:
    """Return the newest entries, oldest of them first."""
    return list(session.scalars(select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)))[::-1]


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value[:50]]
    if isinstance(value, str):
        text = printable(value)
        return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({len(value)} characters)"
    return value
