"""What ``edgeduet-sim describe`` prints about settings: taken from the models that check them."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError, nearest


@dataclass(frozen=True)
class Setting:
    """One setting a user can change with ``--set``.

    Attributes:
        key: dotted name.
        kind: type, choices and bounds in words.
        default: default value as JSON; empty when there is none.
        meaning: its description.
    """

    key: str
    kind: str
    default: str
    meaning: str


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield every leaf setting of a configuration model."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from settings(kind, f"{prefix}{name}.")
        else:
            default = "" if field.is_required() else json.dumps(field.get_default(call_default_factory=True))
            yield Setting(prefix + name, _kind(field), default, field.description or "")


def find_settings(name: str) -> tuple[Setting, ...]:
    """Return the setting called ``name``, or all settings of the section ``name``; empty when there is neither."""
    return tuple(s for s in settings(Scenario) if s.key == name or s.key.startswith(name + "."))


def value_of(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key in nested mappings."""
    for part in key.split("."):
        values = values[part]
    return values


def unknown(name: str, scenarios: tuple[str, ...], methods: tuple[str, ...]) -> ConfigError:
    """Return the error for a name that is neither scenario, method nor setting."""
    known = [*scenarios, *methods, *(s.key for s in settings(Scenario))]
    hint = nearest(name, known)
    if "did you mean" not in hint:
        hint = "; 'edgeduet-sim list' shows scenarios and methods, 'edgeduet-sim describe' all settings"
    return ConfigError(f"'{name}' is no scenario, method or setting{hint}")


def _kind(field: FieldInfo) -> str:
    words = _type_words(field.annotation)
    bounds = [text for item in field.metadata if (text := _bound(item))]
    return ", ".join([words, *bounds])


def _bound(item: Any) -> str:
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        value = getattr(item, name, None)
        if value is not None:
            return f"{sign} {value:g}"
    pattern = getattr(item, "pattern", None)
    return f"matching {pattern}" if pattern else ""


def _type_words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if origin is tuple:
        return f"list of {_type_words(get_args(annotation)[0])}"
    if origin in (Union, types.UnionType):
        inner = [_type_words(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join([*inner, "unset"])
    names: dict[Any, str] = {bool: "true | false", int: "integer", float: "number", str: "text"}
    return names.get(annotation, str(annotation))
