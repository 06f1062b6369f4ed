"""Calls about access: tokens and the audit log."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime

from edgeduet_server.admin import audit
from edgeduet_server.admin.messages import token_message
from edgeduet_server.admin.roles import Role
from edgeduet_server.admin.tokens import Caller, all_tokens, create_token, revoke_token
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.admin_api.as_json import timestamp

MANY, MOST = 50, 1000


class TokenCalls:
    """Tokens of one server.

    Args:
        registry: the registry.
        now: the clock.
    """

    def __init__(self, registry: Registry, now: Callable[[], datetime]) -> None:
        self._registry = registry
        self._now = now

    def create_token(self, request: pb.CreateTokenRequest, caller: Caller) -> pb.CreateTokenReply:
        """Make a token; its secret is in this answer and nowhere else."""
        now, role = self._now(), Role.parse(request.role)
        with self._registry.writing() as session:
            row, secret = create_token(session, request.name, role, days=request.days, by=caller.name, now=now)
            return pb.CreateTokenReply(token=token_message(row, now), secret=secret)

    def list_tokens(self, request: pb.ListTokensRequest, caller: Caller) -> pb.ListTokensReply:
        """Return all tokens, without secrets."""
        now = self._now()
        with self._registry.reading() as session:
            return pb.ListTokensReply(tokens=[token_message(row, now) for row in all_tokens(session)])

    def revoke_token(self, request: pb.TokenRequest, caller: Caller) -> pb.Token:
        """Make a token open nothing any more; takes effect with the next call."""
        now = self._now()
        with self._registry.writing() as session:
            return token_message(revoke_token(session, request.token, now), now)

    def list_audit(self, request: pb.ListAuditRequest, caller: Caller) -> pb.ListAuditReply:
        """Return the newest entries, oldest of them first."""
        with self._registry.reading() as session:
            rows = audit.newest(session, min(request.limit or MANY, MOST))
            return pb.ListAuditReply(
                entries=[
                    pb.AuditEntry(
                        time=timestamp(row.time),
                        token=row.token,
                        role=row.role,
                        peer=row.peer,
                        action=row.action,
                        target=row.target,
                        detail_json=json.dumps(row.detail),
                        outcome=row.outcome,
                    )
                    for row in rows
                ]
            )
