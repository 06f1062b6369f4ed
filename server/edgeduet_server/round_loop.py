"""The rounds of a run: ask clients, check what they send, fold it into the server state, remember it.

Our own loop over Flower's ``Grid``, because ``Strategy.start`` waits for ever when too few nodes are
online, averages whatever arrives, cannot stop early and cannot resume (``methods/flower.md`` 0, 2.5).

For each stage: ``begin_stage``, then ``federation.rounds`` rounds, then ``end_stage``, then the
evaluation of every client and of the global model. A round is

1. sample ``participation`` of the clients, in an order that depends only on (seed, stage, round);
   clients that are offline or still owe an older reply are passed over,
2. send each its request and wait at most ``round_timeout`` seconds,
3. reject what cannot be used (:mod:`edgeduet_server.reply_checks`), counted by reason,
4. aggregate, sorted by client, if at least ``quorum`` of the clients that were to take part answered;
   else the round is skipped: the state stays as it was and the round is counted,
5. record what happened and write a checkpoint.

Before each round and evaluation the loop asks its :class:`~edgeduet_server.orders.Control` what an operator
ordered: stop, wait, leave clients out, other settings. Orders that change results are part of the round's event.

A client without training examples has answered (it counts for the quorum) but adds nothing. A round
without any usable reply is skipped. After ``max_bad_rounds`` bad rounds in a row the run stops; a round in which
enough clients answered, all of them without examples, is skipped but not bad: of images on devices there may be
none of a task yet.

Bytes are counted on the records inside the messages in their wire encoding, greetings left out.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from flwr.serverapp import Grid

from edgeduet_server.checkpoint import CheckpointStore, Progress
from edgeduet_server.exchange import Answers, Exchange, Failure
from edgeduet_server.orders import Control, NoControl, Orders, changed_scenario
from edgeduet_server.recorder import Recorder
from edgeduet_server.reply_checks import ExpectedReply, rejection
from edgeduet_server.timekeeping import Clock, WallClock, clock_of
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import FederationError, RunStopped
from edgeduet_shared.messages import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest
from edgeduet_shared.plan import LocalPlan
from edgeduet_shared.seeds import derive_seed

log = logging.getLogger("edgeduet.server")

# A message lives longer than the round waits for it: a client that is a little late is noticed when it
# is done, and is left alone until then instead of being given work it would only start later.
TIME_TO_LIVE = 2.0

StateT = TypeVar("StateT", bound=Any)


class RoundStrategy(Protocol[StateT]):
    """What the loop needs of a strategy (``edgeduet_server.strategies.strategy.Strategy``)."""

    def begin_stage(self, state: StateT, stage: int) -> StateT:
        """Return the state with which the rounds of ``stage`` begin."""
        ...

    def configure(self, state: StateT, clients: Sequence[int], stage: int, round: int) -> dict[int, TrainRequest]:
        """Return a request for each of ``clients`` that is to train."""
        ...

    def expect(self, state: StateT, request: TrainRequest) -> ExpectedReply:
        """Return the shapes of what ``request`` asks for; they depend on its plan only."""
        ...

    def aggregate(self, state: StateT, replies: Sequence[TrainReply], stage: int, round: int) -> StateT:
        """Return the state after the replies, which are sorted by client."""
        ...

    def end_stage(self, state: StateT, stage: int) -> StateT:
        """Return the state after the rounds of ``stage``."""
        ...

    def configure_evaluate(self, state: StateT, clients: Sequence[int], stage: int) -> dict[int, EvaluateRequest]:
        """Return a request for each of ``clients`` that is to evaluate."""
        ...


EvaluateGlobal = Callable[[Any, int, Sequence[EvaluateReply]], Mapping[str, Any] | None]
"""(state, stage, clients' replies) -> JSON results of the global model, or None."""

MakeStrategy = Callable[[Scenario], RoundStrategy[Any]]
"""Returns the method's strategy under changed settings."""


def run_training(
    grid: Grid,
    strategy: RoundStrategy[StateT],
    scenario: Scenario,
    *,
    start: StateT,
    stages: int,
    recorder: Recorder,
    checkpoints: CheckpointStore,
    seed: int,
    resume: bool = False,
    evaluate_global: EvaluateGlobal | None = None,
    stop: threading.Event | None = None,
    control: Control | None = None,
    make_strategy: MakeStrategy | None = None,
) -> StateT:
    """Train all stages and return the final server state.

    Args:
        grid: Flower's Grid; its own clock is used where it has one.
        strategy: the method.
        scenario: federation settings are read from it.
        start: the state before the first stage.
        stages: number of tasks in the stream.
        recorder: takes the events ``run-start``, ``stage-start``, ``round``, ``evaluate``, ``run-end``.
        checkpoints: where the run is saved.
        seed: all random choices derive from it.
        resume: go on from the last checkpoint, if there is one; the result is the same as without a break.
        evaluate_global: called after each stage.
        stop: set it to stop the run, also from a signal handler or another thread.
        control: asked for orders before each round; None: nobody orders anything.
        make_strategy: makes the method anew when ``control`` changes settings; None: only settings of the
            federation take effect.

    Raises:
        FederationError: too many bad rounds in a row, or an engine that broke.
        RunStopped: ``stop`` was set or ordered, or Ctrl-C pressed; says how to go on.
        StateError: nothing that can be resumed.
    """
    loop = _Loop(
        grid,
        strategy,
        scenario,
        stages,
        recorder,
        checkpoints,
        seed,
        evaluate_global,
        stop or threading.Event(),
        control or NoControl(),
        make_strategy,
    )
    return loop.run(start, resume)


@dataclass(frozen=True)
class _Round:
    """What came of one round's replies."""

    usable: list[TrainReply]
    failures: list[Failure]
    rejected: dict[str, int]
    answered: int
    needed: int

    @property
    def good(self) -> bool:
        return bool(self.usable) and self.answered >= self.needed

    @property
    def idle(self) -> bool:
        """Enough answered, and none has anything to train on."""
        return not self.usable and self.answered >= self.needed


class _Loop:
    def __init__(
        self,
        grid: Grid,
        strategy: RoundStrategy[Any],
        scenario: Scenario,
        stages: int,
        recorder: Recorder,
        checkpoints: CheckpointStore,
        seed: int,
        evaluate_global: EvaluateGlobal | None,
        stop: threading.Event,
        control: Control,
        make_strategy: MakeStrategy | None,
    ) -> None:
        self._scenario = scenario
        self._own_strategy = self._strategy = strategy
        self._make_strategy = make_strategy
        self._federation = federation = scenario.federation
        self._stages = stages
        self._recorder = recorder
        self._checkpoints = checkpoints
        self._seed = seed
        self._evaluate_global = evaluate_global
        self._stop = stop
        self._control = control
        self._orders = Orders()
        self._wall: Clock = WallClock()
        self._exchange = Exchange(
            grid,
            clock_of(grid),
            clients=federation.clients,
            time_to_live=TIME_TO_LIVE * federation.round_timeout,
            check_stop=self._check_stop,
        )
        self._progress = Progress()
        self._saved = Progress()
        self._changed: set[int] = set()

    def run(self, start: Any, resume: bool) -> Any:
        state = self._begin(start, resume)
        try:
            while self._progress.stage < self._stages:
                state = self._stage(state)
        except (KeyboardInterrupt, RunStopped) as error:
            raise RunStopped(self._how_to_go_on()) from error
        self._recorder.record("run-end", **_counts(self._progress))
        return state

    def _begin(self, start: Any, resume: bool) -> Any:
        found = self._checkpoints.load(start) if resume else None
        if found is None:
            if resume:
                log.warning("there is no checkpoint in %s: starting from the beginning", self._checkpoints.folder)
            self._checkpoints.clear()
            self._recorder.rewind(0)
            self._recorder.record("run-start", stages=self._stages, **self._federation.model_dump(mode="json"))
            state = start
        else:
            state, self._progress, events = found
            self._recorder.rewind(events)
            log.info("resumed at stage %d, round %d", self._progress.stage + 1, self._progress.round + 1)
        self._saved = self._progress
        if self._progress.stage < self._stages:
            self._exchange.available(wanted=self._federation.clients, wait=self._federation.node_wait)
        return state

    def _stage(self, state: Any) -> Any:
        stage = self._progress.stage
        if self._progress.round == 0:
            state = self._strategy.begin_stage(state, stage)
            self._recorder.record("stage-start", stage=stage)
        while self._progress.round < self._federation.rounds:
            state = self._train_round(state)
            last = self._progress.round == self._federation.rounds
            if last or self._progress.round % self._checkpoints.every == 0 or self._stop.is_set():
                self._save(state)
            self._check_stop()
        # Before the stage is closed: what is saved here has its end still to come.
        self._obey(state)
        state = self._strategy.end_stage(state, stage)
        self._evaluate(state, stage)
        self._progress = self._progress.next_stage()
        self._save(state)
        return state

    def _obey(self, state: Any) -> None:
        """Do what is ordered for the round or evaluation that comes next: wait, stop, take on other settings."""
        stage, round = self._progress.stage, self._progress.round
        orders = self._control.orders(stage, round)
        if (orders.paused or orders.stop) and self._saved != self._progress and (stage, round) != (0, 0):
            self._save(state)
        if orders.paused and not orders.stop:
            log.info("paused before stage %d, round %d", stage + 1, round + 1)
            while orders.paused and not orders.stop:
                self._control.wait()
                self._check_stop()
                orders = self._control.orders(stage, round)
        if orders.stop:
            raise RunStopped("a stop was ordered")
        if orders.overrides != self._orders.overrides:
            changed = changed_scenario(self._scenario, orders.overrides)
            self._federation = changed.federation
            self._exchange.time_to_live = TIME_TO_LIVE * changed.federation.round_timeout
            if self._make_strategy is not None:
                self._strategy = self._make_strategy(changed) if orders.overrides else self._own_strategy
        self._orders = orders

    def _train_round(self, state: Any) -> Any:
        self._obey(state)
        stage, round = self._progress.stage, self._progress.round
        started = self._wall.now()
        clients, needed = self._sample(stage, round)
        requests = self._strategy.configure(state, clients, stage, round)
        if clients and not requests:
            # The method asks nothing of clients in this round (zero-shot): not a failure.
            self._recorder.record("round", stage=stage, round=round, asked=[], skipped=False, **self._orders_record())
            self._progress = self._progress.next_round()
            return state
        self._changed |= set(requests)
        answers = self._exchange.ask(
            requests,
            TrainReply,
            message_type="train",
            timeout=self._federation.round_timeout,
            group=f"{stage}.{round}",
        )
        # A method may ask only some of the sampled clients (the pooled references ask one).
        needed = max(1, math.ceil(needed * len(requests) / max(1, len(clients)) - 1e-9))
        outcome = self._judge(state, requests, answers, needed)
        if outcome.good:
            state = self._strategy.aggregate(state, outcome.usable, stage, round)
        self._note_round(requests, answers, outcome, self._wall.now() - started)
        self._check_engine(outcome, stage, round)
        self._check_bad_rounds(state, outcome, answers, len(requests))
        return state

    def _sample(self, stage: int, round: int) -> tuple[list[int], int]:
        """Return the clients to ask, sorted, and how many must answer."""
        willing = self._federation.clients - len(self._excluded)
        size = max(1, math.floor(self._federation.participation * willing + 0.5))
        needed = max(1, math.ceil(self._federation.quorum * size - 1e-9))
        free = set(self._available(needed))
        order = np.random.default_rng(derive_seed(self._seed, "sample", stage, round)).permutation(
            self._federation.clients
        )
        return sorted([int(client) for client in order if client in free][:size]), needed

    @property
    def _excluded(self) -> frozenset[int]:
        return self._orders.excluded & frozenset(range(self._federation.clients))

    def _available(self, wanted: int) -> list[int]:
        """Return the clients that can be asked now, after waiting for ``wanted`` of them for a while."""
        free = self._exchange.available(wanted=wanted, wait=self._federation.node_wait, without=self._excluded)
        self._control.sighted(self._exchange.online)
        return free

    def _judge(
        self, state: Any, requests: Mapping[int, TrainRequest], answers: Answers[TrainReply], needed: int
    ) -> _Round:
        usable: list[TrainReply] = []
        failures = list(answers.failures)
        expected: dict[LocalPlan, ExpectedReply] = {}
        empty = 0
        for reply, client in zip(answers.replies, answers.clients, strict=True):
            request = requests[client]
            if request.plan not in expected:
                expected[request.plan] = self._strategy.expect(state, request)
            wrong = rejection(reply, client, request, expected[request.plan])
            if wrong is None:
                usable.append(reply)
            else:
                empty += wrong[0] == "zero-examples"
                failures.append(Failure(client, *wrong))
        failures.sort(key=lambda failure: failure.client)
        rejected = Counter(failure.reason for failure in failures)
        if answers.missing:
            rejected["no-answer"] = len(answers.missing)
        return _Round(usable, failures, dict(sorted(rejected.items())), len(usable) + empty, needed)

    def _note_round(
        self, requests: Mapping[int, TrainRequest], answers: Answers[TrainReply], outcome: _Round, seconds: float
    ) -> None:
        progress = self._progress
        self._recorder.record(
            "round",
            stage=progress.stage,
            round=progress.round,
            asked=sorted(requests),
            skipped=not outcome.good,
            clients=[_client_record(reply) for reply in outcome.usable],
            rejected=outcome.rejected,
            failures=_failure_records(outcome.failures),
            missing=list(answers.missing),
            loss=_weighted(outcome.usable, "loss"),
            accuracy=_weighted(outcome.usable, "accuracy"),
            trained=sorted({group for request in requests.values() for group in request.plan.train}),
            dispatch={str(c): [int(index) for index in r.contexts] for c, r in requests.items() if r.contexts},
            bytes_down=answers.bytes_down,
            bytes_up=answers.bytes_up,
            timing={"seconds": seconds, "client_seconds": sum(reply.seconds for reply in outcome.usable)},
            **self._orders_record(),
        )
        for failure in outcome.failures[:1]:
            log.warning(
                "stage %d, round %d: the reply of client %d is not used (%s; %d of %d are not in this round): %s",
                progress.stage + 1,
                progress.round + 1,
                failure.client,
                failure.reason,
                len(requests) - len(outcome.usable),
                len(requests),
                failure.text,
            )
        if answers.missing:
            log.warning(
                "stage %d, round %d: no answer within %g s from %s",
                progress.stage + 1,
                progress.round + 1,
                self._federation.round_timeout,
                _name_clients(answers.missing),
            )
        self._progress = progress.next_round(
            skipped_rounds=progress.skipped_rounds + (not outcome.good),
            bad_rounds_in_a_row=0 if outcome.good or outcome.idle else progress.bad_rounds_in_a_row + 1,
            late_replies=progress.late_replies + self._exchange.take_late(),
            bytes_down=progress.bytes_down + answers.bytes_down,
            bytes_up=progress.bytes_up + answers.bytes_up,
            rejected=dict(sorted((Counter(progress.rejected) + Counter(outcome.rejected)).items())),
        )

    def _orders_record(self) -> dict[str, Any]:
        """The field of an event that says what was ordered, where something was."""
        record = self._orders.as_record()
        return {"orders": record} if record else {}

    def _check_engine(self, outcome: _Round, stage: int, round: int) -> None:
        """Stop when the same fault of the engine shows in two rounds running: it does not heal."""
        broken = [failure for failure in outcome.failures if failure.reason == "engine-error"]
        kinds = tuple(sorted({failure.kind or failure.text[:80] for failure in broken}))
        repeated = sorted(set(kinds) & set(self._progress.engine_errors))
        self._progress = replace(self._progress, engine_errors=kinds)
        if repeated:
            raise FederationError(
                f"the engine that runs the clients is broken: {repeated[0]} in two rounds running (stage {stage + 1}, "
                f"round {round + 1}, {_name_clients([f.client for f in broken])}); most often a worker process was "
                f"killed for lack of memory: use fewer workers or --engine in-process. {self._how_to_go_on()}"
            )

    def _check_bad_rounds(self, state: Any, outcome: _Round, answers: Answers[Any], asked: int) -> None:
        if self._progress.bad_rounds_in_a_row < self._federation.max_bad_rounds:
            return
        bad, stage, round = self._progress.bad_rounds_in_a_row, self._progress.stage, self._progress.round
        # Whoever resumes after the trouble is over starts with a clean slate.
        self._progress = replace(self._progress, bad_rounds_in_a_row=0)
        self._save(state)
        why = []
        if answers.missing:
            why.append(f"no answer from {_name_clients(answers.missing)}")
        if outcome.failures:
            first = outcome.failures[0]
            why.append(f"client {first.client}: {first.reason}: {_last_line(first.text)}")
        raise FederationError(
            f"stopped after {bad} round(s) in a row without enough usable replies; in the last one (stage "
            f"{stage + 1}, round {round}) {asked} clients were asked, {outcome.answered} answered and "
            f"{outcome.needed} were needed{': ' if why else ''}{'; '.join(why)}. Look at the clients, or change "
            f"federation.quorum, node_wait or round_timeout. {self._how_to_go_on()}"
        )

    def _evaluate(self, state: Any, stage: int) -> None:
        started = self._wall.now()
        clients = self._available(self._federation.clients - len(self._excluded))
        requests = self._strategy.configure_evaluate(state, clients, stage)
        answers = self._exchange.ask(
            requests,
            EvaluateReply,
            message_type="evaluate",
            timeout=self._federation.round_timeout,
            group=f"{stage}.evaluate",
        )
        replies = [
            reply
            for reply, client in zip(answers.replies, answers.clients, strict=True)
            if (reply.client, reply.stage) == (client, stage)
        ]
        common = self._evaluate_global(state, stage, replies) if self._evaluate_global else None
        wanted = set(range(self._federation.clients)) - self._excluded
        absent = sorted(wanted - {reply.client for reply in replies})
        if requests and absent:
            reason = f" (client {answers.failures[0].client}: {answers.failures[0].text})" if answers.failures else ""
            log.warning("stage %d: no evaluation from %s%s", stage + 1, _name_clients(absent), reason)
        self._recorder.record(
            "evaluate",
            stage=stage,
            clients=[_evaluation_record(reply) for reply in replies],
            absent=absent if requests else [],
            failures=_failure_records(answers.failures),
            common=None if common is None else dict(common),
            bytes_down=answers.bytes_down,
            bytes_up=answers.bytes_up,
            timing={
                "seconds": self._wall.now() - started,
                "client_seconds": sum(reply.seconds for reply in replies),
            },
            **self._orders_record(),
        )

    def _save(self, state: Any) -> None:
        self._checkpoints.save(state, self._progress, self._recorder.position(), self._changed)
        self._saved = self._progress
        self._changed = set()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise RunStopped("stop was requested")

    def _how_to_go_on(self) -> str:
        stage, round = self._saved.stage, self._saved.round
        if (stage, round) == (0, 0):
            return f"Nothing was saved yet in {self._checkpoints.folder}."
        return (
            f"Saved in {self._checkpoints.folder} up to stage {stage + 1}, round {round} of {self._federation.rounds}: "
            "the same command with --resume goes on from there."
        )


def _client_record(reply: TrainReply) -> dict[str, Any]:
    return {
        "client": reply.client,
        "examples": reply.examples,
        "loss": reply.loss,
        "accuracy": reply.accuracy,
        "steps": reply.steps,
    }


def _evaluation_record(reply: EvaluateReply) -> dict[str, Any]:
    return {key: value for key, value in asdict(reply).items() if key not in ("stage", "seconds")}


def _failure_records(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """The first failures in full, the others in one line: a thousand equal tracebacks help nobody."""
    return [
        {
            "client": failure.client,
            "reason": failure.reason,
            "text": failure.text[-4000:] if index < 3 else _last_line(failure.text)[:200],
        }
        for index, failure in enumerate(failures)
    ]


def _weighted(replies: Sequence[TrainReply], name: str) -> float | None:
    """Mean of a figure over replies, weighted by examples; None without replies."""
    examples = sum(reply.examples for reply in replies)
    if not examples:
        return None
    return math.fsum(getattr(reply, name) * reply.examples for reply in replies) / examples


def _counts(progress: Progress) -> dict[str, Any]:
    return {
        "skipped_rounds": progress.skipped_rounds,
        "late_replies": progress.late_replies,
        "rejected": progress.rejected,
        "bytes_down": progress.bytes_down,
        "bytes_up": progress.bytes_up,
    }


def _name_clients(clients: Sequence[int]) -> str:
    shown = ", ".join(str(client) for client in clients[:5])
    more = f" and {len(clients) - 5} more" if len(clients) > 5 else ""
    return f"client{'s' if len(clients) > 1 else ''} {shown}{more}"


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].removesuffix("'>") if lines else text
