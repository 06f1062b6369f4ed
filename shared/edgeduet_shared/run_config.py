"""The run configuration as Flower carries it: flat text, numbers and switches, read by both apps.

=====================  ==============================================================================
``scenario-json``      the resolved scenario as JSON text; or, when empty,
``scenario``           name of a built-in scenario, or path of a scenario file
``method``             name of the strategy
``options-json``       its options as a JSON object
``seed``               seed of the run and of the split
``run-dir``            folder of the run; empty: a folder per run under the user's data folder
``run-name``           names the run in the clients' personal stores; empty: made from the above
``split-file``         a saved split to use; empty: the split is built from scenario and seed
``personal-dir``       where clients keep personal state: empty: in memory (one process only);
                       ``run-dir``: in ``personal/`` of the run's folder; else a folder
``resume``             go on from the last checkpoint
``checkpoint-every``   rounds between checkpoints
=====================  ==============================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from edgeduet_shared.config import Scenario, load_scenario, parse
from edgeduet_shared.errors import ConfigError, nearest

FlowerConfig = Mapping[str, bool | int | float | str]

DEFAULTS: dict[str, bool | int | float | str] = {
    "scenario-json": "",
    "scenario": "demo",
    "method": "fed-duet",
    "options-json": "{}",
    "seed": 0,
    "run-dir": "",
    "run-name": "",
    "split-file": "",
    "personal-dir": "run-dir",
    "resume": False,
    "checkpoint-every": 1,
}
"""Every key with the value it has in ``[tool.flwr.app.config]``."""


@dataclass(frozen=True)
class RunConfig:
    """A resolved run configuration; see the table on top of the module."""

    scenario: Scenario
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    run_dir: Path = Path()
    run_name: str = ""
    split_file: str = ""
    personal_dir: str = ""
    resume: bool = False
    checkpoint_every: int = 1

    @cached_property
    def scenario_json(self) -> str:
        """The scenario as the JSON text by which both sides name their shared experiment."""
        return json.dumps(self.scenario.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def to_flower(self) -> dict[str, bool | int | float | str]:
        """Return the flat form; :meth:`from_flower` reads it back to an equal value."""
        return {
            "scenario-json": self.scenario_json,
            "scenario": self.scenario.name,
            "method": self.method,
            "options-json": json.dumps(dict(self.options), sort_keys=True),
            "seed": self.seed,
            "run-dir": str(self.run_dir),
            "run-name": self.run_name,
            "split-file": self.split_file,
            "personal-dir": self.personal_dir,
            "resume": self.resume,
            "checkpoint-every": self.checkpoint_every,
        }

    @classmethod
    def from_flower(cls, values: FlowerConfig) -> RunConfig:
        """Read Flower's run configuration.

        Raises:
            ConfigError: an unknown key or scenario, or a value that cannot be used.
        """
        return _from_items(tuple(sorted(values.items())))

    def identity(self) -> dict[str, Any]:
        """What the run computes: equal identities mean equal results."""
        return {
            "scenario": self.scenario.digest(),
            "method": self.method,
            "options": dict(self.options),
            "seed": self.seed,
        }


# Read for every message a client gets, and the scenario is checked each time.
@lru_cache(maxsize=8)
def _from_items(items: tuple[tuple[str, bool | int | float | str], ...]) -> RunConfig:
    values = dict(items)
    for key in values:
        if key not in DEFAULTS:
            raise ConfigError(f"run config: unknown key '{key}'{nearest(key, DEFAULTS)}")
    values = {**DEFAULTS, **values}
    scenario = _scenario(str(values["scenario-json"]), str(values["scenario"]))
    options = _json_object(str(values["options-json"]), "options-json")
    method, seed, every = str(values["method"]), _whole(values, "seed"), _whole(values, "checkpoint-every")
    if every < 1:
        raise ConfigError(f"run config 'checkpoint-every': must be 1 or more, got {every}")
    name = str(values["run-name"]) or f"{scenario.name}-{method}-seed{seed}-{scenario.digest()[:8]}"
    folder = str(values["run-dir"])
    run_dir = Path(folder) if folder else platformdirs.user_data_path("edgeduet") / "runs" / name
    personal = str(values["personal-dir"])
    return RunConfig(
        scenario=scenario,
        method=method,
        options=options,
        seed=seed,
        run_dir=run_dir,
        run_name=name,
        split_file=str(values["split-file"]),
        personal_dir=str(run_dir / "personal") if personal == "run-dir" else personal,
        resume=bool(values["resume"]),
        checkpoint_every=every,
    )


def _scenario(text: str, name: str) -> Scenario:
    if text:
        return parse(Scenario, _json_object(text, "scenario-json"), "run config 'scenario-json'")
    if name.endswith(".toml"):
        return load_scenario(Path(name))
    try:
        folder = resources.files("edgeduet_sim") / "scenarios"
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"run config 'scenario': '{name}' is the name of a built-in scenario, but edgeduet's simulations are not "
            "installed here; give the path of a scenario file, or its JSON as 'scenario-json'"
        ) from error
    known = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    if name not in known:
        raise ConfigError(f"run config 'scenario': unknown scenario '{name}'{nearest(name, known)}")
    with resources.as_file(folder / f"{name}.toml") as path:
        return load_scenario(path)


def _json_object(text: str, key: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"run config '{key}': not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"run config '{key}': must be a JSON object, got {text[:40]}")
    return value


def _whole(values: FlowerConfig, key: str) -> int:
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"run config '{key}': must be a whole number, got {value!r}")
    return value
