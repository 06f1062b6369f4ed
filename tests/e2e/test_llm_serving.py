"""A real server process, called by the real OpenAI client and by a generated gRPC client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from edgeduet_client.llm.serving import llm_pb2, llm_pb2_grpc
from llm_server import ServerProcess, serving, start
from tiny_llm import TINY, write_model

pytestmark = pytest.mark.e2e

TOKEN = "correct-horse-battery-staple"
LONG = replace(TINY, context_length=100_000)
#: Takes the tiny model about half a minute: nobody waits for its end.
ENDLESS = {"max_tokens": 90_000, "extra_body": {"min_tokens": 90_000}}
ENDLESS_BODY = {"model": "tiny", "prompt": "the cat", "max_tokens": 90_000, "min_tokens": 90_000}
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("serving") / "tiny", architecture=LONG).path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(folder, "--queue", "64") as process:
        yield process


def client_of(server: ServerProcess, **options: Any) -> openai.OpenAI:
    options = {"max_retries": 0, "api_key": server.token or "none"} | options
    return openai.OpenAI(base_url=f"{server.http}/v1", **options)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def stub(server: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield llm_pb2_grpc.LanguageModelStub(channel)


# --- the real OpenAI client -------------------------------------------------------------------------------


def test_openai_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edgeduet"


def test_openai_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, seed=1, logprobs=True, top_logprobs=2, extra_body={"min_tokens": 6}
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 6 and len(choice.logprobs.content[0].top_logprobs) == 2


def test_openai_streams(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 1, "temperature": 0.7}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completes_prompts_with_our_own_settings(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["the cat", "the dog"], n=2, max_tokens=5, echo=True, extra_body={"min_p": 0.05}
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith("the cat") for choice in answer.choices] == [True, True, False, False]


def test_openai_embeds(client: openai.OpenAI) -> None:
    # The client asks for base64 by itself and decodes it.
    answer = client.embeddings.create(model="tiny", input=["the cat", "the dog"])
    assert [len(entry.embedding) for entry in answer.data] == [TINY.hidden_width] * 2
    assert sum(x * x for x in answer.data[0].embedding) == pytest.approx(1, abs=1e-5)


def test_openai_gets_json_that_follows_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"open": {"type": "boolean"}},
        "required": ["open"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "door", "schema": schema, "strict": True}},
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"open"}


def test_openai_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="the cat", max_tokens=99_999)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as huge:
        client.completions.create(model="tiny", prompt="the cat", max_tokens=10**12)
    assert huge.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as empty:
        client.completions.create(model="tiny", prompt="")
    assert empty.value.param == "prompt"


# --- gRPC -------------------------------------------------------------------------------------------------


def text_of(replies: Any) -> tuple[str, Any]:
    pieces, finished = [], None
    for reply in replies:
        if reply.WhichOneof("event") == "piece":
            pieces.append(reply.piece.text)
        else:
            finished = reply.finished
    return "".join(pieces), finished


def test_grpc_and_http_give_the_same_answer(stub: Any, client: openai.OpenAI) -> None:
    sampling = llm_pb2.Sampling(max_tokens=10, seed=4, temperature=0.9, sampler="temperature")
    message = llm_pb2.ChatMessage(role="user", content="hello")
    text, finished = text_of(stub.Chat(llm_pb2.ChatRequest(messages=[message], sampling=sampling)))
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=10, seed=4, temperature=0.9, extra_body={"sampler": "temperature"}
    )
    assert text == answer.choices[0].message.content
    assert answer.usage is not None and finished.completion_tokens == answer.usage.completion_tokens


def test_grpc_goes_on_with_texts_and_ids(stub: Any) -> None:
    sampling = llm_pb2.Sampling(max_tokens=5, min_tokens=5, sampler="greedy", logprobs=1)
    replies = list(stub.Generate(llm_pb2.GenerateRequest(model="tiny", prompt_ids=[5, 6, 7], sampling=sampling)))
    ids = [token for reply in replies for token in reply.piece.ids]
    entries = [entry for reply in replies for entry in reply.piece.logprobs]
    assert replies[-1].finished.reason == llm_pb2.Finished.LENGTH and len(ids) == 5
    assert [entry.id for entry in entries] == ids == [entry.top[0].id for entry in entries]
    two = list(stub.Generate(llm_pb2.GenerateRequest(prompt="the cat", sampling=llm_pb2.Sampling(max_tokens=3, n=2))))
    assert {reply.choice for reply in two} == {0, 1}


def test_grpc_tells_what_it_serves(stub: Any) -> None:
    (model,) = stub.Models(llm_pb2.ModelsRequest()).models
    assert model.name == "tiny" and model.context_length == 100_000 and model.chat and not model.gate


@pytest.mark.parametrize(
    ("request_", "code", "field"),
    [
        (
            llm_pb2.GenerateRequest(prompt="x", sampling=llm_pb2.Sampling(temperature=-1)),
            "INVALID_ARGUMENT",
            "temperature",
        ),
        (llm_pb2.GenerateRequest(prompt=""), "INVALID_ARGUMENT", "prompt"),
        (llm_pb2.GenerateRequest(prompt="x", prompt_ids=[1]), "INVALID_ARGUMENT", "prompt_ids"),
        (llm_pb2.GenerateRequest(prompt_ids=[999_999]), "INVALID_ARGUMENT", "prompt"),
        (
            llm_pb2.GenerateRequest(prompt="x", sampling=llm_pb2.Sampling(json_schema="[")),
            "INVALID_ARGUMENT",
            "json_schema",
        ),
        (llm_pb2.GenerateRequest(prompt="x", model="other"), "NOT_FOUND", None),
        (llm_pb2.GenerateRequest(prompt="x" * 2_000_000), "RESOURCE_EXHAUSTED", None),
    ],
)
def test_grpc_refuses_with_a_code_and_the_field(stub: Any, request_: Any, code: str, field: str | None) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request_))
    assert refused.value.code().name == code and refused.value.details()
    assert dict(refused.value.trailing_metadata()).get("edgeduet-field") == field


def test_grpc_can_be_explored_and_watched(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"edgeduet.llm.v1.LanguageModel", "grpc.health.v1.Health"} <= set(database.get_services())
        assert "GenerateReply" in str(database.FindFileContainingSymbol("edgeduet.llm.v1.LanguageModel"))
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "edgeduet.llm.v1.LanguageModel"):
            status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
            assert status == health_pb2.HealthCheckResponse.SERVING


# --- clients that leave, lines that are full --------------------------------------------------------------


def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_the_worker(server: ServerProcess) -> None:
    left = server.metric("requests_total", call="completions", outcome="cancelled")
    with httpx.stream("POST", f"{server.http}/v1/completions", json=ENDLESS_BODY | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert server.metric("running") == 1
    # A token of this model takes less than a millisecond; most of this is the polling.
    assert server.wait_for("running", 0, seconds=5) < 2
    assert server.metric("requests_total", call="completions", outcome="cancelled") == left + 1


def test_a_client_that_leaves_before_the_answer_frees_the_worker_or_its_place(server: ServerProcess) -> None:
    def impatient() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.http}/v1/completions", json=ENDLESS_BODY, timeout=0.5)

    with ThreadPoolExecutor(3) as pool:
        for call in [pool.submit(impatient) for _ in range(3)]:
            call.result()
    server.wait_for("queue_depth", 0)
    server.wait_for("running", 0)


def test_a_grpc_client_that_cancels_frees_the_worker(server: ServerProcess, stub: Any) -> None:
    sampling = llm_pb2.Sampling(max_tokens=90_000, min_tokens=90_000)
    replies = stub.Generate(llm_pb2.GenerateRequest(prompt="the cat", sampling=sampling))
    assert next(replies).piece.text
    replies.cancel()
    server.wait_for("running", 0)


def test_a_full_queue_is_429_over_http_and_resource_exhausted_over_grpc(folder: Path) -> None:
    with serving(folder, "--queue", "1") as server, ThreadPoolExecutor(2) as pool, client_of(server) as client:
        stop = threading.Event()

        def endless() -> None:
            with httpx.stream("POST", f"{server.http}/v1/completions", json=ENDLESS_BODY | {"stream": True}) as answer:
                for _ in answer.iter_lines():
                    if stop.is_set():
                        return

        first = pool.submit(endless)
        server.wait_for("running", 1)
        second = pool.submit(endless)
        server.wait_for("queue_depth", 1)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="the cat", max_tokens=2)
        assert int(refused.value.response.headers["retry-after"]) >= 1 and refused.value.code == "queue_full"
        with grpc.insecure_channel(server.grpc) as channel:
            stub = llm_pb2_grpc.LanguageModelStub(channel)
            with pytest.raises(grpc.RpcError) as busy:
                list(stub.Generate(llm_pb2.GenerateRequest(prompt="the cat")))
            assert busy.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(busy.value.trailing_metadata())["retry-after"]) >= 1
        stop.set()
        first.result(10)
        second.result(10)
        # Whoever comes back is answered; OpenAI's client waits as long as it was told, by itself.
        assert client.completions.create(model="tiny", prompt="the cat", max_tokens=2).choices


@pytest.mark.slow
def test_many_short_requests_at_once_are_all_answered(folder: Path) -> None:
    """``EDGEDUET_MANY_REQUESTS=10000`` for the full number; each takes a few milliseconds of the worker."""
    count = int(os.environ.get("EDGEDUET_MANY_REQUESTS", "500"))
    with serving(folder, "--queue", "128", "--no-grpc") as server:
        answered, refused = asyncio.run(_ask_many(server, count))
        assert answered == count
        assert server.metric("requests_total", outcome="ok") == count
        assert server.metric("queue_depth") == server.metric("running") == 0
        # Back-pressure was at work: the line never held them all.
        assert count <= 129 or refused > 0
        server.signal()
        assert server.wait() == 0
        assert not [event for event in server.events() if event["level"] in ("error", "warning")]


async def _ask_many(server: ServerProcess, count: int) -> tuple[int, int]:
    """Send ``count`` requests at once, each again when it is told to come back; return answers and refusals."""
    refused = 0

    async def one(number: int) -> bool:
        nonlocal refused
        while True:
            body = {"model": "tiny", "prompt": f"one two {number}", "max_tokens": 2, "seed": number}
            status, headers, answer = await _post(server, body)
            if status == 200:
                return bool(answer["choices"])
            assert status == 429, answer
            refused += 1
            await asyncio.sleep(float(headers["retry-after"]) + number % 100 / 100)

    answers = await asyncio.gather(*(one(number) for number in range(count)))
    return sum(answers), refused


async def _post(server: ServerProcess, body: Any) -> tuple[int, dict[str, str], Any]:
    """Post a completion over a connection of its own; pooling clients take minutes over ten thousand of them."""
    host, port = server.http.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)
    answer = await reader.read()
    writer.close()
    lines, _, content = answer.partition(b"\r\n\r\n")
    first, *rest = lines.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
    return int(first.split()[1]), headers, json.loads(content)


# --- the end of a server ----------------------------------------------------------------------------------


def test_the_first_signal_drains_what_was_accepted_is_answered_new_requests_are_not(folder: Path) -> None:
    with serving(folder) as server, ThreadPoolExecutor(2) as pool:
        body = ENDLESS_BODY | {"max_tokens": 3000, "min_tokens": 3000}
        asked = [pool.submit(httpx.post, f"{server.http}/v1/completions", json=body, timeout=60) for _ in range(2)]
        server.wait_for("queue_depth", 1)
        with grpc.insecure_channel(server.grpc) as channel:
            grpc.channel_ready_future(channel).result(5)
            server.signal()
            server.wait_for("queue_depth", 1)
            deadline = time.monotonic() + 5
            while httpx.get(f"{server.http}/ready").status_code == 200:
                assert time.monotonic() < deadline
            refused = httpx.post(f"{server.http}/v1/completions", json=body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert httpx.get(f"{server.http}/health").status_code == 200
            with pytest.raises(grpc.RpcError) as no:
                list(llm_pb2_grpc.LanguageModelStub(channel).Generate(llm_pb2.GenerateRequest(prompt="x")))
            assert no.value.code() == grpc.StatusCode.UNAVAILABLE
            status = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        for answer in asked:
            assert answer.result().json()["usage"]["completion_tokens"] == 3000
        assert server.wait() == 0
        assert [event["event"] for event in server.events()][-2:] == ["draining", "stopped"]


def test_a_stream_that_runs_is_finished_while_draining(folder: Path) -> None:
    with serving(folder, "--no-grpc") as server:
        body = ENDLESS_BODY | {"max_tokens": 2000, "min_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{server.http}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait() == 0


def test_the_second_signal_stops_at_once_and_says_that_something_was_dropped(folder: Path) -> None:
    with serving(folder) as server:
        with httpx.stream("POST", f"{server.http}/v1/completions", json=ENDLESS_BODY | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal()
            while not any(event["event"] == "draining" for event in server.events()):
                time.sleep(0.01)
            started = time.monotonic()
            server.signal()
            # The answer ends, cut off; the connection may, too.
            try:
                for _ in lines:
                    pass
            except httpx.RemoteProtocolError:
                pass
        assert server.wait(10) == 1
        assert time.monotonic() - started < 5


def test_draining_has_an_end(folder: Path) -> None:
    with serving(folder, "--drain", "0.5", "--no-grpc") as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.post, f"{server.http}/v1/completions", json=ENDLESS_BODY, timeout=60)
        server.wait_for("running", 1)
        server.signal()
        assert server.wait(15) == 1
        # What was generated so far is delivered rather than lost.
        choice = asked.result().json()["choices"][0]
        assert choice["edgeduet"]["finish"] == "cancelled" and choice["text"]


def test_an_idle_server_ends_at_once(folder: Path) -> None:
    with serving(folder) as server:
        started = time.monotonic()
        server.signal()
        assert server.wait() == 0 and time.monotonic() - started < 5


# --- the folder, and other servers on it ------------------------------------------------------------------


def test_two_servers_on_one_folder_give_the_same_answers(folder: Path, server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 16, "seed": 9}
    with serving(folder, "--no-grpc") as other:
        answers = [
            httpx.post(f"{address}/v1/completions", json=body).json()
            for address in (server.http, other.http, server.http)
        ]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert len({answer["system_fingerprint"] for answer in answers}) == 1


def test_one_server_serves_two_models_side_by_side(folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", name="other", chat_template=None, seed=1).path
    with serving(folder, other) as server, client_of(server) as client:
        assert {model.id for model in client.models.list()} == {"tiny", "other"}
        with httpx.stream("POST", f"{server.http}/v1/completions", json=ENDLESS_BODY | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            # Each has a worker of its own.
            assert client.completions.create(model="other", prompt="the cat", max_tokens=2, timeout=20).choices
            assert server.metric("running", model="tiny") == 1
        with grpc.insecure_channel(server.grpc) as channel:
            stub = llm_pb2_grpc.LanguageModelStub(channel)
            with pytest.raises(grpc.RpcError) as unnamed:
                list(stub.Generate(llm_pb2.GenerateRequest(prompt="the cat")))
            assert unnamed.value.code() == grpc.StatusCode.NOT_FOUND
    process = start("llm", "serve", folder, folder)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2 and "same name" in said.splitlines()[-1]


def test_a_folder_that_is_replaced_or_removed_while_it_is_served(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "tiny"
    shutil.copytree(folder, mine)
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 4}
    with serving(mine, "--no-grpc") as server:
        running = ENDLESS_BODY | {"max_tokens": 1500, "min_tokens": 1500, "stream": True}
        with httpx.stream("POST", f"{server.http}/v1/completions", json=running, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            shutil.rmtree(mine)
            refused = httpx.post(f"{server.http}/v1/completions", json=body)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "model_changed"
            assert "\n" not in refused.json()["error"]["message"]
            # What runs finishes from the loaded copy.
            assert [line for line in lines if line][-1] == "data: [DONE]"
        write_model(mine, architecture=LONG, seed=5)
        refused = httpx.post(f"{server.http}/v1/completions", json=body)
        assert refused.status_code == 503 and "restart this server" in refused.json()["error"]["message"]
        shutil.rmtree(mine)
        shutil.copytree(folder, mine)
        assert httpx.post(f"{server.http}/v1/completions", json=body).status_code == 200


# --- who may ask ------------------------------------------------------------------------------------------


def test_any_other_address_needs_a_token_or_the_server_does_not_start(folder: Path) -> None:
    process = start("llm", "serve", folder, "--host", "0.0.0.0", "--port", "0")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert said.startswith("error: ") and "needs a token" in said and said.count("\n") == 1


def test_with_a_token_from_the_environment_the_server_listens_everywhere_and_asks_for_it(folder: Path) -> None:
    environment = {"EDGEDUET_LLM_TOKEN": TOKEN}
    with serving(folder, "--host", "0.0.0.0", environment=environment, token=TOKEN) as server:
        server.http = server.http.replace("0.0.0.0", "127.0.0.1")
        with client_of(server) as client:
            assert client.completions.create(model="tiny", prompt="the cat", max_tokens=2).choices
        with client_of(server, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with grpc.insecure_channel(server.grpc.replace("0.0.0.0", "127.0.0.1")) as channel:
            stub = llm_pb2_grpc.LanguageModelStub(channel)
            for metadata in (None, (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.RpcError) as no:
                    stub.Models(llm_pb2.ModelsRequest(), metadata=metadata)
                assert no.value.code() == grpc.StatusCode.UNAUTHENTICATED
                with pytest.raises(grpc.RpcError) as no:
                    list(stub.Generate(llm_pb2.GenerateRequest(prompt="x"), metadata=metadata))
                assert no.value.code() == grpc.StatusCode.UNAUTHENTICATED
            allowed = (("authorization", f"Bearer {TOKEN}"),)
            assert stub.Models(llm_pb2.ModelsRequest(), metadata=allowed).models
            assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status
        assert any("unencrypted" in event["event"] for event in server.events())
        # Nothing that was logged holds the token.
        assert TOKEN not in json.dumps(server.events())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "edgeduet test")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(built.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)
    return folder / "cert.pem", folder / "key.pem"


def test_with_a_certificate_both_ways_are_encrypted(
    folder: Path, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    chain, key = certificate
    options = ("--host", "0.0.0.0", "--token-file", tmp_path / "token", "--certificate", chain, "--key", key)
    with serving(folder, *options, token=TOKEN) as server:
        address = server.http.replace("0.0.0.0", "127.0.0.1")
        assert address.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(chain))
        assert httpx.get(f"{address}/v1/models", headers=server.headers, verify=trusted).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/v1/models", headers=server.headers)
        credentials = grpc.ssl_channel_credentials(chain.read_bytes())
        with grpc.secure_channel(server.grpc.replace("0.0.0.0", "127.0.0.1"), credentials) as channel:
            allowed = (("authorization", f"Bearer {TOKEN}"),)
            assert llm_pb2_grpc.LanguageModelStub(channel).Models(llm_pb2.ModelsRequest(), metadata=allowed).models
        assert not [event for event in server.events() if event["level"] == "warning"]
    for arguments in (("--certificate", chain), ("--certificate", chain, "--key", tmp_path / "missing")):
        process = start("llm", "serve", folder, *arguments)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 2 and said.startswith("error: ") and said.count("\n") == 1


def test_requests_are_logged_only_when_asked_for_and_never_their_text(folder: Path, server: ServerProcess) -> None:
    body = {"model": "tiny", "prompt": "the secret cat", "max_tokens": 3, "min_tokens": 3}
    with serving(folder, "--verbose", "--no-grpc") as talkative:
        assert httpx.post(f"{talkative.http}/v1/completions", json=body).status_code == 200
        talkative.signal()
        assert talkative.wait() == 0
        (line,) = [event for event in talkative.events() if event["event"] == "request"]
        assert line["outcome"] == "ok" and line["completion_tokens"] == 3 and line["call"] == "completions"
        assert "secret" not in json.dumps(talkative.events())
    httpx.post(f"{server.http}/v1/completions", json=body)
    assert [event["event"] for event in server.events()] == ["loaded", "ready"]


def test_a_port_that_is_taken_is_one_line(folder: Path, server: ServerProcess) -> None:
    process = start("llm", "serve", folder, "--port", server.http.rpartition(":")[2], "--no-grpc")
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2 and "cannot listen on 127.0.0.1" in said.splitlines()[-1]
