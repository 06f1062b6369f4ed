"""One resolved experiment: images, split, backbone, models and cached features of (scenario, seed).

Server and clients of one process share the same object, so that the frozen backbone is loaded once
and every simulated client slices the same memory-mapped features. Everything is loaded on first use.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgeduet_shared.backbone import Backbone, load_backbone
from edgeduet_shared.config import Scenario, parse
from edgeduet_shared.data.features import FeatureCache
from edgeduet_shared.data.growing_features import open_growing
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.data.own_images import declared_split, declared_table, own_split, own_table
from edgeduet_shared.data.sources import load_table
from edgeduet_shared.data.split import Split, build_split, load_split
from edgeduet_shared.duet import DuetModel
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.plan import Parts

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Experiment:
    """Lazily loaded parts of one (scenario, seed).

    Where clients train drafters, only ``scenario``, ``seed``, ``task_names`` and ``split_digest`` mean anything: texts
    and language model are the clients' business.

    Args:
        scenario: the resolved scenario.
        seed: of the split; the same for all methods that are compared.
        split_file: a saved split to use instead of building it again.
        progress: show a progress bar while images are encoded.
    """

    def __init__(
        self, scenario: Scenario, seed: int, *, split_file: Path | None = None, progress: bool = False
    ) -> None:
        self.scenario = scenario
        self.seed = seed
        self._split_file = split_file
        self._progress = progress
        self._models: dict[Parts, DuetModel] = {}
        self._features: dict[str, NDArray[np.float16]] = {}

    @cached_property
    def table(self) -> ImageTable:
        """All images of the scenario; none where they lie on the devices."""
        if self.scenario.data.on_devices:
            return declared_table(self.scenario.data)
        return load_table(self.scenario.data, seed=self.seed)

    @cached_property
    def split(self) -> Split:
        """Tasks and who holds what; of images on devices, only the tasks are known."""
        if self.scenario.data.on_devices:
            return declared_split(self.scenario, self.seed)
        if self._split_file is not None and self._split_file.exists():
            split = load_split(self._split_file)
            split.check_table(self.table)
            return split
        return build_split(self.table, self.scenario, self.seed)

    @property
    def task_names(self) -> tuple[str, ...]:
        """Names of the tasks, one stage each; drafters have one."""
        if self.scenario.learns == "drafter":
            return ("drafting",)
        return tuple(task.name for task in self.split.tasks)

    @property
    def split_digest(self) -> str:
        """Identifies who holds what; of texts, the scenario says it all."""
        return self.scenario.digest() if self.scenario.learns == "drafter" else self.split.digest

    @cached_property
    def backbone(self) -> Backbone:
        """The frozen CLIP."""
        return load_backbone(self.scenario.model.backbone)

    def model(self, parts: Parts) -> DuetModel:
        """Return the model structure with ``parts``; built once, parameters are passed to it."""
        if parts not in self._models:
            self._models[parts] = DuetModel(self.backbone, self.split.class_names, self.scenario.model, parts)
        return self._models[parts]

    def features(self, parts: Parts) -> NDArray[np.float16]:
        """Cached output of the frozen front of the model with ``parts``, one row per image of the table."""
        model = self.model(parts)
        if model.front_key not in self._features:
            self._features[model.front_key] = self._encoded(model)
        return self._features[model.front_key]

    def _encoded(self, model: DuetModel) -> NDArray[np.float16]:
        return FeatureCache().open(
            self.table,
            model_key=f"{self.backbone.fingerprint}:{model.front_key}",
            transform=self.backbone.transform,
            encode=model.front,
            progress=self._progress,
        )

    def rows(self, parts: Parts, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return (features, labels) of some rows of the table as float32 and int64 tensors."""
        features = self.features(parts)[rows].astype(np.float32)
        return torch.from_numpy(features), torch.from_numpy(self.split.labels[rows])


class OwnExperiment(Experiment):
    """What one client sees of a scenario whose images lie on the devices: its own, and what all share.

    Args:
        shared: the experiment of the scenario; backbone and model structures are taken from it.
        client: whose images these are.
        folder: where they are.
        labels: file that says what they show; ``None``: the names of folders say it.
    """

    def __init__(self, shared: Experiment, client: int, folder: Path, labels: Path | None = None) -> None:
        super().__init__(shared.scenario, shared.seed, progress=shared._progress)
        self._shared = shared
        self._client = client
        self._folder = folder
        self._labels = labels

    @cached_property
    def table(self) -> ImageTable:
        """The client's images."""
        return own_table(self.scenario.data, self._folder, seed=self.seed, labels=self._labels)

    @cached_property
    def split(self) -> Split:
        """The tasks of all, with the images of this client."""
        return own_split(self.table, self.scenario, self.seed, client=self._client)

    @property
    def backbone(self) -> Backbone:
        """The frozen CLIP, one for all clients of a process."""
        return self._shared.backbone

    def model(self, parts: Parts) -> DuetModel:
        """Return the model structure with ``parts``, one for all clients of a process."""
        return self._shared.model(parts)

    def _encoded(self, model: DuetModel) -> NDArray[np.float16]:
        return open_growing(
            FeatureCache(),
            self.table,
            folder=self._folder,
            model_key=f"{self.backbone.fingerprint}:{model.front_key}",
            transform=self.backbone.transform,
            encode=model.front,
            progress=self._progress,
        )


@lru_cache(maxsize=2)
def experiment_for(scenario_json: str, seed: int, split_file: str = "") -> Experiment:
    """Return this process's experiment for a resolved scenario given as JSON text.

    Raises:
        ConfigError: the text is not a scenario.
    """
    try:
        values = json.loads(scenario_json)
    except ValueError as error:
        raise ConfigError(f"run config 'scenario-json': not valid JSON ({error})") from error
    scenario = parse(Scenario, values, "run config 'scenario-json'")
    # The bar shows on a terminal only.
    return Experiment(scenario, seed, split_file=Path(split_file) if split_file else None, progress=True)
