"""The speculative loop: the same tokens as plain decoding, ends where it ends, leaves the cache as it leaves it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import generator
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.generate import Interruption, generate
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.text import CommittedText
from speculative_runs import Told, adversaries, plain, speculative
from table_model import (
    EOS,
    PIECES,
    PROMPT,
    ScriptedSelector,
    TableTarget,
    never_interrupted,
    new_answer,
    new_sampling,
    run_to_end,
    table_plan,
)

SIZE = len(PIECES)
LONGEST = 8


@pytest.mark.parametrize("length", range(1, LONGEST + 1))
@pytest.mark.parametrize("name", adversaries([]))
def test_greedy_answers_are_those_of_plain_decoding(name: str, length: int) -> None:
    for seed in range(60):
        target, plan = TableTarget(SIZE, seed=seed), table_plan(SIZE, sampler="greedy")
        wanted = plain(target, plan, 30)
        found = speculative(target, plan, 30, {name: adversaries(wanted.ids)[name]}, [Arm(name, length)])
        assert found.ids == wanted.ids
        assert found.text == wanted.text
        assert found.finished.reason == wanted.finished.reason
        assert found.cache.tokens == wanted.cache.tokens == [*PROMPT, *wanted.ids][:-1]


@pytest.mark.parametrize("budget", range(1, LONGEST + 3))
def test_every_budget_is_met_exactly(budget: int) -> None:
    """Also where a draft of full length would run past it."""
    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    wanted = plain(target, plan, budget)
    drafter = adversaries(plain(TableTarget(SIZE, seed=3), plan, 40).ids)["right"]
    for length in range(1, LONGEST + 1):
        found = speculative(target, plan, budget, {"right": drafter}, [Arm("right", length)])
        assert found.ids == wanted.ids
        assert len(found.ids) == budget
        assert found.finished.reason == "length"
        assert found.cache.length == len(PROMPT) + budget - 1
        # Nothing is drafted that could not be committed.
        assert target.reached == len(PROMPT) + budget - 1


@pytest.mark.parametrize("place", range(1, LONGEST + 2))
def test_an_end_of_text_ends_the_answer_at_every_place_of_a_block(place: int) -> None:
    """Drafted, as a correction, or as the bonus behind a full accept."""
    target = TableTarget(SIZE, seed=3)
    unending = plain(target, table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100}), 40).ids
    plan = table_plan(SIZE, sampler="greedy", min_tokens=place, logit_bias={EOS: 100})
    wanted = plain(target, plan, 40)
    assert wanted.ids == [*unending[:place], EOS]
    for name in ("right", "wrong", "always the end"):
        drafter = adversaries(wanted.ids)[name]
        for length in (place, LONGEST):
            found = speculative(target, plan, 40, {"d": drafter}, [Arm("d", min(length, LONGEST))])
            assert found.ids == wanted.ids
            assert found.finished.reason == "stop"
            assert found.cache.tokens == [*PROMPT, *wanted.ids][:-1]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    sampler=st.sampled_from(
        [
            {},
            {"sampler": "p-less", "temperature": 2.0},
            {"sampler": "top-k", "top_k": 3, "frequency_penalty": 0.7},
            {"sampler": "mirostat", "mirostat_tau": 1.5, "mirostat_eta": 0.5},
            {"min_tokens": 5, "bad_words": ("ab",)},
        ]
    ),
    stops=st.sampled_from([(), ("a日",), ("b", ". ")]),
)
def test_certain_drafts_give_the_very_answer_of_plain_decoding_for_every_seed(
    seed: int, lengths: list[int], sampler: dict[str, Any], stops: tuple[str, ...]
) -> None:
    """Bit for bit, random generator and sampler state included."""
    target, plan = TableTarget(SIZE, seed=seed % 7), table_plan(SIZE, **sampler)
    wanted = plain(target, plan, 25, seed=seed, stops=stops)
    drafters = {"ngram": NgramDrafter(least=1, most=3), "right": adversaries(wanted.ids)["every third wrong"]}
    arms = [Arm(("ngram", "right")[place % 2], length) for place, length in enumerate(lengths)]
    found = speculative(target, plan, 25, drafters, arms, seed=seed, stops=stops)
    assert found.ids == wanted.ids
    assert found.text == wanted.text
    assert found.finished.reason == wanted.finished.reason
    assert found.cache.tokens == wanted.cache.tokens
    assert found.sampling.rng.bit_generator.state == wanted.sampling.rng.bit_generator.state
    assert found.sampling.state.length == wanted.sampling.state.length
    assert found.sampling.state.surprise_bound == wanted.sampling.state.surprise_bound


@pytest.mark.parametrize("rule", ["retruncate", "union"])
def test_the_gate_and_log_probabilities_are_those_of_plain_decoding(rule: str) -> None:
    target = TableTarget(SIZE, seed=5)
    plan = table_plan(SIZE, gated=True, gate="on", gate_rule=rule, temperature=1.3)
    for seed in range(20):
        sides = []
        for drafted in (False, True):
            answer, sampling = new_answer(plan, 20), new_sampling(plan, generator(seed))
            sampling.top_logprobs = 2
            common: dict[str, Any] = {"interruption": never_interrupted(), "clock": lambda: 0.0}
            if drafted:
                means = Means({"n": NgramDrafter("n", least=1, most=2)}, ScriptedSelector([Arm("n", 4)]))
                events = speculate(
                    target, target.new_cache(), PROMPT, answer, sampling, means=means,
                    draft_rng=np.random.default_rng(0), counted=Counted(), **common,
                )  # fmt: skip
            else:
                events = generate(target, target.new_cache(), PROMPT, answer, sampling, **common)
            entries = [entry for event in events for entry in getattr(event, "logprobs", None) or ()]
            sides.append((answer.ids, answer.gate_interventions, entries))
        assert sides[0] == sides[1]
        assert len(sides[0][2]) >= len([i for i in sides[0][0] if i != EOS])


def test_a_drafts_end_never_passes_the_context() -> None:
    target, plan = TableTarget(SIZE, limit=16), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    budget = 16 - len(PROMPT)
    wanted = plain(target, plan, budget)
    for granule in (1, 2):
        found = speculative(
            target,
            plan,
            budget,
            adversaries(wanted.ids),
            [Arm("right", 8), Arm("wrong", 8), Arm(None, 0)],
            granule=granule,
        )
        assert found.ids == wanted.ids


def test_a_cache_from_an_earlier_turn_is_gone_on_with() -> None:
    target, plan = TableTarget(SIZE, seed=4), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    first = speculative(target, plan, 9, adversaries([]), [Arm("random", 3)])
    turn = [*PROMPT, *first.ids, 3, 1]
    second = speculative(target, plan, 9, adversaries([]), [Arm("n-gram", 3)], cache=first.cache, prompt=turn)
    assert second.finished.cached_tokens == len(PROMPT) + 9 - 1
    fresh = speculative(target, plan, 9, {}, [Arm(None, 0)], prompt=turn)
    assert second.ids == fresh.ids


def test_one_step_of_the_target_carries_correction_and_draft() -> None:
    """No step is spent on re-anchoring after a rejection: steps are rounds, and the prompt's."""
    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    wanted = plain(target, plan, 20)
    for name in ("right", "wrong"):
        target.forwards.clear()
        found = speculative(target, plan, 20, {name: adversaries(wanted.ids)[name]}, [Arm(name, 4)])
        assert len(target.forwards) == 1 + len(found.selector.played_rounds)
        for block in target.forwards[1:]:
            assert len(block) <= 5


