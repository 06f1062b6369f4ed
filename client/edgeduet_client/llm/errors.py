"""What can go wrong with the local language model, as one line for the person who asked."""

from __future__ import annotations

from edgeduet_shared.errors import EdgeDuetError


class ModelError(EdgeDuetError):
    """A model folder, source or artefact that is missing, damaged, unsupported or does not fit the machine."""


class RequestError(EdgeDuetError):
    """A request that cannot be honoured as written.

    Attributes:
        field: the parameter at fault, as the caller spells it; ``None`` where several contradict each other.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
