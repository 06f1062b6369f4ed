"""Names of runs, devices and tokens: they end up in paths, logs and tables, so that little is allowed."""

from __future__ import annotations

import re

from edgeduet_shared.errors import ConfigError

LONGEST_NAME = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(text: str, what: str) -> str:
    """Return ``text`` if it can be a name: ASCII letters, digits, dot, dash and underscore, letter or digit first.

    Args:
        text: the name.
        what: of what, for the message ("run name", "--name").

    Raises:
        ConfigError: anything else (a path, control characters, too long); the text is shown escaped.
    """
    if len(text) > LONGEST_NAME:
        raise ConfigError(f"{what}: {len(text)} characters are too many; at most {LONGEST_NAME}")
    if not _NAME.fullmatch(text):
        raise ConfigError(
            f"{what}: {text!a} is no name; use letters, digits, '.', '-' and '_', beginning with a letter or digit"
        )
    return text


def printable(text: str) -> str:
    """Return ``text`` from elsewhere with control characters spelled out, so that it cannot forge log lines.

    Line ends, escape sequences of terminals and marks that turn the direction of writing become ``\\x..``.
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )
