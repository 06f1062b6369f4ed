"""Typed requests to clients and typed replies back, over Flower's ``Grid``.

Facts of Flower 1.42 that shape this module (``methods/flower.md`` 1.6, 2.4, 2.5):

* a node id is random and says nothing; a node is asked once which client (partition) it is,
* ``get_node_ids`` may be empty at first, and nodes come and go: waiting has a deadline,
* an error reply about an unavailable node carries the SuperLink's node id, so every reply is mapped
  through the message it answers,
* a timeout only stops our waiting: the node stays busy until the message's time to live is over. A
  client that still owes an answer is therefore left alone until it answers or that time has passed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic

from flwr.app import Error, Message
from flwr.serverapp import Grid

from edgeduet_server.timekeeping import Clock
from edgeduet_shared.errors import MessageError, VersionError
from edgeduet_shared.messages import (
    HELLO,
    Body,
    BodyT,
    HelloReply,
    HelloRequest,
    WireArrays,
    decode,
    encode,
    serialised_bytes,
)

log = logging.getLogger("edgeduet.server")

FIRST_PAUSE = 0.01
LONGEST_PAUSE = 1.0

# Flower's error codes (flwr.common.constant.ErrorCode) in words.
_ERROR_REASONS = {
    0: "engine-error",
    1: "engine-error",
    2: "client-error",
    3: "expired",
    4: "expired",
    5: "unavailable",
    6: "client-error",
    7: "engine-error",
    8: "client-crashed",
}


@dataclass(frozen=True)
class Failure:
    """Why a client's answer cannot be used; ``kind`` is the name of the exception where there was one."""

    client: int
    reason: str
    text: str
    kind: str = ""


@dataclass
class Answers(Generic[BodyT]):
    """What came back from one question, sorted by client, and who never answered.

    ``clients[i]`` is who was asked what ``replies[i]`` answers, whatever the reply says of itself.
    """

    replies: list[BodyT] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    missing: tuple[int, ...] = ()
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass(frozen=True)
class _Debt:
    client: int
    expires: float


