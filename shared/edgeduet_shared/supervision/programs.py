"""Programs of this Python's environment: where they are, and how Flower's must be started.

Offline, a run fails because Flower installs dependencies for it, and telemetry and update checks go to the
network: all three are switched off (``methods/flower.md`` 0.2, 1.4). A second thread costs more than it gains
on few cores (0.12).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from edgeduet_shared.errors import FederationError

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NO_COLOR": "1",
}
"""Environment of every program of Flower's."""


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for Flower's programs that keep their things in ``home``."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {
        **os.environ,
        **SWITCHES,
        **(extra or {}),
        "FLWR_HOME": str(home),
        # Relative entries would mean other folders in processes started elsewhere.
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, path)),
        # Flower starts its helpers by name.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def program(name: str) -> str:
    """Return a program of the environment this Python runs in.

    Raises:
        FederationError: it is not installed.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise FederationError(f"'{name}' is not installed; get it with: pip install 'flwr>=1.42,<1.43'")
    return found
