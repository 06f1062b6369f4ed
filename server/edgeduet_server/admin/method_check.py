"""``python -m edgeduet_server.admin.method_check``: is this a method, and are these its options?

Reads JSON ``{"method": NAME, "options": {...}}`` from standard input. Exit code 2 and one line if not.
"""

from __future__ import annotations

import json
import sys

from edgeduet_server.strategies.catalogue import strategy_type
from edgeduet_shared.config import parse
from edgeduet_shared.errors import ConfigError


def main() -> int:
    """Check what standard input names."""
    asked = json.load(sys.stdin)
    try:
        kind = strategy_type(asked["method"])
        parse(kind.options_type, asked["options"], f"method '{asked['method']}'")
    except ConfigError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
