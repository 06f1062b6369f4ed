"""Auxiliary losses on routing (fed-duet.md 2.1, U2, U16): load balance, routing consistency, expert stability.

All read *clean* router logits or the full softmax over all E experts of them, one tensor per adapter
site, and average over sites. ``weights`` (0 or 1 per sample) leaves out padding rows, so that clients
with different batch sizes can be trained as one block.

* balance: squared coefficient of variation of the experts' importance (Shazeer et al. 2017, eq. 7).
  With P_e the mean probability of expert e over the batch, ``CV^2 = E * sum_e P_e^2 - 1``: 0 when all
  experts are used alike, E - 1 when one is used alone.
* routing consistency: in-batch contrastive loss between the routing distribution of an image and of
  its class text. ``S_ij = cos(p_i, q_j) / tau``, p_i image, q_j text of sample j's label;
  ``1/2 [CE(S, Y) + CE(S^T, Y)]`` where Y_ij is uniform over the samples with the same label
  (multi-positive: with single positives, same-class pairs would be pushed apart). Sites are paired
  from the deepest backwards; where one tower has more sites, its earliest ones take no part.
* expert stability: ``KL(p || p_bar)`` of the current batch-mean routing and the moving average that
  was frozen at the end of the previous stage, per (layer, modality).

Shape suffixes: B samples, C classes, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from edgeduet_shared.errors import ConfigError

_EXCLUDED = -1e9
_SMALLEST = 1e-12


def mean_routing(logits_BE: Tensor, weights_B: Tensor | None = None) -> Tensor:
    """Mean over the batch of softmax(logits), (E,)."""
    return _weighted_mean(logits_BE.softmax(-1), weights_B)


def balance_loss(probabilities: Sequence[Tensor], weights_B: Tensor | None = None) -> Tensor:
    """Squared coefficient of variation of expert importance, averaged over sites.

    Args:
        probabilities: per site (B, E), rows sum to 1.
        weights_B: 0 for samples to leave out; applies to every site, so pass it for image sites only.

    Raises:
        ConfigError: there is no site with a router.
    """
    _need_sites(probabilities, "balance")
    total = torch.stack([_squared_variation(_weighted_mean(site, weights_B)) for site in probabilities])
    return total.mean()


def routing_consistency(
    image_logits: Sequence[Tensor],
    text_logits: Sequence[Tensor],
    labels_B: Tensor,
    temperature: float,
    weights_B: Tensor | None = None,
) -> Tensor:
    """Multi-positive contrastive loss between image and text routing, averaged over paired sites.

    Args:
        image_logits: per image site (B, E) clean router logits, first layer first.
        text_logits: per text site (C, E), first layer first.
        labels_B: positions of the samples' classes among the C texts.
        temperature: tau.
        weights_B: 0 for samples to leave out.

    Raises:
        ConfigError: one of the towers has no site with a router.
    """
    _need_sites(image_logits, "routing-consistency")
    _need_sites(text_logits, "routing-consistency")
    same_BB = (labels_B.unsqueeze(0) == labels_B.unsqueeze(1)).to(image_logits[0].dtype)
    if weights_B is not None:
        same_BB = same_BB * weights_B.unsqueeze(0)
    target_BB = same_BB / same_BB.sum(-1, keepdim=True).clamp(min=1.0)
    per_site = []
    for image_BE, text_CE in zip(reversed(image_logits), reversed(text_logits), strict=False):
        p_BE = functional.normalize(image_BE.softmax(-1), dim=-1)
        q_BE = functional.normalize(text_CE.softmax(-1)[labels_B], dim=-1)
        similarity_BB = p_BE @ q_BE.transpose(-1, -2) / temperature
        images = _soft_cross_entropy(similarity_BB, target_BB, weights_B)
        texts = _soft_cross_entropy(similarity_BB.transpose(-1, -2), target_BB, weights_B)
        per_site.append((images + texts) / 2.0)
    return torch.stack(per_site).mean()


def stability_loss(current: Sequence[Tensor], frozen: Sequence[Tensor]) -> Tensor:
    """KL(current || frozen) averaged over sites.

    Args:
        current: per site (E,) mean routing of this batch, see :func:`mean_routing`.
        frozen: per site (E,) moving average of the previous stage, in the same order.

    Raises:
        ConfigError: there is no site with a router.
        ValueError: the numbers of sites differ.
    """
    _need_sites(current, "expert-stability")
    pairs = zip(current, frozen, strict=True)
    return torch.stack([_divergence(now_E, before_E) for now_E, before_E in pairs]).mean()


def update_ema(average: Sequence[Tensor] | None, current: Sequence[Tensor], decay: float) -> list[Tensor]:
    """One step of the moving average per site; ``average`` None starts it at ``current``."""
    if average is None:
        return [site.detach().clone() for site in current]
    pairs = zip(average, current, strict=True)
    return [decay * old_E + (1.0 - decay) * new_E.detach() for old_E, new_E in pairs]


def _need_sites(sites: Sequence[Tensor], loss: str) -> None:
    if not sites:
        raise ConfigError(
            f"the {loss} loss needs routers in the towers it looks at; "
            "set model.adapter.experts > 0 and give both towers adapter layers, or switch the loss off"
        )


def _weighted_mean(values_BE: Tensor, weights_B: Tensor | None) -> Tensor:
    if weights_B is None:
        return values_BE.mean(-2)
    total_E = (values_BE * weights_B.unsqueeze(-1)).sum(-2)
    return total_E / weights_B.sum(-1, keepdim=True).clamp(min=1.0)


def _squared_variation(importance_E: Tensor) -> Tensor:
    share_E = importance_E / importance_E.sum(-1, keepdim=True).clamp(min=_SMALLEST)
    return share_E.shape[-1] * share_E.square().sum(-1) - 1.0


def _soft_cross_entropy(logits_BB: Tensor, target_BB: Tensor, weights_B: Tensor | None) -> Tensor:
    if weights_B is None:
        return -(target_BB * logits_BB.log_softmax(-1)).sum(-1).mean()
    # A large finite number, not -inf: a batch of padding only must give 0, not NaN.
    logits_BB = torch.where(weights_B.unsqueeze(0) > 0, logits_BB, _EXCLUDED)
    each_B = -(target_BB * logits_BB.log_softmax(-1)).sum(-1)
    return (each_B * weights_B).sum() / weights_B.sum().clamp(min=1.0)


def _divergence(now_E: Tensor, before_E: Tensor) -> Tensor:
    log_now_E, log_before_E = now_E.clamp(min=_SMALLEST).log(), before_E.clamp(min=_SMALLEST).log()
    return (now_E * (log_now_E - log_before_E)).sum(-1)
