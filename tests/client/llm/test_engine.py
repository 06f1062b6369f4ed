"""One model that answers: admission, turns, caches, failures."""

from __future__ import annotations

import queue as queues
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.serving.embedding import embed
from edgeduet_client.llm.serving.engine import Engine
from edgeduet_client.llm.serving.events import ChoiceDone, Done, Embedded, Event, Failed, Piece, Started
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.metrics import Metrics
from edgeduet_client.llm.serving.refusals import ContextExceeded, ModelChanged, QueueFull, WaitedTooLong, WorkerFailed
from tiny_llm import TINY, write_model

LONG = replace(TINY, context_length=100_000)
ENDLESS = {"min_tokens": 90_000, "max_tokens": 90_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return write_model(tmp_path_factory.mktemp("engine") / "tiny", architecture=LONG)


@pytest.fixture(scope="module")
def model(folder: ModelFolder) -> LocalModel:
    return LocalModel.open(folder, threads=1)


def engine_with(folder: ModelFolder, model: LocalModel, **limits: Any) -> Engine:
    return Engine(folder, model, ServingLimits(**limits), Metrics())


@pytest.fixture
def engine(folder: ModelFolder, model: LocalModel) -> Iterator[Engine]:
    engine = engine_with(folder, model, queue=2)
    yield engine
    engine.queue.stop()


class Heard:
    """What one request hears."""

    def __init__(self) -> None:
        self._events: queues.Queue[Event] = queues.Queue()

    def deliver(self, event: Event) -> None:
        self._events.put(event)

    def next(self) -> Event:
        return self._events.get(timeout=20)

    def all(self) -> list[Event]:
        events = [self.next()]
        while not isinstance(events[-1], Done | Failed):
            events.append(self.next())
        return events


def ask(engine: Engine, text: str, count: int = 1, **settings: Any) -> tuple[Any, Heard]:
    heard = Heard()
    choices = engine.choices(engine.admit_text(text), settings, count)
    return engine.generate(choices, heard.deliver, call="test"), heard


def finished(events: list[Event]) -> list[Finished]:
    return [event.finished for event in events if isinstance(event, ChoiceDone)]


def counted(engine: Engine, outcome: str) -> float:
    labels = {"model": "tiny", "call": "test", "outcome": outcome}
    return engine.metrics.registry.get_sample_value("edgeduet_llm_requests_total", labels) or 0.0


def test_a_request_hears_its_turn_its_answers_and_its_end_in_this_order(engine: Engine) -> None:
    events = ask(engine, "the cat", count=2, max_tokens=5, min_tokens=5, seed=1)[1].all()
    assert isinstance(events[0], Started) and isinstance(events[-1], Done)
    assert [event.choice for event in events[1:-1] if isinstance(event, Piece | ChoiceDone)] == sorted(
        event.choice for event in events[1:-1] if isinstance(event, Piece | ChoiceDone)
    )
    assert [end.completion_tokens for end in finished(events)] == [5, 5]


def test_answers_are_those_of_the_model_alone_and_differ_by_their_seeds(engine: Engine, model: LocalModel) -> None:
    events = ask(engine, "the cat", count=3, max_tokens=12, seed=2**64 - 1, sampler="temperature")[1].all()
    texts = [
        "".join(event.piece.text for event in events if isinstance(event, Piece) and event.choice == n)
        for n in range(3)
    ]
    expected = []
    for seed in (2**64 - 1, 0, 1):
        choice = engine.choices(
            engine.admit_text("the cat"), {"max_tokens": 12, "seed": seed, "sampler": "temperature"}, 1
        )[0]
        pieces = model.generate(list(choice.prompt), choice.request)
        expected.append("".join(piece.text for piece in pieces if not isinstance(piece, Finished)))
    assert texts == expected and len(set(texts)) == 3


def test_the_next_turn_finds_what_was_computed(engine: Engine) -> None:
    text = "one two three four five six seven eight nine ten"
    first = finished(ask(engine, text, max_tokens=4, min_tokens=4, sampler="greedy")[1].all())[0]
    again = finished(ask(engine, text + " the cat sat", max_tokens=4, sampler="greedy")[1].all())[0]
    assert first.cached_tokens == 0 and again.cached_tokens >= first.prompt_tokens - 3
    assert len(engine.caches) == 1


def test_a_seed_gives_the_same_answer_whatever_came_before(engine: Engine) -> None:
    text = "one two three four five six seven eight nine ten"

    def answer() -> tuple[list[int], int]:
        events = ask(engine, text, max_tokens=20, min_tokens=20, seed=3, sampler="temperature")[1].all()
        ids = [token for event in events if isinstance(event, Piece) for token in event.piece.ids]
        return ids, finished(events)[0].cached_tokens

    first = answer()
    ask(engine, text + " the cat", max_tokens=3)[1].all()
    # From scratch each time, although a cache with the very prompt waits: other steps round differently.
    assert len(engine.caches) > 0 and answer() == first and first[1] == 0


def test_a_caller_who_leaves_frees_the_worker_and_the_next_one_is_answered(engine: Engine) -> None:
    ticket, heard = ask(engine, "the cat", **ENDLESS)
    while not isinstance(heard.next(), Piece):
        pass
    waiting = ask(engine, "the dog", max_tokens=3)[1]
    ticket.cancel()
    assert finished(waiting.all())[0].completion_tokens <= 3
    end = finished(heard.all())[0]
    assert end.reason == "cancelled" and end.completion_tokens < 90_000
    assert counted(engine, "cancelled") == 1


def test_leaving_ends_the_work_with_the_token_at_hand(engine: Engine) -> None:
    heard, shown = Heard(), []

    def deliver(event: Event) -> None:
        heard.deliver(event)
        if isinstance(event, Piece):
            shown.extend(event.piece.ids)
            if len(shown) >= 5:
                ticket.cancel()  # on the worker's own thread: nothing happens in between

    choices = engine.choices(engine.admit_text("the cat"), ENDLESS, 2)
    ticket = engine.generate(choices, deliver, call="test")
    ends = finished(heard.all())
    # The second answer is not begun. The token at hand may still be drawn, others are not.
    assert [end.reason for end in ends] == ["cancelled"]
    assert ends[0].completion_tokens <= len(shown) + 1


def test_a_caller_who_leaves_the_line_is_counted_and_never_served(engine: Engine) -> None:
    first, _ = ask(engine, "the cat", **ENDLESS)
    second, heard = ask(engine, "the dog", max_tokens=3)
    second.cancel()
    first.cancel()
    assert engine.queue.wait_idle(10)
    assert heard._events.empty()
    assert counted(engine, "cancelled") == 2


def test_a_full_line_refuses(engine: Engine) -> None:
    tickets = [ask(engine, "the cat", **ENDLESS)[0] for _ in range(3)]
    with pytest.raises(QueueFull):
        ask(engine, "the cat")
    with pytest.raises(QueueFull):
        engine.check_ready()
    for ticket in tickets:
        ticket.cancel()


def test_what_is_wrong_is_refused_before_a_place_is_taken(engine: Engine) -> None:
    for text, settings, field in (
        ("x", {"temperature": -1}, "temperature"),
        ("x", {"max_tokens": 200_000}, "max_tokens"),
        ("x", {"top_k": 3, "sampler": "p-less"}, "top_k"),
        ("", {}, "prompt"),
    ):
        with pytest.raises(RequestError) as refused:
            ask(engine, text, **settings)
        assert refused.value.field == field
    with pytest.raises(RequestError, match="at most"):
        engine.generate(engine.choices((5,), {}, 17), lambda event: None, call="test")
    with pytest.raises(RequestError, match="knows 0 to"):
        engine.admit_text([5, 10_000])
    with pytest.raises(RequestError, match="knows 0 to"):
        engine.admit_text([-1])
    assert engine.queue.waiting == 0 and not engine.queue.running


def test_prompts_and_answers_that_exceed_the_context_are_refused_with_the_numbers(engine: Engine) -> None:
    with pytest.raises(ContextExceeded, match="100000"):
        engine.choices((5,) * 100_000, {}, 1)
    with pytest.raises(ContextExceeded):
        engine.choices((5,) * 99_000, {"max_tokens": 2_000}, 1)
    # Who does not say how long gets what is left.
    assert engine.choices((5,) * 99_900, {}, 1)[0].request.max_tokens == 100


def test_limits_are_named(folder: ModelFolder, model: LocalModel) -> None:
    engine = engine_with(folder, model, prompt_tokens=3, max_tokens=10, choices=2, inputs=1)
    with pytest.raises(RequestError, match="reads 3 at most"):
        engine.admit_text("one two three four five six")
    with pytest.raises(RequestError, match="gives 10 at most"):
        engine.choices((5,), {"max_tokens": 11}, 1)
    assert engine.choices((5,), {}, 1)[0].request.max_tokens == 10
    with pytest.raises(RequestError, match="gives 2 at most"):
        engine.check_count(3)
    with pytest.raises(RequestError, match="takes 1 at most"):
        engine.embed([(5,), (6,)], lambda event: None)
    engine.queue.stop()


def test_time_counts_from_arrival_and_ends_an_answer(engine: Engine) -> None:
    end = finished(ask(engine, "the cat", timeout_s=0.2, **ENDLESS)[1].all())[0]
    assert end.reason == "timeout" and 0 < end.completion_tokens < 90_000


def test_whose_time_is_over_before_the_turn_is_told_so(engine: Engine) -> None:
    first, _ = ask(engine, "the cat", **ENDLESS)
    waiting = ask(engine, "the cat", timeout_s=0.05)[1]
    threading.Timer(0.2, first.cancel).start()
    last = waiting.all()[-1]
    assert isinstance(last, Failed) and isinstance(last.error, WaitedTooLong)


def test_a_request_that_fails_is_told_and_the_worker_goes_on(
    engine: Engine, model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(error: Exception) -> Any:
        def generate(*_: object, **__: object) -> Iterator[Finished]:
            raise error

        return generate

    for error, kind in ((ModelError("the disk is gone"), ModelError), (ZeroDivisionError("a bug"), WorkerFailed)):
        with monkeypatch.context() as patch:
            patch.setattr(LocalModel, "generate", fails(error))
            last = ask(engine, "the cat")[1].all()[-1]
        assert isinstance(last, Failed) and isinstance(last.error, kind)
        assert "a bug" not in str(last.error)
    assert finished(ask(engine, "the cat", max_tokens=2)[1].all())
    assert counted(engine, "failed") == 2 and counted(engine, "ok") == 1


def test_a_changed_folder_ends_nothing_and_admits_nothing(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", architecture=LONG)
    engine = engine_with(folder, LocalModel.open(folder, threads=1))
    ticket, heard = ask(engine, "the cat", **ENDLESS)
    while not isinstance(heard.next(), Piece):
        pass
    folder.path.rename(tmp_path / "away")
    with pytest.raises(ModelChanged):
        ask(engine, "the cat")
    assert isinstance(heard.next(), Piece)
    ticket.cancel()
    (tmp_path / "away").rename(folder.path)
    assert finished(ask(engine, "the cat", max_tokens=2)[1].all())
    engine.queue.stop()


def test_embeddings_have_length_one_and_do_not_depend_on_the_neighbours(engine: Engine, model: LocalModel) -> None:
    texts = [engine.admit_text(text) for text in ("the cat sat on the mat " * 12, "ten nine")]
    heard = Heard()
    engine.embed(texts, heard.deliver)
    answer = next(event for event in heard.all() if isinstance(event, Embedded))
    assert answer.tokens == sum(map(len, texts))
    for ids, vector in zip(texts, answer.vectors, strict=True):
        assert vector.shape == (TINY.hidden_width,) and np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        hidden = model.session.prefill(ids, model.new_cache(), rows=range(len(ids)), hidden=True).hidden
        assert hidden is not None
        mean = hidden.mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
        np.testing.assert_array_equal(vector, embed(model.session, ids))


def test_what_happens_is_counted(engine: Engine) -> None:
    ask(engine, "one two three four five six", max_tokens=4, min_tokens=4)[1].all()
    ask(engine, "one two three four five six", max_tokens=4, min_tokens=4)[1].all()

    def sample(name: str, **labels: str) -> float:
        return engine.metrics.registry.get_sample_value(f"edgeduet_llm_{name}", {"model": "tiny", **labels}) or 0.0

    assert counted(engine, "ok") == 2
    assert sample("tokens_total", kind="answer") == 8
    prompt = len(engine.admit_text("one two three four five six"))
    assert sample("tokens_total", kind="prompt") + sample("tokens_total", kind="cached") == 2 * prompt
    assert sample("tokens_total", kind="cached") == prompt - 1
    assert sample("time_to_first_token_seconds_count") == sample("queue_wait_seconds_count") == 2
    assert sample("tokens_per_second_count") == 2
    assert sample("kept_caches") == 1 and sample("kept_cache_bytes") > 0
    assert sample("queue_depth") == 0 and sample("running") == 0
    assert b"edgeduet_llm_queue_depth" in engine.metrics.text()
