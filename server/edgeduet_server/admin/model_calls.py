"""Calls about models: what each stage left, which one is promoted, and getting one out.

The promoted model lies in ``models/current.safetensors`` of the server home, with ``models/current.json`` beside it
about where it is from; whoever deploys models takes it from there. Rolling back puts the one before in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.admin.messages import model_message
from edgeduet_server.admin.tokens import Caller
from edgeduet_server.registry.errors import Conflict, RegistryError, UnknownName
from edgeduet_server.registry.models import Artefact, Promotion, Run
from edgeduet_server.registry.recorded_run import GLOBAL_MODEL
from edgeduet_server.registry.runs import find_run
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.atomic_files import atomic_write_bytes, atomic_write_json

CHUNK = 256 * 1024
CURRENT = "current"


class ModelCalls:
    """Models of one server home.

    Args:
        registry: the registry.
        home: the server home.
        now: the clock.
    """

    def __init__(self, registry: Registry, home: Path, now: Callable[[], datetime]) -> None:
        self._registry = registry
        self._runs = home / "runs"
        self._models = home / "models"
        self._now = now

    def list_models(self, request: pb.ListModelsRequest, caller: Caller) -> pb.ListModelsReply:
        """Newest run first, in it by stage."""
        with self._registry.reading() as session:
            rows = select(Artefact).where(Artefact.kind == GLOBAL_MODEL)
            if request.run:
                rows = rows.where(Artefact.run_id == find_run(session, request.run).id)
            promoted = in_force(session)
            found = session.scalars(rows.order_by(Artefact.run_id.desc(), Artefact.stage))
            return pb.ListModelsReply(models=[model_message(session, row, promoted) for row in found])

    def export_model(self, request: pb.ModelRequest, caller: Caller) -> Iterator[pb.FileChunk]:
        """Send a model's file, after its checksum has been verified."""
        with self._registry.reading() as session:
            row, run = self._find(session, request)
        content = self._content(row, run)
        return chunks(f"{run.name}-stage-{row.stage + 1:03d}.safetensors", content, row.sha256)

    def promote_model(self, request: pb.ModelRequest, caller: Caller) -> pb.Model:
        """Make a model the one that is used."""
        with self._registry.reading() as session:
            row, run = self._find(session, request)
            present = in_force(session)
            if present is not None and present.artefact_id == row.id:
                raise Conflict(f"the model of run '{run.name}', stage {row.stage}, is promoted already")
        self._put_in_place(row, run)
        with self._registry.writing() as session:
            promotion = Promotion(artefact_id=row.id, by=caller.name, at=self._now())
            session.add(promotion)
            session.flush()
            return model_message(session, row, promotion)

    def rollback_model(self, request: pb.RollbackModelRequest, caller: Caller) -> pb.RollbackModelReply:
        """Put the model that was promoted before in place again."""
        with self._registry.reading() as session:
            present = in_force(session)
            if present is None:
                raise Conflict("no model is promoted, so there is nothing to roll back")
            before = in_force(session, before=present.id)
            old = session.get_one(Artefact, before.artefact_id) if before is not None else None
            old_run = session.get_one(Run, old.run_id) if old is not None else None
        if old is not None and old_run is not None:
            self._put_in_place(old, old_run)
        else:
            for suffix in (".json", ".safetensors"):
                (self._models / f"{CURRENT}{suffix}").unlink(missing_ok=True)
        with self._registry.writing() as session:
            session.get_one(Promotion, present.id).rolled_back_at = self._now()
            session.flush()
            reply = pb.RollbackModelReply(
                rolled_back=model_message(session, session.get_one(Artefact, present.artefact_id), None)
            )
            if old is not None:
                reply.promoted.CopyFrom(model_message(session, old, before))
            return reply

    def _find(self, session: Session, request: pb.ModelRequest) -> tuple[Artefact, Run]:
        if request.promoted:
            present = in_force(session)
            if present is None:
                raise UnknownName("no model is promoted; promote one with: edgeduet-admin models promote RUN")
            promoted = session.get_one(Artefact, present.artefact_id)
            return promoted, session.get_one(Run, promoted.run_id)
        run = find_run(session, request.run or "latest")
        rows = select(Artefact).where(Artefact.run_id == run.id, Artefact.kind == GLOBAL_MODEL)
        if request.HasField("stage"):
            rows = rows.where(Artefact.stage == request.stage)
        row = session.scalar(rows.order_by(Artefact.stage.desc()).limit(1))
        if row is None:
            which = f" of stage {request.stage}" if request.HasField("stage") else ""
            raise UnknownName(f"run '{run.name}' has no model{which} yet; see: edgeduet-admin models list")
        return row, run

    def _content(self, row: Artefact, run: Run) -> bytes:
        """Return a model's bytes; nothing outside the folders of runs is ever read."""
        path = (self._runs / run.name / row.path).resolve()
        if not path.is_relative_to(self._runs.resolve()):
            raise RegistryError(f"the registry names {path}, which is outside {self._runs}; it was tampered with")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UnknownName(f"the file of the model, {path}, cannot be read ({error.strerror})") from error
        if hashlib.sha256(content).hexdigest() != row.sha256:
            raise Conflict(f"{path} is damaged (its checksum is not the one noted when it was made)")
        return content

    def _put_in_place(self, row: Artefact, run: Run) -> None:
        atomic_write_bytes(self._models / f"{CURRENT}.safetensors", self._content(row, run))
        card = {"run": run.name, "method": run.method, "stage": row.stage, "sha256": row.sha256}
        atomic_write_json(self._models / f"{CURRENT}.json", card)


def in_force(session: Session, *, before: int | None = None) -> Promotion | None:
    """Return the newest promotion that was not rolled back; of those older than promotion number ``before``."""
    rows = select(Promotion).where(Promotion.rolled_back_at.is_(None))
    if before is not None:
        rows = rows.where(Promotion.id < before)
    return session.scalar(rows.order_by(Promotion.id.desc()).limit(1))


def chunks(name: str, content: bytes, sha256: str) -> Iterator[pb.FileChunk]:
    """Yield a file in pieces; the first one says what it is."""
    head = pb.FileChunk(name=name, size=len(content), sha256=sha256, content=content[:CHUNK])
    yield head
    for start in range(CHUNK, len(content), CHUNK):
        yield pb.FileChunk(content=content[start : start + CHUNK])