class Exchange:
    """The server's side of all conversations of one run.

    Args:
        grid: Flower's Grid.
        clock: what deadlines are counted on.
        clients: number of clients; valid client ids are ``0 .. clients - 1``.
        time_to_live: seconds a message and its answer stay valid; may be changed between questions.
        check_stop: called while waiting; raises to leave.
    """

    def __init__(
        self, grid: Grid, clock: Clock, *, clients: int, time_to_live: float, check_stop: Callable[[], None]
    ) -> None:
        self._grid = grid
        self._clock = clock
        self._clients = clients
        self.time_to_live = time_to_live
        self._check_stop = check_stop
        self._client_of: dict[int, int] = {}
        self._refused_clients: set[int] = set()
        self._refused_nodes: set[int] = set()
        self._online: dict[int, int] = {}
        self._greeted: dict[int, float] = {}
        self._hellos: dict[str, int] = {}
        self._owed: dict[str, _Debt] = {}
        self._late = 0

    def take_late(self) -> int:
        """Return how many replies came after their round since the last call."""
        late, self._late = self._late, 0
        return late

    @property
    def online(self) -> dict[int, int]:
        """The node of each client that was online when last looked."""
        return dict(self._online)

    def available(self, *, wanted: int, wait: float, without: Collection[int] = ()) -> list[int]:
        """Return the clients that are online and owe nothing, in order, leaving out those in ``without``.

        Waits until there are ``wanted`` of them, at most ``wait`` seconds.
        """
        deadline = self._clock.now() + wait
        pause = FIRST_PAUSE
        while True:
            self._check_stop()
            self._meet_nodes()
            self._forget_debts()
            busy = {debt.client for debt in self._owed.values()}
            free = sorted(client for client in self._online if client not in busy and client not in without)
            remaining = deadline - self._clock.now()
            if len(free) >= wanted or remaining <= 0:
                return free
            self._clock.sleep(min(pause, remaining))
            pause = min(2 * pause, LONGEST_PAUSE)

    def ask(
        self,
        requests: Mapping[int, Body],
        answer: type[BodyT],
        *,
        message_type: str,
        timeout: float,
        group: str,
    ) -> Answers[BodyT]:
        """Send each client its request and wait for the answers, at most ``timeout`` seconds.

        Sizes are those of the record inside each message (protobuf encoding), both ways. A client that
        does not answer in time is named in ``missing`` and not asked again before it answers, or before
        the message's time to live is over.
        """
        answers: Answers[BodyT] = Answers()
        pending: dict[str, int] = self._send(requests, message_type, group, answers)
        expires = self._clock.now() + self.time_to_live
        deadline = self._clock.now() + timeout
        pause = FIRST_PAUSE
        while pending:
            self._check_stop()
            messages = self._pull([*pending, *self._owed])
            for message in messages:
                identifier = message.metadata.reply_to_message_id
                if identifier in pending:
                    self._take(message, pending.pop(identifier), answer, answers)
                elif self._owed.pop(identifier, None) is not None:
                    self._late += 1
            if messages:
                pause = FIRST_PAUSE
                continue
            remaining = deadline - self._clock.now()
            if remaining <= 0:
                break
            self._clock.sleep(min(pause, remaining))
            pause = min(2 * pause, LONGEST_PAUSE)
        self._owed.update({identifier: _Debt(client, expires) for identifier, client in pending.items()})
        answers.missing = tuple(sorted(pending.values()))
        order = sorted(range(len(answers.clients)), key=answers.clients.__getitem__)
        answers.replies = [answers.replies[index] for index in order]
        answers.clients = [answers.clients[index] for index in order]
        answers.failures.sort(key=lambda failure: failure.client)
        return answers

    def _send(
        self, requests: Mapping[int, Body], message_type: str, group: str, answers: Answers[BodyT]
    ) -> dict[str, int]:
        """Push one message per client; return message id -> client of what was accepted."""
        wire: WireArrays = {}
        messages: dict[int, Message] = {}
        for client in sorted(requests):
            node = self._online.get(client)
            if node is None:
                answers.failures.append(Failure(client, "unavailable", "the client is not online"))
                continue
            record = encode(requests[client], wire)
            messages[client] = Message(record, node, message_type, ttl=self.time_to_live, group_id=group)
            answers.bytes_down += serialised_bytes(record)
        # Flower leaves out the ids of messages it would not take (or puts None or ""), so that a
        # position in the returned list says nothing; the id is also set on each message.
        accepted = set(self._grid.push_messages(list(messages.values())))
        pending: dict[str, int] = {}
        for client, message in messages.items():
            if message.metadata.message_id in accepted:
                pending[message.metadata.message_id] = client
            else:
                answers.failures.append(Failure(client, "not-sent", "Flower did not accept the message"))
        return pending

    def _take(self, message: Message, client: int, answer: type[BodyT], answers: Answers[BodyT]) -> None:
        if message.has_error():
            answers.failures.append(describe_error(client, message.error))
            return
        answers.bytes_up += serialised_bytes(message.content)
        try:
            answers.replies.append(decode(message.content, answer))
            answers.clients.append(client)
        except VersionError as error:
            if client not in self._refused_clients:
                self._refused_clients.add(client)
                log.warning("client %d is refused: %s", client, error)
            answers.failures.append(Failure(client, "other-version", str(error), "VersionError"))
        except MessageError as error:
            answers.failures.append(Failure(client, "malformed", str(error), "MessageError"))

    def _pull(self, identifiers: Iterable[str]) -> list[Message]:
        return list(self._grid.pull_messages(list(identifiers)))

    def _forget_debts(self) -> None:
        for message in self._pull(self._owed) if self._owed else ():
            if self._owed.pop(message.metadata.reply_to_message_id, None) is not None:
                self._late += 1
        now = self._clock.now()
        self._owed = {identifier: debt for identifier, debt in self._owed.items() if debt.expires > now}

    def _meet_nodes(self) -> None:
        """Ask nodes not met before who they are, take the answers, and note who is online."""
        nodes = sorted(self._grid.get_node_ids())
        now = self._clock.now()
        strangers = [n for n in nodes if n not in self._client_of and self._greeted.get(n, now) <= now]
        if strangers:
            self._greeted.update(dict.fromkeys(strangers, now + self.time_to_live))
            self._hellos = {message: node for message, node in self._hellos.items() if node not in strangers}
            hello = encode(HelloRequest())
            messages = [Message(hello, node, HELLO, ttl=self.time_to_live, group_id="hello") for node in strangers]
            self._grid.push_messages(messages)
            self._hellos.update({m.metadata.message_id: m.metadata.dst_node_id for m in messages})
        while self._hellos:
            replies = self._pull(self._hellos)
            for message in replies:
                node = self._hellos.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    self._introduce(node, message)
            if not replies:
                break
        self._online = {}
        for node in nodes:
            client = self._client_of.get(node)
            if client is None or client < 0:
                continue
            if client in self._online:
                if node not in self._refused_nodes:
                    self._refused_nodes.add(node)
                    log.warning("two online nodes say they are client %d: node %d is ignored", client, node)
                continue
            self._online[client] = node

    def _introduce(self, node: int, message: Message) -> None:
        """Note which client a node is; -1 stands for one that takes no part, and says why once."""
        if message.has_error():
            failure = describe_error(-1, message.error)
            if failure.reason in ("expired", "unavailable"):
                return  # it went away before it answered: greet it again after the time to live
            self._client_of[node] = -1
            log.warning("node %d is refused: it does not answer the greeting (%s)", node, failure.text)
            return
        try:
            client = decode(message.content, HelloReply).client
        except MessageError as error:
            self._client_of[node] = -1
            log.warning("node %d is refused: %s", node, error)
            return
        if not 0 <= client < self._clients:
            self._client_of[node] = -1
            log.warning(
                "node %d is refused: it says it is client %d, but the scenario has clients 0 to %d "
                "(partition-id in its node config, or federation.clients)",
                node,
                client,
                self._clients - 1,
            )
            return
        self._client_of[node] = client


def describe_error(client: int, error: Error) -> Failure:
    """Return what a Flower error reply says, in our words.

    Flower's reason reads ``<class 'module.Name'>:<'text'>``; our in-process engine appends the
    traceback. Ray wraps a client's exception, so the name of ours is also looked for in the text.
    """
    text = (error.reason or "").strip()
    found = re.match(r"<class '(?:[\w.]+\.)?([\w()]+)'>", text)
    kind = found.group(1) if found else ""
    reason = _ERROR_REASONS.get(error.code, "engine-error")
    if reason == "client-error" and "VersionError" in text:
        reason, kind = "other-version", "VersionError"
    return Failure(client, reason, text or f"Flower error code {error.code}", kind)
