"""Flower's entry point of the server: ``edgeduet_server.app:app``.

Imports stay light; what needs torch is loaded when the run begins.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from edgeduet_shared.run_config import RunConfig

if TYPE_CHECKING:
    from edgeduet_server.recorder import Listener
    from edgeduet_server.registry.recorded_run import RecordedRun
    from edgeduet_server.strategies.strategy import ServerState
    from edgeduet_shared.messages import EvaluateReply

log = logging.getLogger("edgeduet.server")

ERROR_FILE = "error.txt"
"""In the run's folder: why the run stopped. Flower passes on a traceback at best."""

REGISTRY_VARIABLE = "EDGEDUET_REGISTRY"
"""Environment variable with the URL of the registry."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the server of the run that ``context.run_config`` describes (``edgeduet_shared.run_config``).

    The supervisor of a deployed server names the registry in the environment; without it there is none.
    """
    config = RunConfig.from_flower(context.run_config)
    url = os.environ.get(REGISTRY_VARIABLE)
    if not url:
        serve(grid, config)
        return
    from edgeduet_server.registry.recorded_run import recorded_run

    with recorded_run(url, config, str(context.run_id)) as record:
        serve(grid, config, record=record)


def serve(
    grid: Grid,
    config: RunConfig,
    *,
    listeners: Sequence[Listener] = (),
    stop: threading.Event | None = None,
    record: RecordedRun | None = None,
) -> Any:
    """Train all stages of a run over ``grid``; return the final server state.

    Writes into ``config.run_dir``: ``metrics.jsonl``, ``checkpoints/``, and ``error.txt`` when the run
    cannot go on.

    Args:
        grid: Flower's Grid; one that holds simulated clients' personal states has them saved with the run.
        config: what to run.
        listeners: shown each event as it happens.
        stop: set it to stop the run.
        record: the run in the registry, which also gives orders; None: no registry.

    Raises:
        EdgeDuetError: one line for the user, also written to ``error.txt``.
    """
    from edgeduet_shared.atomic_files import atomic_write_text
    from edgeduet_shared.errors import EdgeDuetError

    problem = config.run_dir / ERROR_FILE
    problem.unlink(missing_ok=True)
    try:
        return _serve(grid, config, listeners, stop, record)
    except EdgeDuetError as error:
        with suppress(EdgeDuetError):  # a full disk must not hide why the run stopped
            atomic_write_text(problem, f"{error}\n")
        raise


def _serve(
    grid: Grid,
    config: RunConfig,
    listeners: Sequence[Listener],
    stop: threading.Event | None,
    record: RecordedRun | None,
) -> Any:
    from edgeduet_server.checkpoint import CheckpointStore, PersonalSnapshot
    from edgeduet_server.global_evaluation import GlobalEvaluation
    from edgeduet_server.privacy_spent import privacy_spent
    from edgeduet_server.recorder import JsonlRecorder, read_events
    from edgeduet_server.round_loop import run_training
    from edgeduet_server.strategies.catalogue import make_strategy
    from edgeduet_shared.experiment import experiment_for

    experiment = experiment_for(config.scenario_json, config.seed, config.split_file)
    strategy = make_strategy(config.method, config.options, config.scenario, experiment)
    # A drafter is judged on texts, which no server holds.
    evaluate = GlobalEvaluation(experiment, strategy) if config.scenario.learns == "classifier" else None

    def after_stage(state: ServerState, stage: int, replies: Sequence[EvaluateReply]) -> Mapping[str, Any] | None:
        if record is not None:
            record.keep_model(state, stage, {} if evaluate is None else evaluate.describe(stage))
        return None if evaluate is None else evaluate(state, stage, replies)

    if record is not None:
        record.describe(tasks=list(experiment.task_names))
        listeners = (*listeners, record.listener)
    recorder = JsonlRecorder(config.run_dir / "metrics.jsonl", listeners)
    try:
        state = run_training(
            grid,
            strategy,
            config.scenario,
            start=strategy.initial_state(config.seed),
            stages=len(experiment.task_names),
            recorder=recorder,
            checkpoints=CheckpointStore(
                config.run_dir / "checkpoints",
                {**config.identity(), "split": experiment.split_digest},
                every=config.checkpoint_every,
                personal=grid if isinstance(grid, PersonalSnapshot) else None,
            ),
            seed=config.seed,
            resume=config.resume,
            evaluate_global=after_stage,
            stop=stop,
            control=None if record is None else record.control,
            make_strategy=lambda changed: make_strategy(config.method, config.options, changed, experiment),
        )
        spent = privacy_spent(config.scenario.privacy, read_events(config.run_dir / "metrics.jsonl"))
        if spent is not None:
            recorder.record("privacy", **spent)
            log.warning("privacy spent per client: %s", spent["summary"])
        return state
    finally:
        recorder.close()
