"""Answers of the plain and of the speculative loop on the table target, and drafters that know the plain answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeduet_client.llm.draw import draw, generator
from edgeduet_client.llm.generate import Answer, Finished, Interruption, Sampling, generate
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.text import CommittedText
from table_model import (
    EOS,
    PIECES,
    PROMPT,
    ScriptedSelector,
    TableDrafter,
    never_interrupted,
    new_answer,
    new_sampling,
    run_to_end,
)

SIZE = len(PIECES)


@dataclass
class Told(TableDrafter):
    """Proposes what a function of text and place says: always right, always wrong, or rubbish."""

    says: Callable[[Sequence[int], int], int] = lambda tokens, place: 0

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        return Draft.certain(tuple(self.says(text.tokens, len(text.tokens) + place) for place in range(length)))


def plain(target: Any, plan: Any, budget: int, *, seed: int = 0, stops: Sequence[str] = ()) -> Run:
    answer, cache, sampling = new_answer(plan, budget, stops), target.new_cache(), new_sampling(plan, generator(seed))
    common: dict[str, Any] = {"interruption": never_interrupted(), "clock": lambda: 0.0}
    text, finished = run_to_end(generate(target, cache, PROMPT, answer, sampling, **common))
    return Run(answer, cache, sampling, text, finished, Counted(), ScriptedSelector([]))


@dataclass
class Run:
    answer: Answer
    cache: KVCache
    sampling: Sampling
    text: str
    finished: Finished
    counted: Counted
    selector: ScriptedSelector

    @property
    def ids(self) -> list[int]:
        return self.answer.ids


def speculative(
    target: Any,
    plan: Any,
    budget: int,
    drafters: dict[str, Any],
    arms: Sequence[Arm],
    *,
    seed: int = 0,
    stops: Sequence[str] = (),
    granule: int = 1,
    coupled: bool = False,
    interruption: Interruption | None = None,
    cache: KVCache | None = None,
    prompt: Sequence[int] = PROMPT,
) -> Run:
    answer, cache = new_answer(plan, budget, stops), cache or target.new_cache()
    sampling, counted, selector = new_sampling(plan, generator(seed)), Counted(), ScriptedSelector(arms)
    events = speculate(
        target,
        cache,
        prompt,
        answer,
        sampling,
        means=Means(drafters, selector, granule=granule, coupled=coupled),
        draft_rng=np.random.default_rng(99),
        counted=counted,
        interruption=interruption or never_interrupted(),
        clock=lambda: 0.0,
    )
    text, finished = run_to_end(events)
    return Run(answer, cache, sampling, text, finished, counted, selector)


def adversaries(answer: Sequence[int], prompt: Sequence[int] = PROMPT, size: int = SIZE) -> dict[str, Any]:
    """Drafters that know the plain answer: right, wrong everywhere, right up to some place, random, extreme."""
    known = [*prompt, *answer]

    def right(tokens: Sequence[int], place: int) -> int:
        return known[place] if place < len(known) else 1

    rng = np.random.default_rng(7)
    return {
        "right": Told(size, name="right", says=right),
        "wrong": Told(size, name="wrong", says=lambda tokens, place: (right(tokens, place) + 1) % size),
        "every third wrong": Told(
            size, name="third", says=lambda tokens, place: (right(tokens, place) + (place % 3 == 0)) % size
        ),
        "random": Told(size, name="random", says=lambda tokens, place: int(rng.integers(size))),
        "always the end": Told(size, name="end", says=lambda tokens, place: EOS),
        "always the last id": Told(size, name="last", says=lambda tokens, place: size - 1),
        "sampled": TableDrafter(size, name="sampled", draws=draw),
        "n-gram": NgramDrafter("n-gram", least=1, most=3, eos_ids=[EOS]),
    }
