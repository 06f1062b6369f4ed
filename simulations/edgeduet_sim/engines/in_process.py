"""The default engine: Flower's ``Grid`` in this process, without Ray.

The same ServerApp and ClientApp run as under Flower's own engines and give the same numbers. What is
gained: the frozen backbone and the feature cache exist once, a message costs a function call, and
clients can be trained in blocks by a handler that vectorises over them.

Clients are handled when the server pulls their answers, a few per pull, so that answers of a thousand
clients are never held together, and a run can be stopped in between. Time is simulated
(:class:`~edgeduet_server.timekeeping.SimulatedClock`): deadlines do not depend on how fast this
machine is, and waiting for a client that never answers costs nothing.

With ``workers``, each client is bound to one of several worker processes, which then holds its
personal state; results do not depend on the number of workers.

Uses the constructor arguments and metadata fields of flwr 1.42 (``methods/flower.md`` 1.7);
``tests/sim/test_engines.py`` holds it against Flower's Ray engine.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import multiprocessing
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from edgeduet_server.checkpoint import Arrays, PersonalSnapshot
from edgeduet_server.timekeeping import SimulatedClock
from edgeduet_shared.errors import FederationError
from edgeduet_shared.run_config import RunConfig

log = logging.getLogger("edgeduet.sim")

RUN_ID = 1
FIRST_NODE = 1000
# Messages handled per pull, or handed to a worker process at a time: enough that the cost per pull does
# not matter and broadcast arrays are sent once for several clients, few enough to keep memory flat and
# all workers busy.
PORTION = 16

BlockHandler = Callable[[list[Message], list[Context]], Sequence[Message | None]]


@dataclass(frozen=True)
class Clients:
    """Everything the process that runs the clients needs.

    Attributes:
        app: the ClientApp, or where it is (``module:attribute``), which is needed for spawned workers.
        count: number of clients.
        run_config: Flower's run configuration.
        handle_block: trains several clients at once; answers in the order of the messages.
        block_size: messages given to ``handle_block`` at a time.
        personal: returns the object through which the app's personal states are saved and restored.
    """

    app: ClientApp | str
    count: int
    run_config: UserConfig
    handle_block: BlockHandler | None = None
    block_size: int = 1
    personal: Callable[[], PersonalSnapshot] | None = None


class ClientRunner:
    """Runs messages through the ClientApp, each client with its own Flower ``Context``."""

    def __init__(self, clients: Clients, ids: Collection[int]) -> None:
        self._app = load_client_app(clients.app) if isinstance(clients.app, str) else clients.app
        self._handle_block = clients.handle_block
        self._block_size = clients.block_size
        self._personal = clients.personal() if clients.personal else None
        self._contexts = {
            client: Context(
                run_id=RUN_ID,
                node_id=FIRST_NODE + client,
                node_config={"partition-id": client, "num-partitions": clients.count},
                state=RecordDict(),
                run_config=dict(clients.run_config),
            )
            for client in ids
        }

    def handle(self, messages: Sequence[Message]) -> list[Message | None]:
        """Return the answer to each message; None where the client stays silent."""
        if self._handle_block is None or not _all_train(messages):
            return [self._handle_one(message) for message in messages]
        replies: list[Message | None] = []
        for start in range(0, len(messages), self._block_size):
            replies += self._handle_together(self._handle_block, messages[start : start + self._block_size])
        return replies

    def _handle_together(self, handle_block: BlockHandler, messages: Sequence[Message]) -> list[Message | None]:
        if len(messages) > 1:
            # References to all states, so that half a block can be undone.
            before = self._personal.snapshot(self._contexts) if self._personal is not None else {}
            contexts = [self._contexts[_client_of(message)] for message in messages]
            try:
                return list(handle_block([_private_copy(message) for message in messages], contexts))
            except Exception:
                # One client's trouble must not fail its whole block, nor be hidden: the reference path
                # finds out whose it is.
                log.warning(
                    "training clients %s as one block failed; training them one at a time\n%s",
                    [_client_of(message) for message in messages],
                    traceback.format_exc(),
                )
                if self._personal is not None:
                    self._personal.restore(before)
        return [self._handle_one(message) for message in messages]

    def _handle_one(self, message: Message) -> Message | None:
        context = self._contexts[_client_of(message)]
        before = _copy_records(context.state)
        try:
            reply: Message | None = self._app(_private_copy(message), context)
            return reply
        except Exception as error:
            # As under Flower's engines: an error reply, and the context as it was before the message.
            context.state = before
            reason = f"{type(error)}:<'{error}'>\n{traceback.format_exc()}"
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)

    def snapshot(self, clients: Collection[int]) -> dict[int, Arrays]:
        """Return the app's personal states, and Flower's context states where they hold something."""
        states = {client: dict(arrays) for client, arrays in self._app_states(clients).items()}
        result: dict[int, Arrays] = {}
        for client in clients:
            arrays = {f"app/{name}": value for name, value in states.get(client, {}).items()}
            context = self._contexts[client].state
            if context:
                content = recorddict_to_proto(context).SerializeToString(deterministic=True)
                arrays["context"] = np.frombuffer(content, dtype=np.uint8)
            if arrays:
                result[client] = arrays
        return result

    def restore(self, states: Mapping[int, Arrays]) -> None:
        """Replace all personal and context states."""
        for client, context in self._contexts.items():
            content = states.get(client, {}).get("context")
            proto = ProtoRecordDict()
            if content is not None:
                proto.ParseFromString(content.tobytes())
            context.state = recorddict_from_proto(proto)
        if self._personal is not None:
            app_states = {
                client: {name[4:]: value for name, value in arrays.items() if name.startswith("app/")}
                for client, arrays in states.items()
            }
            self._personal.restore({client: arrays for client, arrays in app_states.items() if arrays})

    def _app_states(self, clients: Collection[int]) -> dict[int, Arrays]:
        return self._personal.snapshot(clients) if self._personal is not None else {}


class InProcessGrid(Grid):
    """Flower's ``Grid`` for simulated clients in this process or in a few worker processes.

    Also a :class:`~edgeduet_server.checkpoint.PersonalSnapshot` of all simulated clients.

    Args:
        clients: the ClientApp and how it is run.
        workers: worker processes; 0 runs the clients in this process.
        start_method: how workers start. ``fork`` shares what is loaded (torch, split, caches) with them;
            ``spawn`` works everywhere and needs ``clients.app`` as text. Forks of a process that has started
            torch's autograd threads (an export to ONNX does, and a GPU) cannot train: spawned workers take
            their place, with a line in the log, or where ``clients.app`` is no text, a warning is logged.

    Raises:
        FederationError: a worker process died.
    """

    def __init__(self, clients: Clients, *, workers: int = 0, start_method: str = "fork") -> None:
        # Flower keeps the identity of the running task in class attributes; Message reads them.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SUPERLINK_NODE_ID
        self._run = Run.create_empty(run_id=RUN_ID)
        self._clock = SimulatedClock()
        self._count = clients.count
        self._portion = max(PORTION, clients.block_size)
        self._numbers = itertools.count()
        self._waiting: OrderedDict[str, Message] = OrderedDict()
        self._ready: dict[str, Message] = {}
        self._workers: list[_Worker] = []
        self._runner: ClientRunner | None = None
        if workers > 0:
            self._workers = _start_workers(clients, min(workers, clients.count), start_method)
        else:
            self._runner = ClientRunner(clients, range(clients.count))

    @property
    def clock(self) -> SimulatedClock:
        """Time as the simulated federation sees it."""
        return self._clock

    @property
    def run(self) -> Run:
        """Information on the run."""
        return self._run

    def set_run(self, run: Run) -> None:
        """Take over information on the run."""
        self._run = run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a new message (Flower's older way of making one)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of all simulated clients: they are always online."""
        return range(FIRST_NODE, FIRST_NODE + self._count)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages; return their ids."""
        identifiers = []
        for message in messages:
            identifier = f"m{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = identifier
            self._waiting[identifier] = message
            identifiers.append(identifier)
        return identifiers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the next block of clients work on what was pushed, and return the answers there are."""
        wanted = set(message_ids)
        if self._workers:
            self._feed_workers(wanted)
            self._take_from_workers(block=not wanted & self._ready.keys())
        else:
            block = self._next_block(wanted, range(self._count))
            if block and self._runner is not None:
                self._keep(block, self._runner.handle(block))
        return [self._ready.pop(identifier) for identifier in sorted(wanted & self._ready.keys(), key=_number)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and return all answers; silent clients are left out at once."""
        pending = set(self.push_messages(messages))
        replies: list[Message] = []
        while pending & self._waiting.keys() or any(pending & worker.busy for worker in self._workers):
            replies += self.pull_messages(pending)
        return replies

    def snapshot(self, clients: Collection[int]) -> dict[int, Arrays]:
        """Return the personal states of ``clients``."""
        if self._runner is not None:
            return self._runner.snapshot(clients)
        states: dict[int, Arrays] = {}
        for worker in self._workers:
            states |= worker.call("snapshot", [client for client in clients if client in worker.clients])
        return states

    def restore(self, states: Mapping[int, Arrays]) -> None:
        """Replace the personal states of all clients."""
        if self._runner is not None:
            self._runner.restore(states)
        for worker in self._workers:
            worker.call("restore", {client: s for client, s in states.items() if client in worker.clients})

    def close(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            worker.close()
        self._workers = []

    def __enter__(self) -> InProcessGrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next_block(self, wanted: set[str], clients: Container[int]) -> list[Message]:
        """Take the next messages of one type to ``clients`` off the queue, in the order they were pushed."""
        block: list[Message] = []
        for identifier, message in self._waiting.items():
            if identifier not in wanted or _client_of(message) not in clients:
                continue
            if block and message.metadata.message_type != block[0].metadata.message_type:
                break
            block.append(message)
            if len(block) == self._portion:
                break
        for message in block:
            del self._waiting[message.metadata.message_id]
        return block

    def _keep(self, block: Sequence[Message], replies: Sequence[Message | None]) -> None:
        for message, reply in zip(block, replies, strict=True):
            if reply is None:
                log.debug("client %d does not answer", _client_of(message))
                continue
            reply.metadata.__dict__["_message_id"] = f"r{message.metadata.message_id}"
            self._ready[message.metadata.message_id] = reply

    def _feed_workers(self, wanted: set[str]) -> None:
        for worker in self._workers:
            if not worker.busy:
                block = self._next_block(wanted, worker.clients)
                if block:
                    worker.give(block)

    def _take_from_workers(self, block: bool) -> None:
        busy = {worker.connection: worker for worker in self._workers if worker.busy}
        # With nothing to hand out yet, wait for the first worker that is done: real work takes real time.
        for connection in wait(list(busy), timeout=None if block else 0) if busy else ():
            self._keep(*busy[connection].take())


def _start_workers(clients: Clients, count: int, start_method: str) -> list[_Worker]:
    start = multiprocessing.get_context(start_method)
    workers = [_Worker(start, clients, index, count) for index in range(count)]
    # All are asked before any is judged: they start at the same time.
    if all([worker.can_train() for worker in workers]):  # noqa: C419
        return workers
    if not isinstance(clients.app, str):
        # An app that does not train with torch is none the worse.
        log.warning(
            "this process has started torch's autograd threads, and its forks cannot train with torch: give the "
            "ClientApp as 'module:attribute', so that workers can be spawned"
        )
        return workers
    for worker in workers:
        worker.close()
    log.info("this process has started torch's autograd threads, and its forks cannot train: workers are spawned")
    return _start_workers(clients, count, "spawn")


class _Worker:
    """A process that runs the clients ``index``, ``index + workers``, ..."""

    def __init__(self, start: Any, clients: Clients, index: int, workers: int) -> None:
        self.clients = frozenset(range(index, clients.count, workers))
        self.connection, far = start.Pipe()
        self._process = start.Process(
            target=_work, args=(far, clients, self.clients), name=f"edgeduet-worker-{index}", daemon=True
        )
        self._process.start()
        far.close()
        self._block: list[Message] = []

    @property
    def busy(self) -> set[str]:
        """Ids of the messages it is working on."""
        return {message.metadata.message_id for message in self._block}

    def can_train(self) -> bool:
        """Whether torch can train in it; called once, before anything else, and waits until it has started."""
        return bool(self._receive())

    def give(self, block: list[Message]) -> None:
        """Hand over messages."""
        self._block = block
        self._send(("handle", block))

    def take(self) -> tuple[list[Message], list[Message | None]]:
        """Return the messages given and their answers."""
        block, self._block = self._block, []
        return block, self._receive()

    def call(self, method: str, argument: Any) -> Any:
        """Call a method of the worker's :class:`ClientRunner`; waits for work still going on."""
        if self._block:
            self.take()
        self._send((method, argument))
        return self._receive()

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            # Closing alone is not seen by forked workers: later ones inherited this end of the pipe.
            self.connection.send(("stop", None))
        self.connection.close()
        self._process.join(timeout=1)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def _send(self, what: tuple[str, Any]) -> None:
        try:
            self.connection.send(what)
        except OSError as error:
            raise self._died() from error

    def _receive(self) -> Any:
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if kind == "raised":
            raise FederationError(f"{self._process.name} failed: {value}")
        return value

    def _died(self) -> FederationError:
        self._process.join(timeout=1)
        return FederationError(
            f"{self._process.name} (process {self._process.pid}) died with exit code {self._process.exitcode}, most "
            "often killed for lack of memory; run again with --resume and fewer workers"
        )


def _work(connection: Connection, clients: Clients, ids: Collection[int]) -> None:
    """Serve requests of the grid until the connection is closed."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SUPERLINK_NODE_ID
    try:
        able = _autograd_works()
        runner = ClientRunner(clients, ids)
        _use_one_thread()
    except Exception:
        connection.send(("raised", traceback.format_exc()))
        return
    connection.send(("done", able))
    while True:
        try:
            method, argument = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        if method == "stop":
            return
        try:
            connection.send(("done", getattr(runner, method)(argument)))
        except KeyboardInterrupt:
            return
        except Exception:
            connection.send(("raised", traceback.format_exc()))


def _use_one_thread() -> None:
    """Workers share the cores; more threads each would slow all of them and change sums in the last bit."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _autograd_works() -> bool:
    """Whether torch, where this process has it, can differentiate here: its threads do not survive a fork."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None:
        return True
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def load_client_app(reference: str) -> ClientApp:
    """Return the ClientApp at ``module:attribute``."""
    module, _, attribute = reference.partition(":")
    app: ClientApp = getattr(importlib.import_module(module), attribute)
    return app


class RunMemory:
    """The personal states that edgeduet's own ClientApp keeps in memory for one run."""

    def __init__(self, run_name: str) -> None:
        from edgeduet_client.handlers import personal_snapshot

        self._run_name = run_name
        self._memory = personal_snapshot()

    def snapshot(self, clients: Collection[int]) -> dict[int, Arrays]:
        """Return the states of ``clients``."""
        self._memory.open(self._run_name)
        return self._memory.snapshot(clients)

    def restore(self, states: Mapping[int, Arrays]) -> None:
        """Replace all states of the run."""
        self._memory.open(self._run_name)
        self._memory.restore(states)


def edgeduet_clients(config: RunConfig, *, block_size: int = 1) -> Clients:
    """Return edgeduet's own clients for a run, with personal states in memory; drafters are trained one by one."""
    from edgeduet_client.handlers import handle_block

    block_size = block_size if config.scenario.learns == "classifier" else 1
    config = replace(config, personal_dir="")
    return Clients(
        app="edgeduet_client.app:app",  # by name: workers may have to be spawned
        count=config.scenario.federation.clients,
        run_config=config.to_flower(),
        handle_block=handle_block if block_size > 1 else None,
        block_size=block_size,
        personal=partial(RunMemory, config.run_name),
    )


def run_in_process(server_app: ServerApp, grid: InProcessGrid, run_config: UserConfig) -> Context:
    """Run ``server_app`` over ``grid`` to the end; return its context."""
    context = Context(
        run_id=RUN_ID, node_id=SUPERLINK_NODE_ID, node_config={}, state=RecordDict(), run_config=dict(run_config)
    )
    server_app(grid, context)
    return context


def _client_of(message: Message) -> int:
    return int(message.metadata.dst_node_id) - FIRST_NODE


def _number(identifier: str) -> int:
    return int(identifier[1:])


def _all_train(messages: Sequence[Message]) -> bool:
    return all(message.metadata.message_type == "train" for message in messages)


def _copy_records(records: RecordDict) -> RecordDict:
    """Return a copy that can be changed without changing ``records``; array contents are shared (they are bytes)."""
    return RecordDict({key: record.copy() for key, record in records.items()})


def _private_copy(message: Message) -> Message:
    """Return the message with records of its own: several clients are sent the same payload objects."""
    copy = Message.__new__(Message)
    copy.__dict__.update(message.__dict__)
    copy.__dict__["_content"] = _copy_records(message.content)
    return copy
