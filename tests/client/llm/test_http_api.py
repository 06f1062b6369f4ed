"""The HTTP side in one process: status, headers and bodies as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.generate import TextPiece
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.serving import http_api
from edgeduet_client.llm.serving.access import Access
from edgeduet_client.llm.serving.engine import Engine
from edgeduet_client.llm.serving.http_api import make_app
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.metrics import Metrics
from tiny_llm import TINY, write_model

TOKEN = "correct-horse-battery-staple"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
GO_ON = {"model": "tiny", "prompt": "the cat sat", "max_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return write_model(tmp_path_factory.mktemp("http") / "tiny", architecture=replace(TINY, context_length=4096))


@pytest.fixture(scope="module")
def model(folder: ModelFolder) -> LocalModel:
    return LocalModel.open(folder, threads=1)


def client_of(folder: ModelFolder, model: LocalModel, token: str | None = None, **limits: Any) -> Iterator[TestClient]:
    bounds, metrics = ServingLimits(**limits), Metrics()
    engine = Engine(folder, model, bounds, metrics)
    app = make_app({"tiny": engine}, Access(token), bounds, metrics)
    yield TestClient(app, base_url="http://127.0.0.1:8217", raise_server_exceptions=False)
    engine.queue.stop()


@pytest.fixture(scope="module")
def client(folder: ModelFolder, model: LocalModel) -> Iterator[TestClient]:
    yield from client_of(folder, model)


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_chat_has_openais_shape(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json=HELLO | {"min_tokens": 4}).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == "tiny"
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["index"] == 0 and choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert choice["edgeduet"]["finish"] == "length"


def test_a_completion_has_openais_shape_for_texts_lists_and_ids(client: TestClient, model: LocalModel) -> None:
    body = GO_ON | {"sampler": "greedy"}
    single = client.post("/v1/completions", json=body).json()
    assert single["object"] == "text_completion" and single["id"].startswith("cmpl-")
    text = single["choices"][0]["text"]
    ids = model.tokenizer.encode_prompt("the cat sat")
    for prompt in (["the cat sat", "the dog"], [ids, [5]], ids):
        choices = client.post("/v1/completions", json=body | {"prompt": prompt}).json()["choices"]
        assert choices[0]["text"] == text
        assert [choice["index"] for choice in choices] == list(range(len(choices)))


def test_n_answers_to_each_of_several_prompts(client: TestClient) -> None:
    body = GO_ON | {"prompt": ["the cat", "the dog"], "n": 3, "seed": 5, "sampler": "temperature", "min_tokens": 4}
    first, again = (client.post("/v1/completions", json=body).json() for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert len(texts) == 6 and texts == [choice["text"] for choice in again["choices"]]
    assert len(set(texts[:3])) == 3
    # A prompt is read once, however many answers it has.
    assert first["usage"]["completion_tokens"] == 24
    one = client.post("/v1/completions", json=body | {"n": 1}).json()["usage"]
    assert first["usage"]["prompt_tokens"] == one["prompt_tokens"]


def test_echo_repeats_the_prompt(client: TestClient) -> None:
    plain, echoed = (
        client.post("/v1/completions", json=GO_ON | {"sampler": "greedy", "echo": echo}).json()["choices"][0]["text"]
        for echo in (False, True)
    )
    assert echoed == "the cat sat" + plain
    streamed = client.post("/v1/completions", json=GO_ON | {"sampler": "greedy", "echo": True, "stream": True})
    assert "".join(chunk["choices"][0]["text"] for chunk in events_of(streamed.text)) == echoed


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_what_a_whole_answer_says(client: TestClient, n: int) -> None:
    body = HELLO | {"max_tokens": 20, "seed": 3, "n": n, "logprobs": True, "top_logprobs": 2}
    whole = client.post("/v1/chat/completions", json=body).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.post("/v1/chat/completions", json=body | options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    chunks = events_of(answer.text)
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == chunks[0]["id"] for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    )
    for index in range(n):
        parts = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == whole["choices"][index]["message"]["content"]
        assert [part["finish_reason"] for part in parts][-1] == whole["choices"][index]["finish_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])
        entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        # The second time the prompt came out of a kept cache, computed in another split: equal but for rounding.
        expected = whole["choices"][index]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [entry["token"] for entry in expected]
        np.testing.assert_allclose(
            [entry["logprob"] for entry in entries], [entry["logprob"] for entry in expected], atol=1e-3
        )


def test_a_stream_has_no_usage_unless_asked(client: TestClient) -> None:
    chunks = events_of(client.post("/v1/chat/completions", json=HELLO | {"stream": True}).text)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_a_stream_that_breaks_ends_with_an_error_event(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, **__: object) -> Iterator[TextPiece]:
        yield TextPiece("the ", (5,), None)
        raise ModelError("the disk is gone")

    monkeypatch.setattr(LocalModel, "generate", breaks)
    answer = client.post("/v1/chat/completions", json=HELLO | {"stream": True})
    lines = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert lines[1]["choices"][0]["delta"] == {"content": "the "}
    assert lines[-1]["error"]["code"] == "model_error" and lines[-1]["error"]["message"] == "the disk is gone"
    # Whole, it is a status.
    assert error_of(client.post("/v1/chat/completions", json=HELLO), 500)["type"] == "server_error"


def test_a_failure_nobody_thought_of_is_an_error_too_and_keeps_its_details(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("the secret cat")

    monkeypatch.setattr(Engine, "admit_text", fails)
    error = error_of(client.post("/v1/completions", json=GO_ON), 500)
    assert error["code"] == "internal_error" and "secret" not in error["message"]


def test_a_body_that_does_not_arrive_is_given_up(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "_BODY_S", 0.05)

    async def never(self: Request) -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    monkeypatch.setattr(Request, "stream", never)
    assert error_of(client.post("/v1/completions", json=GO_ON), 408)["code"] == "request_too_slow"


def test_log_probabilities_add_up(client: TestClient) -> None:
    body = HELLO | {"logprobs": True, "top_logprobs": 20, "min_tokens": 4}
    entries = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 20 and tops == sorted(tops, reverse=True)
        assert sum(np.exp(tops)) <= 1 + 1e-9 and entry["logprob"] <= tops[0]
        assert entry["bytes"] is None or bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    legacy = client.post("/v1/completions", json=GO_ON | {"logprobs": 3, "min_tokens": 4}).json()["choices"][0][
        "logprobs"
    ]
    assert len(legacy["tokens"]) == len(legacy["token_logprobs"]) == len(legacy["text_offset"]) == 4
    assert legacy["text_offset"][0] == 0 and legacy["text_offset"] == sorted(legacy["text_offset"])


def test_stop_strings_end_an_answer_and_are_not_part_of_it(client: TestClient) -> None:
    body = GO_ON | {"max_tokens": 40, "sampler": "greedy", "min_tokens": 40}
    text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    stop = text[8:11]
    choice = client.post("/v1/completions", json=body | {"stop": [stop], "min_tokens": 0}).json()["choices"][0]
    assert choice["text"] == text[: text.index(stop)] and choice["finish_reason"] == "stop"


def test_an_answer_follows_its_schema(client: TestClient) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for response_format in (
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    ):
        body = HELLO | {"max_tokens": 200, "response_format": response_format}
        answer = json.loads(client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"])
        assert answer["a"] in ("x", "y") and isinstance(answer["b"], bool)
    by_regex = client.post("/v1/completions", json=GO_ON | {"regex": "[0-9]{3}", "max_tokens": 9}).json()
    assert by_regex["choices"][0]["text"].isdigit() and len(by_regex["choices"][0]["text"]) == 3


def test_a_time_out_shows_as_length_with_the_reason_beside_it(client: TestClient) -> None:
    choice = client.post(
        "/v1/completions", json=GO_ON | {"max_tokens": 4000, "min_tokens": 4000, "timeout_s": 0.1}
    ).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["edgeduet"]["finish"] == "timeout"


def test_embeddings_as_numbers_and_as_base64(client: TestClient) -> None:
    body = {"model": "tiny", "input": ["the cat", "the dog sat on the mat"]}
    numbers = client.post("/v1/embeddings", json=body).json()
    assert [entry["index"] for entry in numbers["data"]] == [0, 1] and numbers["usage"]["prompt_tokens"] > 2
    packed = client.post("/v1/embeddings", json=body | {"encoding_format": "base64"}).json()
    for plain, coded in zip(numbers["data"], packed["data"], strict=True):
        raw = base64.b64decode(coded["embedding"])
        np.testing.assert_array_equal(np.float32(plain["embedding"]), struct.unpack(f"<{TINY.hidden_width}f", raw))
    assert error_of(client.post("/v1/embeddings", json=body | {"dimensions": 7}), 400)["param"] == "dimensions"
    assert error_of(client.post("/v1/embeddings", json=body | {"input": []}), 400)["param"] == "input"
    assert error_of(client.post("/v1/embeddings", json=body | {"input": ["x"] * 65}), 400)["param"] == "input"


def test_models_are_listed_and_shown(client: TestClient) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny"] and cards[0]["edgeduet"]["context_length"] == 4096
    assert client.get("/v1/models/tiny").json() == cards[0]
    assert error_of(client.get("/v1/models/tony"), 404)["code"] == "model_not_found"
    assert "tiny" in error_of(client.post("/v1/completions", json=GO_ON | {"model": "tinny"}), 404)["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "tiny", "prompt": "\xff"}', "not valid UTF-8 at byte 29"),
        (b'{"model": ', "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "not valid Unicode"),
        (b'["a"]', ""),
        (b'{"model": "tiny", "prompt": ""}', "empty"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 1000000000000000000000}', "at most"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": -5}', "greater than or equal to 1"),
        (b'{"model": "tiny", "prompt": "x", "n": 1000000}', "at most"),
    ],
)
def test_a_body_that_cannot_be_read_is_a_bad_request(client: TestClient, body: bytes, says: str) -> None:
    answer = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert says in error_of(answer, 400)["message"]


def test_json_must_be_declared_as_json(client: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client.post("/v1/completions", content=json.dumps(GO_ON), headers={"content-type": kind})
        assert "application/json" in error_of(answer, 400)["message"]


def test_a_body_that_is_too_large_is_refused_declared_or_not(folder: ModelFolder, model: LocalModel) -> None:
    for client in client_of(folder, model, body_bytes=2000):
        large = json.dumps(GO_ON | {"prompt": "x" * 3000}).encode()
        headers = {"content-type": "application/json"}
        assert error_of(client.post("/v1/completions", content=large, headers=headers), 413)
        parts = (large[start : start + 100] for start in range(0, len(large), 100))
        assert error_of(client.post("/v1/completions", content=parts, headers=headers), 413)
        assert client.post("/v1/completions", json=GO_ON).status_code == 200


def test_a_prompt_longer_than_the_context_is_refused_by_openais_code(client: TestClient) -> None:
    long = GO_ON | {"prompt": "the cat sat on the mat " * 1000}
    error = error_of(client.post("/v1/completions", json=long), 400)
    assert error["code"] == "context_length_exceeded" and "4096" in error["message"]
    assert client.post("/v1/completions", json=long | {"context_policy": "truncate-left"}).status_code == 200


def test_without_a_token_only_this_machine_is_answered(client: TestClient) -> None:
    for host in ("rebound.example", "192.168.1.9:8217"):
        assert error_of(client.get("/v1/models", headers={"host": host}), 401)
        assert error_of(client.post("/v1/completions", json=GO_ON, headers={"host": host}), 401)
    assert client.get("/v1/models", headers={"host": "localhost:8217"}).status_code == 200


def test_with_a_token_every_call_needs_it_but_health(folder: ModelFolder, model: LocalModel) -> None:
    for client in client_of(folder, model, TOKEN):
        for path in ("/v1/models", "/v1/models/tiny", "/metrics"):
            answer = client.get(path)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert client.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        for path, body in (("chat/completions", HELLO), ("completions", GO_ON), ("embeddings", {})):
            assert error_of(client.post(f"/v1/{path}", json=body, headers={"authorization": "Bearer wrong"}), 401)
        assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_a_full_queue_is_429_with_a_time_to_come_back(folder: ModelFolder, model: LocalModel) -> None:
    for client in client_of(folder, model, queue=0):
        engine = _engine_behind(client)
        ticket = engine.generate(
            engine.choices((5,), {"max_tokens": 4000, "min_tokens": 4000}, 1), lambda event: None, call="test"
        )
        answer = client.post("/v1/completions", json=GO_ON)
        assert error_of(answer, 429)["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1
        assert client.get("/ready").status_code == 200  # busy is not broken
        ticket.cancel()


def test_a_draining_server_is_503_and_not_ready_but_healthy(folder: ModelFolder, model: LocalModel) -> None:
    for client in client_of(folder, model):
        _engine_behind(client).queue.drain()
        answer = client.post("/v1/completions", json=GO_ON)
        assert error_of(answer, 503)["code"] == "draining" and "retry-after" in answer.headers
        assert client.get("/ready").status_code == 503 and client.get("/ready").json() == {"status": "draining"}
        assert client.get("/health").status_code == 200


def test_a_changed_folder_is_503_with_one_clear_line(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    for client in client_of(folder, LocalModel.open(folder, threads=1)):
        assert client.post("/v1/completions", json=GO_ON).status_code == 200
        folder.path.rename(tmp_path / "away")
        error = error_of(client.post("/v1/completions", json=GO_ON), 503)
        assert error["code"] == "model_changed" and str(folder.path) in error["message"]
        # Open to all, so without the path.
        assert client.get("/ready").status_code == 503 and client.get("/ready").json() == {"status": "model_changed"}


def test_a_base_model_has_no_chats_and_says_so(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", chat_template=None)
    for client in client_of(folder, LocalModel.open(folder, threads=1)):
        assert "base model" in error_of(client.post("/v1/chat/completions", json=HELLO), 400)["message"]
        assert client.post("/v1/completions", json=GO_ON).status_code == 200


def test_unknown_paths_and_methods_have_openais_error_shape(client: TestClient) -> None:
    error_of(client.get("/v1/nothing"), 404)
    error_of(client.get("/v1/completions"), 405)


def test_metrics_are_prometheus_text(client: TestClient) -> None:
    client.post("/v1/completions", json=GO_ON)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'edgeduet_llm_requests_total{call="completions",model="tiny",outcome="ok"}' in answer.text


def _engine_behind(client: TestClient) -> Engine:
    engine: Engine = client.app.state.engines["tiny"]  # type: ignore[attr-defined]
    return engine
