"""The one error family a user meets.

Every command catches :class:`EdgeDuetError`, prints its single line and exits with code 2.
A message says what was wrong, where (file, option or key), and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EdgeDuetError(Exception):
    """A problem the user can fix: one clear line, exit code 2."""


class ConfigError(EdgeDuetError):
    """A configuration value, key, scenario or method that cannot be used."""


class DataError(EdgeDuetError):
    """Images, folders, partitions or caches that cannot be used."""


class FederationError(EdgeDuetError):
    """A federation that cannot go on: too few usable replies, or an engine that broke."""


class RunStopped(EdgeDuetError):
    """A run that was asked to stop; says where it is saved and how to go on."""


class BackboneError(EdgeDuetError):
    """A backbone that is missing, altered or unsupported."""


class MessageError(EdgeDuetError):
    """A message that does not follow the schema of this version."""


class VersionError(MessageError):
    """A message of another schema version."""


class StateError(EdgeDuetError):
    """A checkpoint or personal state that is corrupted or belongs to another run."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or the list of names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(names)}"
