"""Class prototypes: what a client keeps of the images of earlier stages, and rehearses in later ones.

Zhu et al. 2021, "Prototype Augmentation and Self-Supervision for Incremental Learning" (PASS, CVPR): keep
one mean feature per class and train on ``mean + radius * N(0, I)`` in place of images that are gone.

Where we differ, and why:

* Features are what the frozen front of the image tower gives (the cached ones), so that prototypes never go stale.
* One deviation per coordinate instead of one radius, pooled over the classes of a stage: a client holds
  few images of a class.
* One prototype per class *and* stage, since in a domain-incremental stream a class looks different each
  time; they are drawn in proportion to the images they stand for.
* They never leave the client.
* Inside a convolutional tower the frozen feature is a map: its prototype is the mean map, and each position
  and channel is drawn by itself. A drawn map lacks the correlation between positions that real ones have,
  and helps all the same (``docs/methods.md`` has the numbers).

In the personal state: ``prototypes/STAGE/{classes,counts,means,deviation}``.

Shape suffixes: N images, P prototypes, S stages, D numbers of a feature (a map is flattened).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Prototypes:
    """What a client remembers of earlier stages.

    Attributes:
        classes_P: labels.
        counts_P: images each prototype stands for.
        means_PD: mean features.
        stages_P: rows of ``deviations_SD``.
        deviations_SD: standard deviation within classes, per stage.
    """

    classes_P: Tensor
    counts_P: Tensor
    means_PD: Tensor
    stages_P: Tensor
    deviations_SD: Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw ``count`` features (count, D) and their labels."""
        picked = torch.multinomial(self.counts_P.float(), count, replacement=True, generator=generator)
        noise = torch.randn(count, self.means_PD.shape[1], generator=generator)
        return self.means_PD[picked] + self.deviations_SD[self.stages_P[picked]] * noise, self.classes_P[picked]


State = MutableMapping[str, npt.NDArray[Any]]


def memorise(state: State, stage: int, x: Tensor, labels_N: Tensor) -> None:
    """Put the prototypes of a stage into the personal state; the stage's images do not change, once is enough.

    Args:
        state: the client's personal state.
        stage: which one.
        x: frozen features of the stage's images, vectors (N, D) or maps (N, C, H, W).
        labels_N: their labels.
    """
    under = f"prototypes/{stage}/"
    if f"{under}classes" in state:
        return
    x_ND = x.flatten(1)
    classes_P, which_N, counts_P = torch.unique(labels_N, return_inverse=True, return_counts=True)
    sums_PD = torch.zeros(len(classes_P), x_ND.shape[1]).index_add_(0, which_N, x_ND)
    means_PD = sums_PD / counts_P.unsqueeze(1)
    # With one image per class nothing is known about the spread: the sum is zero, and so is the deviation.
    free = max(1, len(x_ND) - len(classes_P))
    deviation_D = ((x_ND - means_PD[which_N]).square().sum(0) / free).sqrt()
    found = {"classes": classes_P, "counts": counts_P, "means": means_PD, "deviation": deviation_D}
    state.update({f"{under}{name}": np.asarray(value.numpy()) for name, value in found.items()})


def recall(state: State, stage: int) -> Prototypes | None:
    """Return the prototypes of the stages before ``stage``; None when there are none."""
    stages = [before for before in range(stage) if f"prototypes/{before}/classes" in state]
    if not stages:
        return None

    def each(name: str) -> list[Tensor]:
        return [torch.from_numpy(np.array(state[f"prototypes/{before}/{name}"])) for before in stages]

    classes = each("classes")
    return Prototypes(
        classes_P=torch.cat(classes),
        counts_P=torch.cat(each("counts")),
        means_PD=torch.cat(each("means")),
        stages_P=torch.cat([torch.full((len(found),), row) for row, found in enumerate(classes)]),
        deviations_SD=torch.stack(each("deviation")),
    )
