"""Calls about backups of the registry."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from edgeduet_server.admin.model_calls import chunks
from edgeduet_server.admin.tokens import Caller
from edgeduet_server.registry.backup import SUFFIX, restore_backup, write_backup
from edgeduet_server.registry.errors import Conflict, UnknownName
from edgeduet_server.registry.runs import active_run
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.admin_api.as_json import timestamp
from edgeduet_shared.names import check_name


class BackupCalls:
    """Backups of one server home.

    Args:
        registry: the registry.
        folder: where backups are.
        now: the clock.
    """

    def __init__(self, registry: Registry, folder: Path, now: Callable[[], datetime]) -> None:
        self._registry = registry
        self._folder = folder
        self._now = now

    def backup(self, request: pb.BackupRequest, caller: Caller) -> pb.BackupFile:
        """Write a backup."""
        return _file_message(write_backup(self._registry, self._folder, self._now()))

    def list_backups(self, request: pb.ListBackupsRequest, caller: Caller) -> pb.ListBackupsReply:
        """Return the backups, oldest first."""
        files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        return pb.ListBackupsReply(backups=[_file_message(path) for path in files])

    def download_backup(self, request: pb.BackupName, caller: Caller) -> Iterator[pb.FileChunk]:
        """Send a backup."""
        path = self._path(request.name)
        content = path.read_bytes()
        return chunks(path.name, content, hashlib.sha256(content).hexdigest())

    def restore(self, request: pb.BackupName, caller: Caller) -> pb.RestoreReply:
        """Bring the registry back to a backup, after one of the present has been made."""
        path = self._path(request.name)
        with self._registry.reading() as session:
            run = active_run(session)
            if run is not None:
                raise Conflict(f"run '{run.name}' is {run.state}; stop it before the registry is restored")
        saved = write_backup(self._registry, self._folder, self._now())
        return pb.RestoreReply(rows=restore_backup(self._registry, path), saved_as=saved.name)

    def _path(self, name: str) -> Path:
        path = self._folder / check_name(name, "backup")
        if not name.endswith(SUFFIX) or path.is_symlink() or not path.is_file():
            raise UnknownName(f"no backup '{name}'; see: edgeduet-admin backup --list")
        return path


def _file_message(path: Path) -> pb.BackupFile:
    status = path.stat()
    made = datetime.fromtimestamp(status.st_mtime, UTC)
    return pb.BackupFile(name=path.name, size=status.st_size, created_at=timestamp(made))
