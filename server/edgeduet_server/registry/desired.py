"""Wishes of operators about a run: added as rows, put in force by the round loop, never changed.

Keys: ``stop`` and ``paused`` (true or false) hold at once. ``excluded/CLIENT`` (true or false) and ``set/KEY``
(a value, or null for the scenario's own) hold from the first round that begins after they were made; that
round is written into the row, so that a resumed run applies them at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.orders import Orders
from edgeduet_server.registry.models import Desired

STOP, PAUSED, EXCLUDED, SET = "stop", "paused", "excluded/", "set/"


def wish(session: Session, run_id: int, key: str, value: Any, *, by: str, now: datetime) -> Desired:
    """Add a wish."""
    row = Desired(run_id=run_id, key=key, value=value, by=by, since=now)
    session.add(row)
    session.flush()
    return row


def wishes(session: Session, run_id: int) -> Sequence[Desired]:
    """Return all wishes about a run, oldest first."""
    return list(session.scalars(select(Desired).where(Desired.run_id == run_id).order_by(Desired.id)))


def apply_pending(rows: Sequence[Desired], stage: int, round: int) -> bool:
    """Put wishes that wait in force from ``round`` of ``stage`` on; return whether there were any."""
    waiting = [row for row in rows if row.applied_stage is None]
    for row in waiting:
        row.applied_stage, row.applied_round = stage, round
    return bool(waiting)


def orders_at(rows: Sequence[Desired], stage: int, round: int) -> Orders:
    """Return what is in force for ``round`` of ``stage``.

    Args:
        rows: all wishes about the run, oldest first.
        stage, round: 0-based.
    """
    newest: dict[str, Any] = {}
    for row in rows:
        at_once = row.key in (STOP, PAUSED)
        if at_once or (row.applied_stage is not None and (row.applied_stage, row.applied_round) <= (stage, round)):
            newest[row.key] = row.value
    return _orders(newest)


def latest_orders(rows: Sequence[Desired]) -> Orders:
    """Return what will be in force once every wish is."""
    return _orders({row.key: row.value for row in rows})


def _orders(newest: dict[str, Any]) -> Orders:
    return Orders(
        stop=bool(newest.get(STOP, False)),
        paused=bool(newest.get(PAUSED, False)),
        excluded=frozenset(
            int(key.removeprefix(EXCLUDED)) for key, value in newest.items() if key.startswith(EXCLUDED) and value
        ),
        overrides={
            key.removeprefix(SET): value
            for key, value in sorted(newest.items())
            if key.startswith(SET) and value is not None
        },
    )