def test_rounds_are_counted_as_what_they_were() -> None:
    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    wanted = plain(target, plan, 40).ids
    drafters = adversaries(wanted)
    found = speculative(target, plan, 21, drafters, [Arm("right", 4), Arm("wrong", 3), Arm(None, 0)])
    first, second, third = found.selector.played_rounds[:3]
    assert (first.proposed, first.evaluated, first.accepted, first.emitted) == (4, 4, 4, 5)
    assert (second.proposed, second.evaluated, second.accepted, second.emitted) == (3, 1, 0, 1)
    assert (third.proposed, third.evaluated, third.accepted, third.emitted) == (0, 0, 0, 1)
    assert sum(round.emitted for round in found.selector.played_rounds) == 20
    arms = {(arm.drafter, arm.length): arm for arm in found.counted.rounds.arms()}
    assert sum(arm.emitted for arm in arms.values()) == 20
    assert arms["wrong", 3].discarded == arms["wrong", 3].proposed
    assert arms["right", 4].discarded == 0
    assert found.counted.rounds.switches == len(found.selector.played_rounds) - 1


def test_an_idle_drafters_catching_up_is_told_from_drafting() -> None:
    now = [0.0]

    class ReadsFirst(Told):
        """Takes a second to read each token it has not seen, and 0.1 to draft one."""

        read = 0

        def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
            draft = super().draft(text, length, rng)
            now[0] += 0.1 * length + (len(text) - self.read if len(text) - self.read > 3 else 0)
            self.read = len(text)
            return draft

    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    answer, selector = new_answer(plan, 40), ScriptedSelector([Arm("d", 2), Arm("d", 2), *[Arm(None, 0)] * 8])
    events = speculate(
        target,
        target.new_cache(),
        PROMPT,
        answer,
        new_sampling(plan, generator(0)),
        means=Means({"d": ReadsFirst(SIZE, says=lambda tokens, place: 1)}, selector),
        draft_rng=generator(0),
        counted=Counted(),
        interruption=never_interrupted(),
        clock=lambda: now[0],
    )
    run_to_end(events)
    first, second, *_ = selector.played_rounds
    again = selector.played_rounds[10]
    assert first.seconds["draft"] == pytest.approx(0.2)
    assert second.seconds["catch_up"] == 0
    assert again.seconds["draft"] == pytest.approx(0.2)
    assert again.seconds["catch_up"] == pytest.approx(sum(r.emitted for r in selector.played_rounds[1:10]))


