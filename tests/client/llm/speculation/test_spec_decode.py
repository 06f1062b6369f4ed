"""The speculative loop: the same tokens as plain decoding, ends where it ends, leaves the cache as it leaves it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import draw, generator
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.generate import Answer, Finished, Interruption, Sampling, generate
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.plan import Vocabulary, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import initial_state
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.invariance import Invariance, cached_invariance, measure_invariance
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.text_stream import TextStream
from edgeduet_client.llm.token_bytes import TokenBytes
from table_model import (
    EOS,
    PIECES,
    PROMPT,
    ScriptedSelector,
    TableDrafter,
    TableTarget,
    never_interrupted,
    new_answer,
    new_sampling,
    run_to_end,
    table_plan,
)
from tiny_llm import TINY, write_graph

SIZE = len(PIECES)
LONGEST = 8


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


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_coupled_verification_gives_the_answer_of_plain_decoding_for_drawn_drafts_too(
    seed: int, lengths: list[int]
) -> None:
    target, plan = TableTarget(SIZE, seed=seed % 7), table_plan(SIZE, temperature=1.5)
    wanted = plain(target, plan, 25, seed=seed)
    drafters = {"drawn": TableDrafter(SIZE, seed=seed % 5, draws=draw)}
    arms = [Arm("drawn", length) for length in lengths]
    found = speculative(target, plan, 25, drafters, arms, seed=seed, coupled=True)
    assert found.ids == wanted.ids
    assert found.sampling.rng.bit_generator.state == wanted.sampling.rng.bit_generator.state


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TargetSession:
    graph = write_graph(tmp_path_factory.mktemp("graph"))
    return TargetSession(graph, context_length=TINY.context_length, threads=1)


def onnx_plan(**asked: Any) -> Any:
    request = GenerationRequest(**asked)
    tokens = TokenBytes(tuple(bytes([33 + token % 90]) for token in range(TINY.vocab_width)), frozenset({0}), "0" * 64)
    return make_plan(request, Vocabulary(TINY.vocab_width, TINY.vocab_width, (0,), tokens, lambda text: []))


def on_onnx(
    session: TargetSession,
    plan: Any,
    prompt: Sequence[int],
    drafters: dict[str, Any],
    arms: Sequence[Arm],
    seed: int = 0,
) -> tuple[list[int], KVCache]:
    """An answer of 24 tokens in exact mode."""
    granule = measure_invariance(session, TINY.vocab_width, LONGEST + 1).granule
    stream = TextStream()
    answer = Answer(stream, lambda token: bytes([33 + token % 90]), eos_ids=frozenset({0}), budget=24)
    cache = session.new_cache()
    events = speculate(
        session,
        cache,
        prompt,
        answer,
        Sampling(plan, initial_state(plan), generator(seed)),
        means=Means(drafters, ScriptedSelector(arms), granule=granule),
        draft_rng=generator(1),
        counted=Counted(),
        interruption=never_interrupted(),
        clock=lambda: 0.0,
    )
    run_to_end(events)
    return answer.ids, cache


@pytest.mark.parametrize("asked", [{"sampler": "greedy"}, {"sampler": "p-less", "temperature": 3.0}])
def test_a_real_graph_in_exact_mode_gives_the_answer_of_plain_decoding(
    tiny: TargetSession, asked: dict[str, Any]
) -> None:
    """Certain drafts, so sampled answers are equal too; where this machine's kernels allow it."""
    if not measure_invariance(tiny, TINY.vocab_width, LONGEST + 1).holds:
        pytest.skip("this machine computes rows differently in steps of different sizes")
    plan = onnx_plan(**asked)
    rng = np.random.default_rng(5)
    for seed in range(12):
        prompt = rng.integers(1, TINY.vocab_width, 5 + 7 * seed).tolist()
        wanted, plain_cache = on_onnx(tiny, plan, prompt, {}, [Arm(None, 0)], seed)
        drafters = adversaries(wanted, prompt, TINY.vocab_width)
        del drafters["sampled"]
        arms = [Arm(name, 1 + (seed + place) % LONGEST) for place, name in enumerate(drafters)]
        found, cache = on_onnx(tiny, plan, prompt, drafters, arms, seed)
        assert found == wanted
        assert cache.tokens == plain_cache.tokens
        for ours, theirs in zip(cache.buffers, plain_cache.buffers, strict=True):
            np.testing.assert_array_equal(ours[:, :, : cache.length], theirs[:, :, : cache.length])


