"""Options of drafters, checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from edgeduet_client.llm.errors import RequestError

Options = TypeVar("Options", bound=BaseModel)


def checked_options(kind: type[Options], name: str, options: Mapping[str, Any]) -> Options:
    """Return what a configuration says.

    Raises:
        RequestError: an option is unknown, missing or out of range.
    """
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"]))
        raise RequestError(f"drafter {name}: {field}: {fault['msg']}", f"drafters.{name}.{field}") from None
