"""The gRPC side: the service of ``llm.proto``, with health checking and reflection, on the server's event loop.

``llm_pb2.py``, ``llm_pb2.pyi`` and ``llm_pb2_grpc.py`` are generated, by grpcio-tools 1.74.0 so that devices with older
releases of grpcio and protobuf can run them; after a change of ``llm.proto``::

    python -m grpc_tools.protoc -I client --python_out=client --pyi_out=client --grpc_python_out=client \\
        client/edgeduet_client/llm/serving/llm.proto
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.serving import llm_pb2, llm_pb2_grpc
from edgeduet_client.llm.serving.access import Access
from edgeduet_client.llm.serving.engine import Choice, Engine
from edgeduet_client.llm.serving.event_stream import EventStream
from edgeduet_client.llm.serving.events import ChoiceDone, Event, Piece
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.refusals import Refusal, UnknownModel, WorkerFailed, verdict
from edgeduet_client.llm.settings import implied_sampler
from edgeduet_shared.errors import EdgeDuetError, nearest

if TYPE_CHECKING:
    from edgeduet_client.llm.logprobs import TokenLogprob
    from edgeduet_client.llm.serving.server import Certificate
    from edgeduet_client.llm.speculation.stats import SpeculationStats
    from edgeduet_client.llm.tokenizer import Tokenizer

log = logging.getLogger(__name__)
SERVICE = llm_pb2.DESCRIPTOR.services_by_name["LanguageModel"].full_name
_OPEN = ("/grpc.health.v1.Health/",)  # whoever watches over the server need not know the token
_REASONS = {
    "stop": llm_pb2.Finished.STOP,
    "length": llm_pb2.Finished.LENGTH,
    "cancelled": llm_pb2.Finished.CANCELLED,
    "timeout": llm_pb2.Finished.TIMEOUT,
}


class GrpcServer:
    """A started gRPC server; ``port`` is the one it listens on."""

    def __init__(self, server: grpc.aio.Server, health: health_aio.HealthServicer, port: int) -> None:
        self.port = port
        self._server = server
        self._health = health

    @classmethod
    async def start(
        cls,
        engines: Mapping[str, Engine],
        access: Access,
        limits: ServingLimits,
        host: str,
        port: int,
        certificate: Certificate | None,
    ) -> GrpcServer:
        """Listen and serve.

        Raises:
            AddressError: the address is taken or not of this machine.
        """
        from edgeduet_client.llm.serving.server import AddressError

        server = grpc.aio.server(
            interceptors=[_TokenCheck(access)],
            options=[("grpc.max_receive_message_length", limits.body_bytes), ("grpc.so_reuseport", 0)],
        )
        llm_pb2_grpc.add_LanguageModelServicer_to_server(LanguageModel(engines), server)
        health = health_aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                bound = server.add_insecure_port(where)
            else:
                pair = (certificate.key.read_bytes(), certificate.chain.read_bytes())
                bound = server.add_secure_port(where, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise AddressError(f"cannot listen on {host} port {port} for gRPC; choose another --grpc-port") from error
        await server.start()
        for service in ("", SERVICE):
            await health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return cls(server, health, bound)

    async def say_not_serving(self) -> None:
        """Tell whoever watches that nothing new is taken."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Close, after what still is being sent has had ``grace_s`` seconds."""
        await self._server.stop(grace_s)


