"""Why a server says no, with the HTTP status and the gRPC code of each reason, in one table.

A request that cannot be honoured as written is :class:`~edgeduet_client.llm.errors.RequestError`; the classes
here are the other reasons. Whoever calls over HTTP sees OpenAI's error object, whoever calls over gRPC the code.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_shared.errors import EdgeDuetError


class Refusal(EdgeDuetError):
    """A request the server does not take, whatever its parameters.

    Attributes:
        retry_after_s: whole seconds after which trying again makes sense; ``None`` where it does not.
    """

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ContextExceeded(RequestError):
    """Prompt and answer do not fit into the model's context."""


class QueueFull(Refusal):
    """As many requests wait as may wait."""


class Draining(Refusal):
    """The server is about to stop and takes nothing new."""


class WaitedTooLong(Refusal):
    """The time of the request was over before its turn came."""


class Stopped(Refusal):
    """The server stopped at once and dropped the request."""


class ModelChanged(Refusal):
    """The model folder is not the one that was loaded."""


class UnknownModel(Refusal):
    """No model of that name is served here."""


class NotAllowed(Refusal):
    """The token is missing or wrong, or the request comes from a place that may not ask."""


class TooLarge(Refusal):
    """The body is larger than the server reads."""


class TooSlow(Refusal):
    """The body did not arrive in time."""


class WorkerFailed(Refusal):
    """The worker met something it did not expect: a bug of edgeduet, with its trace in the log."""


@dataclass(frozen=True)
class Verdict:
    """How one reason is told.

    Attributes:
        http: HTTP status.
        grpc: name of a ``grpc.StatusCode``.
        kind: OpenAI's ``error.type``.
        code: OpenAI's ``error.code``; ``None`` where OpenAI gives none.
    """

    http: int
    grpc: str
    kind: str
    code: str | None


_VERDICTS: dict[type[EdgeDuetError], Verdict] = {
    RequestError: Verdict(400, "INVALID_ARGUMENT", "invalid_request_error", None),
    ContextExceeded: Verdict(400, "INVALID_ARGUMENT", "invalid_request_error", "context_length_exceeded"),
    NotAllowed: Verdict(401, "UNAUTHENTICATED", "invalid_request_error", "invalid_api_key"),
    UnknownModel: Verdict(404, "NOT_FOUND", "invalid_request_error", "model_not_found"),
    TooSlow: Verdict(408, "DEADLINE_EXCEEDED", "invalid_request_error", "request_too_slow"),
    TooLarge: Verdict(413, "RESOURCE_EXHAUSTED", "invalid_request_error", "request_too_large"),
    QueueFull: Verdict(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "queue_full"),
    WaitedTooLong: Verdict(503, "DEADLINE_EXCEEDED", "server_error", "waited_too_long"),
    Draining: Verdict(503, "UNAVAILABLE", "server_error", "draining"),
    Stopped: Verdict(503, "UNAVAILABLE", "server_error", "stopped"),
    ModelChanged: Verdict(503, "FAILED_PRECONDITION", "server_error", "model_changed"),
    ModelError: Verdict(500, "INTERNAL", "server_error", "model_error"),
    WorkerFailed: Verdict(500, "INTERNAL", "server_error", "internal_error"),
}


def verdict(error: EdgeDuetError) -> Verdict:
    """Return how ``error`` is told; the table's entry of its nearest class."""
    for kind in type(error).__mro__:
        if kind in _VERDICTS:
            return _VERDICTS[kind]
    return Verdict(500, "INTERNAL", "server_error", "internal_error")
