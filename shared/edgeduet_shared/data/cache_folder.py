"""The one folder in which reusable intermediate results live."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from edgeduet_shared.errors import DataError


def cache_folder() -> Path:
    """``$EDGEDUET_CACHE`` if set, else the user's cache folder. Not created here."""
    chosen = os.environ.get("EDGEDUET_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("edgeduet", appauthor=False))


def make_folder(folder: Path) -> Path:
    """Create ``folder``; raise :class:`DataError` when that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{folder}: the cache folder cannot be created ({error.strerror}); "
            "set EDGEDUET_CACHE to a folder you may write to"
        ) from error
    return folder
