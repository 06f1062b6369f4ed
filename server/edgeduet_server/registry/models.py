"""The tables of the registry.

Rounds and stages are counted from 0, as everywhere in the code. Node ids are unsigned 64-bit numbers, which
no SQL integer holds, so that they are text. Times are UTC.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from sqlalchemy import JSON, BigInteger, DateTime, Double, ForeignKey, Index, MetaData, String, Text, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

Json = Annotated[Any, mapped_column(JSON, nullable=False)]

# Migrations change constraints by name, so that every constraint must have one, and the same everywhere.
_NAMES = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


_NOT_REVOKED = text("status <> 'revoked'")


class UtcTime(TypeDecorator[datetime]):
    """A moment. SQLite keeps no time zone: UTC goes in, and comes out marked as such."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse moments of unknown zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a time zone cannot be stored")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Mark what comes back as UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of all tables."""

    metadata = MetaData(naming_convention=_NAMES)
    type_annotation_map = {datetime: UtcTime, float: Double}  # noqa: RUF012 - SQLAlchemy's form


class Run(Base):
    """One training run. ``state``: requested, pending, running, paused, stopped, failed, finished."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    method: Mapped[str] = mapped_column(String(60))
    options: Mapped[Json]
    scenario_name: Mapped[str] = mapped_column(String(100))
    scenario: Mapped[Json]
    seed: Mapped[int] = mapped_column(BigInteger)
    folder: Mapped[str] = mapped_column(Text)
    config: Mapped[Json]
    state: Mapped[str] = mapped_column(String(20), index=True)
    stages: Mapped[int | None]
    rounds: Mapped[int]
    clients: Mapped[int]
    tasks: Mapped[Json] = mapped_column(default=list)
    flower_run_id: Mapped[str | None] = mapped_column(String(20), index=True)
    starts: Mapped[int] = mapped_column(default=0)
    error: Mapped[str] = mapped_column(Text, default="")
    requested_by: Mapped[str] = mapped_column(String(100), default="")
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]


class Stage(Base):
    """One stage of a run; what its evaluation counted, once that is done."""

    __tablename__ = "stages"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    stage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    common: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    evaluated: Mapped[bool] = mapped_column(default=False)
    absent: Mapped[Json] = mapped_column(default=list)
    failures: Mapped[Json] = mapped_column(default=list)
    bytes_down: Mapped[int] = mapped_column(BigInteger, default=0)
    bytes_up: Mapped[int] = mapped_column(BigInteger, default=0)
    seconds: Mapped[float] = mapped_column(default=0.0)
    started_at: Mapped[datetime]
    evaluated_at: Mapped[datetime | None]


class Round(Base):
    """One round: who was asked, who answered, what failed, and what was in force."""

    __tablename__ = "rounds"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    stage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    round: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    skipped: Mapped[bool]
    asked: Mapped[Json]
    clients: Mapped[Json]
    rejected: Mapped[Json]
    missing: Mapped[Json]
    failures: Mapped[Json]
    trained: Mapped[Json]
    dispatch: Mapped[Json]
    orders: Mapped[Json]
    loss: Mapped[float | None]
    accuracy: Mapped[float | None]
    bytes_down: Mapped[int] = mapped_column(BigInteger)
    bytes_up: Mapped[int] = mapped_column(BigInteger)
    seconds: Mapped[float]
    client_seconds: Mapped[float]
    ended_at: Mapped[datetime]


class ClientSighting(Base):
    """Which node spoke for which client (partition) of a run, and when last."""

    __tablename__ = "client_sightings"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    client: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    node_id: Mapped[str] = mapped_column(String(20), index=True)
    name: Mapped[str] = mapped_column(String(100), default="")
    first_seen: Mapped[datetime]
    last_seen: Mapped[datetime]


class ClientMetric(Base):
    """A number of one client after one stage; ``metric`` is ``KIND/TASK``, see ``listener``."""

    __tablename__ = "client_metrics"

    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    stage: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    client: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    metric: Mapped[str] = mapped_column(String(60), primary_key=True)
    value: Mapped[float]


class Artefact(Base):
    """A file that a run left: ``path`` relative to the server home, SHA-256 of its content."""

    __tablename__ = "artefacts"
    __table_args__ = (Index("ix_artefacts_place", "run_id", "kind", "stage", unique=True),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(40))
    stage: Mapped[int]
    path: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime]


class Promotion(Base):
    """One promotion of an artefact; the newest that was not rolled back is in force."""

    __tablename__ = "promotions"

    id: Mapped[int] = mapped_column(primary_key=True)
    artefact_id: Mapped[int] = mapped_column(ForeignKey("artefacts.id", ondelete="CASCADE"))
    by: Mapped[str] = mapped_column(String(100))
    at: Mapped[datetime]
    rolled_back_at: Mapped[datetime | None]


class Desired(Base):
    """One wish about a run. Rows are only added; of rows with the same key the newest in force counts.

    ``applied_stage`` and ``applied_round`` say from which round on it was in force: a resumed run that
    trains that round again, or an earlier one, applies it at the same place.
    """

    __tablename__ = "desired_state"
    __table_args__ = (Index("ix_desired_state_run", "run_id", "key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    key: Mapped[str] = mapped_column(String(100))
    value: Mapped[Json]
    since: Mapped[datetime]
    by: Mapped[str] = mapped_column(String(100))
    applied_stage: Mapped[int | None]
    applied_round: Mapped[int | None]


class Device(Base):
    """An enrolled device. ``status``: pending, approved, revoked; a revoked one leaves its name to another."""

    __tablename__ = "clients"
    __table_args__ = (
        Index("ix_clients_live_name", "name", unique=True, sqlite_where=_NOT_REVOKED, postgresql_where=_NOT_REVOKED),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(100), index=True)
    public_key: Mapped[str] = mapped_column(Text)
    fingerprint: Mapped[str] = mapped_column(String(64), unique=True)
    nonce: Mapped[str] = mapped_column(String(64), unique=True)
    status: Mapped[str] = mapped_column(String(20))
    node_id: Mapped[str | None] = mapped_column(String(20), unique=True)
    approved_by: Mapped[str] = mapped_column(String(100), default="")
    created_at: Mapped[datetime]
    approved_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Token(Base):
    """A bearer token of the admin service; of its secret only a salted hash is kept."""

    __tablename__ = "tokens"

    id: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), unique=True)
    role: Mapped[str] = mapped_column(String(20))
    salt: Mapped[str] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))
    created_by: Mapped[str] = mapped_column(String(100), default="")
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]


class AuditEntry(Base):
    """Who did what, and what came of it. Rows are never changed."""

    __tablename__ = "audit_log"

    id: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[datetime] = mapped_column(index=True)
    token: Mapped[str] = mapped_column(String(100))
    role: Mapped[str] = mapped_column(String(20))
    peer: Mapped[str] = mapped_column(String(100), default="")
    action: Mapped[str] = mapped_column(String(60))
    target: Mapped[str] = mapped_column(String(200), default="")
    detail: Mapped[Json]
    outcome: Mapped[str] = mapped_column(Text)
