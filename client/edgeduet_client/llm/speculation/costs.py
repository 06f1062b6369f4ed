"""What a round costs on this machine, as calibrated and as measured since.

    seconds(i, g) = overhead + draft_i(g) + T(g + 1),   T(m): a step of the target with m rows,

with T by context length (buckets that double) and draft_i(g) = first + g each. V(m) = T(m) / T(1). Every round that is
played corrects its own cells: the median of the last five observations, so that one interrupted step moves little,
goes into a mean of the logarithm whose weights fall to 1/20; where the median jumps, new observations weigh more
again. Cells that were not seen for a while follow, by four fifths: when a step takes longer than it did, the reason is
usually the machine and concerns all steps, but it may be this size of step alone. A selector that wants to know better
plays an old cell now and then (:meth:`CostModel.age`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.arms import Arm, Round
from edgeduet_client.llm.speculation.invariance import filled

FORMAT = 1
SMALLEST_BUCKET = 256
"""Tokens up to which a context is short; buckets end at this times 2, 4, 8, ..."""
_MEDIAN_OF = 5
_LEAST_WEIGHT = 0.05
_JUMP = 0.25
"""A median that far off (in logarithms) is a change, not noise."""
_CATCH_UP_WEIGHT = 0.2
_STALE = 32
"""Rounds after which a cell counts as not seen lately."""
_FOLLOW = 0.8
_NEVER = -1_000_000


@dataclass(frozen=True)
class DraftCost:
    """Seconds of drafting g >= 1 tokens: ``first + g * each``."""

    first: float
    each: float

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a draft of ``tokens``; looking and finding nothing costs ``first``."""
        return self.first + tokens * self.each


@dataclass
class _Cell:
    """A positive number that drifts: its logarithm, and what was seen last."""

    log: float
    seen: int = _NEVER
    fresh: int = 0
    jumps: int = 0
    window: deque[float] = field(default_factory=lambda: deque(maxlen=_MEDIAN_OF))

    def observe(self, value: float, now: int) -> float:
        """Take up ``value``; return by how much the logarithm moved."""
        if now - self.seen > _STALE:
            # Old observations say nothing about now, and the first new ones count for more.
            self.window.clear()
            self.fresh = 0
        self.seen = now
        self.window.append(value)
        off = math.log(statistics.median(self.window)) - self.log
        if abs(off) > _JUMP and len(self.window) > _MEDIAN_OF // 2:
            self.jumps += self.fresh > 2
            self.fresh = min(self.fresh, 2)
        self.fresh += 1
        moved = max(_LEAST_WEIGHT, 1 / (self.fresh + 1)) * off
        self.log += moved
        return moved


