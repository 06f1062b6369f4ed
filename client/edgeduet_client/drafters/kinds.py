"""The kinds of drafters a scenario may name (``drafter.kind``), loaded when one is asked for."""

from __future__ import annotations

from importlib import import_module

from edgeduet_client.drafters.kind import DrafterKind
from edgeduet_shared.errors import ConfigError, nearest

KINDS = {"recurrent": "edgeduet_client.drafters.recurrent:KIND"}
"""Name -> ``module:attribute`` of a :class:`~edgeduet_client.drafters.kind.DrafterKind`."""


def drafter_kind(name: str) -> DrafterKind:
    """Return the kind called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in KINDS:
        raise ConfigError(f"drafter.kind: unknown kind '{name}'{nearest(name, KINDS)}")
    module, _, attribute = KINDS[name].partition(":")
    kind: DrafterKind = getattr(import_module(module), attribute)
    return kind