class LanguageModel(llm_pb2_grpc.LanguageModelServicer):
    """The service of ``llm.proto``."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    async def Generate(
        self, request: llm_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[llm_pb2.GenerateReply]:
        """Go on with a text."""

        def ask(engine: Engine, settings: Mapping[str, Any], count: int) -> list[Choice]:
            if request.prompt and request.prompt_ids:
                raise RequestError("'prompt' and 'prompt_ids' exclude each other; give one", "prompt_ids")
            prompt = engine.admit_text(list(request.prompt_ids) or request.prompt)
            return engine.choices(prompt, settings, count)

        async for reply in self._answer(request, context, ask, "grpc-generate"):
            yield reply

    async def Chat(
        self, request: llm_pb2.ChatRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[llm_pb2.GenerateReply]:
        """Answer a conversation."""

        def ask(engine: Engine, settings: Mapping[str, Any], count: int) -> list[Choice]:
            if not request.messages:
                raise RequestError("'messages' is empty; give at least one", "messages")
            messages = [{"role": message.role, "content": message.content} for message in request.messages]
            return engine.choices(engine.admit_chat(messages), settings, count)

        async for reply in self._answer(request, context, ask, "grpc-chat"):
            yield reply

    async def Models(self, request: llm_pb2.ModelsRequest, context: grpc.aio.ServicerContext) -> llm_pb2.ModelsReply:
        """Tell what is served here."""
        return llm_pb2.ModelsReply(
            models=[llm_pb2.Model(name=engine.name, **engine.card()) for engine in self._engines.values()]
        )

    async def _answer(
        self,
        request: llm_pb2.GenerateRequest | llm_pb2.ChatRequest,
        context: grpc.aio.ServicerContext,
        ask: Callable[[Engine, Mapping[str, Any], int], list[Choice]],
        call: str,
    ) -> AsyncIterator[llm_pb2.GenerateReply]:
        stream = None
        try:
            engine = self._engine(request.model)
            engine.check_ready()
            count = request.sampling.n or 1
            engine.check_count(count)
            settings = sampling_settings(request.sampling)
            choices = await asyncio.to_thread(ask, engine, settings, count)
            stream = EventStream(lambda deliver: engine.generate(choices, deliver, call=call))
            await stream.begin(min(settings.get("timeout_s", engine.limits.timeout_s), engine.limits.timeout_s))
            while (event := await stream.next()) is not None:
                if (reply := _reply(event, engine.model.tokenizer)) is not None:
                    yield reply
        except EdgeDuetError as error:
            await _abort(context, error)
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            log.exception("a call failed", extra={"fields": {"call": call}})
            await _abort(context, WorkerFailed(f"the server failed ({type(error).__name__}); its log says more"))
        finally:
            # A client that cancels or goes away ends this coroutine here.
            if stream is not None:
                stream.cancel()

    def _engine(self, name: str) -> Engine:
        if not name and len(self._engines) == 1:
            return next(iter(self._engines.values()))
        if name not in self._engines:
            raise UnknownModel(f"no model {name!r} is served here{nearest(name, self._engines)}")
        return self._engines[name]


def sampling_settings(sampling: llm_pb2.Sampling) -> dict[str, Any]:
    """Return the settings a message holds, by the names of ``GenerationRequest``.

    Raises:
        RequestError: ``json_schema`` is no JSON object.
    """
    settings: dict[str, Any] = {}
    for field, value in sampling.ListFields():
        if field.name == "logit_bias":
            settings[field.name] = dict(value)
        elif field.name in ("stop", "bad_words"):
            settings[field.name] = tuple(value)
        elif field.name != "n":
            settings[field.name] = value
    if "json_schema" in settings:
        settings["json_schema"] = _json_object(settings["json_schema"])
    if "sampler" not in settings and (sampler := implied_sampler(settings)) is not None:
        settings["sampler"] = sampler
    return settings


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"'json_schema' is not JSON: {error}", "json_schema") from error
    if not isinstance(value, dict):
        raise RequestError("'json_schema' must be a JSON object", "json_schema")
    return value


def _reply(event: Event, tokenizer: Tokenizer) -> llm_pb2.GenerateReply | None:
    if isinstance(event, Piece):
        piece = llm_pb2.Piece(
            text=event.piece.text,
            ids=event.piece.ids,
            logprobs=[_logprob(entry, tokenizer) for entry in event.piece.logprobs or ()],
        )
        return llm_pb2.GenerateReply(choice=event.choice, piece=piece)
    if isinstance(event, ChoiceDone):
        done = event.finished
        finished = llm_pb2.Finished(
            reason=_REASONS[done.reason],
            prompt_tokens=done.prompt_tokens,
            completion_tokens=done.completion_tokens,
            cached_tokens=done.cached_tokens,
            gate_interventions=done.gate_interventions,
            seconds_prefill=done.seconds_prefill,
            seconds_decode=done.seconds_decode,
            speculation=None if done.speculation is None else speculation_message(done.speculation),
        )
        return llm_pb2.GenerateReply(choice=event.choice, finished=finished)
    return None


def speculation_message(stats: SpeculationStats) -> llm_pb2.Speculation:
    """Return what speculation did, as the service says it."""
    arms = [
        llm_pb2.SpeculationArm(
            drafter=arm.drafter or "",
            length=arm.length,
            rounds=arm.rounds,
            proposed=arm.proposed,
            evaluated=arm.evaluated,
            accepted=arm.accepted,
            emitted=arm.emitted,
            seconds=dict(arm.seconds),
        )
        for arm in stats.arms
    ]
    message = llm_pb2.Speculation(
        mode=stats.mode,
        verify=stats.verify,
        lossy=stats.lossy,
        rounds=stats.rounds,
        proposed=stats.proposed,
        evaluated=stats.evaluated,
        accepted=stats.accepted,
        emitted=stats.emitted,
        discarded=stats.discarded,
        relaxed=stats.relaxed,
        switches=stats.switches,
        evaluation_share=stats.evaluation_share,
        arms=arms,
        unused=dict(stats.unused),
        failed=dict(stats.failed),
        notes=stats.notes,
        survival={
            name: llm_pb2.SpeculationSurvival(
                starts=known.starts, mean=known.mean, standard_error=known.standard_error, reach=known.reach
            )
            for name, known in stats.survival.items()
        },
    )
    if stats.invariant is not None:
        message.row_invariant = stats.invariant
    if (best := stats.hindsight) is not None:
        message.best_fixed_arm.CopyFrom(
            llm_pb2.SpeculationHindsight(
                drafter=best.arm.drafter or "",
                length=best.arm.length,
                tokens_per_second=best.tokens_per_second,
                regret_seconds=best.regret_seconds,
            )
        )
    return message


def _logprob(entry: TokenLogprob, tokenizer: Tokenizer) -> llm_pb2.TokenLogprob:
    top = [
        llm_pb2.TopLogprob(id=token, token=tokenizer.token_bytes(token), logprob=logprob)
        for token, logprob in entry.top
    ]
    return llm_pb2.TokenLogprob(
        id=entry.token, token=tokenizer.token_bytes(entry.token), logprob=entry.logprob, top=top
    )


async def _abort(context: grpc.aio.ServicerContext, error: EdgeDuetError) -> None:
    code = getattr(grpc.StatusCode, verdict(error).grpc)
    await context.abort(code, str(error), trailing_metadata=_told_with(error))


def _told_with(error: EdgeDuetError) -> Sequence[tuple[str, str]]:
    told = []
    if isinstance(error, RequestError) and error.field is not None:
        told.append(("edgeduet-field", error.field))
    if isinstance(error, Refusal) and error.retry_after_s is not None:
        told.append(("retry-after", str(error.retry_after_s)))
    return tuple(told)


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Lets through who shows the token; all others get UNAUTHENTICATED."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith(_OPEN):
            return await continuation(details)
        given = dict(details.invocation_metadata).get("authorization")
        try:
            self._access.check_token(given if isinstance(given, str) else None)
        except EdgeDuetError as error:
            return _refusing(await continuation(details), error)
        return await continuation(details)


def _refusing(handler: Any, error: EdgeDuetError) -> Any:
    """Return a handler of the same shape as ``handler`` that refuses."""
    if handler is None:
        return None

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
        await _abort(context, error)

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        await _abort(context, error)
        yield None

    makers = {
        (False, False): (grpc.unary_unary_rpc_method_handler, refuse),
        (False, True): (grpc.unary_stream_rpc_method_handler, refuse_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, refuse),
        (True, True): (grpc.stream_stream_rpc_method_handler, refuse_stream),
    }
    make, refusal = makers[handler.request_streaming, handler.response_streaming]
    return make(refusal, handler.request_deserializer, handler.response_serializer)
