"""The methods by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeduet_server.strategies.centralised import Centralised, Joint
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
    )
}
"""In the order of tables: reference, controls, federated baselines, ours, upper references."""


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
        ConfigError: unknown method or option, or a value out of range.
    """
    kind = strategy_type(method)
    return kind(parse(kind.options_type, options, f"method '{method}'"), scenario, experiment)
