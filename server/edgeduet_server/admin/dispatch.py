"""From bytes on the wire to a call: address, token, role, and only then the message; errors to status codes.

A message is parsed after its sender has been recognised, so that strangers cannot reach the parser. Every call
whose rule says so leaves one row in the audit log, also when it is refused or fails.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from sqlalchemy import update

from edgeduet_server.admin import audit
from edgeduet_server.admin.attempts import Attempts
from edgeduet_server.admin.roles import RULES, Rule
from edgeduet_server.admin.tokens import BadToken, Caller, check_token
from edgeduet_server.registry.errors import Conflict, RegistryError, UnknownName
from edgeduet_server.registry.models import Token
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.enrolment import EnrolmentError
from edgeduet_shared.errors import ConfigError, EdgeDuetError
from edgeduet_shared.names import printable

log = logging.getLogger("edgeduet.admin")

SERVICE = pb.DESCRIPTOR.services_by_name["Admin"]
_CODES: tuple[tuple[type[EdgeDuetError], grpc.StatusCode], ...] = (
    (UnknownName, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (EnrolmentError, grpc.StatusCode.INVALID_ARGUMENT),
    (RegistryError, grpc.StatusCode.UNAVAILABLE),
    (EdgeDuetError, grpc.StatusCode.FAILED_PRECONDITION),
)
_LONGEST_DETAILS = 2000
_LONGEST_TOKEN = 200


class Dispatcher:
    """Makes the handlers of the service.

    Args:
        calls: objects that have a method ``some_call(request, caller)`` for each ``SomeCall`` of the service.
        registry: tokens and audit log.
        attempts: counts wrong tokens.
        now: the clock.
    """

    def __init__(
        self, calls: Sequence[object], registry: Registry, attempts: Attempts, now: Callable[[], datetime]
    ) -> None:
        self._calls = {method.name: _find(calls, method.name) for method in SERVICE.methods}
        self._registry = registry
        self._attempts = attempts
        self._now = now

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service for gRPC."""
        return grpc.method_handlers_generic_handler(
            SERVICE.full_name, {method.name: self._method_handler(method) for method in SERVICE.methods}
        )

    def _method_handler(self, method: Any) -> grpc.RpcMethodHandler:
        request_type = GetMessageClass(method.input_type)

        def serialise(message: Message) -> bytes:
            return message.SerializeToString()

        if method.server_streaming:

            def stream(raw: bytes, context: grpc.ServicerContext) -> Iterator[Message]:
                yield from self._call(method.name, request_type, raw, context)

            return grpc.unary_stream_rpc_method_handler(stream, None, serialise)

        def unary(raw: bytes, context: grpc.ServicerContext) -> Any:
            return self._call(method.name, request_type, raw, context)

        return grpc.unary_unary_rpc_method_handler(unary, None, serialise)

    def _call(self, method: str, request_type: type[Message], raw: bytes, context: grpc.ServicerContext) -> Any:
        rule, address = RULES[method], address_of(context.peer())
        caller = self._recognise(method, rule, address, context)
        if caller.role < rule.role:
            why = f"{method} needs role {rule.role.label}; the token '{caller.name}' is a {caller.role.label}'s"
            self._audit(rule, method, caller, address, None, f"refused: {why}")
            _abort(context, grpc.StatusCode.PERMISSION_DENIED, why)
        try:
            request = request_type.FromString(raw)
        except DecodeError:
            self._audit(rule, method, caller, address, None, "refused: malformed message")
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"the message is no {request_type.DESCRIPTOR.name}")
        try:
            answer = self._calls[method](request, caller)
        except EdgeDuetError as error:
            self._audit(rule, method, caller, address, request, f"failed: {error}")
            _abort(context, next(code for kind, code in _CODES if isinstance(error, kind)), str(error))
        except Exception as error:
            log.exception("%s failed", method)
            self._audit(rule, method, caller, address, request, f"failed: {type(error).__name__}")
            _abort(context, grpc.StatusCode.INTERNAL, "a bug of edgeduet; the log of the admin service says more")
        self._audit(rule, method, caller, address, request, "ok")
        return answer

    def _recognise(self, method: str, rule: Rule, address: str, context: grpc.ServicerContext) -> Caller:
        wait = self._attempts.wait_for(address)
        if wait > 0:
            context.set_trailing_metadata((("retry-after", str(int(wait) + 1)),))
            _abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many wrong tokens from this address; try again in {int(wait) + 1} s",
            )
        try:
            with self._registry.reading() as session:
                caller, unnoted = check_token(session, _bearer(context), self._now())
            if unnoted:
                with self._registry.writing() as session:
                    used = update(Token).where(Token.id == caller.token_id)
                    session.execute(used.values(last_used_at=self._now()))
        except BadToken as error:
            self._attempts.failed(address)
            log.warning("%s refused from %s: %s", method, address, error)
            self._audit(rule, method, None, address, None, f"refused: {error}")
            _abort(context, grpc.StatusCode.UNAUTHENTICATED, str(error))
        except RegistryError as error:
            _abort(context, grpc.StatusCode.UNAVAILABLE, str(error))
        return caller

    def _audit(
        self, rule: Rule, method: str, caller: Caller | None, address: str, request: Message | None, outcome: str
    ) -> None:
        if not rule.audited:
            return
        log.info("%s by %s from %s: %s", method, caller.name if caller else "-", address, printable(outcome))
        try:
            with self._registry.writing() as session:
                audit.note(
                    session,
                    now=self._now(),
                    token=caller.name if caller else "",
                    role=caller.role.label if caller else "",
                    peer=address,
                    action=method,
                    request=request,
                    outcome=outcome,
                )
        except RegistryError as error:
            log.error("the audit log cannot be written (%s by %s): %s", method, caller, error)


def address_of(peer: str) -> str:
    """Return the address in gRPC's ``ipv4:127.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``, without the port."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return printable(peer)[:100]
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")


def _bearer(context: grpc.ServicerContext) -> str:
    values = [value for key, value in context.invocation_metadata() if key == "authorization"]
    if len(values) != 1 or not isinstance(values[0], str):
        raise BadToken("no token was sent; log in with: edgeduet-admin login")
    scheme, _, token = values[0].partition(" ")
    if scheme.lower() != "bearer" or len(token) > _LONGEST_TOKEN:
        raise BadToken("the authorization sent is no 'Bearer TOKEN'")
    return token.strip()


def _find(calls: Sequence[object], method: str) -> Callable[[Any, Caller], Any]:
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()
    found: list[Callable[[Any, Caller], Any]] = [getattr(c, name) for c in calls if hasattr(c, name)]
    if len(found) != 1 or method not in RULES:
        raise LookupError(f"{method}: {len(found)} implementations, rule: {RULES.get(method)}")
    return found[0]


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, printable(details)[:_LONGEST_DETAILS])
    raise AssertionError("abort always raises")
