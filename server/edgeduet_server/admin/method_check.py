"""``python -m edgeduet_server.admin.method_check``: a method, its options, and one that suits the scenario?

Reads JSON ``{"method": NAME, "options": {...}, "scenario": {...}}`` from standard input. Exit code 2 and one line if
not.
"""

from __future__ import annotations

import json
import sys

from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.experiment import Experiment


def main() -> int:
    """Check what standard input names."""
    asked = json.load(sys.stdin)
    scenario = Scenario.model_validate(asked["scenario"])
    try:
        # Building a strategy loads no data.
        make_strategy(asked["method"], asked["options"], scenario, Experiment(scenario, seed=0))
    except ConfigError as error:
        print(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
