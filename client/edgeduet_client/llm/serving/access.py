"""Who may ask: this machine only, or whoever knows the token.

A server on a loopback address needs no token, but then it answers only requests that name this machine as
their host: a web page that points a name of its own at 127.0.0.1 (DNS rebinding) is turned away. On any other
address a token is required, from a file or the environment: what stands on a command line, every user of the
machine can read.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from edgeduet_client.llm.serving.refusals import NotAllowed
from edgeduet_shared.errors import EdgeDuetError

TOKEN_VARIABLE = "EDGEDUET_LLM_TOKEN"
SHORTEST_TOKEN = 16


class AccessError(EdgeDuetError):
    """A server that would be open to others than its owner meant."""


class Access:
    """The rule of one server.

    Args:
        token: what callers must know; ``None`` = nothing, for loopback addresses only.
    """

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()

    @property
    def needs_token(self) -> bool:
        """Whether callers must show a token."""
        return self._token is not None

    def check_token(self, authorization: str | None) -> None:
        """Check an ``Authorization`` header, in time that does not depend on how much of it is right.

        Raises:
            NotAllowed: the header is missing or holds another token.
        """
        if self._token is None:
            return
        scheme, _, given = (authorization or "").partition(" ")
        # Bytes of any kind may come; surrogateescape keeps a strange header from being an error of its own.
        right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._token)
        if scheme.lower() != "bearer" or not right:
            raise NotAllowed("the token is missing or wrong; send 'Authorization: Bearer TOKEN'")

    def check_host(self, host: str | None) -> None:
        """Check a ``Host`` header: without a token only names of this machine are answered.

        Raises:
            NotAllowed: the request was sent to another name.
        """
        if self._token is None and not is_loopback(_host_name(host or "")):
            raise NotAllowed(f"this server has no token and so answers requests to localhost only, not to {host!r}")


def access_for(host: str, token: str | None) -> Access:
    """Return the rule for a server that listens on ``host``.

    Raises:
        AccessError: ``host`` can be reached from other machines and there is no token.
    """
    if token is None and not is_loopback(host):
        raise AccessError(
            f"listening on {host!r} lets other machines in and needs a token: "
            f"give --token-file FILE or set {TOKEN_VARIABLE}, or listen on 127.0.0.1"
        )
    return Access(token)


def read_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the token from ``file``, else from the environment, else ``None``.

    Raises:
        AccessError: the file cannot be read, or the token is too short or has blanks.
    """
    if file is not None:
        token, where = _token_in(file), str(file)
    elif TOKEN_VARIABLE in environment:
        token, where = environment[TOKEN_VARIABLE].strip(), TOKEN_VARIABLE
    else:
        return None
    if len(token) < SHORTEST_TOKEN or any(character.isspace() for character in token) or not token.isascii():
        raise AccessError(
            f"the token in {where} must be one line of at least {SHORTEST_TOKEN} ASCII characters without blanks; "
            'make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return token


def open_to_all(file: Path) -> bool:
    """Whether every user of this machine can read ``file`` (mounted secrets often are; elsewhere it is a mistake)."""
    return bool(file.stat().st_mode & stat.S_IROTH)


def is_loopback(host: str) -> bool:
    """Whether ``host`` (a name or an address) is this machine and nothing else."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _token_in(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise AccessError(f"cannot read the token file {file}: {reason}") from error


def _host_name(header: str) -> str:
    """``localhost:8080`` -> ``localhost``, ``[::1]:8080`` -> ``::1``."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0] if header.count(":") == 1 else header
