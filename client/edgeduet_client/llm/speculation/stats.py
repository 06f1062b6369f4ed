"""What speculation did in one request, in numbers that can be compared between systems.

Counted per arm (a drafter and a length asked for): *proposed* tokens; *evaluated* ones, whose verdict was reached (the
last of them may be a rejection); *accepted* ones, which were committed; *emitted* tokens, accepted ones and those the
target put in their place or behind them; *discarded*, proposed but not committed. Acceptance is accepted /
evaluated, never accepted / proposed: positions behind a rejection say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from edgeduet_client.llm.speculation.regret import Hindsight

PARTS = ("draft", "verify", "catch_up", "sampling", "evaluation")
"""Where the time of a round goes: drafting, the target's step, bringing an idle drafter up to date, distributions and
verdicts, scoring drafters counterfactually."""


@dataclass(frozen=True)
class ArmStats:
    """What one arm did; ``drafter`` is ``None`` for plain steps."""

    drafter: str | None
    length: int
    rounds: int
    proposed: int
    evaluated: int
    accepted: int
    emitted: int
    seconds: Mapping[str, float]

    @property
    def discarded(self) -> int:
        """Tokens proposed in vain."""
        return self.proposed - self.accepted

    def as_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {
            "drafter": self.drafter,
            "length": self.length,
            "rounds": self.rounds,
            "proposed": self.proposed,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "discarded": self.discarded,
            "seconds": {part: round(self.seconds[part], 6) for part in PARTS},
        }


@dataclass(frozen=True)
class SurvivalStats:
    """Counterfactual evidence about one drafter in one request.

    Attributes:
        starts: places it was scored at.
        mean: S(1..K), share of starts whose first k tokens would have been accepted.
        standard_error: of each mean, as if starts were independent (neighbours overlap, so it is a little small).
        reach: share of its drafts that have at least 1..K tokens.
    """

    starts: int
    mean: tuple[float, ...]
    standard_error: tuple[float, ...]
    reach: tuple[float, ...]


@dataclass(frozen=True)
class SpeculationStats:
    """What speculation did in one request.

    Attributes:
        mode: ``exact``: all steps round alike, so greedy answers (and those of certain drafts, for the same seed) are
            those of exact mode without drafters; ``fast``: the same law, but kernels that round one row and several
            differently may tip a token.
        verify: ``exact`` or ``fly``.
        invariant: in exact mode, whether this machine computes a row alike in steps of every size; ``None``: not
            asked.
        arms: those that were played, most used first.
        switches: rounds whose arm is another than the round before.
        decode_seconds: from the first distribution to the end.
        survival: by drafter.
        hindsight: the best fixed arm of the request, estimated; ``None`` where costs are not known.
        relaxed: tokens that only ``fly`` let stand.
        unused: configured drafters that proposed nothing, and why.
        failed: drafters that broke down during the request, and how; it went on without them.
        notes: anything else a reader of the numbers has to know.
    """

    mode: str
    verify: str
    invariant: bool | None
    arms: tuple[ArmStats, ...]
    switches: int
    decode_seconds: float
    survival: Mapping[str, SurvivalStats] = field(default_factory=dict)
    hindsight: Hindsight | None = None
    relaxed: int = 0
    unused: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def lossy(self) -> bool:
        """Whether the answer's law may differ from plain decoding's."""
        return self.verify != "exact"

    @property
    def rounds(self) -> int:
        """Steps of the target after the prompt."""
        return self._sum("rounds")

    @property
    def emitted(self) -> int:
        """Tokens of all rounds; the first token of an answer comes with the prompt and is not among them."""
        return self._sum("emitted")

    @property
    def mean_accepted_tokens(self) -> float | None:
        """MAT: tokens a step of the target emits; 1 without speculation."""
        return self.emitted / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the evaluated drafts."""
        return self.accepted / self.evaluated if self.evaluated else None

    @property
    def evaluation_share(self) -> float:
        """Share of the decoding time that went into scoring drafters."""
        spent = sum(arm.seconds["evaluation"] for arm in self.arms)
        return spent / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def seconds(self) -> dict[str, float]:
        """Return the seconds of all rounds by part."""
        return {part: sum(arm.seconds[part] for arm in self.arms) for part in PARTS}

    @property
    def proposed(self) -> int:
        """Drafted tokens."""
        return self._sum("proposed")

    @property
    def evaluated(self) -> int:
        """Drafted tokens whose verdict was reached."""
        return self._sum("evaluated")

    @property
    def accepted(self) -> int:
        """Drafted tokens that were committed."""
        return self._sum("accepted")

    @property
    def discarded(self) -> int:
        """Drafted tokens that were not."""
        return self.proposed - self.accepted

    def as_json(self) -> dict[str, Any]:
        """Return everything, as JSON can say it."""
        return {
            "mode": self.mode,
            "verify": self.verify,
            "lossy": self.lossy,
            "row_invariant": self.invariant,
            "rounds": self.rounds,
            "emitted": self.emitted,
            "proposed": self.proposed,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "discarded": self.discarded,
            "relaxed": self.relaxed,
            "mean_accepted_tokens": _rounded(self.mean_accepted_tokens),
            "acceptance": _rounded(self.acceptance),
            "switches": self.switches,
            "evaluation_share": _rounded(self.evaluation_share),
            "seconds": {part: round(value, 6) for part, value in self.seconds().items()},
            "arms": [arm.as_json() for arm in self.arms],
            "survival": {
                name: {
                    "starts": evidence.starts,
                    "mean": [round(value, 4) for value in evidence.mean],
                    "standard_error": [round(value, 4) for value in evidence.standard_error],
                    "reach": [round(value, 4) for value in evidence.reach],
                }
                for name, evidence in self.survival.items()
            },
            "best_fixed_arm": None if self.hindsight is None else self.hindsight.as_json(),
            "unused": dict(self.unused),
            "failed": dict(self.failed),
            "notes": list(self.notes),
        }

    def messages(self) -> list[str]:
        """Return what whoever configured this should be told, one line each; usually nothing."""
        lines = [f"drafter {name} was never used: {reason}" for name, reason in self.unused.items()]
        lines += [f"drafter {name} broke down: {reason}" for name, reason in self.failed.items()]
        lines += self.notes
        if self.lossy:
            lines.append(f"lossy verification ({self.verify}): {self.relaxed} tokens are not plain decoding's")
        return lines

    def _sum(self, name: str) -> int:
        return sum(getattr(arm, name) for arm in self.arms)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


