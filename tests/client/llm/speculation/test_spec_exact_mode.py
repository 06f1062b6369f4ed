"""Exact mode: steps that round alike, a real graph whose answers do not depend on drafts, seeds that do not either."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import draw, generator
from edgeduet_client.llm.generate import Answer, Sampling
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.plan import Vocabulary, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import initial_state
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.speculation import text as committed
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.invariance import Invariance, cached_invariance, measure_invariance
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.text_stream import TextStream
from edgeduet_client.llm.token_bytes import TokenBytes
from speculative_runs import Told, adversaries, plain, speculative
from table_model import (
    EOS,
    PIECES,
    PROMPT,
    ScriptedSelector,
    TableDrafter,
    TableTarget,
    never_interrupted,
    run_to_end,
    table_plan,
)
from tiny_llm import TINY, write_graph

SIZE = len(PIECES)
LONGEST = 8


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


def test_a_committed_text_forgets_wide_distributions_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without truncation one position of a large vocabulary takes megabytes."""
    monkeypatch.setattr(committed, "MOST_ENTRIES", 100)
    text = CommittedText([1, 2], window=50)
    wide = Distribution(np.arange(30), np.full(30, 1 / 30))
    for token in range(10):
        text.extend([token], [wide])
    assert len(text) - text.first_kept == 3
    narrow = Distribution(np.array([1]), np.ones(1))
    for token in range(40):
        text.extend([token], [narrow])
    assert len(text) - text.first_kept == 40 + 2
    assert text.target(text.first_kept) is wide
    huge = Distribution(np.arange(500), np.full(500, 1 / 500))
    text.extend([3], [huge])
    assert len(text) - text.first_kept == 1


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
