"""AdamW over parameters that carry a leading client axis.

``torch.optim`` has one learning rate and one step count per tensor; clients that are trained as one
block have as many steps as they have batches, each with its own schedule. The update rule is that of
Loshchilov & Hutter 2019 ("Decoupled weight decay regularization") with PyTorch's defaults, and
``tests/client/test_optimiser.py`` holds it against ``torch.optim.AdamW``.

Shape suffix: K clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from edgeduet_shared.duet import Params

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


@dataclass
class AdamW:
    """Moments of one round; a round starts with a new optimiser.

    Args:
        params: trained parameters, each (K, ...).
        weight_decay: decoupled weight decay.
    """

    params: Params
    weight_decay: float

    def __post_init__(self) -> None:
        self._first = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self._second = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self._steps = 0

    def step(self, grads: Params, rates: dict[str, Tensor], active_K: Tensor) -> None:
        """Update in place the clients with ``active_K`` True; ``rates[name]`` (K,) are learning rates.

        Clients are active from the first step on and stop once, so that one step count serves all.
        """
        self._steps += 1
        correct1, correct2 = 1 - BETA1**self._steps, 1 - BETA2**self._steps
        for name, value in self.params.items():
            grad, first, second = grads[name], self._first[name], self._second[name]
            first.mul_(BETA1).add_(grad, alpha=1 - BETA1)
            second.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
            shape = (-1,) + (1,) * (value.dim() - 1)
            rate = (rates[name] * active_K).view(shape)
            value.mul_(1 - rate * self.weight_decay)
            value.sub_(rate / correct1 * first / ((second / correct2).sqrt() + EPSILON))


def clip_gradients(grads: Params, limit: float) -> Params:
    """Scale each client's gradients so that their joint L2 norm is at most ``limit``."""
    squares = [grad.flatten(1).square().sum(1) for grad in grads.values()]
    norm_K = torch.stack(squares).sum(0).sqrt()
    scale_K = (limit / (norm_K + 1e-6)).clamp(max=1.0)
    return {name: grad * scale_K.view((-1,) + (1,) * (grad.dim() - 1)) for name, grad in grads.items()}


def schedule(step: int, steps: int, warmup: float) -> float:
    """Factor on the learning rate: linear warm-up over ``warmup * steps`` (at least one step), then cosine to 0.

    Defined for every number of steps, also one (fed-duet.md 2.2 names the division by zero to avoid).
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
