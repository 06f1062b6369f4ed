"""What ``list`` and ``describe`` say about methods: taken from the strategies themselves."""

from __future__ import annotations

import inspect
import sys

from edgeduet_server.strategies.catalogue import STRATEGIES, strategy_type
from edgeduet_sim.describe import Setting, settings


def method_names() -> tuple[str, ...]:
    """Return the names of all methods, in the order of tables."""
    return tuple(STRATEGIES)


def method_lines() -> list[tuple[str, str]]:
    """Return (name, purpose) of every method."""
    return [(name, strategy.purpose) for name, strategy in STRATEGIES.items()]


def method_text(name: str) -> str:
    """Return purpose, source and the module's explanation of a method."""
    strategy = strategy_type(name)
    source = f"\nafter {strategy.paper}" if strategy.paper else ""
    explanation = inspect.cleandoc(sys.modules[strategy.__module__].__doc__ or "")
    return f"{name}: {strategy.purpose}{source}\n\n{explanation}\n"


def option_settings(name: str) -> tuple[Setting, ...]:
    """Return the options of a method."""
    return tuple(settings(strategy_type(name).options_type))


def spell_out(methods: str) -> str:
    """Replace ``all`` in a comma-separated list of methods by the names of all methods."""
    return ",".join(",".join(STRATEGIES) if part.strip() == "all" else part for part in methods.split(","))
