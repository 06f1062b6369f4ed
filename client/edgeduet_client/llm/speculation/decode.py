"""The speculative loop: draft, verify in one step of the target, commit token by token, learn.

Each round the selector picks an arm (a drafter and a length, or none). The drafted tokens go through the target
behind the last committed token, which the target has not seen either: one step both corrects and goes on. What the
verifier lets through is committed one by one, so that an end-of-text token, a stop string or the budget ends the
text where plain decoding would have ended it. Then the cache is cropped to all committed tokens but the last.

Sampler state and random generator of the request move with committed tokens only. Drafters and selector draw from
generators of their own, so they cannot change what an answer is, only how fast it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.generate import (
    Answer,
    Clock,
    Drawn,
    Finished,
    Interruption,
    Reason,
    Sampling,
    TextPiece,
    logprob_of,
    read_prompt,
    reuse_prefix,
)
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.session import Forward, TargetSession
from edgeduet_client.llm.speculation.arms import Arm, Round, Selector
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.fly import FlyRule, verify_loosely
from edgeduet_client.llm.speculation.invariance import filled
from edgeduet_client.llm.speculation.positions import Emission, Positions
from edgeduet_client.llm.speculation.stats import PARTS, RoundCounter
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.speculation.verify import verify

if TYPE_CHECKING:
    from edgeduet_client.llm.speculation.costs import CostModel
    from edgeduet_client.llm.speculation.scoring import Scoring

log = logging.getLogger(__name__)


@dataclass
class Means:
    """What requests of one model speculate with; outlives a request.

    Attributes:
        drafters: by name; used by one request at a time.
        selector: picks the arm of a round.
        costs: what steps and drafts take on this machine; ``None`` for selectors that do not look at it.
        scoring: scores drafters at places they were not used; ``None`` where nothing learns from that.
        granule: exact mode: every step is filled up to a multiple of so many rows, with tokens that are dropped
            again, so that all steps round alike (:mod:`.invariance`); 1: steps are as they come.
        fly: lossy rule of verification; ``None``: exact.
        coupled: verify drawn drafts as if they were certain: fewer are accepted, but every token takes the random
            number plain decoding takes for it, so that a seed gives the very same answer whatever is drafted.
        draft_seconds: by drafter, what a drafted token took at best.
    """

    drafters: Mapping[str, Drafter]
    selector: Selector
    costs: CostModel | None = None
    scoring: Scoring | None = None
    granule: int = 1
    fly: FlyRule | None = None
    coupled: bool = False
    draft_seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Counted:
    """What is counted during a request.

    Attributes:
        rounds: by arm.
        failed: drafters that broke down, and how.
        relaxed: tokens that only a lossy rule let stand.
        unfilled: steps that could not be filled up, at the very end of the context.
    """

    rounds: RoundCounter = field(default_factory=RoundCounter)
    failed: dict[str, str] = field(default_factory=dict)
    relaxed: int = 0
    unfilled: int = 0


def speculate(
    session: TargetSession,
    cache: KVCache,
    prompt: Sequence[int],
    answer: Answer,
    sampling: Sampling,
    *,
    means: Means,
    draft_rng: np.random.Generator,
    counted: Counted,
    interruption: Interruption,
    clock: Clock,
    told: Callable[[CommittedText, Round], None] = lambda text, round: None,
) -> Generator[TextPiece | Finished, None, None]:
    """As :func:`~edgeduet_client.llm.generate.generate`: the text as it becomes visible, then :class:`Finished`.

    Args:
        session, cache, prompt, answer, sampling, interruption, clock: as there; afterwards, and also when anything
            is raised, the cache holds the prompt and all committed tokens but the last.
        means: drafters and selector.
        draft_rng: what drafters draw from.
        counted: empty; filled by this.
        told: hears of every round, when its tokens are committed (a trace).

    Raises:
        ModelError: the target failed, or a drafter lied about what it drew from.
    """
    started = clock()
    cached = reuse_prefix(cache, prompt)
    request = _Request(session, cache, CommittedText(prompt), answer, sampling, means, draft_rng, counted, clock, told)
    step = read_prompt(session, cache, prompt[cached:], hidden=request.hidden, interruption=interruption)
    read = clock()
    reason = request.begin(step) if isinstance(step, Forward) else step
    while reason is None:
        if piece := answer.take_piece():
            yield piece
        reason = interruption.reason() or request.round()
    reason = answer.finish(reason)
    if piece := answer.take_piece():
        yield piece
    yield Finished(
        reason=reason,
        prompt_tokens=len(prompt),
        completion_tokens=len(answer.ids),
        cached_tokens=cached,
        gate_interventions=answer.gate_interventions,
        seconds_prefill=read - started,
        seconds_decode=clock() - read,
    )


@dataclass
class _Request:
    """One request in work."""

    session: TargetSession
    cache: KVCache
    text: CommittedText
    answer: Answer
    sampling: Sampling
    means: Means
    draft_rng: np.random.Generator
    counted: Counted
    clock: Clock
    told: Callable[[CommittedText, Round], None]

    last_drafter: str | None = None

    def __post_init__(self) -> None:
        drafters = self.means.drafters.values()
        self.hidden = self.sampling.plan.needs_hidden or any(drafter.needs_hidden for drafter in drafters)

    def begin(self, step: Forward) -> Reason | None:
        """Commit the token the prompt's last row predicts, and tell everybody that a text begins."""
        self.means.selector.start_request()
        for name, drafter in self.means.drafters.items():
            with self._survives(name):
                drafter.start(self.text)
        if self.means.scoring is not None:
            self.means.scoring.start(self.text, coupled=self.means.coupled)
        _, reason = self._commit(step, Draft())
        return reason

    def round(self) -> Reason | None:
        """Do one round; return why the answer ends with it, or ``None`` if it goes on."""
        seconds = dict.fromkeys(PARTS, 0.0)
        arm = self.means.selector.choose(self.means.costs, len(self.text))
        began = self.clock()
        draft = self._draft(arm)
        drafted = self.clock()
        try:
            step = self._step(draft)
            verified = self.clock()
            emissions, reason = self._commit(step, draft)
        finally:
            # Drafted tokens leave the cache whatever happened; the last committed one was never in it.
            self.cache.crop(min(self.cache.length, self.text.prompt_length + len(self.answer.ids) - 1))
        committed = self.clock()
        seconds |= self._drafting_seconds(arm, len(draft), drafted - began)
        seconds |= {"verify": verified - drafted, "sampling": committed - verified}
        if reason is None:
            seconds["evaluation"] = self._learn(committed - began)
        self._account(arm, draft, emissions, seconds)
        return reason

    def _draft(self, arm: Arm) -> Draft:
        """Return the arm's proposal, no longer than what may still be drawn after the target's own token."""
        name = arm.drafter
        if name is None or name in self.counted.failed:
            return Draft()
        drafter = self.means.drafters[name]
        room = self.cache.shape.limit - len(self.text)
        length = min(arm.length, drafter.longest, self.answer.left - 1, room)
        if length < 1:
            return Draft()
        draft = Draft()
        with self._survives(name):
            draft = drafter.draft(self.text, length, self.draft_rng)
        _check(draft, length, self.sampling.plan.vocab_size, name)
        return Draft.certain(draft.tokens, draft.part) if self.means.coupled else draft

    def _step(self, draft: Draft) -> Forward:
        """Run the last committed token and the draft; return one row for each."""
        last = self.text.tokens[-1]
        block = (last, *draft.tokens)
        size = min(filled(len(block), self.means.granule), self.cache.shape.limit - self.cache.length)
        self.counted.unfilled += size % self.means.granule != 0
        rows = tuple(range(size))
        step = self.session.forward(block + (last,) * (size - len(block)), self.cache, rows=rows, hidden=self.hidden)
        if size == len(block):
            return step
        return Forward(step.logits[: len(block)], None if step.hidden is None else step.hidden[: len(block)])

    def _commit(self, step: Forward, draft: Draft) -> tuple[list[Emission], Reason | None]:
        """Commit what the verifier lets through, up to where the text ends."""
        sampling, fly = self.sampling, self.means.fly
        positions = Positions(step, self.answer.ids, draft)
        if fly is None:
            emitted = verify(positions, draft, sampling.plan, sampling.state, sampling.rng)
        else:
            emitted = verify_loosely(positions, draft, sampling.plan, sampling.state, sampling.rng, rule=fly)
        emissions: list[Emission] = []
        reason = None
        for emission in emitted:
            sampling.state = emission.state
            logprob = logprob_of(emission.token, step, emission.row, sampling)
            reason = self.answer.commit(Drawn(emission.token, emission.target.gate_fired, logprob))
            emissions.append(emission)
            if reason is not None:
                break
        rows = [emission.row for emission in emissions]
        self.text.extend(
            [emission.token for emission in emissions],
            [emission.target for emission in emissions],
            None if step.hidden is None else step.hidden[rows],
        )
        return emissions, reason

    def _learn(self, seconds: float) -> float:
        """Score drafters where it is due, and tell the selector; return the seconds it took."""
        if self.means.scoring is None:
            return 0.0
        began = self.clock()
        scored = self.means.scoring.advance(self.text, seconds, left_out=self.counted.failed, guard=self._survives)
        for one in scored:
            self.counted.rounds.evidence(one.survival, one.proposed)
            self.means.selector.learn(one.survival, one.proposed, one.start)
        return self.clock() - began

    def _drafting_seconds(self, arm: Arm, proposed: int, seconds: float) -> dict[str, float]:
        """Split the time of a draft: a drafter that was idle first reads what was written meanwhile.

        Drafting alone takes per token what it took at best so far; only what an idle drafter takes beyond that is
        catching up.
        """
        at_best, idle = self.means.draft_seconds, self.last_drafter != arm.drafter
        self.last_drafter = arm.drafter
        if arm.drafter is None or not proposed:
            return {"draft": seconds}
        known = at_best.get(arm.drafter)
        at_best[arm.drafter] = min(seconds / proposed, seconds if known is None else known)
        if not idle or known is None:
            return {"draft": seconds}
        drafting = min(known * proposed, seconds)
        return {"draft": drafting, "catch_up": seconds - drafting}

    def _account(self, arm: Arm, draft: Draft, emissions: list[Emission], seconds: dict[str, float]) -> None:
        """Count a round and tell the selector how it went."""
        accepted = sum(emission.drafted for emission in emissions)
        self.counted.relaxed += sum(emission.relaxed for emission in emissions)
        counts = {
            "proposed": len(draft),
            # The last emission is a verdict about a draft unless all were accepted.
            "evaluated": min(len(emissions), len(draft)),
            "accepted": accepted,
            "emitted": len(emissions),
        }
        self.counted.rounds.add(arm.drafter, arm.length, seconds=seconds, **counts)
        round = Round(arm=arm, seconds=seconds, spoke=draft.part, **counts)
        self.means.selector.played(round)
        if self.means.costs is not None:
            self.means.costs.observe(round, len(self.text))
        self.told(self.text, round)

    @contextmanager
    def _survives(self, name: str) -> Iterator[None]:
        """Go on without a drafter that breaks down: it can cost speed only. The result says so, and the log."""
        try:
            yield
        except Exception as error:
            self.counted.failed[name] = f"{type(error).__name__}: {error}"
            log.warning("drafter %s broke down; the answer goes on without it", name, exc_info=True)


def _check(draft: Draft, length: int, vocabulary: int, name: str) -> None:
    """Refuse what no drafter may do; an answer that rests on it could not be trusted.

    Raises:
        ModelError: too many tokens, ids that do not exist, or a token its own law excludes.
    """
    if len(draft) > length:
        raise ModelError(f"drafter {name} proposed {len(draft)} tokens where {length} were asked for; leave it out")
    for token, law in zip(draft.tokens, draft.laws, strict=True):
        if not 0 <= token < vocabulary:
            raise ModelError(f"drafter {name} proposed token {token}, which does not exist; leave it out")
        if law is not None and law.probability(token) <= 0:
            raise ModelError(f"drafter {name} proposed token {token}, which its own law excludes; leave it out")
