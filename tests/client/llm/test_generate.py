"""The decoding loop: what is drawn, what is shown, when it ends, what the cache holds afterwards."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.generate import Finished, TextPiece
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.session import PREFILL_CHUNK
from tiny_llm import TINY, byte_fallback_tokenizer, write_model

LONG = [int(token) for token in np.random.default_rng(1).integers(2, 290, 150)]
SHORT = LONG[:5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return LocalModel.open(write_model(tmp_path_factory.mktemp("models") / "tiny"), threads=1)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    tokenizer = byte_fallback_tokenizer(strips_leading_space=True)
    return LocalModel.open(write_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=tokenizer), threads=1)


def answer(
    model: LocalModel, prompt: list[int], *, cache: KVCache | None = None, cancel: Any = None, **asked: Any
) -> tuple[list[TextPiece], Finished]:
    """All pieces of an answer, and how it ended."""
    extra = {"clock": asked.pop("clock")} if "clock" in asked else {}
    events = list(model.generate(prompt, GenerationRequest(**asked), cache=cache, cancel=cancel, **extra))
    assert isinstance(events[-1], Finished)
    pieces = [event for event in events if isinstance(event, TextPiece)]
    assert len(pieces) == len(events) - 1
    return pieces, events[-1]


def text_of(pieces: list[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids_of(pieces: list[TextPiece]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


def ticking(*, step: float = 1.0) -> Any:
    """A clock that moves on by ``step`` seconds whenever it is read."""
    count = itertools.count()
    return lambda: next(count) * step


def test_greedy_draws_the_best_token_of_a_fresh_prefill_every_time(model: LocalModel) -> None:
    pieces, finished = answer(model, SHORT, sampler="greedy", max_tokens=30)
    ids = list(SHORT)
    for _ in range(30):
        logits = model.session.forward(ids, model.new_cache()).logits[0, : model.vocabulary.used]
        best = int(logits.argmax())
        if best in model.manifest.eos_ids:
            break
        ids.append(best)
    assert ids_of(pieces) == ids[len(SHORT) :]
    assert finished.prompt_tokens == len(SHORT)
    assert finished.cached_tokens == 0


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), begins=st.booleans())
def test_pieces_joined_are_the_decoded_ids(
    model: LocalModel, sentencepiece: LocalModel, seed: int, begins: bool
) -> None:
    for one in (model, sentencepiece):
        prompt = [*SHORT, one.manifest.eos_ids[0]] if begins else SHORT
        pieces, finished = answer(one, prompt, seed=seed, max_tokens=24, sampler="temperature", temperature=0.9)
        ids = ids_of(pieces)
        assert text_of(pieces) == one.tokenizer.decode(ids, starts_text=begins)
        assert len(ids) == finished.completion_tokens - (finished.reason == "stop")


def test_a_leading_space_shows_unless_the_answer_begins_a_text(sentencepiece: LocalModel) -> None:
    (the,) = sentencepiece.tokenizer.encode("the")
    end = sentencepiece.manifest.eos_ids[0]
    for prompt, expected in ((SHORT, " the the"), ([*SHORT, end], "the the")):
        pieces, _ = answer(sentencepiece, prompt, logit_bias={the: 100.0}, max_tokens=2)
        assert text_of(pieces) == expected


def test_every_piece_but_the_last_shows_text(model: LocalModel) -> None:
    pieces, _ = answer(model, SHORT, seed=3, max_tokens=40)
    assert all(piece.text for piece in pieces[:-1])


def test_the_same_seed_gives_the_same_answer(model: LocalModel) -> None:
    answers = {seed: text_of(answer(model, SHORT, seed=seed, max_tokens=20)[0]) for seed in (1, 2)}
    assert answers[1] != answers[2]
    assert text_of(answer(model, SHORT, seed=1, max_tokens=20)[0]) == answers[1]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 50), data=st.data())
def test_an_answer_ends_before_its_first_stop_string(model: LocalModel, seed: int, data: st.DataObject) -> None:
    settings_: dict[str, Any] = {"seed": seed, "max_tokens": 24, "logit_bias": {model.manifest.eos_ids[0]: -100.0}}
    whole = text_of(answer(model, SHORT, **settings_)[0])
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    pieces, finished = answer(model, SHORT, stop=(stop, "never there"), **settings_)
    assert text_of(pieces) == whole[: whole.index(stop)]
    assert finished.reason == "stop"
    cut = model.tokenizer.decode(ids_of(pieces), starts_text=False)
    assert cut.startswith(text_of(pieces)) or "\ufffd" in cut
    assert len(ids_of(pieces)) <= finished.completion_tokens


def test_end_of_text_ends_and_does_not_show(model: LocalModel) -> None:
    end = model.manifest.eos_ids[0]
    pieces, finished = answer(model, SHORT, logit_bias={end: 100.0}, max_tokens=9)
    assert (pieces, finished.reason, finished.completion_tokens) == ([], "stop", 1)
    pieces, finished = answer(model, SHORT, logit_bias={end: 100.0}, min_tokens=4, max_tokens=9)
    assert len(ids_of(pieces)) == 4
    assert (finished.reason, finished.completion_tokens) == ("stop", 5)


def test_without_a_budget_the_context_is_the_limit(model: LocalModel) -> None:
    pieces, finished = answer(model, LONG, seed=0, logit_bias={model.manifest.eos_ids[0]: -100.0})
    assert finished.reason == "length"
    assert finished.prompt_tokens + finished.completion_tokens == TINY.context_length
    assert len(ids_of(pieces)) == finished.completion_tokens


def test_the_next_turn_computes_only_what_is_new(model: LocalModel) -> None:
    cache = model.new_cache()
    pieces, first = answer(model, LONG, cache=cache, sampler="greedy", max_tokens=12)
    drawn = ids_of(pieces)
    assert cache.tokens == LONG + drawn[:-1]
    turn = [*LONG, *drawn, *SHORT]
    again, second = answer(model, turn, cache=cache, sampler="greedy", max_tokens=12)
    assert (first.cached_tokens, second.cached_tokens) == (0, len(LONG) + len(drawn) - 1)
    fresh, _ = answer(model, turn, sampler="greedy", max_tokens=12)
    assert ids_of(again) == ids_of(fresh)
    # Another branch of the conversation keeps what both share; the same prompt again computes its last token.
    _, third = answer(model, [*LONG[:100], 7, 8], cache=cache, max_tokens=1)
    assert third.cached_tokens == 100
    _, fourth = answer(model, [*LONG[:100], 7, 8], cache=cache, max_tokens=1)
    assert fourth.cached_tokens == 101


def test_cancelled_before_the_first_token(model: LocalModel) -> None:
    cancel = threading.Event()
    cancel.set()
    pieces, finished = answer(model, LONG, cancel=cancel, max_tokens=9)
    assert (pieces, finished.reason, finished.completion_tokens) == ([], "cancelled", 0)


def test_cancelled_in_the_middle_keeps_what_was_said_and_a_usable_cache(model: LocalModel) -> None:
    cancel, cache = threading.Event(), model.new_cache()
    events = model.generate(SHORT, GenerationRequest(sampler="greedy", max_tokens=50), cache=cache, cancel=cancel)
    said = [next(events), next(events)]
    cancel.set()
    said += list(events)
    assert isinstance(said[-1], Finished)
    assert said[-1].reason == "cancelled"
    before = [token for piece in said[:-1] for token in piece.ids]  # type: ignore[union-attr]
    assert said[-1].completion_tokens == len(before)
    assert cache.tokens == [*SHORT, *before[:-1]]
    _, finished = answer(model, [*SHORT, *before], cache=cache, max_tokens=1)
    assert finished.cached_tokens == len(SHORT) + len(before) - 1


def test_an_abandoned_answer_leaves_a_usable_cache(model: LocalModel) -> None:
    cache = model.new_cache()
    events = model.generate(SHORT, GenerationRequest(sampler="greedy", max_tokens=50), cache=cache)
    next(events)
    events.close()
    resumed, _ = answer(model, SHORT, cache=cache, sampler="greedy", max_tokens=20)
    fresh, _ = answer(model, SHORT, sampler="greedy", max_tokens=20)
    assert ids_of(resumed) == ids_of(fresh)


def test_time_runs_out_while_the_prompt_is_read(model: LocalModel) -> None:
    cache = model.new_cache()
    _, finished = answer(model, LONG, cache=cache, timeout_s=3, clock=ticking())
    assert (finished.reason, finished.completion_tokens) == ("timeout", 0)
    assert 0 < cache.length < len(LONG)
    assert cache.length % PREFILL_CHUNK == 0


def test_time_runs_out_while_answering(model: LocalModel) -> None:
    pieces, finished = answer(model, SHORT, timeout_s=8, clock=ticking(), sampler="greedy", max_tokens=50)
    assert finished.reason == "timeout"
    assert 0 < finished.completion_tokens < 8
    assert len(ids_of(pieces)) == finished.completion_tokens
    assert finished.seconds_prefill > 0
    assert finished.seconds_decode > 0


def test_logprobs_are_the_models_own(model: LocalModel) -> None:
    pieces, _ = answer(model, SHORT, seed=5, max_tokens=10, logprobs=3, temperature=0.5, sampler="p-less")
    ids = list(SHORT)
    for piece in pieces:
        assert piece.logprobs is not None
        assert [entry.token for entry in piece.logprobs] == list(piece.ids)
        for entry in piece.logprobs:
            z = model.session.forward(ids, model.new_cache()).logits[0, : model.vocabulary.used].astype(np.float64)
            expected = z - z.max() - np.log(np.exp(z - z.max()).sum())
            assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-4)
            assert [token for token, _ in entry.top] == np.argsort(-expected, kind="stable")[:3].tolist()
            assert [value for _, value in entry.top] == pytest.approx(np.sort(expected)[::-1][:3], abs=1e-4)
            ids.append(entry.token)


def test_no_logprobs_unless_asked_for(model: LocalModel) -> None:
    assert all(piece.logprobs is None for piece in answer(model, SHORT, max_tokens=5, seed=0)[0])
    pieces, _ = answer(model, SHORT, max_tokens=5, seed=0, logprobs=0)
    assert all(entry.top == () for piece in pieces for entry in piece.logprobs or ())
    assert sum(len(piece.logprobs or ()) for piece in pieces) == len(ids_of(pieces))


def test_a_prompt_that_is_too_long_is_refused_or_cut_as_asked(model: LocalModel) -> None:
    prompt = (LONG * 4)[:600]
    with pytest.raises(RequestError, match="prompt has 600 tokens and the model's context holds 512"):
        model.generate(prompt, GenerationRequest())
    with pytest.raises(RequestError, match="set max_tokens to at most 362") as caught:
        model.generate(LONG, GenerationRequest(max_tokens=1_000_000_000))
    assert caught.value.field == "max_tokens"
    cache = model.new_cache()
    _, finished = answer(model, prompt, cache=cache, context_policy="truncate-left", max_tokens=12)
    assert finished.prompt_tokens == 500
    assert cache.tokens[:500] == prompt[100:]


def test_ids_the_model_does_not_know_are_refused(model: LocalModel) -> None:
    for wrong in (-1, model.vocabulary.used):
        with pytest.raises(RequestError, match=f"token {wrong}, but tiny knows 0 to {model.vocabulary.used - 1}"):
            model.generate([*SHORT, wrong], GenerationRequest())


def test_an_empty_prompt_begins_a_text_where_the_model_can(model: LocalModel, sentencepiece: LocalModel) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        model.generate([], GenerationRequest())
    _, finished = answer(sentencepiece, [], seed=1, max_tokens=3)
    assert finished.prompt_tokens == 1


def test_a_refusal_comes_before_any_work(model: LocalModel) -> None:
    cache = model.new_cache()
    with pytest.raises(RequestError, match="gate=on"):
        model.generate(SHORT, GenerationRequest(gate="on"), cache=cache)
    assert cache.length == 0


def test_a_constraint_holds_through_the_loop(model: LocalModel) -> None:
    pieces, finished = answer(model, SHORT, regex="(cat|dog){3}", seed=2)
    assert text_of(pieces).replace("cat", "").replace("dog", "") == ""
    assert len(text_of(pieces)) == 9
    assert finished.reason == "stop"


def test_two_answers_at_once_do_not_mix(model: LocalModel) -> None:
    alone = [ids_of(answer(model, LONG[:number], seed=number, max_tokens=30)[0]) for number in (3, 90)]
    first, second = (model.generate(LONG[:number], GenerationRequest(seed=number, max_tokens=30)) for number in (3, 90))
    together: tuple[list[int], list[int]] = ([], [])
    for pair in itertools.zip_longest(first, second):
        for ids, event in zip(together, pair, strict=True):
            ids.extend(event.ids if isinstance(event, TextPiece) else ())
    assert list(together) == alone
