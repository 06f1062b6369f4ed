"""A selector around any learner from expert advice: arms are experts, and all their losses are known.

Losses arrive late, when the horizon behind a start is committed; they are taken up as they come, as Joulani, Gyorgy
and Szepesvari (2013) propose for stochastic settings and HedgeSpec (arXiv 2510.20064) does; :mod:`.delayed` is their
reduction with a guarantee against adversaries.
An arm that was not scored at a start sleeps there: it gets the loss the learner expects, so its regret stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import Arm, Round
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.evidence import Evidence
from edgeduet_client.llm.speculation.rates import ArmRates
from edgeduet_client.llm.speculation.selectors.choices import check_choice
from edgeduet_client.llm.speculation.selectors.dinkelbach import dinkelbach_losses, length_losses

Objective = Literal["rate", "length"]
Play = Literal["sample", "leader"]


class Learner(Protocol):
    """Prediction with expert advice."""

    def weights(self) -> NDArray[np.float64]:
        """Return (N,) probabilities of the experts."""

    def update(self, losses: NDArray[np.float64]) -> None:
        """Take up (N,) losses in [0, 1]."""


class HedgingSelector:
    """Plays what a learner says.

    Args:
        arms: to choose from.
        learner: makes a learner for N experts; a new one for every request.
        seed: of the arm that is drawn.
        objective: ``rate``: tokens per second; ``length``: accepted tokens only (for study: it may well be slower
            than no draft).
        play: ``sample``: an arm drawn from the weights, as the guarantee needs; ``leader``: the heaviest.
        discount, carry_over: of the means lambda is taken from, see :class:`~..evidence.Evidence`.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        learner: Callable[[int], Learner],
        *,
        seed: int = 0,
        objective: Objective = "rate",
        play: Play = "sample",
        discount: float = 0.995,
        carry_over: float = 4.0,
    ) -> None:
        check_choice("objective", objective, get_args(Objective))
        check_choice("play", play, get_args(Play))
        self.table = ArmRates(arms)
        self.evidence = Evidence(self.table.drafters, self.table.depth, discount=discount, carry_over=carry_over)
        self._lengths_A = np.array([arm.length for arm in self.table.arms])
        self._new_learner = learner
        self._learner = learner(len(self.table.arms))
        self._rng = np.random.default_rng(seed)
        self._objective = objective
        self._play = play
        self._seconds_A: NDArray[np.float64] | None = None

    def start_request(self) -> None:
        """Forget the weights, keep the means."""
        self.evidence.start_request()
        self._learner = self._new_learner(len(self.table.arms))

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Return an arm drawn from the weights, or the heaviest."""
        if self._objective == "rate":
            if costs is None:
                raise ValueError("the objective rate needs costs")
            self._seconds_A = self.table.seconds(self.evidence.reach(), costs, context_length)
        weights = self._learner.weights()
        if self._play == "leader":
            return self.table.arms[int(weights.argmax())]
        return self.table.arms[int(self._rng.choice(len(weights), p=weights))]

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Give the learner the losses at one start."""
        self.evidence.add(survival, proposed)
        scored = np.full((len(self.table.drafters), self.table.depth), np.nan)
        for row, name in enumerate(self.table.drafters):
            if name in survival:
                curve = survival[name]
                scored[row] = 0.0
                scored[row, : len(curve)] = curve[: self.table.depth]
        losses = self._losses(self.table.tokens(scored))
        if losses is not None:
            self._learner.update(awakened(losses, self._learner.weights()))

    def played(self, round: Round) -> None:
        """Nothing: what the arm in use got is known from the text."""

    def standing(self) -> Mapping[str, float]:
        """Return each drafter's best mean rate as a share of the best of all; nothing before the first choice."""
        if self._seconds_A is None:
            return {}
        return self.table.standing(self.table.tokens(self.evidence.survival()) / self._seconds_A)

    def _losses(self, tokens_A: NDArray[np.float64]) -> NDArray[np.float64] | None:
        if self._objective == "length":
            # No draft emits one token whatever happens; it takes part, and loses.
            return length_losses(tokens_A, self.table.depth)
        if self._seconds_A is None:
            return None
        rate = float((self.table.tokens(self.evidence.survival()) / self._seconds_A).max())
        return np.clip(dinkelbach_losses(tokens_A, self._seconds_A, self._lengths_A, rate), 0.0, 1.0)


def awakened(losses: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the losses with NaN replaced by the expected loss of the arms that were scored."""
    awake = ~np.isnan(losses)
    if awake.all():
        return losses
    mass = float(weights[awake].sum())
    expected = float(weights[awake] @ losses[awake]) / mass if mass > 0 else float(losses[awake].mean())
    return np.where(awake, losses, expected)
