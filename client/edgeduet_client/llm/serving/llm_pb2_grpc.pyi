"""Types of the generated ``llm_pb2_grpc``, written by hand: its generator makes none."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio

from edgeduet_client.llm.serving import llm_pb2

class LanguageModelStub:
    """A caller of the service."""

    Generate: Callable[..., Iterator[llm_pb2.GenerateReply]]
    Chat: Callable[..., Iterator[llm_pb2.GenerateReply]]
    Models: Callable[..., llm_pb2.ModelsReply]
    def __init__(self, channel: grpc.Channel) -> None: ...

class LanguageModelServicer:
    """What a server implements."""

    def Generate(self, request: llm_pb2.GenerateRequest, context: Any) -> AsyncIterator[llm_pb2.GenerateReply]: ...
    def Chat(self, request: llm_pb2.ChatRequest, context: Any) -> AsyncIterator[llm_pb2.GenerateReply]: ...
    async def Models(self, request: llm_pb2.ModelsRequest, context: Any) -> llm_pb2.ModelsReply: ...

def add_LanguageModelServicer_to_server(servicer: LanguageModelServicer, server: grpc.aio.Server) -> None: ...
