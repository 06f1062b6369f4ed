"""The HTTP side: OpenAI's endpoints, health, readiness and metrics, on FastAPI."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.serving import openai_reply
from edgeduet_client.llm.serving.access import Access
from edgeduet_client.llm.serving.engine import Deliver, Engine
from edgeduet_client.llm.serving.event_stream import EventStream
from edgeduet_client.llm.serving.events import Embedded
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.metrics import CONTENT_TYPE, Metrics
from edgeduet_client.llm.serving.openai_calls import Asked, asked_chat, asked_completion, reply_chunks, whole_reply
from edgeduet_client.llm.serving.openai_schema import ChatBody, CompletionBody, EmbeddingsBody, parse_body
from edgeduet_client.llm.serving.refusals import TooLarge, TooSlow, UnknownModel, WorkerFailed, verdict
from edgeduet_client.llm.serving.work_queue import Ticket
from edgeduet_shared.errors import EdgeDuetError, nearest

log = logging.getLogger(__name__)
T = TypeVar("T")
_BODY_S = 30
_CLIENT_LEFT = 499  # nobody reads it; what nginx writes into its log for the same


def make_app(engines: Mapping[str, Engine], access: Access, limits: ServingLimits, metrics: Metrics) -> FastAPI:
    """Return the application that serves ``engines`` by their names."""
    app = FastAPI(title="edgeduet local model", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.limits = limits
    app.state.engines = engines

    async def allowed(request: Request) -> None:
        access.check_host(request.headers.get("host"))
        access.check_token(request.headers.get("authorization"))

    guarded = [Depends(allowed)]

    def engine_of(name: str) -> Engine:
        if name not in engines:
            raise UnknownModel(f"no model {name!r} is served here{nearest(name, engines)}")
        return engines[name]

    @app.post("/v1/chat/completions", dependencies=guarded)
    async def chat(request: Request, body: Annotated[ChatBody, Depends(_body(ChatBody))]) -> Response:
        engine = engine_of(body.model)
        engine.check_ready()
        return await _answer(request, engine, await asyncio.to_thread(asked_chat, body, engine), body)

    @app.post("/v1/completions", dependencies=guarded)
    async def complete(request: Request, body: Annotated[CompletionBody, Depends(_body(CompletionBody))]) -> Response:
        engine = engine_of(body.model)
        engine.check_ready()
        return await _answer(request, engine, await asyncio.to_thread(asked_completion, body, engine), body)

    @app.post("/v1/embeddings", dependencies=guarded)
    async def embed(request: Request, body: Annotated[EmbeddingsBody, Depends(_body(EmbeddingsBody))]) -> Response:
        engine = engine_of(body.model)
        engine.check_ready()
        return await _embeddings(request, engine, body)

    @app.get("/v1/models", dependencies=guarded)
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model_card(engine) for engine in engines.values()]})

    @app.get("/v1/models/{name:path}", dependencies=guarded)
    async def model(name: str) -> Response:
        return JSONResponse(_model_card(engine_of(name)))

    @app.get("/metrics", dependencies=guarded)
    async def metrics_text() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        try:
            for engine in engines.values():
                engine.check_alive()
        except EdgeDuetError as error:
            # Open to all: the reason as a word, without the folder's path.
            return JSONResponse({"status": verdict(error).code}, verdict(error).http)
        return JSONResponse({"status": "ready"})

    _tell_errors_as_openai_does(app)
    return app


def _tell_errors_as_openai_does(app: FastAPI) -> None:
    @app.exception_handler(EdgeDuetError)
    async def refused(request: Request, error: EdgeDuetError) -> Response:
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def no_such_place(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return JSONResponse({"error": body}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error(
            "a request failed", exc_info=error, extra={"fields": {"path": request.url.path, "error": repr(error)}}
        )
        return _refusal(WorkerFailed(f"the server failed on this request ({type(error).__name__}); its log says more"))


def _refusal(error: EdgeDuetError) -> Response:
    return JSONResponse(openai_reply.error_body(error), verdict(error).http, headers=openai_reply.error_headers(error))


def _body(kind: type[BaseModel]) -> Callable[[Request], Awaitable[Any]]:
    async def read(request: Request) -> Any:
        return parse_body(kind, await read_json(request, request.app.state.limits.body_bytes))

    return read


async def read_json(request: Request, limit: int) -> Any:
    """Return the decoded body.

    Raises:
        TooLarge: more than ``limit`` bytes.
        TooSlow: it did not arrive in time.
        RequestError: not declared as JSON, not UTF-8, or not JSON.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A web page may send other types to this machine without asking first.
        raise RequestError("send the body as 'Content-Type: application/json'")
    too_large = TooLarge(f"the body is larger than the {limit} bytes this server reads")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > limit:
                    raise too_large
    except TimeoutError:
        raise TooSlow(f"the body did not arrive within {_BODY_S} seconds") from None
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_no_such_number)
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error


