"""Writes the events of a run into the registry: one transaction per event.

``metrics.jsonl`` in the run's folder stays the first record: an event is there before it is here. When a
checkpoint is taken up again, the file is cut back and :meth:`RegistryListener.rewind` brings the registry to
exactly what the file holds, so that rounds that are trained again appear once, and rounds that a database
outage swallowed appear at all. While the database does not answer, events wait here and training goes on.

Numbers of clients after a stage are rows of ``client_metrics``, named ``KIND/TASK``: images the client's
personal model got right (``personal``) and the plain global model (``shared``) out of ``total`` of its own; the
personal model on the common test set (``common`` of ``common_total``). -1 stands for "not evaluated".
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, insert, or_, select, update
from sqlalchemy.orm import Session

from edgeduet_server.registry.errors import RegistryError
from edgeduet_server.registry.models import Artefact, ClientMetric, Round, Run, Stage
from edgeduet_server.registry.store import Registry

log = logging.getLogger("edgeduet.registry")

Event = Mapping[str, Any]

METRIC_KINDS = {
    "personal": "personal",
    "shared": "shared",
    "total": "totals",
    "common": "personal_common",
    "common_total": "common_totals",
}
"""Kind of a metric -> field of an ``evaluate`` event's clients."""


def utc_now() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


class RegistryListener:
    """A recorder's listener for one run.

    Args:
        registry: where to write.
        run_id: row of the run.
        now: the clock.
    """

    def __init__(self, registry: Registry, run_id: int, now: Callable[[], datetime] = utc_now) -> None:
        self._registry = registry
        self._run_id = run_id
        self._now = now
        self._waiting: deque[tuple[Event, datetime]] = deque()

    def __call__(self, event: Event) -> None:
        """Write one event, after those that still wait."""
        self._waiting.append((event, self._now()))
        try:
            self.flush()
        except RegistryError as error:
            log.warning("%d event(s) wait for the registry: %s", len(self._waiting), error)

    def flush(self) -> None:
        """Write all events that wait.

        Raises:
            RegistryError: the database does not answer; the events go on waiting.
        """
        while self._waiting:
            event, when = self._waiting[0]
            with self._registry.writing() as session:
                _make_room(session, self._run_id, event)
                _insert(session, self._run_id, event, when)
            self._waiting.popleft()

    def rewind(self, events: Iterable[Event]) -> None:
        """Make the registry hold ``events`` and nothing else of this run; times already noted are kept.

        Raises:
            RegistryError: the database does not answer.
        """
        kept = list(events)
        self._waiting.clear()
        with self._registry.writing() as session:
            rounds = {(e["stage"], e["round"]) for e in kept if e["event"] == "round"}
            stages = {e["stage"] for e in kept if e["event"] == "stage-start"}
            evaluated = {e["stage"] for e in kept if e["event"] == "evaluate"}
            written = _clear(session, self._run_id, rounds, stages, evaluated)
            for event in kept:
                if _key(event) not in written:
                    _insert(session, self._run_id, event, self._now())


_Key = tuple[Any, ...]


def _key(event: Event) -> _Key:
    return (event["event"], event.get("stage"), event.get("round"))


def _clear(
    session: Session, run_id: int, rounds: set[tuple[int, int]], stages: set[int], evaluated: set[int]
) -> set[_Key]:
    """Remove what is not named; return the keys of what is there."""
    found_rounds = {(s, r) for s, r in session.execute(select(Round.stage, Round.round).where(Round.run_id == run_id))}
    for stage, round in found_rounds - rounds:
        session.execute(delete(Round).where(Round.run_id == run_id, Round.stage == stage, Round.round == round))
    found = dict(session.execute(select(Stage.stage, Stage.evaluated).where(Stage.run_id == run_id)).all())
    for stage in found.keys() - stages:
        _forget_evaluation(session, run_id, stage)
        session.execute(delete(Stage).where(Stage.run_id == run_id, Stage.stage == stage))
    done = {stage for stage, is_done in found.items() if is_done}
    for stage in done - evaluated:
        _forget_evaluation(session, run_id, stage)
    return {
        *(("round", stage, round) for stage, round in found_rounds & rounds),
        *(("stage-start", stage, None) for stage in found.keys() & stages),
        *(("evaluate", stage, None) for stage in done & evaluated),
    }


