"""Why a SuperNode ended, from what it printed, and what to do about it.

Flower 1.42 says most of it in one exit code (305) and a text; several causes share a text, and then all are
named (``methods/flower.md`` 2.2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ExitReason:
    """A cause in a word for programs, and a line for people with its remedy."""

    word: str
    line: str


UNREACHABLE = ExitReason(
    "unreachable",
    "the server cannot be reached: check the network, and that `edgeduet-server status` says ready",
)
_CLOCK = "set it with NTP (`timedatectl set-ntp true`)"
# The first that fits is it: from what only one cause prints to what many do.
_TABLE: tuple[tuple[re.Pattern[str], ExitReason], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), ExitReason(word, line))
    for pattern, word, line in (
        (
            r"certificate is not yet valid",
            "clock",
            f"the server's certificate is not valid yet by this device's clock, which is behind: {_CLOCK}",
        ),
        (
            r"certificate has expired",
            "certificate-expired",
            "the server's certificate has ended by this device's clock: on the server run `edgeduet-server certificate "
            f"renew`; if it is in order there, the clock is ahead: {_CLOCK}",
        ),
        (
            r"hostname mismatch|ip address mismatch|not valid for",
            "certificate-name",
            "the server's certificate is for another name: use a name in it for [server] address, or add this one to "
            "public_names in server.toml and run `edgeduet-server certificate renew`",
        ),
        (
            r"certificate_verify_failed|self-signed certificate|unable to get local issuer",
            "wrong-ca",
            "the server shows a certificate of another authority: identity/ca.crt is not this server's pki/ca.crt "
            "(copy it again over a way you trust), or somebody else answers at that address",
        ),
        (
            r"\[code: 2004\]|failed to activate supernode",
            "not-registered",
            "the server does not accept this device's key: it is not approved yet (`edgeduet-admin clients approve`), "
            "was revoked (then enrol anew: `edgeduet-client reset --identity`), or is online from another place",
        ),
        (
            r"\[code: 2001\]",
            "no-key",
            "the server wants a key and was shown none: identity/node_key is missing; enrol anew",
        ),
        (
            r"unauthorized|unauthenticated|status code:? 401",
            "refused",
            "the server refuses this device's signature: its clock is more than 5 s ahead or 5 min behind the server's "
            f"({_CLOCK}), or its key was revoked",
        ),
        (
            r"exit code: 606|incompatible|version mismatch",
            "version",
            "server and device have different versions of Flower: install the same release of edgeduet on both",
        ),
        (
            r"server disconnected without sending a response|wrong_version_number|record layer failure",
            "no-tls",
            "something that does not speak TLS answers at that address: check [server] address, and the proxy",
        ),
        (
            r"address already in use",
            "port-taken",
            "a port of this machine is taken by another program; it is tried again with another",
        ),
        (
            r"no space left|disk quota",
            "disk-full",
            "the disk is full: free some space; personal state is kept as it was",
        ),
        (
            r"name or service not known|temporary failure in name resolution|nodename nor servname",
            "no-name",
            "the server's name cannot be resolved: check [server] address and the network",
        ),
    )
)
_UNREACHABLE = re.compile(
    r"connection refused|network is unreachable|no route to host|timed out|connecterror", re.IGNORECASE
)


def explain_exit(text: str) -> ExitReason | None:
    """Return the cause in the last lines of a SuperNode's log, or ``None`` for one not known."""
    for pattern, reason in _TABLE:
        if pattern.search(text):
            return reason
    return UNREACHABLE if _UNREACHABLE.search(text) else None
