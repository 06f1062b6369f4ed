"""Runs in the registry: made, begun, ended, looked up.

A run's ``state`` goes ``requested`` (row made) -> ``pending`` (given to Flower) -> ``running`` <-> ``paused`` ->
``finished``, ``stopped`` or ``failed``; the last two can be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from edgeduet_server.registry.desired import latest_orders, wishes
from edgeduet_server.registry.errors import Conflict, UnknownName
from edgeduet_server.registry.models import Round, Run, Stage
from edgeduet_shared.errors import nearest
from edgeduet_shared.names import check_name
from edgeduet_shared.run_config import RunConfig

ACTIVE = ("requested", "pending", "running", "paused")
RESUMABLE = ("stopped", "failed")
ERROR_LENGTH = 4000
START_LIMIT = timedelta(minutes=10)
INTERRUPTED = "its server process ended"
"""How the error of a run begins that did not end by itself, nor because an operator said so."""


@dataclass(frozen=True)
class RunPosition:
    """How far a run is: ``stage`` stages are evaluated, and of the next one ``rounds_done`` rounds are trained."""

    stage: int
    rounds_done: int


def add_run(session: Session, config: RunConfig, now: datetime, *, by: str = "", state: str = "requested") -> Run:
    """Make the row of a new run.

    Raises:
        Conflict: there is one of that name.
        ConfigError: the name is none.
    """
    name = check_name(config.run_name, "run name")
    if session.scalar(select(Run.id).where(Run.name == name)) is not None:
        raise Conflict(f"there is a run '{name}' already; choose another --name, or resume it: runs resume {name}")
    run = Run(
        name=name,
        method=config.method,
        options=dict(config.options),
        scenario_name=config.scenario.name,
        scenario=config.scenario.model_dump(mode="json"),
        seed=config.seed,
        folder=str(config.run_dir),
        config=config.to_flower(),
        state=state,
        rounds=config.scenario.federation.rounds,
        clients=config.scenario.federation.clients,
        requested_by=by,
        created_at=now,
    )
    session.add(run)
    session.flush()
    return run


def find_run(session: Session, name: str) -> Run:
    """Return the run called ``name``; ``"latest"`` is the one made last.

    Raises:
        UnknownName: there is none.
    """
    newest = select(Run).order_by(Run.id.desc()).limit(1)
    run = session.scalar(newest if name == "latest" else select(Run).where(Run.name == name))
    if run is None:
        if name == "latest":
            raise UnknownName("there is no run yet; start one with: edgeduet-admin runs start SCENARIO --method METHOD")
        raise UnknownName(f"no run '{ascii(name)[1:-1]}'{nearest(name, session.scalars(select(Run.name)))}")
    return run


def active_run(session: Session) -> Run | None:
    """Return the run that is requested, pending, running or paused."""
    return session.scalar(select(Run).where(Run.state.in_(ACTIVE)).order_by(Run.id.desc()).limit(1))


def begin_run(session: Session, config: RunConfig, flower_run_id: str, now: datetime) -> Run:
    """Note that a ServerApp took up the run; make its row where the run was started without the admin service."""
    run = session.scalar(select(Run).where(Run.name == config.run_name))
    if run is None:
        run = add_run(session, config, now)
    run.state, run.error = "running", ""
    run.flower_run_id = flower_run_id
    run.starts += 1
    run.started_at, run.ended_at = now, None
    return run


def end_run(session: Session, run_id: int, state: str, now: datetime, error: str = "") -> None:
    """Note how a run ended."""
    # PostgreSQL takes no NUL in a text.
    values = {"state": state, "error": error.replace("\x00", "")[:ERROR_LENGTH], "ended_at": now}
    session.execute(update(Run).where(Run.id == run_id).values(values))


def set_state(session: Session, run_id: int, state: str) -> None:
    """Change a run's state."""
    session.execute(update(Run).where(Run.id == run_id).values(state=state))


def position(session: Session, run_id: int) -> RunPosition:
    """Return how far a run is."""
    done = session.scalar(select(func.count()).where(Stage.run_id == run_id, Stage.evaluated)) or 0
    rounds = session.scalar(select(func.count()).where(Round.run_id == run_id, Round.stage == done)) or 0
    return RunPosition(stage=done, rounds_done=rounds)


def config_of(run: Run, *, resume: bool) -> RunConfig:
    """Return the configuration to give to Flower for this run."""
    return RunConfig.from_flower({**run.config, "resume": resume})


def reconcile(session: Session, flower_runs: Mapping[str, str], now: datetime) -> Sequence[str]:
    """Bring runs that say they are active in line with what Flower says; return a line for each that changed.

    A ServerApp that was killed could not write down its end. What Flower calls stopped was stopped by an operator only
    where there is an order for it: a SuperLink that is told to end says the same of what it ran.

    Args:
        session: a writing session.
        flower_runs: Flower's run id -> status (``running``, ``finished:failed``, ...).
        now: the time.
    """
    lines = []
    abandoned = select(Run).where(Run.state == "requested", Run.created_at < now - START_LIMIT)
    for run in session.scalars(abandoned):
        end_run(session, run.id, "failed", now, "it was never given to Flower: the admin service ended meanwhile")
        lines.append(f"run {run.name} was never started")
    for run in session.scalars(select(Run).where(Run.state.in_(("pending", "running", "paused")))):
        if run.flower_run_id is None:
            continue
        status = flower_runs.get(run.flower_run_id, "unknown")
        if not status.startswith("finished") and status != "unknown":
            continue
        if status == "finished:stopped" and latest_orders(wishes(session, run.id)).stop:
            end_run(session, run.id, "stopped", now)
        elif status == "finished:completed":
            # Its ServerApp could not write into the registry at the end; all rounds are there.
            end_run(session, run.id, "finished", now)
        else:
            why = "Flower does not know it any more" if status == "unknown" else f"Flower says {status}"
            end_run(session, run.id, "failed", now, interruption(f" without a word ({why})", run.name))
        lines.append(f"run {run.name} is over: {status}")
    return lines


def interruption(how: str, name: str) -> str:
    """Return the error of a run whose server process ended in the middle of it."""
    remedy = f"killed, or server or machine restarted; go on with: edgeduet-admin runs resume {name}"
    return f"{INTERRUPTED}{how}: {remedy}"


def interrupted_run(session: Session) -> Run | None:
    """Return the run that was interrupted and waits to be resumed, if it is the newest and none is active.

    A run that failed by itself, or that an operator stopped, is not meant. Whoever noticed the interruption first,
    admin service or supervisor, wrote it down in the same words.
    """
    if active_run(session) is not None:
        return None
    newest = session.scalar(select(Run).order_by(Run.id.desc()).limit(1))
    waits = newest is not None and newest.state == "failed" and newest.error.startswith(INTERRUPTED)
    return newest if waits else None


def error_of(folder: Path) -> str:
    """Return the line a run left in its folder about why it could not go on; empty if none."""
    try:
        return (folder / "error.txt").read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
