"""What a strategy is: the server's half of a method, as pure functions over a state value.

One method is one file in this package. A strategy says, per round, which client gets which
:class:`~edgeduet_shared.plan.LocalPlan` and arrays, and folds the replies into a new
:class:`ServerState`. It keeps nothing between calls: state in, state out, so that a run can be saved,
resumed and replayed. (Flower's own ``Strategy`` keeps state in the object and its ``start`` cannot
resume; our loop over Flower's ``Grid`` is :mod:`edgeduet_server.round_loop`.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from edgeduet_server.reply_checks import ExpectedReply
from edgeduet_shared.config import Scenario, Section
from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.evaluation import merged_params
from edgeduet_shared.experiment import Experiment
from edgeduet_shared.messages import Arrays, EvaluateRequest, TrainReply, TrainRequest
from edgeduet_shared.plan import Group, LocalPlan, Parts

REHEARSAL = "features drawn from the client's class prototypes of earlier stages, per image of a batch (0 = off)"


@dataclass(frozen=True)
class ServerState:
    """Everything a strategy remembers.

    Attributes:
        shared: parameters the server owns, by name; together they are the plain global model.
        extra: further arrays of the method (prompt pool, gate, records).
        notes: further small values of the method, JSON only.
    """

    shared: Arrays = field(default_factory=dict)
    extra: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


class Options(Section):
    """Options of a method; each strategy has its own subclass."""


class Strategy(ABC):
    """Base of all methods.

    Class attributes:
        name: as written on the command line.
        purpose: one line for ``edgeduet-sim list``.
        paper: where the method is from.
        options_type: its options.
        learns: what its clients train; the scenario must say the same.
        has_global_model: whether the server holds a model.
    """

    name: ClassVar[str]
    purpose: ClassVar[str]
    paper: ClassVar[str] = ""
    options_type: ClassVar[type[Options]] = Options
    learns: ClassVar[Literal["classifier", "drafter"]] = "classifier"
    has_global_model: ClassVar[bool] = True

    def __init__(self, options: Options, scenario: Scenario, experiment: Experiment) -> None:
        self.options = options
        self.scenario = scenario
        self.experiment = experiment

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """Trainable parts of the method's model."""

    @property
    @abstractmethod
    def owns(self) -> tuple[Group, ...]:
        """Groups whose global values the server holds."""

    @abstractmethod
    def plan(self, stage: int, round: int) -> LocalPlan | None:
        """What clients do in a round; None when they do nothing (zero-shot)."""

    @abstractmethod
    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Fold the replies, sorted by client, into a new state."""

    @property
    def model(self) -> DuetModel:
        """Structure of the method's model."""
        return self.experiment.model(self.parts)

    def initial_state(self, seed: int) -> ServerState:
        """State before the first stage: fresh values of the groups the server owns."""
        return ServerState(shared=self._select(self.model.initial(seed), self.owns))

    def begin_stage(self, state: ServerState, stage: int) -> ServerState:
        """Hook before the rounds of a stage."""
        return state

    def end_stage(self, state: ServerState, stage: int) -> ServerState:
        """Hook after the rounds of a stage, before evaluation."""
        return state

    def configure(self, state: ServerState, clients: Sequence[int], stage: int, round: int) -> dict[int, TrainRequest]:
        """Return one request per client: everybody gets the plan and all of the shared state."""
        plan = self.plan(stage, round)
        if plan is None:
            return {}
        return {client: TrainRequest(stage, round, plan, state.shared) for client in clients}

    def expect(self, state: ServerState, request: TrainRequest) -> ExpectedReply:
        """Return the shapes of a right reply to ``request``."""
        shapes = {name: tuple(value.shape) for name, value in self.model.named_parameters()}
        wanted = {name: shape for name, shape in shapes.items() if self.model.group_of(name) in request.plan.upload}
        digest = (self.experiment.backbone.embed_dim,) if request.plan.digest else None
        return ExpectedReply(update=wanted, digest=digest)

    def configure_evaluate(self, state: ServerState, clients: Sequence[int], stage: int) -> dict[int, EvaluateRequest]:
        """Ask every client to evaluate its personal model and the global one."""
        plan = self.evaluation_plan()
        common = self.scenario.federation.evaluate_common
        return {client: EvaluateRequest(stage, plan, common, self.global_arrays(state)) for client in clients}

    def evaluation_plan(self) -> LocalPlan:
        """Plan under which clients evaluate: that of a training round, if the method trains."""
        return self.plan(0, self.scenario.federation.rounds - 1) or LocalPlan(parts=self.parts)

    def global_arrays(self, state: ServerState) -> Arrays:
        """Parameters of the plain global model."""
        return state.shared

    def global_params(self, state: ServerState) -> Params:
        """All parameters of the plain global model, as tensors; groups the server lacks are fresh."""
        return merged_params(self.model, self.experiment.seed, self.global_arrays(state))

    def rehearsal(self, wanted: float | None) -> float:
        """Return the plan's rehearsal; unset = 1 where an image's cached feature is one vector, else 0.

        Raises:
            ConfigError: asked for with adapters in ViT blocks, where what is cached are all tokens or, with an
                adapter in block 0, the pixels themselves: a prototype would be a mean picture.
        """
        placement = self.scenario.model.adapter.placement
        if wanted and placement == "blocks":
            raise ConfigError(
                f"method '{self.name}': rehearsal keeps means of cached features, and with "
                "model.adapter.placement='blocks' these are all tokens of an image, or its pixels; "
                "set rehearsal=0, or model.adapter.placement='embedding' or 'stages'"
            )
        if wanted is None:
            return 1.0 if placement == "embedding" else 0.0
        return wanted

    def last_round(self, round: int) -> bool:
        """Whether ``round`` ends its stage."""
        return round == self.scenario.federation.rounds - 1

    def _select(self, params: Params, groups: Sequence[Group]) -> Arrays:
        return {name: value.numpy() for name, value in params.items() if self.model.group_of(name) in groups}

    def _round_settings(self) -> dict[str, Any]:
        return {
            "optimiser": self.scenario.train,
            "privacy": self.scenario.privacy,
            "mix": self.scenario.model.fusion.mix,
        }


def weighted_mean(replies: Sequence[TrainReply], names: Sequence[str], start: Mapping[str, Any]) -> Arrays:
    """FedAvg (McMahan et al. 2017): mean of uploaded values weighted by examples.

    Summed in float64 in the order of ``replies``, so that the result does not depend on the engine.
    Names no reply holds keep their value in ``start``.
    """
    result: Arrays = {}
    for name in names:
        holders = [reply for reply in replies if name in reply.update]
        total = sum(reply.examples for reply in holders)
        if total == 0:
            result[name] = start[name]
            continue
        mean = np.zeros(holders[0].update[name].shape, np.float64)
        for reply in holders:
            mean += reply.examples / total * reply.update[name].astype(np.float64)
        result[name] = mean.astype(np.float32)
    return result


class AveragingStrategy(Strategy):
    """Methods whose clients train what the server owns, and whose server averages it."""

    def plan(self, stage: int, round: int) -> LocalPlan:
        """Train and upload every group the server owns."""
        return LocalPlan(
            parts=self.parts,
            train=self.owns,
            upload=self.owns,
            last_round=self.last_round(round),
            **self._round_settings(),
        )

    def aggregate(self, state: ServerState, replies: Sequence[TrainReply], stage: int, round: int) -> ServerState:
        """Average what was uploaded."""
        return replace(state, shared=weighted_mean(replies, list(state.shared), state.shared))
