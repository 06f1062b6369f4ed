"""Which kinds of drafters there are: ours, and those other packages register as ``edgeduet.drafters``.

An entry point's name is the kind, its value a :class:`~.drafter.DrafterFactory`. Ours are registered the same way,
and listed here too, so that a source tree that was never installed has them.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.speculation.cascade import KIND as CASCADE
from edgeduet_client.llm.speculation.drafter import DrafterFactory
from edgeduet_shared.errors import nearest

GROUP = "edgeduet.drafters"
"""Entry-point group."""

BUILT_IN = {
    kind: f"edgeduet_client.llm.speculation.{module}:FACTORY"
    for kind, module in {
        "ngram": "ngram",
        "recurrent": "recurrent",
        "model": "model_drafter",
        "truncated": "truncated",
    }.items()
}


def drafter_kinds() -> list[str]:
    """Return every kind that can be configured."""
    return sorted({*BUILT_IN, CASCADE, *(entry.name for entry in entry_points(group=GROUP))})


def drafter_factory(kind: str) -> DrafterFactory:
    """Return the factory of ``kind``.

    Raises:
        RequestError: there is no such kind.
        ModelError: another package registers it, and cannot be imported or registers something else.
    """
    if kind in BUILT_IN:
        return _loaded(EntryPoint(kind, BUILT_IN[kind], GROUP))
    found = list(entry_points(group=GROUP, name=kind))
    if not found:
        known = drafter_kinds()
        raise RequestError(
            f"no drafter of kind {kind!r}{nearest(kind, known)}; there are {', '.join(known)}", "drafters"
        )
    return _loaded(found[0])


def _loaded(entry: EntryPoint) -> DrafterFactory:
    try:
        factory = getattr(import_module(entry.module), entry.attr)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"the drafter kind {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error
    if not callable(getattr(factory, "open", None)):
        raise ModelError(f"the drafter kind {entry.name!r} ({entry.value}) is no factory: it has no open()")
    return factory
