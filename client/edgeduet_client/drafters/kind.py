"""What the federated part needs of a kind of drafter: plain functions over named arrays.

The kinds themselves belong to the language model (``edgeduet_client.llm.speculation``) and know no clients, rounds or
messages; here is the only place where a scenario's ``drafter.kind`` becomes one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_shared.config import DrafterConfig, TrainConfig

Arrays = dict[str, npt.NDArray[Any]]
Parameters = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Training:
    """How one round of local training goes.

    Attributes:
        optimiser: rates, batch, passes.
        proximal: weight of half the squared distance to the values the round began with.
        seed: of the order of batches.
    """

    optimiser: TrainConfig
    proximal: float
    seed: int


@dataclass(frozen=True)
class Trained:
    """What came of a round.

    Attributes:
        parameters: new values.
        loss: mean over all steps.
        accuracy: share of first drafted tokens that were right while training, in [0, 1].
        steps: optimiser steps.
        examples: positions trained on, each counted once: the client's weight in an average.
    """

    parameters: Parameters
    loss: float
    accuracy: float
    steps: int
    examples: int


class DrafterKind(Protocol):
    """A kind of drafter that can be trained."""

    def initial_parameters(self, model: LocalModel, config: DrafterConfig, seed: int) -> Parameters:
        """Return the values every client of a run begins with: a function of the arguments alone."""
        ...

    def capture(self, model: LocalModel, texts: Sequence[tuple[int, ...]], config: DrafterConfig) -> Arrays:
        """Return what the target says on, or behind the beginnings of, ``texts`` (token ids)."""
        ...

    def train(
        self, parameters: Parameters, data: Mapping[str, npt.NDArray[Any]], config: DrafterConfig, how: Training
    ) -> Trained:
        """Train on captured texts from ``parameters``, which are not changed."""
        ...

    def open(self, name: str, parameters: Parameters, model: LocalModel, config: DrafterConfig) -> Drafter:
        """Return a drafter with these values."""
        ...

    def install(
        self, name: str, parameters: Parameters, data: Mapping[str, npt.NDArray[Any]], config: DrafterConfig
    ) -> None:
        """Put a drafter into the target's folder, where the language model finds it; replaces one of that name.

        Args:
            name: of the drafter's folder.
            parameters: its values.
            data: captured texts, to measure what its export needs.
            config: names the target.
        """
        ...
