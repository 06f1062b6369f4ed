"""Bring a registry to the tables of this version: forward only, one process at a time, a backup first.

Alembic keeps the revision in the database. A SQLite file is copied (``VACUUM INTO``) before it is changed;
a PostgreSQL database is changed in one transaction, and its backups are its operator's (docs/registry.md).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from filelock import FileLock
from sqlalchemy import Connection, Engine, text

from edgeduet_server.registry.errors import RegistryError
from edgeduet_shared.atomic_files import write_failure

log = logging.getLogger("edgeduet.registry")

# An arbitrary number that only migrations of edgeduet lock.
_POSTGRES_LOCK = 7_311_904_220_156
_LOCK_SECONDS = 120.0


def migrate(engine: Engine, backups: Path | None = None) -> None:
    """Bring the database behind ``engine`` to the newest revision.

    Args:
        engine: of the registry.
        backups: where a SQLite file is copied first; None: ``backups`` beside the file.

    Raises:
        RegistryError: made by a newer edgeduet, or the database refuses.
    """
    config = _alembic()
    scripts = ScriptDirectory.from_config(config)
    newest = scripts.get_current_head()
    with engine.connect() as connection:
        if _revision(connection) == newest:
            return
    with _only_one(engine), engine.connect() as connection:
        found = _revision(connection)
        connection.rollback()
        if found == newest:
            return
        known = {script.revision for script in scripts.walk_revisions()}
        if found is not None and found not in known:
            raise RegistryError(
                f"the registry {engine.url.render_as_string()} was made by a newer edgeduet (revision {found}, this "
                f"one knows up to {newest}); install that version, or restore a backup of before"
            )
        if found is not None and engine.dialect.name == "sqlite":
            copy_sqlite(engine, backup_path(engine, backups, found))
        config.attributes["connection"] = connection
        with connection.begin():
            command.upgrade(config, "head")
        log.info("registry brought from revision %s to %s", found or "nothing", newest)


def newest_revision() -> str:
    """Return the revision of this version's tables."""
    return str(ScriptDirectory.from_config(_alembic()).get_current_head())


def backup_path(engine: Engine, folder: Path | None, revision: str) -> Path:
    """Return where the next backup of a SQLite registry goes."""
    home = folder or Path(str(engine.url.database)).parent / "backups"
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
    return home / f"registry-{revision}-{stamp}.db"


def copy_sqlite(engine: Engine, target: Path) -> Path:
    """Write a whole, consistent copy of a SQLite registry to ``target`` while others go on using it.

    Raises:
        EdgeDuetError: the copy cannot be written; nothing is left behind.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        # The copy holds hashes of tokens: it must not be readable by others at any moment.
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL, 0o600))
        # By the driver itself: SQLAlchemy would begin a transaction, in which SQLite does not vacuum.
        pooled = engine.raw_connection()
        try:
            pooled.cursor().execute("VACUUM INTO ?", (str(partial),))
        finally:
            pooled.close()
        os.replace(partial, target)
    except OSError as error:
        raise write_failure(target, error) from error
    except sqlite3.Error as error:
        raise RegistryError(f"the registry cannot be copied to {target}: {error}; free some disk space") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return target


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    return config


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


@contextlib.contextmanager
def _only_one(engine: Engine) -> Iterator[None]:
    """Keep other processes of this server from migrating at the same time."""
    if engine.dialect.name == "sqlite":
        with FileLock(f"{engine.url.database}.lock", timeout=_LOCK_SECONDS):
            yield
        return
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _POSTGRES_LOCK})
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _POSTGRES_LOCK})