def test_a_real_cache_after_speculation_says_what_a_fresh_prefill_says(tiny: TargetSession) -> None:
    """No key or value of a rejected draft is left behind."""
    plan = onnx_plan(sampler="greedy")
    for seed in range(4):
        prompt = np.random.default_rng(seed).integers(1, TINY.vocab_width, 9).tolist()
        wanted, _ = on_onnx(tiny, plan, prompt, {}, [Arm(None, 0)])
        drafters = adversaries(wanted, prompt, TINY.vocab_width)
        _, cache = on_onnx(tiny, plan, prompt, drafters, [Arm("every third wrong", 7), Arm("random", 5)])
        held = list(cache.tokens)
        ours = tiny.forward([7], cache).logits.copy()
        fresh = tiny.new_cache()
        theirs = tiny.prefill([*held, 7], fresh).logits
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_hidden_states_are_those_that_predicted_each_token(tiny: TargetSession) -> None:
    texts: list[CommittedText] = []

    class Listens(Told):
        def start(self, text: CommittedText) -> None:
            texts.append(text)

    plan, prompt = onnx_plan(sampler="greedy"), [5, 6, 7]
    wanted, _ = on_onnx(tiny, plan, prompt, {}, [Arm(None, 0)])
    says = adversaries(wanted, prompt, TINY.vocab_width)["every third wrong"].says
    on_onnx(tiny, plan, prompt, {"n": Listens(TINY.vocab_width, says=says, needs_hidden=True)}, [Arm("n", 5)])
    (text,) = texts
    rows = tuple(range(len(prompt) - 1, len(text) - 1))
    fresh = tiny.forward(text.tokens, tiny.new_cache(), rows=rows, hidden=True).hidden
    kept = np.array([text.hidden(position) for position in range(len(prompt), len(text))])
    np.testing.assert_allclose(kept, fresh, atol=1e-4)


def test_a_committed_text_forgets_what_is_older_than_its_window() -> None:
    text = CommittedText([1, 2], window=4)
    for token in range(10):
        certain = Distribution(np.array([token]), np.ones(1))
        text.extend([token], [certain], np.full((1, 3), token, np.float32))
    assert text.first_kept == 8
    for position in range(8, 12):
        assert text.target(position).ids[0] == text.tokens[position]
        assert text.hidden(position).tolist() == [text.tokens[position]] * 3
    for position in (-1, 0, 7, 12):
        with pytest.raises(LookupError):
            text.target(position)
        with pytest.raises(LookupError):
            text.hidden(position)
    with pytest.raises(LookupError, match="hidden states are not kept"):
        bare = CommittedText([1])
        bare.extend([2], [certain])
        bare.hidden(1)
    with pytest.raises(ValueError, match="need as many"):
        text.extend([1, 2], [certain])


def test_invariance_of_rows_is_measured_once_and_kept(tiny: TargetSession, tmp_path: Path) -> None:
    def asked(weights: str) -> Invariance:
        return cached_invariance(tiny, TINY.vocab_width, 4, weights_sha256=weights, folder=tmp_path)

    found = asked("a")
    assert found == measure_invariance(tiny, TINY.vocab_width, 4)
    (kept,) = (tmp_path / "invariance").iterdir()
    kept.write_text(kept.read_text("utf-8").replace(f'"rows": {found.rows}', '"rows": 47'), "utf-8")
    assert asked("a").rows == 47
    assert asked("b") == found
    kept.write_text("rubbish", "utf-8")
    assert asked("a") == found


class RoundsBySize(TableTarget):
    """A target whose steps come out a little differently in some sizes, as kernels with tiles do."""

    def __init__(self, off: Callable[[int], bool]) -> None:
        super().__init__(SIZE, limit=256)
        self.off = off

    def forward(self, ids: Sequence[int], cache: KVCache, **asked: Any) -> Any:
        outcome = super().forward(ids, cache, **asked)
        if self.off(len(ids)) and len(outcome.logits):
            # The last row only, as the remainder of a tile.
            outcome.logits[-1] = np.nextafter(outcome.logits[-1], np.inf)
        return outcome


@pytest.mark.parametrize(
    ("off", "granule", "holds"),
    [
        (lambda size: False, 1, True),
        (lambda size: size % 2 == 1, 2, True),
        (lambda size: size % 4 != 0, 4, True),
        (lambda size: size % 8 != 0, 8, True),
        (lambda size: size > 2, 2, False),
    ],
)
def test_the_granule_of_the_kernels_is_found(off: Callable[[int], bool], granule: int, holds: bool) -> None:
    found = measure_invariance(RoundsBySize(off), SIZE, 9)  # type: ignore[arg-type]
    assert (found.granule, found.holds) == (granule, holds)
    assert found.largest % granule == 0
    assert ("NOT" in found.sentence()) != holds


@pytest.mark.parametrize("granule", [1, 2, 4, 8])
def test_every_step_is_filled_up_to_the_granule(granule: int) -> None:
    target, plan = TableTarget(SIZE, seed=3, limit=256), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    wanted = plain(target, plan, 30)
    target.forwards.clear()
    arms = [Arm("right", 3), Arm(None, 0), Arm("wrong", 2), Arm("random", 5)]
    found = speculative(target, plan, 30, adversaries(wanted.ids), arms, granule=granule)
    assert found.ids == wanted.ids
    assert {len(block) % granule for block in target.forwards[1:]} == {0}
    assert found.cache.tokens == [*PROMPT, *found.ids][:-1]
    assert found.counted.unfilled == 0


def test_a_step_at_the_end_of_the_context_that_cannot_be_filled_up_is_counted() -> None:
    target, plan = TableTarget(SIZE, limit=16), table_plan(SIZE, sampler="greedy", logit_bias={EOS: -100})
    found = speculative(target, plan, 16 - len(PROMPT), {}, [Arm(None, 0)], granule=4)
    assert found.ids == plain(target, plan, 16 - len(PROMPT)).ids
    assert found.counted.unfilled == 2
    found = speculative(target, plan, 16 - len(PROMPT), {}, [Arm(None, 0)], granule=2)
    assert found.counted.unfilled == 0
