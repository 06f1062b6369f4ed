"""Random sequences of everything that can happen to a speculating chat, against a reference that starts from scratch.

Turns with random drafters, lengths and budgets, drafters and targets that fail at random places, answers that are
abandoned, caches that are rewound and used again. After each step: the cache holds exactly the committed tokens but
the last, what it says next equals a fresh prefill, and random generator and sampler state are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edgeduet_client.llm.draw import generator
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.generate import generate
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.text import CommittedText
from table_model import (
    PIECES,
    ScriptedSelector,
    TableDrafter,
    TableTarget,
    never_interrupted,
    new_answer,
    new_sampling,
    table_plan,
)

SIZE = len(PIECES)
TOKEN = st.integers(1, SIZE - 1)
ARMS = [Arm("ngram", 3), Arm("certain", 4), Arm("ngram", 1), Arm(None, 0), Arm("certain", 7)]


ASKED: list[dict[str, Any]] = [
    {"sampler": "greedy"},
    {},
    {"sampler": "mirostat", "mirostat_tau": 1.5, "mirostat_eta": 0.3},
    {"min_tokens": 4},
]
TURN = {
    "seed": st.integers(0, 99),
    "budget": st.integers(1, 14),
    "shift": st.integers(0, len(ARMS) - 1),
    "asked": st.sampled_from(ASKED),
}


class Fault(Exception):
    """What a drafter or target raises when its time has come."""


class Faulty(NgramDrafter):
    """Counts its drafts and fails at one of them."""

    fails_at: int | None = None
    drafts = 0

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        self.drafts += 1
        if self.drafts == self.fails_at:
            raise Fault("drafter")
        return super().draft(text, length, rng)


class FaultyTarget(TableTarget):
    """Fails at a step, before or after it wrote into the cache."""

    fails_in: int | None = None
    late = False

    def forward(self, ids: Sequence[int], cache: Any, **asked: Any) -> Any:
        if self.fails_in is not None:
            self.fails_in -= 1
        if self.fails_in == 0 and not self.late:
            raise ModelError("target, early")
        outcome = super().forward(ids, cache, **asked)
        if self.fails_in == 0:
            outcome.logits[-1:] = np.nan
        return outcome


class SpeculatingChat(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 50), prompt=st.lists(TOKEN, min_size=1, max_size=4))
    def begin(self, seed: int, prompt: list[int]) -> None:
        self.target = FaultyTarget(SIZE, seed=seed, limit=400)
        self.healthy = TableTarget(SIZE, seed=seed, limit=400)
        self.cache = self.target.new_cache()
        self.context = list(prompt)
        self.ngram = Faulty("ngram", least=1, most=3)
        self.drafters = {"ngram": self.ngram, "certain": TableDrafter(SIZE, certain=True, name="certain")}

    def turn(self, seed: int, budget: int, shift: int, *, abandon: int | None = None, **asked: Any) -> Any:
        """Answer the context; return the answer, its sampling side and what was raised."""
        plan = table_plan(SIZE, **asked)
        answer, sampling = new_answer(plan, budget), new_sampling(plan, generator(seed))
        arms = ARMS[shift:] + ARMS[:shift]
        events = speculate(
            self.target, self.cache, self.context, answer, sampling,
            means=Means(self.drafters, ScriptedSelector(arms), granule=1 + shift % 4),
            draft_rng=generator(1), counted=Counted(), interruption=never_interrupted(), clock=lambda: 0.0,
        )  # fmt: skip
        raised = None
        try:
            for count, _ in enumerate(events):
                if count == abandon:
                    events.close()
                    break
        except ModelError as error:
            raised = error
        return answer, sampling, raised

    def reference(self, seed: int, budget: int, **asked: Any) -> Any:
        plan = table_plan(SIZE, **asked)
        answer, sampling = new_answer(plan, budget), new_sampling(plan, generator(seed))
        states = []
        events = generate(
            self.healthy, self.healthy.new_cache(), self.context, answer, sampling,
            interruption=never_interrupted(), clock=lambda: 0.0,
        )  # fmt: skip
        for _ in events:
            states.append((len(answer.ids), sampling.rng.bit_generator.state, sampling.state))
        return answer, {length: (state, sampler) for length, state, sampler in states}

    def compare(
        self, answer: Any, sampling: Any, seed: int, budget: int, asked: dict[str, Any], *, whole: bool
    ) -> None:
        expected, states = self.reference(seed, budget, **asked)
        assert answer.ids == expected.ids[: len(answer.ids)]
        if whole:
            assert answer.ids == expected.ids
        if len(answer.ids) in states:
            state, sampler = states[len(answer.ids)]
            assert sampling.rng.bit_generator.state == state
            assert sampling.state.length == sampler.length
            assert sampling.state.surprise_bound == sampler.surprise_bound
        if answer.ids:
            assert self.cache.tokens == [*self.context, *answer.ids][:-1]

    @precondition(lambda self: len(self.context) < 300)
    @rule(**TURN)
    def answer_in_full(self, seed: int, budget: int, shift: int, asked: dict[str, Any]) -> None:
        answer, sampling, raised = self.turn(seed, budget, shift, **asked)
        assert raised is None
        self.compare(answer, sampling, seed, budget, asked, whole=True)
        self.context += answer.ids

    @precondition(lambda self: len(self.context) < 300)
    @rule(after=st.integers(0, 4), **TURN)
    def abandon_an_answer(self, after: int, seed: int, budget: int, shift: int, asked: dict[str, Any]) -> None:
        answer, sampling, raised = self.turn(seed, budget, shift, abandon=after, **asked)
        assert raised is None
        self.compare(answer, sampling, seed, budget, asked, whole=False)
        self.context += answer.ids

    @precondition(lambda self: len(self.context) < 300)
    @rule(at=st.integers(1, 4), **TURN)
    def a_drafter_fails(self, at: int, seed: int, budget: int, shift: int, asked: dict[str, Any]) -> None:
        self.ngram.drafts, self.ngram.fails_at = 0, at
        answer, sampling, raised = self.turn(seed, budget, shift, **asked)
        self.ngram.fails_at = None
        assert raised is None
        self.compare(answer, sampling, seed, budget, asked, whole=True)
        self.context += answer.ids

    @precondition(lambda self: len(self.context) < 300)
    @rule(at=st.integers(1, 5), late=st.booleans(), **TURN)
    def the_target_fails(self, at: int, late: bool, seed: int, budget: int, shift: int, asked: dict[str, Any]) -> None:
        self.target.fails_in, self.target.late = at, late
        answer, sampling, _ = self.turn(seed, budget, shift, **asked)
        self.target.fails_in = None
        self.compare(answer, sampling, seed, budget, asked, whole=False)
        self.context += answer.ids

    @rule(more=st.lists(TOKEN, min_size=1, max_size=3))
    def say_more(self, more: list[int]) -> None:
        self.context += more

    @precondition(lambda self: len(self.context) > 2)
    @rule(back=st.integers(1, 12))
    def rewind(self, back: int) -> None:
        """Edit an earlier message: the cache holds more than the prompt now has, or something else."""
        del self.context[max(1, len(self.context) - back) :]

    @invariant()
    def the_cache_says_what_a_fresh_prefill_says(self) -> None:
        if not hasattr(self, "cache") or not self.cache.length:
            return
        held = list(self.cache.tokens)
        mark = self.cache.length
        ours = self.healthy.forward([1], self.cache).logits
        self.cache.crop(mark)
        fresh = self.healthy.new_cache()
        theirs = self.healthy.forward([*held, 1], fresh).logits
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


SpeculatingChat.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)
TestSpeculatingChat = SpeculatingChat.TestCase
