"""Write TOML: flat values, and configurations with the documentation of every key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel


def toml_lines(values: Mapping[str, bool | int | float | str]) -> str:
    """Return flat values as lines of TOML; numbers and switches are written as in JSON."""
    return "\n".join(f"{toml_text(key)} = {_value(value)}" for key, value in values.items())


def toml_text(text: str) -> str:
    """Return ``text`` as a basic string of TOML.

    JSON's strings are, but for two things: TOML knows no surrogate pairs, and wants DEL escaped.
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def documented_toml(config: BaseModel, heading: str) -> str:
    """Return a configuration of sections: each with its docstring, each key with its description.

    Args:
        heading: first line, without the comment mark.
    """
    return "\n".join(_documented(config, heading)) + "\n"


def _documented(config: BaseModel, heading: str) -> Iterator[str]:
    yield f"# {heading}"
    for name in type(config).model_fields:
        section = getattr(config, name)
        if not isinstance(section, BaseModel):
            continue
        yield ""
        yield f"# {type(section).__doc__}"
        yield f"[{name}]"
        for key, entry in type(section).model_fields.items():
            yield f"# {entry.description}"
            yield f"{key} = {_value(getattr(section, key))}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return toml_text(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(entry) for entry in value)}]"
    return json.dumps(value)
