"""Forget what a device has learned, and where wanted who it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgeduet_client.device.device_config import CONFIG_FILE
from edgeduet_client.device.enrolment import NODE_KEY
from edgeduet_client.device.supervisor import KIND
from edgeduet_shared.atomic_files import write_failure
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.supervision.running_state import RunningState

_LEARNED = ("personal", "classifier", "cache", "flwr")
# The configuration last: it makes the folder a home, so that an interrupted reset can be run again.
_IDENTITY = ("identity", CONFIG_FILE)


def what_is_removed(home: Path, *, identity: bool) -> list[Path]:
    """Return the files and folders of a home that a reset removes.

    Raises:
        ConfigError: it is no device home.
    """
    # Not through device.toml: one that is damaged is a reason for a reset.
    if not (home / CONFIG_FILE).exists() and not (home / NODE_KEY).exists():
        raise ConfigError(f"{home} is no device home: there is no {CONFIG_FILE}; check the folder")
    names = [*_LEARNED, *_IDENTITY] if identity else list(_LEARNED)
    return [home / name for name in names if (home / name).exists()]


def remove_learned(home: Path, paths: list[Path]) -> list[Path]:
    """Remove paths of a home that no device runs in; return them.

    Raises:
        ConfigError: a device runs there.
        EdgeDuetError: the system refused.
    """
    state = RunningState(home, KIND)
    if state.read() is not None:
        raise ConfigError(f"a device is running in {home}; first run `edgeduet-client stop {home}`")
    with state.held():
        for path in paths:
            try:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            except OSError as error:
                raise write_failure(path, error) from error
    return paths
