"""A process that makes one run: reads the job as JSON from stdin, writes events as JSON lines to stdout.

Started by ``edgeduet-sim compare --jobs N``; not meant to be called by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import EdgeDuetError, RunStopped


def main() -> int:
    """Make the run; exit code 2 with one line on stderr for what the user can fix, 130 when interrupted."""
    try:
        _make(json.loads(sys.stdin.read()))
    except (KeyboardInterrupt, RunStopped):
        return 130
    except EdgeDuetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _make(request: dict[str, Any]) -> None:
    import torch

    from edgeduet_shared.method_spec import MethodSpec
    from edgeduet_sim.progress import JsonEvents
    from edgeduet_sim.runner import EngineSetup, Job, run_one

    torch.set_num_threads(1)
    job = Job(
        scenario=Scenario.model_validate(request["scenario"]),
        method=MethodSpec(request["method"], request["options"]),
        seed=request["seed"],
        folder=Path(request["folder"]),
    )
    run_one(job, EngineSetup(*request["engine"]), JsonEvents(), resume=True, command=request["command"])


if __name__ == "__main__":
    sys.exit(main())
