"""What a run may do on this device, whatever the server asks for.

The supervisor names the device's home in the environment of everything it starts. Where it does, personal
state stays under that home (never at a path the server sends), and a run that wants more than ``device.toml``
allows is refused: the error is the reply, so that the operator reads it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from edgeduet_client.device.device_config import DeviceConfig, load_device_config
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.plan import LocalPlan
from edgeduet_shared.run_config import RunConfig

HOME_VARIABLE = "EDGEDUET_DEVICE_HOME"


@dataclass(frozen=True)
class TrainingRules:
    """The rules of one device."""

    config: DeviceConfig

    @property
    def personal(self) -> Path:
        """Where personal state is kept."""
        return self.config.folder("personal")

    @property
    def classifier(self) -> Path:
        """Where the personal classifier is kept."""
        return self.config.folder("classifier")

    def images(self) -> tuple[Path, Path | None]:
        """Return the folder of the device's own images, and its labels file if it has one.

        Raises:
            ConfigError: the device has none.
        """
        found = self.config.own_images()
        if found is None:
            raise ConfigError(
                f"device {self._name}: the run trains on devices' own images and this device names none; set [data] "
                "images in its device.toml"
            )
        return found

    def check_run(self, run: RunConfig) -> None:
        """Refuse a run that would read files this device does not offer.

        Raises:
            ConfigError: it names a split file, a data source that is not in device.toml, or a language model by path.
        """
        source, allowed = self._source(run.scenario), self.config.data.sources
        if source not in allowed:
            raise ConfigError(
                f"device {self._name}: data source {source!a} is not allowed here; choose one of {allowed}, "
                "or add it to [data] sources in its device.toml"
            )
        if run.split_file:
            raise ConfigError(
                f"device {self._name}: a split file is a path of the server's; leave 'split-file' empty, the split is "
                "built from scenario and seed"
            )

    def _source(self, scenario: Scenario) -> str:
        """Return the one source this device would read."""
        drafter = scenario.drafter
        if scenario.learns == "classifier":
            return scenario.data.source
        if not drafter.target.isprintable() or set(drafter.target) & set("/\\~") or drafter.target.startswith("."):
            self._refuse(f"drafter.target {drafter.target!a} is a path; a run may only name a model imported here")
        return drafter.source(self.config.data.partition)

    def check_training(self, plan: LocalPlan) -> None:
        """Refuse training that would send more than this device lets out.

        Raises:
            ConfigError: says what, and where it is forbidden.
        """
        rules, privacy = self.config.privacy, plan.privacy
        if plan.data != "own":
            self._refuse(f"data = {plan.data!a} would train on other clients' images, for simulations only")
        if plan.digest and not rules.send_digest:
            self._refuse("it may not send digests ([privacy] send_digest)")
        if "drafter" in plan.upload and "drafter" in plan.personal and not rules.share_drafter:
            self._refuse("its own drafter may not be handed to others ([privacy] share_drafter)")
        if plan.usage and not rules.send_usage:
            self._refuse("it may not send the use of prompts ([privacy] send_usage)")
        noise = {
            "update": (privacy.update_noise, rules.min_update_noise, bool(plan.upload)),
            "digest": (privacy.digest_noise, rules.min_digest_noise, plan.digest),
        }
        for what, (planned, least, leaves) in noise.items():
            if not leaves or least == 0:
                continue
            if planned < least:
                self._refuse(f"{what}s need a noise multiplier of {least:g} or more, the run has {planned:g}")
            if privacy.noise_seed != "secret":
                self._refuse(f"noise on {what}s must be secret (privacy.noise_seed), or it hides nothing")

    def check_evaluation(self) -> None:
        """Refuse evaluation where no scores may leave.

        Raises:
            ConfigError: they may not.
        """
        if not self.config.privacy.send_scores:
            self._refuse("it may not send scores ([privacy] send_scores)")

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"device {self._name} does not take part: {why}")

    @property
    def _name(self) -> str:
        return self.config.server.name


def device_rules() -> TrainingRules | None:
    """Return the rules of the device this process works for, or ``None`` in a simulation.

    Raises:
        ConfigError: its ``device.toml`` cannot be used.
    """
    home = os.environ.get(HOME_VARIABLE)
    return None if home is None else _rules(home)


# Asked for every message; on a device every message is a process, so that a changed file is read again.
@lru_cache(maxsize=2)
def _rules(home: str) -> TrainingRules:
    return TrainingRules(load_device_config(Path(home)))
