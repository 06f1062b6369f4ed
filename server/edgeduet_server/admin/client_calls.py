"""Calls about devices: who is enrolled, who may come in, who was seen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime

from sqlalchemy import case, delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from edgeduet_server.admin.flower_view import Flower, FlowerView
from edgeduet_server.admin.messages import last_words
from edgeduet_server.admin.refused_devices import refused_devices
from edgeduet_server.admin.tokens import Caller
from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.registry.desired import latest_orders, wishes
from edgeduet_server.registry.errors import Conflict, RegistryError, UnknownName
from edgeduet_server.registry.models import ClientSighting, Device, Round, Run
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.admin_api.as_json import timestamp
from edgeduet_shared.enrolment import EnrolmentError, EnrolmentRequest, read_request, same_code
from edgeduet_shared.errors import EdgeDuetError, nearest

log = logging.getLogger("edgeduet.admin")

PENDING, APPROVED, REVOKED = "pending", "approved", "revoked"


class ClientCalls:
    """Devices of one server home.

    Args:
        registry: the registry.
        config: of the server home: by which names devices reach it, and the log of its proxy.
        flower: lets devices in and out.
        view: what Flower says.
        now: the clock.
    """

    def __init__(
        self,
        registry: Registry,
        config: ServerConfig,
        flower: Flower,
        view: FlowerView,
        now: Callable[[], datetime],
    ) -> None:
        self._registry = registry
        self._names = tuple(config.network.public_names)
        self._logs = config.folder("logs")
        self._flower = flower
        self._view = view
        self._now = now

    def list_clients(self, request: pb.ListClientsRequest, caller: Caller) -> pb.ListClientsReply:
        """Enrolled devices by name, then those seen in the newest run that are not enrolled here."""
        nodes, problem = self._view.nodes()
        connections = {node.node_id: node.status for node in nodes}
        with self._registry.reading() as session:
            devices = list(session.scalars(select(Device).order_by(Device.name, Device.id)))
            refused = refused_devices(session, self._logs, self._now())
            messages = [_device_message(session, device, connections, refused) for device in devices]
            newest = session.scalar(select(Run).order_by(Run.id.desc()).limit(1))
            if newest is not None:
                known = {device.node_id for device in devices}
                seen = select(ClientSighting).where(ClientSighting.run_id == newest.id).order_by(ClientSighting.client)
                for sighting in session.scalars(seen):
                    if sighting.node_id not in known:
                        message = pb.Client(
                            name=sighting.name,
                            node_id=sighting.node_id,
                            connection=connections.get(sighting.node_id, ""),
                        )
                        messages.append(_with_sighting(session, message, newest, sighting))
        return pb.ListClientsReply(clients=messages, flower_problem=problem)

    def get_client(self, request: pb.ClientRequest, caller: Caller) -> pb.Client:
        """Return one device."""
        nodes, _ = self._view.nodes()
        with self._registry.reading() as session:
            device = _find_device(session, request.name)
            refused = refused_devices(session, self._logs, self._now())
            return _device_message(session, device, {node.node_id: node.status for node in nodes}, refused)

    def approve_client(self, request: pb.ApproveClientRequest, caller: Caller) -> pb.Client:
        """Let a device in: its request must be whole, fresh, meant for this server, new, and the one with this code."""
        asked = read_request(request.request, now=self._now())
        if not same_code(request.code, asked.code):
            raise EnrolmentError(
                f"the code does not belong to this request of '{asked.name}': the request was exchanged on its way, "
                "or the code mistyped; compare with what the device shows"
            )
        self._check_server(asked)
        self._reserve(asked, caller)
        try:
            node_id = self._flower.register_node(asked.public_key, asked.name)
        except EdgeDuetError:
            # Nothing was let in: the same request may be tried again.
            with self._registry.writing() as session:
                session.execute(delete(Device).where(Device.nonce == asked.nonce, Device.status == PENDING))
            raise
        finally:
            self._view.forget()
        with self._registry.writing() as session:
            device = session.scalars(select(Device).where(Device.nonce == asked.nonce)).one()
            device.status, device.node_id, device.approved_at = APPROVED, node_id, self._now()
            log.info("device %s let in as node %s by %s", device.name, node_id, caller.name)
            return _device_message(session, device, {}, {})

    def revoke_client(self, request: pb.ClientRequest, caller: Caller) -> pb.Client:
        """Lock a device out for ever."""
        with self._registry.reading() as session:
            device = _find_device(session, request.name)
            if device.status == REVOKED:
                raise Conflict(f"device '{device.name}' is revoked already")
        if device.node_id is not None:
            self._flower.unregister_node(device.node_id)
            self._view.forget()
        with self._registry.writing() as session:
            row = session.get_one(Device, device.id)
            row.status, row.revoked_at = REVOKED, self._now()
            return _device_message(session, row, {}, {})

    def _check_server(self, asked: EnrolmentRequest) -> None:
        host = asked.server.rpartition(":")[0].strip("[]") or asked.server
        if host.lower() not in {name.lower() for name in self._names}:
            raise EnrolmentError(
                f"the request is meant for the server {asked.server}, but devices reach this one as "
                f"{', '.join(self._names)} ([network] public_names); enrol again with the right --server"
            )

    def _reserve(self, asked: EnrolmentRequest, caller: Caller) -> None:
        """Take name, key and nonce; the database lets each be taken once."""
        row = Device(
            name=asked.name,
            public_key=asked.public_key,
            fingerprint=asked.fingerprint,
            nonce=asked.nonce,
            status=PENDING,
            approved_by=caller.name,
            created_at=asked.created,
        )
        try:
            with self._registry.writing() as session:
                _check_new(session, asked)
                session.add(row)
        except RegistryError as error:
            if isinstance(error.__cause__, IntegrityError):
                raise Conflict(f"device '{asked.name}' is being let in by somebody else at this moment") from error
            raise


def _check_new(session: Session, asked: EnrolmentRequest) -> None:
    if session.scalar(select(Device.id).where(Device.nonce == asked.nonce)) is not None:
        raise Conflict(
            f"this request of '{asked.name}' was used before; a request is good once: make a new one on the device"
        )
    same_key = session.scalar(select(Device).where(Device.fingerprint == asked.fingerprint))
    if same_key is not None:
        again = "a revoked key cannot come back: make a new key on the device" if same_key.status == REVOKED else "see"
        raise Conflict(
            f"the key of this request belongs to device '{same_key.name}' ({same_key.status}); {again}"
            + ("" if same_key.status == REVOKED else f": clients show {same_key.name}")
        )
    if session.scalar(select(Device.id).where(Device.name == asked.name, Device.status != REVOKED)) is not None:
        raise Conflict(f"there is a device '{asked.name}' already; enrol with another --name, or revoke that one first")


def _find_device(session: Session, name: str) -> Device:
    """Return the device of that name; of several, the one that is not revoked, else the newest."""
    revoked_last = case((Device.status == REVOKED, 1), else_=0)
    device = session.scalar(select(Device).where(Device.name == name).order_by(revoked_last, Device.id.desc()).limit(1))
    if device is None:
        known = session.scalars(select(Device.name)).all()
        hint = nearest(name, known) if known else "; none is enrolled yet"
        raise UnknownName(f"no device {name!a}{hint}")
    return device


def _device_message(
    session: Session, device: Device, connections: Mapping[str, str], refused: Mapping[str, str]
) -> pb.Client:
    message = pb.Client(
        name=device.name,
        status=device.status,
        connection=connections.get(device.node_id or "", ""),
        node_id=device.node_id or "",
        public_key=device.public_key,
        fingerprint=device.fingerprint,
        approved_by=device.approved_by,
        created_at=timestamp(device.created_at),
        approved_at=timestamp(device.approved_at),
        revoked_at=timestamp(device.revoked_at),
        refused=refused.get(device.fingerprint, ""),
    )
    found = session.execute(
        select(ClientSighting, Run)
        .join(Run, Run.id == ClientSighting.run_id)
        .where(ClientSighting.node_id == device.node_id)
        .order_by(Run.id.desc())
        .limit(1)
    ).first()
    return message if found is None else _with_sighting(session, message, found[1], found[0])


def _with_sighting(session: Session, message: pb.Client, run: Run, sighting: ClientSighting) -> pb.Client:
    message.run, message.client = run.name, sighting.client
    message.last_seen.FromDatetime(sighting.last_seen)
    message.excluded = sighting.client in latest_orders(wishes(session, run.id)).excluded
    rounds = session.execute(
        select(Round.asked, Round.clients, Round.missing, Round.failures)
        .where(Round.run_id == run.id)
        .order_by(Round.stage, Round.round)
    )
    for asked, used, missing, failures in rounds:
        if sighting.client not in asked:
            continue
        message.rounds_asked += 1
        if any(client["client"] == sighting.client for client in used):
            message.rounds_used += 1
        for failure in failures:
            if failure["client"] == sighting.client:
                message.last_failure = f"{failure['reason']}: {last_words(failure['text'])}"
        if sighting.client in missing:
            message.last_failure = "no answer in time"
    return message
