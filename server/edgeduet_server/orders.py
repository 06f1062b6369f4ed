"""What an operator may order between two rounds, and which settings can be changed while a run goes on.

The round loop asks its :class:`Control` before each round and each evaluation. In a simulation nobody
orders anything (:class:`NoControl`); a deployed server reads wishes from the registry
(``edgeduet_server.registry.control``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from edgeduet_shared.config import Scenario, known_keys, parse
from edgeduet_shared.errors import ConfigError, nearest

SETTABLE = (
    "federation.participation",
    "federation.quorum",
    "federation.node_wait",
    "federation.round_timeout",
    "federation.max_bad_rounds",
    "train.lr",
    "train.prompt_lr",
    "train.weight_decay",
    "train.batch_size",
    "train.local_epochs",
    "train.max_steps",
    "train.clip_norm",
    "train.warmup",
)
"""Settings that hold for one round at a time. What a run is made of (data, model, clients, rounds, privacy)
is fixed when it starts."""


@dataclass(frozen=True)
class Orders:
    """What is in force for one round.

    Attributes:
        stop: save and end.
        paused: do nothing until this changes.
        excluded: clients that are not asked.
        overrides: dotted key of :data:`SETTABLE` -> value in force instead of the scenario's.
    """

    stop: bool = False
    paused: bool = False
    excluded: frozenset[int] = frozenset()
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """What of it changes the results of a round, in JSON; empty when nothing does."""
        record: dict[str, Any] = {}
        if self.excluded:
            record["excluded"] = sorted(self.excluded)
        if self.overrides:
            record["overrides"] = dict(sorted(self.overrides.items()))
        return record


class Control(Protocol):
    """Where orders come from."""

    def orders(self, stage: int, round: int) -> Orders:
        """Return what is in force for ``round`` of ``stage``; the same again when that round is run again."""
        ...

    def sighted(self, nodes: Mapping[int, int]) -> None:
        """Take note of which node speaks for which client (client -> node id)."""
        ...

    def wait(self) -> None:
        """Let a moment pass before the next question, while the run is paused."""
        ...


class NoControl:
    """Nobody orders anything."""

    def orders(self, stage: int, round: int) -> Orders:
        """Nothing is ordered."""
        return Orders()

    def sighted(self, nodes: Mapping[int, int]) -> None:
        """Nobody wants to know."""

    def wait(self) -> None:
        """Never paused."""


def changed_scenario(scenario: Scenario, overrides: Mapping[str, Any]) -> Scenario:
    """Return ``scenario`` with settings changed, checked by the scenario's own rules.

    Raises:
        ConfigError: a key that cannot be changed while a run goes on (with those that can), or a bad value.
    """
    if not overrides:
        return scenario
    values: dict[str, Any] = scenario.model_dump(mode="json")
    for key, value in overrides.items():
        if key not in SETTABLE:
            known = known_keys(Scenario)
            why = "is fixed when a run starts" if key in known else f"is no setting{nearest(key, SETTABLE)}"
            raise ConfigError(f"'{key}' {why}; can be changed from the next round: {', '.join(SETTABLE)}")
        section, _, name = key.partition(".")
        values[section][name] = value
    return parse(Scenario, values, "config set")
