"""Rows of the registry as messages of the admin service."""

from __future__ import annotations

import json
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.admin.tokens import state_of
from edgeduet_server.registry.desired import latest_orders, wishes
from edgeduet_server.registry.models import Artefact, Promotion, Round, Run, Token
from edgeduet_server.registry.runs import position
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.admin_api.as_json import timestamp
from edgeduet_shared.names import printable

_LONGEST_TEXT = 500


def run_message(session: Session, run: Run) -> pb.Run:
    """Return a run with how far it is and what is ordered."""
    place, orders = position(session, run.id), latest_orders(wishes(session, run.id))
    return pb.Run(
        name=run.name,
        state=run.state,
        method=run.method,
        options_json=json.dumps(run.options, sort_keys=True),
        scenario=run.scenario_name,
        seed=run.seed,
        stages_done=place.stage,
        rounds_done=place.rounds_done,
        stages=run.stages or 0,
        rounds_per_stage=run.rounds,
        clients=run.clients,
        tasks=run.tasks,
        stop_ordered=orders.stop,
        pause_ordered=orders.paused,
        excluded=sorted(orders.excluded),
        overrides_json=json.dumps(dict(orders.overrides), sort_keys=True),
        error=last_words(run.error),
        requested_by=run.requested_by,
        flower_run_id=run.flower_run_id or "",
        starts=run.starts,
        folder=run.folder,
        created_at=timestamp(run.created_at),
        started_at=timestamp(run.started_at),
        ended_at=timestamp(run.ended_at),
    )


def round_message(row: Round) -> pb.Round:
    """Return one round."""
    return pb.Round(
        stage=row.stage,
        round=row.round,
        skipped=row.skipped,
        asked=row.asked,
        used=[client["client"] for client in row.clients],
        rejected=row.rejected,
        missing=row.missing,
        failures=[
            pb.Failure(client=max(0, f["client"]), reason=f["reason"], text=last_words(f["text"])) for f in row.failures
        ],
        loss=row.loss,
        accuracy=row.accuracy,
        bytes_down=row.bytes_down,
        bytes_up=row.bytes_up,
        seconds=row.seconds,
        excluded=row.orders.get("excluded", []),
        overrides_json=json.dumps(row.orders.get("overrides", {}), sort_keys=True),
        ended_at=timestamp(row.ended_at),
    )


def token_message(row: Token, now: datetime) -> pb.Token:
    """Return a token without anything secret."""
    return pb.Token(
        id=row.id,
        name=row.name,
        role=row.role,
        created_by=row.created_by,
        created_at=timestamp(row.created_at),
        expires_at=timestamp(row.expires_at),
        revoked_at=timestamp(row.revoked_at),
        last_used_at=timestamp(row.last_used_at),
        state=state_of(row, now),
    )


def model_message(session: Session, row: Artefact, promoted: Promotion | None) -> pb.Model:
    """Return a model; ``promoted`` is the promotion in force, of whichever model."""
    mine = promoted if promoted is not None and promoted.artefact_id == row.id else None
    return pb.Model(
        run=session.scalar(select(Run.name).where(Run.id == row.run_id)) or "",
        stage=row.stage,
        sha256=row.sha256,
        size=row.bytes,
        promoted=mine is not None,
        promoted_by=mine.by if mine else "",
        promoted_at=timestamp(mine.at) if mine else None,
        created_at=timestamp(row.created_at),
    )


def last_words(text: str) -> str:
    """Return the line of a text from elsewhere that says most: the last one of a traceback, printable."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return printable(lines[-1].strip().removesuffix("'>"))[:_LONGEST_TEXT] if lines else ""