def _make_room(session: Session, run_id: int, event: Event) -> None:
    """Remove what ``event`` makes out of date: whatever comes at or after its place in the run."""
    kind = event["event"]
    if kind == "run-start":
        for table in (Round, Stage, ClientMetric, Artefact):
            session.execute(delete(table).where(table.run_id == run_id))
    elif kind == "stage-start":
        _drop_from(session, run_id, event["stage"], 0)
        session.execute(delete(Stage).where(Stage.run_id == run_id, Stage.stage == event["stage"]))
    elif kind == "round":
        _drop_from(session, run_id, event["stage"], event["round"])
    elif kind == "evaluate":
        _forget_evaluation(session, run_id, event["stage"])


def _insert(session: Session, run_id: int, event: Event, when: datetime) -> None:
    kind = event["event"]
    if kind == "run-start":
        session.execute(update(Run).where(Run.id == run_id).values(stages=event["stages"]))
    elif kind == "stage-start":
        session.add(Stage(run_id=run_id, stage=event["stage"], started_at=when))
        session.flush()
    elif kind == "round":
        session.add(_round(run_id, event, when))
    elif kind == "evaluate":
        _evaluation(session, run_id, event, when)


def _drop_from(session: Session, run_id: int, stage: int, round: int) -> None:
    """Remove rounds at or after ``round`` of ``stage``, and what was evaluated since: they are trained again."""
    later = or_(Round.stage > stage, (Round.stage == stage) & (Round.round >= round))
    session.execute(delete(Round).where(Round.run_id == run_id, later))
    session.execute(delete(Stage).where(Stage.run_id == run_id, Stage.stage > stage))
    session.execute(delete(ClientMetric).where(ClientMetric.run_id == run_id, ClientMetric.stage > stage))
    _forget_evaluation(session, run_id, stage)


def _round(run_id: int, event: Event, when: datetime) -> Round:
    # A method that asks nothing of its clients (zero-shot) records little more than the round itself.
    timing = event.get("timing", {})
    return Round(
        run_id=run_id,
        stage=event["stage"],
        round=event["round"],
        skipped=event["skipped"],
        asked=event["asked"],
        clients=event.get("clients", []),
        rejected=event.get("rejected", {}),
        missing=event.get("missing", []),
        failures=event.get("failures", []),
        trained=event.get("trained", []),
        dispatch=event.get("dispatch", {}),
        orders=event.get("orders", {}),
        loss=event.get("loss"),
        accuracy=event.get("accuracy"),
        bytes_down=event.get("bytes_down", 0),
        bytes_up=event.get("bytes_up", 0),
        seconds=timing.get("seconds", 0.0),
        client_seconds=timing.get("client_seconds", 0.0),
        ended_at=when,
    )


def _evaluation(session: Session, run_id: int, event: Event, when: datetime) -> None:
    stage = event["stage"]
    values = {
        "common": event["common"],
        "evaluated": True,
        "absent": event["absent"],
        "failures": event["failures"],
        "bytes_down": event["bytes_down"],
        "bytes_up": event["bytes_up"],
        "seconds": event["timing"]["seconds"],
        "evaluated_at": when,
    }
    session.execute(update(Stage).where(Stage.run_id == run_id, Stage.stage == stage).values(values))
    rows = [
        {"run_id": run_id, "stage": stage, "client": reply["client"], "metric": metric, "value": float(value)}
        for reply in event["clients"]
        for metric, value in _metrics(reply)
    ]
    if rows:
        session.execute(insert(ClientMetric), rows)


def _metrics(reply: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for kind, name in METRIC_KINDS.items():
        for task, value in enumerate(reply[name]):
            yield f"{kind}/{task}", value
    yield "held_out", reply["held_out"]
    yield "held_out_total", reply["held_out_total"]


def _forget_evaluation(session: Session, run_id: int, stage: int) -> None:
    session.execute(delete(ClientMetric).where(ClientMetric.run_id == run_id, ClientMetric.stage == stage))
    empty: dict[str, Any] = {"common": None, "evaluated": False, "evaluated_at": None, "absent": [], "failures": []}
    session.execute(update(Stage).where(Stage.run_id == run_id, Stage.stage == stage).values(empty))