def test_a_draft_cut_by_an_end_of_text_counts_what_was_committed() -> None:
    target = TableTarget(SIZE, seed=3)
    plan = table_plan(SIZE, sampler="greedy", min_tokens=3, logit_bias={EOS: 100})
    wanted = plain(target, plan, 40).ids
    found = speculative(target, plan, 40, adversaries(wanted), [Arm("right", 8)])
    (round,) = found.selector.played_rounds
    assert (round.proposed, round.evaluated, round.accepted, round.emitted) == (8, 3, 3, 3)


def test_the_committed_text_holds_what_each_token_was_drawn_from() -> None:
    texts: list[CommittedText] = []

    class Listens(Told):
        def start(self, text: CommittedText) -> None:
            texts.append(text)

    target, plan = TableTarget(SIZE, seed=2), table_plan(SIZE, temperature=1.4)
    says = adversaries(plain(target, plan, 25, seed=5).ids)["every third wrong"].says
    found = speculative(target, plan, 25, {"n": Listens(SIZE, says=says)}, [Arm("n", 4)], seed=5)
    (text,) = texts
    assert max(round.emitted for round in found.selector.played_rounds) > 2
    assert text.tokens == [*PROMPT, *found.ids]
    for position in range(len(PROMPT), len(text)):
        logits = target.row(text.tokens[:position]).astype(np.float64) / 1.4
        wanted = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        np.testing.assert_allclose(text.target(position).probabilities, wanted, rtol=1e-5)
    with pytest.raises(LookupError):
        text.target(len(PROMPT) - 1)


def test_cancelling_ends_between_two_rounds_with_a_valid_cache() -> None:
    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, logit_bias={EOS: -100})
    cancel = threading.Event()

    class CancelsLater(NgramDrafter):
        def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
            if len(text) > 12:
                cancel.set()
            return super().draft(text, length, rng)

    interruption = Interruption(cancel, lambda: 0.0, None)
    found = speculative(
        target, plan, 50, {"n": CancelsLater("n", least=1, most=2)}, [Arm("n", 3)], interruption=interruption
    )
    assert found.finished.reason == "cancelled"
    assert 12 < len(PROMPT) + len(found.ids) <= 12 + 4 + 4
    assert found.cache.tokens == [*PROMPT, *found.ids][:-1]


def test_a_time_out_ends_between_two_rounds() -> None:
    ticks = iter(range(10_000))
    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, logit_bias={EOS: -100})
    interruption = Interruption(None, lambda: float(next(ticks)), 8.5)
    found = speculative(target, plan, 60, {"n": NgramDrafter("n", least=1)}, [Arm("n", 3)], interruption=interruption)
    assert found.finished.reason == "timeout"
    assert found.cache.tokens == [*PROMPT, *found.ids][:-1]


class Breaks(NgramDrafter):
    """Works for a while, then raises."""

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        if len(text) > 9:
            raise RuntimeError("out of memory")
        return super().draft(text, length, rng)


def test_a_drafter_that_breaks_down_costs_speed_only_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, logit_bias={EOS: -100})
    wanted = plain(target, plan, 30, seed=4)
    found = speculative(target, plan, 30, {"n": Breaks("n", least=1)}, [Arm("n", 3)], seed=4)
    assert found.ids == wanted.ids
    assert found.counted.failed == {"n": "RuntimeError: out of memory"}
    assert caplog.text.count("drafter n broke down") == 1


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft.certain((1, 1, 1)), "proposed 3 tokens where 2 were asked for"),
        (Draft.certain((SIZE,)), f"proposed token {SIZE}, which does not exist"),
        (Draft.certain((-1,)), "proposed token -1, which does not exist"),
        (Draft((1,), (Distribution(np.array([2]), np.ones(1)),)), "proposed token 1, which its own law excludes"),
    ],
)
def test_a_drafter_that_breaks_the_rules_ends_the_answer(draft: Draft, message: str) -> None:
    class BreaksRules(NgramDrafter):
        def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
            return draft

    target, plan = TableTarget(SIZE, seed=3), table_plan(SIZE, logit_bias={EOS: -100})
    with pytest.raises(ModelError, match=f"drafter n {message}"):
        speculative(target, plan, 30, {"n": BreaksRules("n")}, [Arm("n", 2)])


@pytest.mark.parametrize("step", range(1, 6))
def test_a_target_that_fails_leaves_a_cache_the_next_call_can_use(step: int) -> None:
    class Fails(TableTarget):
        calls = 0

        def forward(self, *given: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == step:
                raise ModelError("the disk is gone")
            return super().forward(*given, **named)

    plan = table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    target = Fails(SIZE, seed=3)
    wanted = plain(TableTarget(SIZE, seed=3), plan, 30)
    cache, drafters = target.new_cache(), adversaries(wanted.ids)
    arms = [Arm("every third wrong", 4)]
    with pytest.raises(ModelError, match="the disk is gone"):
        speculative(target, plan, 30, drafters, arms, cache=cache)
    assert cache.tokens == [*PROMPT, *wanted.ids][: cache.length]
    found = speculative(target, plan, 30, drafters, arms, cache=cache)
    assert found.ids == wanted.ids
