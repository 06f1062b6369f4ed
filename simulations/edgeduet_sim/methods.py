"""What ``list`` and ``describe`` say about methods: taken from the strategies themselves."""

from __future__ import annotations

import inspect
import sys

from edgeduet_server.strategies.catalogue import STRATEGIES, methods_for, strategy_type
from edgeduet_shared.config import Scenario
from edgeduet_sim.describe import Setting, settings

DEFAULT_METHODS = "zero-shot,local,promptfl,fedavg-adapter,fed-duet,joint"
DRAFTER_METHODS = "drafter-local,drafter-fedavg,drafter-fedprox,drafter-pool:share=false,drafter-pool"


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


def spell_out(methods: str, scenario: Scenario) -> str:
    """Replace ``all`` in a comma-separated list of methods by the names of all methods for ``scenario``."""
    names = ",".join(methods_for(scenario))
    return ",".join(names if part.strip() == "all" else part for part in methods.split(","))


def default_methods(scenario: Scenario) -> str:
    """Return what is compared where nothing is chosen."""
    return DRAFTER_METHODS if scenario.learns == "drafter" else DEFAULT_METHODS


def default_method(scenario: Scenario) -> str:
    """Return what is run where nothing is chosen."""
    return "drafter-pool" if scenario.learns == "drafter" else "fed-duet"