class RoundCounter:
    """Adds up rounds by arm; also the running means of survival by drafter."""

    def __init__(self) -> None:
        self._arms: dict[tuple[str | None, int], dict[str, Any]] = {}
        self._last: tuple[str | None, int] | None = None
        self._survival: dict[str, _RunningMean] = {}
        self._reach: dict[str, _RunningMean] = {}
        self.switches = 0

    def add(
        self,
        drafter: str | None,
        length: int,
        *,
        proposed: int,
        evaluated: int,
        accepted: int,
        emitted: int,
        seconds: Mapping[str, float],
    ) -> None:
        """Count one round."""
        arm = (drafter, length)
        self.switches += self._last is not None and self._last != arm
        self._last = arm
        sums = self._arms.setdefault(arm, {"rounds": 0, "seconds": dict.fromkeys(PARTS, 0.0)})
        counts = {"rounds": 1, "proposed": proposed, "evaluated": evaluated, "accepted": accepted, "emitted": emitted}
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count
        for part, value in seconds.items():
            sums["seconds"][part] += value

    def evidence(self, survival: Mapping[str, np.ndarray], proposed: Mapping[str, int]) -> None:
        """Count one start: survival curves, and how many tokens would have been proposed, by drafter."""
        for name, curve in survival.items():
            depth = len(curve)
            self._survival.setdefault(name, _RunningMean(depth)).add(curve)
            self._reach.setdefault(name, _RunningMean(depth)).add(np.arange(depth) < proposed[name])

    @property
    def rounds(self) -> int:
        """Rounds so far."""
        return sum(sums["rounds"] for sums in self._arms.values())

    def rounds_of(self, drafter: str) -> int:
        """Return in how many rounds ``drafter`` was chosen."""
        return sum(sums["rounds"] for (name, _), sums in self._arms.items() if name == drafter)

    def proposed_by(self, drafter: str) -> int:
        """Return how many tokens ``drafter`` has proposed."""
        return sum(sums["proposed"] for (name, _), sums in self._arms.items() if name == drafter)

    def arms(self) -> tuple[ArmStats, ...]:
        """Return the arms, most used first."""
        arms = [ArmStats(drafter=name, length=length, **sums) for (name, length), sums in self._arms.items()]
        return tuple(sorted(arms, key=lambda arm: (-arm.rounds, arm.drafter or "", arm.length)))

    def survival(self) -> dict[str, SurvivalStats]:
        """Return the evidence by drafter."""
        return {
            name: SurvivalStats(
                curve.count,
                tuple(curve.mean.tolist()),
                tuple(curve.standard_error().tolist()),
                tuple(self._reach[name].mean.tolist()),
            )
            for name, curve in self._survival.items()
        }


class _RunningMean:
    """Welford's sums of curves."""

    def __init__(self, depth: int) -> None:
        self.count = 0
        self.mean = np.zeros(depth)
        self._squares = np.zeros(depth)

    def add(self, curve: np.ndarray) -> None:
        self.count += 1
        off = curve - self.mean
        self.mean += off / self.count
        self._squares += off * (curve - self.mean)

    def standard_error(self) -> np.ndarray:
        variance: np.ndarray = self._squares / max(self.count - 1, 1)
        return np.sqrt(variance / self.count)
