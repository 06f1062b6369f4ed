"""Backups of a registry in one form for both databases, and their way back.

A backup is a gzip file of JSON lines: a head with the revision, one line per row, and a foot with the number of
rows, by which a torn file is told from a whole one. It can be restored into SQLite and PostgreSQL alike, so it is also
the way from one to the other.

Restoring replaces runs and everything that belongs to them. Tokens, devices and the audit log are different: what is
there *now* stays, and only what is missing is added. Otherwise a backup would bring back tokens and devices that were
revoked since, and remove the traces of it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Table, delete, func, insert, select, text
from sqlalchemy.orm import Session

from edgeduet_server.registry.errors import RegistryError
from edgeduet_server.registry.migrate import newest_revision
from edgeduet_server.registry.models import AuditEntry, Base, Device, Token, UtcTime
from edgeduet_server.registry.store import Registry
from edgeduet_shared.atomic_files import atomic_output

FORMAT = 1
SUFFIX = ".jsonl.gz"
_KEPT = (Token, Device, AuditEntry)


def write_backup(registry: Registry, folder: Path, now: datetime) -> Path:
    """Write a backup of one moment of the registry into ``folder``.

    Raises:
        EdgeDuetError: the file cannot be written, or the registry not be read.
    """
    revision = newest_revision()
    stem = f"registry-{revision}-{now.astimezone(UTC):%Y%m%dT%H%M%S%fZ}"
    path, number = folder / f"{stem}{SUFFIX}", 1
    while path.exists():  # clocks are set back; a backup is never overwritten
        number += 1
        path = folder / f"{stem}-{number}{SUFFIX}"
    with registry.reading() as session, atomic_output(path) as partial:
        if not registry.is_sqlite:
            session.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        partial.touch(mode=0o600)
        with gzip.open(partial, "wt", encoding="utf-8") as file:
            head = {"edgeduet-registry": FORMAT, "revision": revision, "made": now.isoformat()}
            file.write(json.dumps(head) + "\n")
            rows = 0
            for table in Base.metadata.sorted_tables:
                for row in session.execute(select(table).order_by(*table.primary_key)).mappings():
                    file.write(json.dumps({"table": table.name, "row": _plain(row)}, allow_nan=False) + "\n")
                    rows += 1
            file.write(json.dumps({"rows": rows}) + "\n")
    return path


def restore_backup(registry: Registry, path: Path) -> int:
    """Bring the registry to what the backup holds; return how many rows were taken from it.

    Raises:
        RegistryError: no backup, torn, or of another revision; the registry is as it was.
    """
    with registry.writing() as session:
        kept = {table.__tablename__: _present(session, table) for table in _KEPT}
        for table in reversed(Base.metadata.sorted_tables):
            if table.name not in kept:
                session.execute(delete(table))
        taken = 0
        for name, row in _rows(path):
            table = Base.metadata.tables[name]
            values = _typed(table, row)
            if name in kept and not _is_new(name, values, kept[name]):
                continue
            session.execute(insert(table).values(values))
            taken += 1
        if not registry.is_sqlite:
            _advance_sequences(session)
    return taken


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    damaged = RegistryError(f"{path.name}: is damaged or no backup of a registry; choose another one")
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            head = json.loads(file.readline())
            if head.get("edgeduet-registry") != FORMAT:
                raise damaged
            if head["revision"] != newest_revision():
                raise RegistryError(
                    f"{path.name}: has revision {head['revision']}, this edgeduet has {newest_revision()}; restore "
                    "it with the version that made it, then upgrade"
                )
            count, foot = 0, None
            for line in file:
                entry = json.loads(line)
                if "rows" in entry:
                    foot = entry["rows"]
                    break
                count += 1
                yield entry["table"], entry["row"]
            if foot != count:
                raise damaged
    except FileNotFoundError as error:
        raise RegistryError(f"{path.name}: there is no such backup; see: edgeduet-admin backup --list") from error
    except (OSError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise damaged from error


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(key): value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
        for key, value in row.items()
    }


def _typed(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line as the table takes them."""
    values = {}
    for column in table.columns:
        value = row[column.name]
        is_time = isinstance(column.type, UtcTime) and value is not None
        values[column.name] = datetime.fromisoformat(value) if is_time else value
    return values


_Present = dict[str, set[Any]]


def _present(session: Session, table: type[Base]) -> _Present:
    """Return the values that the rows of ``table`` have in columns that must be unique."""
    columns = [c for c in table.__table__.columns if c.primary_key or c.unique or c.name == "name"]
    return {column.name: set(session.scalars(select(column))) - {None} for column in columns}


def _is_new(name: str, values: dict[str, Any], present: _Present) -> bool:
    """Whether a row of a table that keeps what it has is to be added; a number that is taken is removed from it."""
    if name == AuditEntry.__tablename__:
        return not present["id"]
    own_number = name == Device.__tablename__
    if any(values[column] in seen for column, seen in present.items() if not (own_number and column == "id")):
        return False
    if own_number and values["id"] in present["id"]:
        del values["id"]
    return True


def _advance_sequences(session: Session) -> None:
    """PostgreSQL counts by itself: tell it which numbers are taken."""
    for table in Base.metadata.sorted_tables:
        if "id" in table.columns and table.columns["id"].type.python_type is int:
            last = session.scalar(select(func.max(table.columns["id"]))) or 0
            session.execute(
                text("SELECT setval(pg_get_serial_sequence(:table, 'id'), :last, :used)"),
                {"table": table.name, "last": max(last, 1), "used": last > 0},
            )