class CostModel:
    """Costs of all arms; corrected by every round.

    Args:
        steps: by context length, seconds of steps of 1, 2, ... rows behind that many tokens; at least one.
        drafts: by drafter.
        overhead: seconds of a round that are nobody's.
        catch_up: by drafter, seconds to bring it up to date when another one was in use.
        granule: rows steps are filled up to a multiple of (exact mode).
    """

    def __init__(
        self,
        steps: Mapping[int, Sequence[float]],
        drafts: Mapping[str, DraftCost],
        *,
        overhead: float = 0.0,
        catch_up: Mapping[str, float] | None = None,
        granule: int = 1,
    ) -> None:
        if not steps or any(not times or min(times) <= 0 for times in steps.values()):
            raise ValueError("steps need positive seconds")
        self.granule = granule
        self.overhead = overhead
        self._drafts = dict(drafts)
        self._draft_scale = {name: _Cell(0.0) for name in drafts}
        self._catch_up = {name: (catch_up or {}).get(name, 0.0) for name in drafts}
        self._cells = {
            bucket_of(context): [_Cell(math.log(seconds)) for seconds in times]
            for context, times in sorted(steps.items())
        }
        self._now = 0

    @classmethod
    def guessed(cls, drafters: Sequence[str], rows: int, *, granule: int = 1) -> CostModel:
        """Return a model for where nothing was measured: each row beyond the first costs .15 of a plain step, a
        drafted token .02; the units are seconds only after the first rounds.
        """
        steps = [0.01 * (1 + 0.15 * row) for row in range(rows)]
        return cls({0: steps}, {name: DraftCost(0.0, 0.0002) for name in drafters}, granule=granule)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Whose drafts have a cost."""
        return tuple(self._drafts)

    def step_seconds(self, rows: int, context_length: int) -> float:
        """Return the seconds of a step that needs ``rows`` rows; beyond the largest size known, a straight line."""
        return self._step_seconds(self._at(context_length), filled(rows, self.granule))

    def step_table(self, rows: int, context_length: int) -> NDArray[np.float64]:
        """Return (rows,) seconds of steps of 1 to ``rows`` rows."""
        cells = self._at(context_length)
        return np.array([self._step_seconds(cells, filled(count, self.granule)) for count in range(1, rows + 1)])

    @staticmethod
    def _step_seconds(cells: Sequence[_Cell], rows: int) -> float:
        if rows <= len(cells):
            return math.exp(cells[rows - 1].log)
        last = math.exp(cells[-1].log)
        slope = (last - math.exp(cells[0].log)) / (len(cells) - 1) if len(cells) > 1 else last
        return last + (rows - len(cells)) * max(slope, 0.0)

    def draft_seconds(self, drafter: str, tokens: int) -> float:
        """Return the seconds of a draft of ``tokens``."""
        return math.exp(self._draft_scale[drafter].log) * self._drafts[drafter].seconds(tokens)

    def catch_up(self, drafter: str) -> float:
        """Return the seconds to bring an idle drafter up to date."""
        return self._catch_up[drafter]

    def seconds(self, arm: Arm, context_length: int) -> float:
        """Return the seconds of a round in which ``arm`` proposes all it may."""
        drafting = 0.0 if arm.drafter is None else self.draft_seconds(arm.drafter, arm.length)
        return self.overhead + drafting + self.step_seconds(arm.length + 1, context_length)

    def age(self, rows: int, context_length: int) -> int:
        """Return how many rounds ago a step of that size was last measured; very many if never."""
        cells = self._at(context_length)
        rows = filled(rows, self.granule)
        return self._now - cells[min(rows, len(cells)) - 1].seen

    @property
    def jumps(self) -> int:
        """How often what a step takes was found to have changed by a quarter or more."""
        return sum(cell.jumps for cells in self._cells.values() for cell in cells)

    def observe(self, round: Round, context_length: int) -> None:
        """Take up what a round took, at ``context_length`` tokens."""
        self._now += 1
        cells = self._at(context_length)
        rows = filled(round.proposed + 1, self.granule)
        verify = round.seconds.get("verify", 0.0)
        if verify > 0 and rows <= len(cells):
            moved = cells[rows - 1].observe(verify, self._now)
            for bucket in self._cells.values():
                for cell in bucket:
                    if self._now - cell.seen > _STALE:
                        cell.log += _FOLLOW * moved
        name, drafting = round.arm.drafter, round.seconds.get("draft", 0.0)
        if name in self._drafts and drafting > 0 and (expected := self._drafts[name].seconds(round.proposed)) > 0:
            self._draft_scale[name].observe(drafting / expected, self._now)
        if name in self._drafts and (caught := round.seconds.get("catch_up", 0.0)) > 0:
            self._catch_up[name] += _CATCH_UP_WEIGHT * (caught - self._catch_up[name])

    def scaled(self, factor: float) -> CostModel:
        """Return the same costs on a machine that takes ``factor`` times as long."""
        values = self.as_json()
        return CostModel(
            {int(context): [factor * one for one in times] for context, times in values["steps"].items()},
            {n: DraftCost(factor * cost["first"], factor * cost["each"]) for n, cost in values["drafts"].items()},
            overhead=factor * self.overhead,
            catch_up={name: factor * seconds for name, seconds in self._catch_up.items()},
            granule=self.granule,
        )

    def as_json(self) -> dict[str, Any]:
        """Return all costs as they stand."""
        return {
            "format": FORMAT,
            "granule": self.granule,
            "overhead": self.overhead,
            "steps": {
                str(_context_of(bucket)): [math.exp(cell.log) for cell in cells]
                for bucket, cells in self._cells.items()
            },
            "drafts": {
                name: {part: math.exp(self._draft_scale[name].log) * value for part, value in asdict(cost).items()}
                for name, cost in self._drafts.items()
            },
            "catch_up": dict(self._catch_up),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> CostModel:
        """Return the model that :meth:`as_json` wrote.

        Raises:
            ModelError: it is something else.
        """
        try:
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}")
            return cls(
                {int(context): [float(one) for one in times] for context, times in values["steps"].items()},
                {name: DraftCost(float(one["first"]), float(one["each"])) for name, one in values["drafts"].items()},
                overhead=float(values["overhead"]),
                catch_up={name: float(one) for name, one in values["catch_up"].items()},
                granule=int(values["granule"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"this is no table of costs ({error}); calibrate again") from None

    def _at(self, context_length: int) -> list[_Cell]:
        """Return the cells of the bucket; a bucket never seen starts as the nearest one."""
        bucket = bucket_of(context_length)
        if bucket not in self._cells:
            nearest = min(self._cells, key=lambda known: (abs(known - bucket), known))
            self._cells[bucket] = [_Cell(cell.log) for cell in self._cells[nearest]]
        return self._cells[bucket]


def bucket_of(context_length: int) -> int:
    """Return which bucket a context of so many tokens belongs to."""
    return max(0, math.ceil(math.log2(max(context_length, 1) / SMALLEST_BUCKET)))


def _context_of(bucket: int) -> int:
    return SMALLEST_BUCKET << bucket
