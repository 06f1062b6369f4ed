"""Which drafters are scored at which starts, within a share of the time.

Starts are taken in blocks, because one call of a drafter scores a block for little more than a single start. The first
blocks of a request are short, so that something is known soon; one of them takes every position, so that rounds can be
followed through it (:mod:`.round_starts`), the others leave some out, because neighbours say nearly the same. Who is
scored on a block is settled when the block *opens*, before any token behind its first start is known: whatever the
text then says, no start is left out or added, so every curve that is handed on is unbiased given what was known when
it was asked for.

Every drafter has an account. ``share`` of the time of all rounds is paid in, in equal parts to those that have less
than four blocks cost: a cheap drafter soon has. A block is scored when the account covers
what it took before. Within a request a drafter is scored on the first three blocks, then on every 2nd, 4th, 8th: the
text has shown what it is like; one that takes next to no time (a lookup) on all. A drafter that stands clearly below
the best goes on to every 64th, over requests. A change (of the text, or of a standing) brings everybody back to every
block. While no draft at all is the best that can be done, an eighth of the share is paid in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgeduet_client.llm.speculation.delay_queue import DelayQueue

BLOCKS = ((4, 1), (8, 1), (16, 3))
"""Starts of the blocks of a request, and positions from one to the next; the last goes on."""
DOMINATED = 0.85
"""Share of the best rate below which a drafter is looked at more and more rarely."""
LONGEST_PERIOD = 64
LONGEST_PERIOD_IN_REQUEST = 8
NOTHING_PAYS = 0.125
"""Part of the share that is paid in while no draft is best."""
CHEAP = 0.002
"""Share of the time for which a drafter is scored everywhere, whatever it is worth."""
_ACCOUNT_BLOCKS = 4.0
_REMEMBERED = 0.7


@dataclass(frozen=True)
class Block:
    """Neighbouring starts whose horizon is committed, and who is to be scored there."""

    starts: tuple[int, ...]
    drafters: tuple[str, ...]


@dataclass
class _Account:
    """What a drafter's scoring may take.

    Attributes:
        credit: seconds paid in and not spent.
        reserved: of open blocks, oldest first: what was set aside, so that two of them do not spend the same credit.
        seconds_per_start: what scoring took lately; ``None``: never scored.
        period: scored at every how-many-th block.
        due_in: blocks until it is due.
        dominated: whether it stood clearly below the best when last looked at.
    """

    credit: float = 0.0
    reserved: deque[float] = field(default_factory=deque)
    seconds_per_start: float | None = None
    period: int = 1
    due_in: int = 0
    dominated: bool = False

    def cost(self, starts: int) -> float:
        return 0.0 if self.seconds_per_start is None else self.seconds_per_start * starts

    def affords(self, starts: int) -> bool:
        if self.seconds_per_start is None:
            # The first block shows what blocks cost; until then there is no second.
            return not self.reserved
        return self.credit - sum(self.reserved) >= self.cost(starts)

    @property
    def wants(self) -> bool:
        return self.seconds_per_start is None or self.credit < _ACCOUNT_BLOCKS * self.cost(BLOCKS[-1][0])


class EvaluationBudget:
    """Schedules scoring over all requests of a model.

    Args:
        drafters: their names.
        depth: tokens of the horizon.
        share: of the time of all rounds that scoring may take on top; 0: nothing is ever scored.
        standing: the best rate of each drafter as a share of the best of all, no draft included, as far as it is
            known; what it says affects blocks that have not opened yet only.
        changes: how often the text was found to have changed.
    """

    def __init__(
        self,
        drafters: Sequence[str],
        *,
        depth: int,
        share: float,
        standing: Callable[[], Mapping[str, float]] = dict,
        changes: Callable[[], int] = int,
    ) -> None:
        if not 0 <= share < 1:
            raise ValueError(f"a share of {share} of the time")
        self.depth = depth
        self.share = share
        self.spent = 0.0
        self.elapsed = 0.0
        self._standing = standing
        self._changes = changes
        self._changed = 0
        self._positions = 0
        self._accounts = {name: _Account() for name in drafters}
        self.begin()

    def begin(self) -> None:
        """Begin a request; what was not scored of the last one never will be."""
        for account in self._accounts.values():
            account.reserved.clear()
            if not account.dominated:
                account.period, account.due_in = 1, 0
        self._queue = DelayQueue(self.depth)
        self._planned: list[tuple[int, tuple[str, ...]]] = []
        self._released: list[int] = []
        self._opened = 0
        self._room = 0
        self._next = 0
        self._stride = 1

    def push(self, start: int) -> None:
        """Take up ``start``, the next position; where it opens a block, settle who will be scored on it."""
        self._positions += 1
        if self._room == 0:
            size, self._stride = BLOCKS[min(self._opened, len(BLOCKS) - 1)]
            self._opened += 1
            self._room = size
            self._next = start
            self._planned.append((size, self._settle(size)))
        if start < self._next:
            return
        self._room -= 1
        self._next = start + self._stride
        self._queue.push(start)

    def paid(self, seconds: float) -> None:
        """Pay in for a round that took ``seconds``, scoring not included."""
        self.elapsed += seconds
        standing = self._standing()
        nothing_pays = bool(standing) and max(standing.values()) < 1
        left = self.share * seconds * (NOTHING_PAYS if nothing_pays else 1)
        wanting = [account for account in self._accounts.values() if account.wants]
        for account in wanting:
            account.credit += left / len(wanting)

    def due(self, length: int) -> list[Block]:
        """Return the blocks that can be scored now that ``length`` tokens are committed, each once."""
        self._released += self._queue.release(length)
        blocks = []
        while self._planned and len(self._released) >= self._planned[0][0]:
            size, drafters = self._planned.pop(0)
            starts, self._released = tuple(self._released[:size]), self._released[size:]
            if drafters:
                blocks.append(Block(starts, drafters))
        return blocks

    def took(self, drafter: str, starts: int, seconds: float) -> None:
        """Take up what scoring ``drafter`` at ``starts`` starts took."""
        account = self._accounts[drafter]
        self.spent += seconds
        account.credit -= seconds
        if account.reserved:
            account.reserved.popleft()
        latest = seconds / starts
        before = account.seconds_per_start
        account.seconds_per_start = latest if before is None else _REMEMBERED * before + (1 - _REMEMBERED) * latest

    def _is_cheap(self, account: _Account) -> bool:
        """Whether scoring it at every position would take next to no time."""
        at_every_position = (account.seconds_per_start or math.inf) * self._positions
        return at_every_position <= CHEAP * self.elapsed

    def _settle(self, size: int) -> tuple[str, ...]:
        if self.share == 0:
            return ()
        standing = self._standing()
        changed, self._changed = self._changed != self._changes(), self._changes()
        chosen = []
        for name, account in self._accounts.items():
            was_dominated, account.dominated = account.dominated, standing.get(name, 1.0) < DOMINATED
            if changed or (was_dominated and not account.dominated):
                account.period, account.due_in = 1, 0
            account.due_in -= 1
            waits = account.due_in > 0 and not self._is_cheap(account)
            if waits or not account.affords(size):
                continue
            if account.dominated or self._opened >= len(BLOCKS):
                longest = LONGEST_PERIOD if account.dominated else LONGEST_PERIOD_IN_REQUEST
                account.period = min(2 * account.period, longest)
            account.due_in = account.period
            account.reserved.append(account.cost(size))
            chosen.append(name)
        return tuple(chosen)
