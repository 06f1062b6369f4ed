"""Clipping, Gaussian noise and the privacy they buy (off by default).

A vector is scaled to L2 norm at most ``clip`` and gets noise N(0, (clip * multiplier)^2) per number: the
Gaussian mechanism, applied on the client before anything is sent. Epsilon is accounted with Renyi
differential privacy (``dp-accounting``) for the composition of all rounds a client takes part in; no
amplification by sampling is claimed, because the server sees who takes part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edgeduet_shared.errors import ConfigError, StateError

FloatArray = npt.NDArray[np.float32]


def clip_and_noise(vector: FloatArray, clip: float, multiplier: float, rng: np.random.Generator) -> FloatArray:
    """Clip ``vector`` (any shape) to joint L2 norm ``clip`` and add noise of std ``clip * multiplier``.

    Raises:
        StateError: the vector holds NaN or infinity, which no clipping bounds.
    """
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    if not math.isfinite(norm):
        raise StateError("a value to be sent is NaN or infinite; nothing is sent (lower train.lr)")
    clipped = vector * min(1.0, clip / norm) if norm > 0 else vector
    noise = rng.normal(0.0, clip * multiplier, size=vector.shape) if multiplier > 0 else 0.0
    return (clipped + noise).astype(np.float32)


def privatise_update(
    update: Mapping[str, FloatArray],
    start: Mapping[str, FloatArray],
    clip: float,
    multiplier: float,
    rng: np.random.Generator,
) -> dict[str, FloatArray]:
    """Clip the joint change ``update - start`` and add noise; names in sorted order draw the noise."""
    names = sorted(update)
    changes = [(update[name] - start[name]).ravel() for name in names]
    flat = np.concatenate(changes) if changes else np.zeros(0, np.float32)
    private = clip_and_noise(flat, clip, multiplier, rng)
    result, offset = {}, 0
    for name in names:
        size = update[name].size
        result[name] = (start[name] + private[offset : offset + size].reshape(update[name].shape)).astype(np.float32)
        offset += size
    return result


def epsilon(multiplier: float, releases: int, delta: float) -> float:
    """Epsilon at ``delta`` after ``releases`` Gaussian mechanisms with this noise multiplier.

    The multiplier is noise over clipping norm. Neighbouring data sets differ in all of one client's
    data, which can move a clipped vector by twice the norm, so the effective multiplier is half.

    Returns:
        0 when nothing was released, infinity without noise.

    Raises:
        ConfigError: ``dp-accounting`` is not installed.
    """
    if releases == 0:
        return 0.0
    if multiplier == 0:
        return math.inf
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise ConfigError(
            "privacy noise needs dp-accounting to report epsilon; pip install 'edgeduet[server]'"
        ) from error
    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(multiplier / 2.0), releases)
    return float(accountant.get_epsilon(delta))
