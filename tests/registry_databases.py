"""Databases for tests of the registry: a fresh SQLite file, or a PostgreSQL server of the test's own.

PostgreSQL refuses to run as root; there it runs as the user ``postgres`` that its package makes. It listens on a
socket in its own folder only. Without ``initdb`` (Debian: ``apt-get install postgresql``) its tests are skipped.
"""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _programs() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run a PostgreSQL server; yield its URL."""
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    as_user: dict[str, Any] = {}
    user = getpass.getuser()
    folder = Path(tempfile.mkdtemp(prefix="edgeduet-pg-"))
    if os.geteuid() == 0:
        user = "postgres"
        try:
            owner = pwd.getpwnam(user)
        except KeyError:
            pytest.skip("this is root, and there is no user 'postgres' to run PostgreSQL as")
        as_user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
        os.chown(folder, owner.pw_uid, owner.pw_gid)

    def call(*command: str) -> None:
        result = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=120, **as_user
        )
        assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"

    data = folder / "data"
    options = f"-k {folder} -c listen_addresses='' -c fsync=off -c max_connections=40"
    try:
        call(str(programs / "initdb"), "-D", str(data), "-U", user, "-A", "trust", "-E", "UTF8", "--no-sync")
        control = (str(programs / "pg_ctl"), "-D", str(data), "-w", "-t", "60")
        call(*control, "-l", str(folder / "log"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg://{user}@/postgres?host={folder}"
        finally:
            call(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_postgres_registry(url: str) -> str:
    """Make an empty schema (quicker than a database); return the URL of it."""
    from sqlalchemy import create_engine, text

    name = f"registry_{uuid.uuid4().hex[:12]}"
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    return f"{url}&options=-csearch_path%3D{name}"
