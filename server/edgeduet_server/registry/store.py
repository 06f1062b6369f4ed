"""The registry as an open database: transactions, and what they need of SQLite and PostgreSQL.

SQLite runs in WAL mode, so that readers and the one writer do not wait for each other; a writer takes the
write lock when it begins (``BEGIN IMMEDIATE``), because a reader that turns writer half-way can be refused
without a way to wait.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, NoSuchModuleError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from edgeduet_server.registry.errors import RegistryError
from edgeduet_server.registry.migrate import migrate
from edgeduet_shared.atomic_files import write_failure

_BUSY_MILLISECONDS = 30_000


class Registry:
    """An open registry; safe to use from several threads and processes.

    Make one with :meth:`open`.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def open(cls, url: str, *, backups: Path | None = None) -> Registry:
        """Open the registry at ``url``, made or brought to this version's tables where needed.

        Args:
            url: SQLAlchemy URL: ``sqlite:////home/registry.db``, ``postgresql+psycopg://user@host/name``.
            backups: where a SQLite file is copied before it is changed; None: ``backups`` beside it.

        Raises:
            RegistryError: no such database, no driver for it, a damaged file, or one of a newer version.
        """
        parsed = _checked(url)
        if parsed.get_backend_name() == "sqlite":
            _private_file(Path(str(parsed.database)))
        try:
            engine = _engine(parsed)
            migrate(engine, backups)
        except ModuleNotFoundError as error:
            raise RegistryError(
                f"registry {_shown(parsed)}: the driver '{error.name}' is not installed; for PostgreSQL: "
                "pip install 'edgeduet[server]'"
            ) from error
        except SQLAlchemyError as error:
            raise explain(parsed, error) from error
        return cls(engine)

    @property
    def is_sqlite(self) -> bool:
        """Whether the registry is a file."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """Yield a session that sees one moment of the registry.

        Raises:
            RegistryError: the database does not answer.
        """
        with self._session(write=False) as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """Yield a session whose changes are kept together when the block ends, or not at all.

        Raises:
            RegistryError: the database does not answer, or refuses.
        """
        with self._session(write=True) as session:
            yield session

    @contextmanager
    def _session(self, *, write: bool) -> Iterator[Session]:
        try:
            with (
                self.engine.connect().execution_options(edgeduet_write=write) as connection,
                Session(connection, expire_on_commit=False) as session,
            ):
                yield session
                if write:
                    session.commit()
        except (OperationalError, DatabaseError) as error:
            raise explain(self.engine.url, error) from error

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def explain(url: URL, error: SQLAlchemyError) -> RegistryError:
    """Return the line for the user about a database that refuses."""
    cause = str(getattr(error, "orig", None) or error).strip().splitlines()
    text = cause[0] if cause else type(error).__name__
    remedy = "check that the database runs and that [registry] url in server.toml is right"
    if "not a database" in text or "malformed" in text:
        remedy = "the file is damaged: put the newest file of backups/ in its place"
    elif "locked" in text:
        remedy = "another program holds it for long; find out which (fuser), and try again"
    elif "disk" in text or "full" in text:
        remedy = "free some disk space"
    elif "readonly" in text or "unable to open" in text:
        remedy = "check the folder and its permissions"
    return RegistryError(f"registry {_shown(url)}: {text}; {remedy}")


def _shown(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def _checked(url: str) -> URL:
    try:
        parsed = make_url(url)
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError) as error:
        # The text itself may hold a password.
        raise RegistryError(
            "the registry's URL cannot be read; expected sqlite:////absolute/path.db or "
            "postgresql+psycopg://USER@HOST/DATABASE ([registry] url in server.toml)"
        ) from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise RegistryError(
            f"registry {_shown(parsed)}: only SQLite and PostgreSQL are supported ([registry] url in server.toml)"
        )
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise RegistryError("a registry in memory is seen by one process only; give sqlite:////absolute/path.db")
    return parsed


def _private_file(path: Path) -> None:
    """Make the file before SQLite does, so that nobody else can read it; the WAL takes its permissions."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise write_failure(path, error) from error


def _engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        # A connection that a restarted database dropped is noticed and replaced.
        return create_engine(url, pool_pre_ping=True, pool_size=5, connect_args={"connect_timeout": 10})
    engine = create_engine(url)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: sqlite3.Connection, _: Any) -> None:
    # The driver must not begin transactions by itself: see _begin_sqlite.
    connection.isolation_level = None
    for pragma in (
        f"busy_timeout={_BUSY_MILLISECONDS}",
        "journal_mode=WAL",
        # A power cut may undo the last transactions but never damages the file; checkpoints of a run are
        # flushed by themselves, and the registry is brought in line with them when it resumes.
        "synchronous=NORMAL",
        "foreign_keys=ON",
    ):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    write = connection.get_execution_options().get("edgeduet_write", True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
