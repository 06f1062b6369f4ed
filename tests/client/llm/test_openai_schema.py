"""Requests as OpenAI's clients spell them: honoured, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.serving.openai_calls import request_settings
from edgeduet_client.llm.serving.openai_schema import ChatBody, CompletionBody, EmbeddingsBody, parse_body

HELLO = [{"role": "user", "content": "hello"}]


def chat(**more: Any) -> ChatBody:
    return parse_body(ChatBody, {"model": "m", "messages": HELLO, **more})


def completion(**more: Any) -> CompletionBody:
    return parse_body(CompletionBody, {"model": "m", "prompt": "hello", **more})


def refused(make: Any, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as found:
        make(**more)
    assert "\n" not in str(found.value)
    return found.value


def test_what_is_left_out_or_null_is_left_to_the_model() -> None:
    nothing = dict.fromkeys(
        ("temperature", "top_p", "stop", "seed", "logit_bias", "max_tokens", "response_format", "user")
    )
    assert request_settings(chat()) == request_settings(chat(**nothing)) == {}


def test_settings_go_over_by_name() -> None:
    body = chat(temperature=0.5, seed=7, presence_penalty=0.1, stop="END", logit_bias={"5": -100}, max_tokens=9)
    assert request_settings(body) == {
        "temperature": 0.5,
        "seed": 7,
        "presence_penalty": 0.1,
        "stop": ("END",),
        "logit_bias": {5: -100.0},
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("given_", "sampler"),
    [
        ({"top_p": 0.9}, "top-p"),
        ({"top_k": 40}, "top-k"),
        ({"top_k": 40, "top_p": 0.9}, "top-k"),
        ({"min_p": 0.05}, "min-p"),
        ({"typical_p": 0.9}, "typical"),
        ({"mirostat_tau": 3.0, "mirostat_eta": 0.1}, "mirostat"),
        ({"top_n_sigma": 1.0}, "top-n-sigma"),
        ({"sampler": "p-less-norm"}, "p-less-norm"),
        ({"top_p": 1.0}, None),
        ({"top_p": 1, "sampler": "top-p"}, "top-p"),
    ],
)
def test_a_samplers_parameter_chooses_it_and_openais_default_chooses_none(
    given_: dict[str, Any], sampler: str | None
) -> None:
    assert request_settings(chat(**given_)).get("sampler") == sampler


@pytest.mark.parametrize(
    "field", ["tools", "functions", "audio", "prediction", "web_search_options", "store", "suffix"]
)
def test_what_is_not_supported_is_refused_by_name_unless_it_asks_for_nothing(field: str) -> None:
    assert refused(chat, **{field: [{"x": 1}]}).field == field
    chat(**{field: None})


def test_values_that_ask_for_nothing_and_words_without_effect_are_taken() -> None:
    chat(tools=[], tool_choice="auto", store=False, modalities=["text"], user="u", metadata={"a": "b"})
    completion(best_of=1, suffix="")


def test_an_unknown_parameter_is_refused_with_the_nearest_known_one() -> None:
    error = refused(chat, temprature=1)
    assert error.field == "temprature" and "did you mean 'temperature'" in str(error)


def test_answers_can_be_sent_back_as_they_came() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
        "audio": None,
    }
    body = parse_body(ChatBody, {"model": "m", "messages": [*HELLO, answer, *HELLO]})
    assert [message.plain() for message in body.messages][1] == {"role": "assistant", "content": "hi"}


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = parse_body(ChatBody, {"model": "m", "messages": [{"role": "developer", "content": parts}]})
    assert body.messages[0].plain() == {"role": "system", "content": "ab"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "robot", "content": "x"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": "x", "name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "user", "content": "half \ud800 a character"},
        "hello",
    ],
)
def test_messages_that_cannot_be_understood_are_refused(message: Any) -> None:
    with pytest.raises(RequestError) as found:
        parse_body(ChatBody, {"model": "m", "messages": [message]})
    assert found.value.field == "messages"


def test_a_conversation_needs_a_message() -> None:
    assert refused(lambda: parse_body(ChatBody, {"model": "m", "messages": []})).field == "messages"
    assert refused(lambda: parse_body(ChatBody, {"messages": HELLO})).field == "model"
    refused(lambda: parse_body(ChatBody, ["not", "an", "object"]))


def test_log_probabilities_are_spelt_differently_in_chats_and_completions() -> None:
    assert request_settings(chat(logprobs=True, top_logprobs=3))["logprobs"] == 3
    assert request_settings(chat(logprobs=True))["logprobs"] == 0
    assert "logprobs" not in request_settings(chat(logprobs=False))
    assert request_settings(completion(logprobs=2))["logprobs"] == 2
    assert refused(chat, top_logprobs=3).field == "top_logprobs"
    assert refused(chat, logprobs=True, top_logprobs=21).field == "top_logprobs"
    assert refused(completion, logprobs=1, echo=True).field == "echo"


def test_both_names_of_the_budget_work_and_must_agree() -> None:
    assert request_settings(chat(max_completion_tokens=5))["max_tokens"] == 5
    assert request_settings(chat(max_completion_tokens=5, max_tokens=5))["max_tokens"] == 5
    assert refused(chat, max_completion_tokens=5, max_tokens=6).field == "max_completion_tokens"


def test_response_format_becomes_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    strict = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert request_settings(chat(response_format=strict))["json_schema"] == schema
    assert request_settings(chat(response_format={"type": "json_object"}))["json_schema"] == {"type": "object"}
    assert "json_schema" not in request_settings(chat(response_format={"type": "text"}))
    assert refused(chat, response_format={"type": "json_schema"}).field == "response_format"
    assert refused(chat, response_format=strict, regex="a+").field == "response_format"
    assert refused(chat, response_format={"type": "xml"}).field == "response_format"


def test_stream_options_are_for_streams() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage
    assert refused(chat, stream_options={"include_usage": True}).field == "stream_options"


def test_the_four_forms_of_a_prompt() -> None:
    assert completion(prompt="a").prompts() == ["a"]
    assert completion(prompt=["a", "b"]).prompts() == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts() == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompts() == [[1, 2], [3]]
    assert refused(lambda: completion(prompt=[]).prompts()).field == "prompt"
    assert refused(completion, prompt=None).field == "prompt"
    assert refused(completion, prompt=[1, "a"]).field == "prompt"
    embeddings = parse_body(EmbeddingsBody, {"model": "m", "input": [[1], [2]]})
    assert embeddings.inputs() == [[1], [2]]


def test_an_error_does_not_repeat_what_was_sent() -> None:
    assert "my secret" not in str(refused(chat, temperature="my secret"))
    assert "my secret" not in str(refused(lambda: parse_body(ChatBody, {"model": "m", "messages": "my secret"})))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(ChatBody.model_fields)), inner)
        ),
        max_leaves=12,
    )
)
def test_whatever_json_comes_it_is_a_request_or_one_line(value: Any) -> None:
    value = json.loads(json.dumps(value))
    for kind in (ChatBody, CompletionBody, EmbeddingsBody):
        try:
            parse_body(kind, value)
        except RequestError as error:
            assert str(error) and "\n" not in str(error)
