"""Write a file so that a reader sees the old content or the new content, never half of it.

The content goes to a temporary file in the same folder, is flushed to the disk, and then takes the
place of the old file in one step (``os.replace``); the folder is flushed too, so that the new name
survives a power cut. Whatever goes wrong, the temporary file is removed and the old file is intact.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgeduet_shared.errors import EdgeDuetError

_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space or choose another folder",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another folder",
    errno.EFBIG: "the file is larger than the disk or the limit allows; choose another folder",
    errno.EROFS: "the disk is read-only; choose another folder",
    errno.EACCES: "permission denied; choose a folder you may write to, or change its permissions",
    errno.EPERM: "permission denied; choose a folder you may write to, or change its permissions",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another path",
    errno.EEXIST: "a part of the path is a file, not a folder; choose another path",
    errno.EISDIR: "the path is a folder; choose the name of a file",
    errno.ENAMETOOLONG: "the path is too long; choose a shorter one",
}


def write_failure(path: Path | str, error: OSError) -> EdgeDuetError:
    """Return the line for the user about ``error``, which happened while writing ``path``."""
    remedy = _REMEDIES.get(error.errno or 0, f"{error.strerror or error}; check the disk, or choose another folder")
    return EdgeDuetError(f"cannot write {path}: {remedy}")


@contextmanager
def atomic_output(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path to write to; on leaving without an error it becomes ``path``.

    For writers that want a file name. Missing parent folders are created. An exception in the body
    removes the temporary file and leaves ``path`` as it was.

    Raises:
        EdgeDuetError: the system refused (disk full, no permission, ...); names path and remedy.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary)
        os.replace(temporary, target)
        _flush(target.parent)
    except OSError as error:
        raise write_failure(target, error) from error
    finally:
        # After a successful replace the temporary name is gone already. Where a parent is a file, no
        # temporary file was ever made, and the cause is being raised.
        with suppress(NotADirectoryError):
            temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: Path | str, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one step; see :func:`atomic_output` for what is raised."""
    with atomic_output(path) as temporary:
        temporary.write_bytes(content)


def atomic_write_text(path: Path | str, content: str) -> None:
    """Replace ``path`` by ``content`` as UTF-8 with the line ends of ``content``."""
    atomic_write_bytes(path, content.encode("utf-8"))


def atomic_write_json(path: Path | str, value: Any, *, indent: int | None = 2) -> None:
    """Replace ``path`` by ``value`` as JSON that every parser reads (keys in the order given).

    Raises:
        TypeError: ``value`` holds something JSON has no word for.
        ValueError: ``value`` holds NaN or an infinity; write ``None`` for "no such number".
        EdgeDuetError: the file cannot be written.
    """
    atomic_write_text(path, json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False) + "\n")


def _flush(path: Path) -> None:
    """Force ``path`` (a file or a folder) to the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows has no handle for a folder; NTFS journals the rename itself
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
