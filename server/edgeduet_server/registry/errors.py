"""What can go wrong with the registry."""

from __future__ import annotations

from edgeduet_shared.errors import EdgeDuetError


class RegistryError(EdgeDuetError):
    """A registry that cannot be opened, is damaged, or belongs to another version."""


class UnknownName(EdgeDuetError):
    """A run, device, token or model that the registry does not hold."""


class Conflict(EdgeDuetError):
    """A change that the present state does not allow (a name taken, a run that is over)."""
