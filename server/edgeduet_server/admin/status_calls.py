"""Calls about everything at once: how it stands, what is wrong, what to do about it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from edgeduet_server.admin.flower_view import FlowerView
from edgeduet_server.admin.messages import model_message, round_message, run_message
from edgeduet_server.admin.model_calls import in_force
from edgeduet_server.admin.refused_devices import refusal_lines
from edgeduet_server.admin.run_calls import RunCalls
from edgeduet_server.admin.tokens import Caller, all_tokens, state_of
from edgeduet_server.deployment.home import check_home
from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.deployment.supervisor import database_bytes, read_state
from edgeduet_server.registry.backup import SUFFIX
from edgeduet_server.registry.models import Artefact, Device, Round, Run
from edgeduet_server.registry.runs import ACTIVE, error_of
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.admin_api.as_json import timestamp
from edgeduet_shared.errors import EdgeDuetError
from edgeduet_shared.metrics import format_bytes

LEAST_FREE_BYTES = 2_000_000_000
SOON = timedelta(days=14)
BACKUP_AGE = timedelta(days=7)
PENDING_LIMIT = timedelta(minutes=1)


class StatusCalls:
    """Overview of one server home.

    Args:
        registry: the registry.
        config: of the home.
        runs: brings runs in line with Flower.
        view: what Flower says.
        now: the clock.
    """

    def __init__(
        self,
        registry: Registry,
        config: ServerConfig,
        runs: RunCalls,
        view: FlowerView,
        now: Callable[[], datetime],
    ) -> None:
        self._registry = registry
        self._config = config
        self._runs = runs
        self._view = view
        self._now = now

    def status(self, request: pb.StatusRequest, caller: Caller) -> pb.StatusReply:
        """Return how everything stands."""
        self._runs.catch_up()
        nodes, problem = self._view.nodes()
        online = {node.node_id for node in nodes if node.status == "online"}
        with self._registry.reading() as session:
            devices = list(session.scalars(select(Device).where(Device.status == "approved")))
            reply = pb.StatusReply(
                version=package_version(),
                time=timestamp(self._now()),
                token=caller.name,
                role=caller.role.label,
                devices=len(devices),
                devices_online=sum(device.node_id in online for device in devices),
            )
            reply.warnings.extend(self._of_server(problem))
            run = session.scalar(select(Run).where(Run.state.in_(ACTIVE)).order_by(Run.id.desc()).limit(1))
            run = run or session.scalar(select(Run).order_by(Run.id.desc()).limit(1))
            if run is not None:
                reply.run.CopyFrom(run_message(session, run))
                last = _last_round(session, run)
                if last is not None:
                    reply.last_round.CopyFrom(round_message(last))
                reply.warnings.extend(self._of_run(session, run, reply.run, last, reply.last_round))
            offline = [device.name for device in devices if device.node_id not in online]
            if offline and not problem:
                reply.warnings.append(f"offline: {_some(offline)}")
            reply.warnings.extend(refusal_lines(session, self._config.folder("logs"), self._now()))
            promoted = in_force(session)
            if promoted is not None:
                artefact = session.get_one(Artefact, promoted.artefact_id)
                reply.promoted.CopyFrom(model_message(session, artefact, promoted))
        return reply

    def doctor(self, request: pb.DoctorRequest, caller: Caller) -> pb.DoctorReply:
        """Check the server; each problem with its remedy."""
        return pb.DoctorReply(time=timestamp(self._now()), checks=list(self._checks()))

    def _of_server(self, problem: str) -> Iterator[str]:
        if problem:
            yield f"Flower's SuperLink does not answer: {problem}"
        try:
            state = read_state(self._config.home)
        except EdgeDuetError as error:
            yield str(error)
            return
        for complaint in (state or {}).get("complaints", []):
            yield str(complaint)

    def _of_run(
        self, session: Session, run: Run, shown: pb.Run, last: Round | None, last_shown: pb.Round
    ) -> Iterator[str]:
        if run.state == "failed":
            why = shown.error or error_of(self._config.folder("runs") / run.name) or "see its log"
            yield f"run {run.name} failed: {why}"
        if run.state == "pending" and self._now() - run.created_at > PENDING_LIMIT and run.starts == 0:
            yield f"run {run.name} was given to Flower at {run.created_at:%H:%M} UTC and has not begun"
        if last is None or run.state not in (*ACTIVE, "failed"):
            return
        if last.skipped and last.asked:
            yield (
                f"stage {last.stage + 1}, round {last.round + 1} was skipped: {len(last.clients)} of {len(last.asked)} "
                "replies could be used, fewer than the quorum"
            )
        for failure in last_shown.failures[:5]:
            yield f"client {failure.client}: {failure.reason}: {failure.text}"
        if last.missing:
            yield f"no answer in time from client {_some([str(client) for client in last.missing])}"
        recent = session.scalars(
            select(Round.skipped)
            .where(Round.run_id == run.id)
            .order_by(Round.stage.desc(), Round.round.desc())
            .limit(10)
        ).all()
        if sum(recent) > 1:
            yield f"{sum(recent)} of the last {len(recent)} rounds were skipped"

    def _checks(self) -> Iterator[pb.Check]:
        config, now = self._config, self._now()
        yield pb.Check(what="version", ok=True, text=package_version())
        for finding in check_home(config, now=now):
            yield pb.Check(what=finding.what, ok=not finding.problem, text=finding.problem or self._fine(finding.what))
        _, problem = self._view.runs()
        yield pb.Check(what="SuperLink", ok=not problem, text=problem or "answers")
        complaints = list(self._of_server(""))
        yield pb.Check(what="programs", ok=not complaints, text="; ".join(complaints) or "all run")
        free = shutil.disk_usage(config.home).free
        remedy = "" if free >= LEAST_FREE_BYTES else "; free some, or runs will stop when they save"
        yield pb.Check(what="disk", ok=not remedy, text=f"{format_bytes(free)} free in {config.home}{remedy}")
        yield self._size_check()
        yield from self._registry_checks(now)

    def _fine(self, what: str) -> str:
        if what == "certificate":
            return f"good until {Pki(self._config.folder('pki')).expires():%Y-%m-%d}"
        return "PostgreSQL" if what == "registry" and not self._registry.is_sqlite else "in order"

    def _size_check(self) -> pb.Check:
        size, limit = database_bytes(self._config.home / "superlink.db"), self._config.limits.max_superlink_db_bytes
        text = f"{format_bytes(size)} (compacted between runs above {format_bytes(limit)})"
        return pb.Check(what="Flower's database", ok=size <= 2 * limit, text=text)

    def _registry_checks(self, now: datetime) -> Iterator[pb.Check]:
        with self._registry.reading() as session:
            tokens = [t for t in all_tokens(session) if state_of(t, now) == "valid"]
            rounds = session.scalar(select(func.count()).select_from(Round)) or 0
        ending = [f"{t.name} ({t.expires_at:%Y-%m-%d})" for t in tokens if t.expires_at - now < SOON]
        text = f"end soon: {_some(ending)}; make new ones (tokens create)" if ending else f"{len(tokens)} valid"
        yield pb.Check(what="tokens", ok=not ending, text=text)
        made = [path.stat().st_mtime for path in self._config.folder("backups").glob(f"*{SUFFIX}")]
        age = timedelta(seconds=now.timestamp() - max(made)) if made else None
        if age is None:
            late, text = rounds > 0, "there is none; make one with: edgeduet-admin backup"
        else:
            late, text = age > BACKUP_AGE, f"the newest is {age.days} day(s) old"
        yield pb.Check(what="backup of the registry", ok=not late, text=text)


def package_version() -> str:
    """Return the version of edgeduet that runs here."""
    try:
        return version("edgeduet")
    except PackageNotFoundError:
        return "not installed as a package"


def _last_round(session: Session, run: Run) -> Round | None:
    newest = select(Round).where(Round.run_id == run.id).order_by(Round.stage.desc(), Round.round.desc()).limit(1)
    return session.scalar(newest)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}"
