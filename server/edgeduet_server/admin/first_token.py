"""A token made on the server itself, without the service: the first one, or after the last was lost.

Whoever may write the registry of a home is its owner anyway.
"""

from __future__ import annotations

import getpass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from edgeduet_server.admin import audit
from edgeduet_server.admin.messages import token_message
from edgeduet_server.admin.roles import Role
from edgeduet_server.admin.tokens import create_token
from edgeduet_server.deployment.server_config import load_server_config
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.admin_api.as_json import as_json


def make_local_token(home: Path, name: str, role: str, days: int) -> dict[str, Any]:
    """Make a token in the registry of ``home``; return it as the service would, with its secret.

    Raises:
        EdgeDuetError: no server home, or no such token can be made.
    """
    config = load_server_config(home)
    registry = Registry.open(config.registry_url, backups=config.folder("backups"))
    now, maker = datetime.now(UTC), f"{getpass.getuser()} on the server"
    try:
        with registry.writing() as session:
            row, secret = create_token(session, name, Role.parse(role), days=days, by=maker, now=now)
            audit.note(
                session,
                now=now,
                token=maker,
                role="",
                peer="local",
                action="CreateToken",
                request=pb.CreateTokenRequest(name=name, role=role, days=days),
                outcome="ok",
            )
            return as_json(pb.CreateTokenReply(token=token_message(row, now), secret=secret))
    finally:
        registry.close()
