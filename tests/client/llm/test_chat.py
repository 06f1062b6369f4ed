"""A conversation: turns, what is forgotten when they no longer fit, and the cache between turns."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.chat import Conversation, fit_messages
from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.generate import Finished, TextPiece
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.request import GenerationRequest
from tiny_llm import TINY, write_model

GREEDY = GenerationRequest(sampler="greedy", max_tokens=10)
LIMIT = TINY.context_length


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return LocalModel.open(write_model(tmp_path_factory.mktemp("models") / "tiny"), threads=1)


def say(conversation: Conversation, text: str, request: GenerationRequest = GREEDY) -> tuple[str, Finished]:
    """The answer to ``text``, and how it ended."""
    *pieces, last = conversation.reply(text, request)
    assert isinstance(last, Finished)
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)), last


def test_turns_are_kept_and_not_computed_again(model: LocalModel) -> None:
    conversation = Conversation(model, system="Be brief.")
    first, one = say(conversation, "the cat")
    second, two = say(conversation, "the dog")
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert [message["content"] for message in conversation.messages[2::2]] == [first, second]
    assert one.cached_tokens == 0
    assert two.cached_tokens >= one.prompt_tokens
    whole = model.tokenizer.encode_chat(conversation.messages[:-1])
    assert two.prompt_tokens == len(whole)
    *pieces, _ = model.generate(whole, GREEDY)
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)) == second


def test_an_answer_that_is_abandoned_is_kept_as_far_as_it_came(model: LocalModel) -> None:
    conversation = Conversation(model)
    events = conversation.reply("the cat", GREEDY)
    said = next(events)
    assert isinstance(said, TextPiece)
    events.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": said.text}


def test_a_cancelled_answer_is_kept(model: LocalModel) -> None:
    conversation, cancel = Conversation(model), threading.Event()
    events = conversation.reply("the cat", GREEDY, cancel=cancel)
    first = next(events)
    cancel.set()
    rest = list(events)
    assert isinstance(rest[-1], Finished)
    assert rest[-1].reason == "cancelled"
    assert isinstance(first, TextPiece)
    assert conversation.messages[-1]["content"].startswith(first.text)


def test_a_refused_turn_does_not_join(model: LocalModel) -> None:
    conversation = Conversation(model)
    with pytest.raises(RequestError, match="gate=on"):
        conversation.reply("the cat", GenerationRequest(gate="on"))
    with pytest.raises(RequestError, match="has room for 502 beside the answer; the last turn alone has"):
        conversation.reply("z9" * 600, GREEDY)
    assert conversation.messages == []


def test_a_long_chat_goes_on_by_leaving_out_its_oldest_turns(model: LocalModel) -> None:
    conversation = Conversation(model, system="Be brief.")
    left_out = []
    for turn in range(14):
        _, last = say(conversation, f"{turn} the quick brown fox jumps over the lazy dog, one two three")
        assert last.prompt_tokens + 10 <= LIMIT
        left_out.append(conversation.left_out)
    assert len(conversation.messages) == 29
    assert left_out[0] == 0
    assert left_out == sorted(left_out)
    assert left_out[-1] > 0
    assert all(count % 2 == 0 for count in left_out)


def test_a_long_chat_is_refused_where_nothing_may_be_left_out(model: LocalModel) -> None:
    conversation = Conversation(model, trimming="error")
    with pytest.raises(RequestError, match="start a new chat, or let the oldest turns be dropped"):
        for turn in range(30):
            say(conversation, f"{turn} the quick brown fox jumps over the lazy dog, one two three")
    assert len(conversation.messages) < 60


def test_a_base_model_has_no_conversation(tmp_path: Path) -> None:
    model = LocalModel.open(write_model(tmp_path / "m", chat_template=None), threads=1)
    with pytest.raises(RequestError, match="base model without a chat template"):
        Conversation(model)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    system=st.booleans(),
    room=st.integers(10, 120),
)
def test_the_fewest_oldest_turns_go(model: LocalModel, sizes: list[int], system: bool, room: int) -> None:
    tokenizer = model.tokenizer
    opening = [{"role": "system", "content": "s"}] if system else []
    turns = [{"role": ("user", "assistant")[place % 2], "content": "x " * size} for place, size in enumerate(sizes)]
    # A chat ends with the user's turn.
    turns = turns if len(turns) % 2 else turns[:-1] or turns
    messages = opening + turns
    candidates = [opening + turns[place:] for place in range(0, len(turns), 2)]
    fitting = [one for one in candidates if len(tokenizer.encode_chat(one)) <= room]
    if not fitting:
        with pytest.raises(RequestError, match=f"room for {room} beside the answer"):
            fit_messages(tokenizer, messages, room=room, policy="drop-oldest")
        return
    ids, dropped = fit_messages(tokenizer, messages, room=room, policy="drop-oldest")
    assert ids == tokenizer.encode_chat(fitting[0])
    assert dropped == len(messages) - len(fitting[0])
    if dropped:
        with pytest.raises(RequestError, match="start a new chat"):
            fit_messages(tokenizer, messages, room=room, policy="error")
