"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeduet_server.strategies.centralised import Centralised, Joint
from edgeduet_server.strategies.drafter_fedavg import DrafterFedAvg
from edgeduet_server.strategies.drafter_fedprox import DrafterFedProx
from edgeduet_server.strategies.drafter_local import DrafterLocal
from edgeduet_server.strategies.drafter_pool import DrafterPool
from edgeduet_server.strategies.fed_duet import FedDuet
from edgeduet_server.strategies.fed_duet_released import FedDuetReleased
from edgeduet_server.strategies.fed_ewc import FedEwc
from edgeduet_server.strategies.fed_lwf import FedLwf
from edgeduet_server.strategies.fedavg_adapter import FedAvgAdapter
from edgeduet_server.strategies.fedavg_lora import FedAvgLora
from edgeduet_server.strategies.fedclip import FedClip
from edgeduet_server.strategies.fedprox import FedProx
from edgeduet_server.strategies.local import Local
from edgeduet_server.strategies.pfedmoap import PFedMoAP
from edgeduet_server.strategies.promptfl import PromptFL
from edgeduet_server.strategies.strategy import Strategy
from edgeduet_server.strategies.zero_shot import ZeroShot
from edgeduet_shared.config import Scenario, parse
from edgeduet_shared.errors import ConfigError, nearest
from edgeduet_shared.experiment import Experiment

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        ZeroShot,
        Local,
        PromptFL,
        FedClip,
        FedAvgAdapter,
        FedAvgLora,
        FedProx,
        FedEwc,
        FedLwf,
        PFedMoAP,
        FedDuetReleased,
        FedDuet,
        Centralised,
        Joint,
        DrafterLocal,
        DrafterFedAvg,
        DrafterFedProx,
        DrafterPool,
    )
}
"""In the order of tables: reference, controls, federated baselines, ours, upper references; then those of drafters."""


def methods_for(scenario: Scenario) -> tuple[str, ...]:
    """Return the names of the methods that train what ``scenario`` is about."""
    return tuple(name for name, strategy in STRATEGIES.items() if strategy.learns == scenario.learns)


def strategy_type(method: str) -> type[Strategy]:
    """Return the class of ``method``.

    Raises:
        ConfigError: no such method; names the nearest.
    """
    if method not in STRATEGIES:
        raise ConfigError(f"unknown method '{method}'{nearest(method, STRATEGIES)}")
    return STRATEGIES[method]


def make_strategy(method: str, options: Mapping[str, Any], scenario: Scenario, experiment: Experiment) -> Strategy:
    """Build the strategy of ``method`` with its ``options``.

    Raises:
        ConfigError: unknown method or option, a value out of range, or a method for another kind of scenario.
    """
    kind = strategy_type(method)
    if kind.learns != scenario.learns:
        raise ConfigError(
            f"method '{method}' trains a {kind.learns}, scenario '{scenario.name}' a {scenario.learns}; "
            f"use one of {', '.join(methods_for(scenario))}"
        )
    if scenario.data.on_devices and kind in (Centralised, Joint):
        raise ConfigError(
            f"method '{method}' trains on all images in one place, and with data.source = 'device' they never leave "
            "their clients; choose another method"
        )
    return kind(parse(kind.options_type, options, f"method '{method}'"), scenario, experiment)
