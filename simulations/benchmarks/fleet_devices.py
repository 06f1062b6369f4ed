"""Simulated devices for the load benchmark: a thread each that speaks the real fleet protocol with its own key.

Connection, signatures, heartbeats, pulling and pushing of objects are Flower's own SuperNode code
(``flwr.supernode.fleet_http_connection``), over TLS through the proxy. What a SuperNode would start a process
for, training, is left out: the reply holds the arrays that came, which is what the server has to carry and average.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_connection import http_request_response

from edgeduet_shared.messages import (
    Body,
    EvaluateReply,
    EvaluateRequest,
    HelloReply,
    TrainReply,
    TrainRequest,
    decode,
    encode,
)

log = logging.getLogger("edgeduet.bench")

# As often as an idle SuperNode asks for work.
POLL_SECONDS = 3.0
EXAMPLES = 10


@dataclass
class Fleet:
    """All simulated devices.

    Attributes:
        server: ``HOST:PORT`` of the proxy.
        authority: the server's ``ca.crt``.
        tasks: number of tasks of the run.
        work: seconds each message takes a device.
    """

    server: str
    authority: Path
    tasks: int
    work: float
    over: threading.Event = field(default_factory=threading.Event)
    connected: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    answered: int = 0
    problems: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, keys: Sequence[ec.EllipticCurvePrivateKey]) -> list[threading.Thread]:
        """Start a device per key; return when all are connected."""
        threads = [
            threading.Thread(target=self._live, args=(index, key), name=f"device-{index}", daemon=True)
            for index, key in enumerate(keys)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            self.connected.acquire()
        return threads

    def _live(self, index: int, key: ec.EllipticCurvePrivateKey) -> None:
        pause = random.Random(index)
        certificate = self.authority.read_bytes()
        try:
            with http_request_response(self.server, False, certificate, (key, key.public_key())) as connection:
                _, receive, send, _, _, pull, push, confirm = connection
                self.connected.release()
                self.over.wait(pause.uniform(0, POLL_SECONDS))
                while not self.over.is_set():
                    received = receive()
                    if received is None:
                        self.over.wait(POLL_SECONDS)
                        continue
                    head, tree = received
                    run = head.metadata.run_id
                    message = pull_and_inflate_object_from_tree(
                        tree,
                        lambda name, run=run: pull(run, name),
                        lambda name, run=run: confirm(run, name),
                        return_type=Message,
                    )
                    message.metadata.__dict__["_message_id"] = tree.object_id
                    started = time.monotonic()
                    reply = Message(encode(self._answer(message, index)), reply_to=message)
                    self.over.wait(max(0.0, self.work - (time.monotonic() - started)))
                    reply.metadata.__dict__["_message_id"] = reply.object_id
                    wanted, session = send(reply, get_object_tree(reply), time.monotonic() - started)
                    push_objects(
                        get_all_nested_objects(reply),
                        lambda name, content, run=run, session=session: push(run, session, name, content),
                        object_ids_to_push=wanted,
                    )
                    with self._lock:
                        self.answered += 1
        except Exception as error:
            log.exception("device %d ended", index)
            with self._lock:
                self.problems.append(f"device {index}: {type(error).__name__}: {error}")

    def _answer(self, message: Message, client: int) -> Body:
        """Answer as a client would, without the work."""
        kind = message.metadata.message_type
        if kind == "train":
            asked = decode(message.content, TrainRequest)
            return TrainReply(
                client, asked.stage, asked.round, EXAMPLES, 1.0, 0.5, 1, self.work, update=dict(asked.shared)
            )
        if kind == "evaluate":
            evaluated = decode(message.content, EvaluateRequest)
            seen = tuple(EXAMPLES // 2 if task <= evaluated.stage else -1 for task in range(self.tasks))
            totals = (EXAMPLES,) * self.tasks
            unknown = (-1,) * self.tasks
            return EvaluateReply(client, evaluated.stage, seen, seen, totals, unknown, totals, seconds=self.work)
        return HelloReply(client)


def let_in(superlink: str, authority: Path, count: int) -> list[ec.EllipticCurvePrivateKey]:
    """Make ``count`` keys and register them at the SuperLink on loopback, as ``clients approve`` does one by one."""
    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(count)]
    with ControlHttpClient.from_server_address(
        superlink, False, authority.read_bytes(), interceptors=[RuntimeVersionHttpInterceptor(component_name="bench")]
    ) as control:
        for index, key in enumerate(keys):
            control.RegisterNode(
                RegisterNodeRequest(public_key=public_key_to_bytes(key.public_key()), name=f"device-{index}")
            )
    return keys
