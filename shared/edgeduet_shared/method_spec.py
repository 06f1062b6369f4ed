"""A method with its options, as people write it: ``fed-duet:fusion=false+dispatch=random``."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeduet_shared.errors import ConfigError


@dataclass(frozen=True)
class MethodSpec:
    """Name of a method and the options that differ from its defaults."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> MethodSpec:
        """Read ``name[:key=value[+key=value]...]``; values are TOML, anything else is kept as text.

        Raises:
            ConfigError: an option without ``=``, or the same option twice.
        """
        name, _, tail = text.strip().partition(":")
        options: dict[str, Any] = {}
        for part in filter(None, tail.split("+")):
            key, equals, value = part.partition("=")
            if not equals or not key:
                raise ConfigError(f"method '{text}': expected option=value after ':', for example {name}:fusion=false")
            if key in options:
                raise ConfigError(f"method '{text}': option '{key}' is given twice")
            options[key] = _value(value)
        if not name:
            raise ConfigError(f"method '{text}': the method's name is missing; 'edgeduet-sim list' shows the methods")
        return cls(name, options)

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads back to an equal value."""
        parts = [f"{key}={_text(value)}" for key, value in sorted(self.options.items())]
        return self.name + (":" + "+".join(parts) if parts else "")

    @property
    def slug(self) -> str:
        """A file name for this method; different options give different names."""
        if not self.options:
            return self.name
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", str(self))
        if len(readable) <= 60:
            return readable
        digest = hashlib.sha256(json.dumps(dict(self.options), sort_keys=True).encode()).hexdigest()[:8]
        return f"{readable[:50]}-{digest}"


def parse_methods(text: str) -> tuple[MethodSpec, ...]:
    """Read a comma-separated list of methods; the same method twice is an error."""
    specs = tuple(MethodSpec.parse(part) for part in text.split(",") if part.strip())
    names = [str(spec) for spec in specs]
    if not specs:
        raise ConfigError("--methods is empty; for example --methods fed-duet,zero-shot,local,joint")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--methods names '{name}' twice")
    return specs


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
