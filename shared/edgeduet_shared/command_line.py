"""How every command of edgeduet ends: a problem the user can fix is one line and exit code 2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from edgeduet_shared.errors import EdgeDuetError

DEBUG_VARIABLE = "EDGEDUET_DEBUG"


def run_command_line(app: Callable[[], object], *, extra: str, extras: Mapping[str, str] | None = None) -> None:
    """Run a command line and turn what it raises into a line and an exit code.

    An :class:`~edgeduet_shared.errors.EdgeDuetError` or a library that is not installed: exit code 2. Anything else
    is a bug of ours: exit code 1. ``EDGEDUET_DEBUG=1`` shows the traceback instead.

    Args:
        app: the command line.
        extra: the extra of edgeduet that brings what this command needs.
        extras: module -> extra, where a module comes with another one.
    """
    if os.environ.get(DEBUG_VARIABLE) == "1":
        app()
        return
    try:
        app()
    except EdgeDuetError as error:
        _end(str(error), 2)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("edgeduet"):
            wanted = (extras or {}).get(error.name.partition(".")[0], extra)
            _end(f"'{error.name}' is not installed; get it with: pip install 'edgeduet[{wanted}]'", 2)
        _end(f"{type(error).__name__}: {error} (a bug of edgeduet; {DEBUG_VARIABLE}=1 shows where)", 1)


def _end(line: str, code: int) -> None:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)
