"""Bearer tokens ``edt_ID_SECRET``: made, checked, revoked.

The secret is 256 random bits, so that one round of salted SHA-256 protects it at rest as well as a slow
function would: nobody guesses it. It is shown once, when the token is made.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from edgeduet_server.admin.roles import Role
from edgeduet_server.registry.errors import Conflict, UnknownName
from edgeduet_server.registry.models import Token
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.names import check_name

DEFAULT_DAYS = 90
LONGEST_DAYS = 730
_FORM = re.compile(r"edt_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
# Checked when the id is unknown, so that the time taken does not tell which ids exist.
_NOBODY = ("00" * 16, "0" * 64)
# Not every call is worth a write.
_USE_NOTED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True)
class Caller:
    """Who makes a call."""

    token_id: str
    name: str
    role: Role


class BadToken(Exception):
    """A token that opens nothing; the text is for the caller and says no more than it must."""


def create_token(session: Session, name: str, role: Role, *, days: int, by: str, now: datetime) -> tuple[Token, str]:
    """Make a token; return its row and the text to give to its user.

    Args:
        session: a writing session.
        name: whose it is.
        role: what it may do.
        days: how long it is good; 0: 90.
        by: who makes it.
        now: the time.

    Raises:
        ConfigError: the name is none, or days out of bounds.
        Conflict: there is one of that name.
    """
    check_name(name, "token name")
    days = days or DEFAULT_DAYS
    if not 1 <= days <= LONGEST_DAYS:
        raise ConfigError(f"token: {days} days; must be 1 to {LONGEST_DAYS}")
    if session.scalar(select(Token.id).where(Token.name == name)) is not None:
        raise Conflict(f"there is a token '{name}' already (names are not used twice); choose another name")
    identifier, secret, salt = secrets.token_hex(6), secrets.token_urlsafe(32), secrets.token_hex(16)
    row = Token(
        id=identifier,
        name=name,
        role=role.label,
        salt=salt,
        hash=_hash(salt, secret),
        created_by=by,
        created_at=now,
        expires_at=now + timedelta(days=days),
    )
    session.add(row)
    session.flush()
    return row, f"edt_{identifier}_{secret}"


def check_token(session: Session, text: str, now: datetime) -> tuple[Caller, bool]:
    """Return whose token ``text`` is, and whether its use should be written down.

    Raises:
        BadToken: no token of this server, revoked, or expired.
    """
    found = _FORM.fullmatch(text)
    row = session.get(Token, found.group(1)) if found else None
    salt, expected = (row.salt, row.hash) if row else _NOBODY
    right = hmac.compare_digest(_hash(salt, found.group(2) if found else ""), expected)
    if row is None or not right:
        raise BadToken("the token is not one of this server's")
    if row.revoked_at is not None:
        raise BadToken("the token was revoked; ask for another one")
    if row.expires_at <= now:
        raise BadToken(f"the token expired on {row.expires_at:%Y-%m-%d}; ask for another one")
    unnoted = row.last_used_at is None or now - row.last_used_at > _USE_NOTED_EVERY
    return Caller(row.id, row.name, Role.parse(row.role)), unnoted


def revoke_token(session: Session, name_or_id: str, now: datetime) -> Token:
    """Make a token open nothing any more.

    Raises:
        UnknownName: there is none.
    """
    row = session.scalar(select(Token).where(or_(Token.name == name_or_id, Token.id == name_or_id)))
    if row is None:
        raise UnknownName(f"no token {name_or_id!a}; see: edgeduet-admin tokens list")
    row.revoked_at = row.revoked_at or now
    return row


def all_tokens(session: Session) -> Sequence[Token]:
    """Return all tokens, oldest first."""
    return list(session.scalars(select(Token).order_by(Token.created_at, Token.id)))


def state_of(token: Token, now: datetime) -> str:
    """Return ``valid``, ``expired`` or ``revoked``."""
    if token.revoked_at is not None:
        return "revoked"
    return "expired" if token.expires_at <= now else "valid"


def _hash(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()