def _no_such_number(word: str) -> None:
    raise ValueError(f"{word} is no number in JSON")


async def _answer(request: Request, engine: Engine, asked: Asked, body: ChatBody | CompletionBody) -> Response:
    call = "chat" if isinstance(body, ChatBody) else "completions"

    def ask(deliver: Deliver) -> Ticket:
        return engine.generate(asked.choices, deliver, call=call)

    stream = EventStream(ask)
    handed_over = False
    try:
        # Whatever is wrong with a request shows here, while a status can still be sent.
        begun = stream.begin(min(body.timeout_s or engine.limits.timeout_s, engine.limits.timeout_s))
        if not await _unless_gone(request, begun):
            return Response(status_code=_CLIENT_LEFT)
        if body.stream:
            handed_over = True
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            events = _server_sent_events(stream, asked, body.include_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        reply: list[openai_reply.Json] = []

        async def collect() -> None:
            reply.append(await whole_reply(stream, asked))

        if not await _unless_gone(request, collect()):
            return Response(status_code=_CLIENT_LEFT)
        return JSONResponse(reply[0])
    finally:
        if not handed_over:
            stream.cancel()


async def _server_sent_events(stream: EventStream, asked: Asked, include_usage: bool) -> AsyncIterator[bytes]:
    """Yield the stream as bytes. Left early, by a client that went away, it frees the worker."""
    try:
        async for chunk in reply_chunks(stream, asked, include_usage):
            yield openai_reply.server_sent(chunk)
        yield openai_reply.DONE
    except EdgeDuetError as error:
        yield openai_reply.server_sent(openai_reply.error_body(error))
    finally:
        stream.cancel()


async def _embeddings(request: Request, engine: Engine, body: EmbeddingsBody) -> Response:
    width = engine.model.session.hidden_width
    if body.dimensions is not None and body.dimensions != width:
        raise RequestError(
            f"'dimensions' cannot be chosen: the vectors of this model have {width} numbers", "dimensions"
        )
    inputs = body.inputs()
    if len(inputs) > engine.limits.inputs:
        raise RequestError(f"{len(inputs)} texts at once; this server takes {engine.limits.inputs} at most", "input")
    texts = [await asyncio.to_thread(engine.admit_text, text, "input") for text in inputs]
    stream = EventStream(lambda deliver: engine.embed(texts, deliver))
    try:
        if not await _unless_gone(request, stream.begin(engine.limits.timeout_s)):
            return Response(status_code=_CLIENT_LEFT)
        event = await stream.next()
        assert isinstance(event, Embedded)
        return JSONResponse(openai_reply.embeddings(engine.name, event.vectors, event.tokens, body.encoding_format))
    finally:
        stream.cancel()


async def _unless_gone(request: Request, work: Awaitable[None]) -> bool:
    """Await ``work``, but not for a client that went away; return whether it was done."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            return False
        doing.result()
        return True
    finally:
        doing.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _model_card(engine: Engine) -> openai_reply.Json:
    return {
        "id": engine.name,
        "object": "model",
        "created": engine.created,
        "owned_by": "edgeduet",
        "edgeduet": engine.card(),
    }
