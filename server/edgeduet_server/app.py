"""Flower's entry point of the server: ``edgeduet_server.app:app``.

Imports stay light; what needs torch is loaded when the run begins.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from edgeduet_shared.run_config import RunConfig

if TYPE_CHECKING:
    from edgeduet_server.recorder import Listener

log = logging.getLogger("edgeduet.server")

ERROR_FILE = "error.txt"
"""In the run's folder: why the run stopped. Flower passes on a traceback at best."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server of the run that ``context.run_config`` describes (``edgeduet_shared.run_config``)."""
    serve(grid, RunConfig.from_flower(context.run_config))


def serve(
    grid: Grid, config: RunConfig, *, listeners: Sequence[Listener] = (), stop: threading.Event | None = None
) -> Any:
    """Train all stages of a run over ``grid``; return the final server state.

    Writes into ``config.run_dir``: ``metrics.jsonl``, ``checkpoints/``, and ``error.txt`` when the run
    cannot go on.

    Args:
        grid: Flower's Grid; one that holds simulated clients' personal states has them saved with the run.
        config: what to run.
        listeners: shown each event as it happens.
        stop: set it to stop the run.

    Raises:
        EdgeDuetError: one line for the user, also written to ``error.txt``.
    """
    from edgeduet_shared.atomic_files import atomic_write_text
    from edgeduet_shared.errors import EdgeDuetError

    problem = config.run_dir / ERROR_FILE
    problem.unlink(missing_ok=True)
    try:
        return _serve(grid, config, listeners, stop)
    except EdgeDuetError as error:
        with suppress(EdgeDuetError):  # a full disk must not hide why the run stopped
            atomic_write_text(problem, f"{error}\n")
        raise


def _serve(grid: Grid, config: RunConfig, listeners: Sequence[Listener], stop: threading.Event | None) -> Any:
    from edgeduet_server.checkpoint import CheckpointStore, PersonalSnapshot
    from edgeduet_server.global_evaluation import GlobalEvaluation
    from edgeduet_server.privacy_spent import privacy_spent
    from edgeduet_server.recorder import JsonlRecorder, read_events
    from edgeduet_server.round_loop import run_training
    from edgeduet_server.strategies.catalogue import make_strategy
    from edgeduet_shared.experiment import experiment_for

    experiment = experiment_for(config.scenario_json, config.seed, config.split_file)
    strategy = make_strategy(config.method, config.options, config.scenario, experiment)
    recorder = JsonlRecorder(config.run_dir / "metrics.jsonl", listeners)
    try:
        state = run_training(
            grid,
            strategy,
            config.scenario,
            start=strategy.initial_state(config.seed),
            stages=len(experiment.split.tasks),
            recorder=recorder,
            checkpoints=CheckpointStore(
                config.run_dir / "checkpoints",
                {**config.identity(), "split": experiment.split.digest},
                every=config.checkpoint_every,
                personal=grid if isinstance(grid, PersonalSnapshot) else None,
            ),
            seed=config.seed,
            resume=config.resume,
            evaluate_global=GlobalEvaluation(experiment, strategy),
            stop=stop,
        )
        spent = privacy_spent(config.scenario.privacy, read_events(config.run_dir / "metrics.jsonl"))
        if spent is not None:
            recorder.record("privacy", **spent)
            log.warning("privacy spent per client: %s", spent["summary"])
        return state
    finally:
        recorder.close()
