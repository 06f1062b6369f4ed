"""The round loop's control over the registry: reads wishes between rounds, notes who was seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.orders import Orders
from edgeduet_server.registry.desired import apply_pending, orders_at, wishes
from edgeduet_server.registry.errors import RegistryError
from edgeduet_server.registry.listener import utc_now
from edgeduet_server.registry.models import ClientSighting, Device
from edgeduet_server.registry.runs import set_state
from edgeduet_server.registry.store import Registry

log = logging.getLogger("edgeduet.registry")

PAUSE_SECONDS = 1.0


class RegistryControl:
    """Orders for one run.

    While the database does not answer, what was in force last stays in force, and the log says so.

    Args:
        registry: where the wishes are.
        run_id: row of the run.
        now: the clock.
    """

    def __init__(self, registry: Registry, run_id: int, now: Callable[[], datetime] = utc_now) -> None:
        self._registry = registry
        self._run_id = run_id
        self._now = now
        self._last: Orders | None = None
        self._paused = False

    def orders(self, stage: int, round: int) -> Orders:
        """Return what is in force for ``round`` of ``stage``; wishes that wait are put in force.

        Raises:
            RegistryError: the database did not answer the very first question.
        """
        try:
            orders = self._read(stage, round)
        except RegistryError as error:
            if self._last is None:
                raise
            log.warning("orders cannot be read; those of the last round stay in force: %s", error)
            return self._last
        self._last = orders
        return orders

    def _read(self, stage: int, round: int) -> Orders:
        with self._registry.reading() as session:
            rows = wishes(session, self._run_id)
            waiting = any(row.applied_stage is None for row in rows)
            orders = orders_at(rows, stage, round)
        if waiting or orders.paused != self._paused:
            with self._registry.writing() as session:
                rows = wishes(session, self._run_id)
                apply_pending(rows, stage, round)
                orders = orders_at(rows, stage, round)
                set_state(session, self._run_id, "paused" if orders.paused else "running")
            self._paused = orders.paused
        return orders

    def sighted(self, nodes: Mapping[int, int]) -> None:
        """Write down which node speaks for which client."""
        try:
            with self._registry.writing() as session:
                _note(session, self._run_id, nodes, self._now())
        except RegistryError as error:
            log.warning("who is online cannot be written down: %s", error)

    def wait(self) -> None:
        """Let a second pass."""
        time.sleep(PAUSE_SECONDS)


def _note(session: Session, run_id: int, nodes: Mapping[int, int], now: datetime) -> None:
    ids = [str(node) for node in nodes.values()]
    names = dict(session.execute(select(Device.node_id, Device.name).where(Device.node_id.in_(ids))).all())
    known = {row.client: row for row in session.scalars(select(ClientSighting).where(ClientSighting.run_id == run_id))}
    for client, node in nodes.items():
        row = known.get(client)
        if row is None:
            row = ClientSighting(run_id=run_id, client=client, first_seen=now)
            session.add(row)
        row.node_id, row.name, row.last_seen = str(node), names.get(str(node), ""), now
