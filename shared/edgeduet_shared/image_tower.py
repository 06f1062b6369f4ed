"""The frozen image tower, cut in two at the first place where something is trained.

``front`` is the part below the cut: it depends on nothing that is trained, so its output is computed
once per image and cached. ``tail`` is the rest, with adapter sites in it. Three placements:

* ``embedding``: one site behind the image embedding. The front stores the raw embedding; the site
  reads it scaled to norm sqrt(D) and adds to it at that scale::

      x = r / |r| * sqrt(D)        z = normalise(r + |r| / sqrt(D) * site(x))  =  normalise(x + site(x))

  Unit-norm input has coordinates of size 1/sqrt(D): bias steps would drown it and a router would
  need sqrt(D) times more steps to leave its noise. At norm sqrt(D) coordinates are of order 1, as in
  the towers' layer-normalised streams. With a zero-initialised site z is bitwise the backbone's own.
* ``stages``: after chosen stages of a convolutional tower, positions of the feature map as tokens, the
  mean over positions as router input. The front stores the output of the first chosen stage.
* ``blocks``: parallel to the MLP of chosen ViT blocks (class token as router input). The front stores
  the input of the first chosen block; pixels when that is block 0.

Towers refer to the frozen model and never change it.

Shape suffixes: B images, D joint width, H W map height and width, T tokens, E experts.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from edgeduet_shared.adapters import AdapterSite, SiteNoise
from edgeduet_shared.backbone import Backbone
from edgeduet_shared.config import AdapterConfig
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.transformer_block import block_forward

if TYPE_CHECKING:
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import VisionTransformer

Sites = Mapping[str, AdapterSite]
TailOutput = tuple[Tensor, tuple[Tensor, ...]]


class ImageTower(ABC):
    """A frozen image tower with a cut.

    Attributes:
        front_key: names what :meth:`front` computes; part of the feature cache's key.
        site_widths: channels of each adapter site by name, first layer first.
    """

    front_key: str
    site_widths: dict[str, int]

    @abstractmethod
    def front(self, pixels_BCHW: Tensor) -> Tensor:
        """The frozen part, (B, ...)."""

    @abstractmethod
    def tail(self, x: Tensor, sites: Sites, noise: Sequence[SiteNoise]) -> TailOutput:
        """The rest: embedding (B, D) before normalisation, clean router logits (B, E) per routed site.

        Args:
            x: output of :meth:`front`, first axis B.
            sites: adapter sites under the names of ``site_widths``; may be empty.
            noise: one entry per site, or empty for evaluation.
        """


def adapted_image_tower(backbone: Backbone, config: AdapterConfig) -> ImageTower:
    """The image side of ``backbone`` with adapter sites where ``config`` places them.

    Placement ``embedding`` does not load the image tower: its front does, and only when called.

    Raises:
        ConfigError: the tower has no such place; names the placements that work.
    """
    if config.placement == "embedding":
        if config.image_layers:
            raise ConfigError("model.adapter.image_layers must be empty with placement 'embedding': it has one site")
        return EmbeddingTower(lambda pixels: backbone.model.encode_image(pixels), backbone.embed_dim, adapted=True)
    from open_clip.transformer import VisionTransformer

    visual: Any = backbone.model.visual
    if config.placement == "blocks":
        if not isinstance(visual, VisionTransformer):
            raise ConfigError(_misplaced(visual, "blocks"))
        count = len(visual.transformer.resblocks)
        return BlockTower(visual, _layers(config, count, tuple(range(count)), "blocks"))
    stages = conv_stages(visual)
    if stages is None:
        raise ConfigError(_misplaced(visual, "stages"))
    count = len(stages.stages)
    return StageTower(stages, _layers(config, count, tuple(range(max(count - 2, 0), count)), "stages"))


class EmbeddingTower(ImageTower):
    """Front is the whole tower; the tail adds at most one site behind the embedding.

    Args:
        encode_image: pixels (B, 3, H, W) to the raw embedding (B, D).
        embed_dim: D.
        adapted: whether there is a site.
    """

    front_key = "embedding"

    def __init__(self, encode_image: Callable[[Tensor], Tensor], embed_dim: int, *, adapted: bool) -> None:
        self._encode_image = encode_image
        self.site_widths = {"embedding": embed_dim} if adapted else {}

    def front(self, pixels_BCHW: Tensor) -> Tensor:
        """Raw image embedding (B, D), not normalised."""
        return self._encode_image(pixels_BCHW)

    def tail(self, x: Tensor, sites: Sites, noise: Sequence[SiteNoise]) -> TailOutput:
        """See the module docstring for the scaling."""
        if not sites:
            return x, ()
        scale_B1 = x.norm(dim=-1, keepdim=True).clamp(min=1e-12) / math.sqrt(x.shape[-1])
        scaled_BD = x / scale_B1
        added_BTD, logits_BE = sites["embedding"](scaled_BD.unsqueeze(1), scaled_BD, noise[0] if noise else None)
        return x + scale_B1 * added_BTD[:, 0], () if logits_BE is None else (logits_BE,)


class PooledTower(ImageTower):
    """Front ends at the pooled feature of a timm trunk; the tail is the trained projection head (LoRA)."""

    front_key = "pooled"

    def __init__(self, visual: TimmModel) -> None:
        self._visual = visual
        self.site_widths = {}

    def front(self, pixels_BCHW: Tensor) -> Tensor:
        """Pooled trunk feature (B, channels)."""
        return self._visual.trunk(pixels_BCHW)

    def tail(self, x: Tensor, sites: Sites, noise: Sequence[SiteNoise]) -> TailOutput:
        """Apply the projection head."""
        return self._visual.head(x), ()


class ConvStages:
    """A convolutional tower as stem, stages and head.

    Args:
        stem: pixels to the input of the first stage.
        stages: the stages in order.
        head: output of the last stage to the embedding.
        widths: channels after each stage.
    """

    def __init__(
        self,
        stem: Callable[[Tensor], Tensor],
        stages: Sequence[nn.Module],
        head: Callable[[Tensor], Tensor],
        widths: Sequence[int],
    ) -> None:
        self.stem = stem
        self.stages = list(stages)
        self.head = head
        self.widths = list(widths)


def conv_stages(visual: Any) -> ConvStages | None:
    """Stages of an open_clip ``ModifiedResNet`` or of a timm EfficientNet or ConvNeXt trunk; None for others."""
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.timm_model import TimmModel

    if isinstance(visual, ModifiedResNet):
        layers = [visual.layer1, visual.layer2, visual.layer3, visual.layer4]
        return ConvStages(visual.stem, layers, visual.attnpool, [_last_batch_norm(layer) for layer in layers])
    trunk = getattr(visual, "trunk", None)
    if not isinstance(visual, TimmModel) or trunk is None:
        return None
    if all(hasattr(trunk, part) for part in ("conv_stem", "bn1", "blocks", "conv_head", "bn2", "global_pool")):
        return ConvStages(
            lambda pixels: trunk.bn1(trunk.conv_stem(pixels)),
            list(trunk.blocks),
            lambda x: visual.head(trunk.forward_head(trunk.bn2(trunk.conv_head(x)))),
            [_last_batch_norm(stage) for stage in trunk.blocks],
        )
    if all(hasattr(trunk, part) for part in ("stem", "stages", "norm_pre", "head", "feature_info")):
        return ConvStages(
            trunk.stem,
            list(trunk.stages),
            lambda x: visual.head(trunk.forward_head(trunk.norm_pre(x))),
            [int(info["num_chs"]) for info in trunk.feature_info],
        )
    return None


class StageTower(ImageTower):
    """Sites after chosen stages of a convolutional tower."""

    def __init__(self, stages: ConvStages, layers: Sequence[int]) -> None:
        self._stages = stages
        self._first = layers[0]
        self.front_key = f"stage{self._first}"
        self.site_widths = {f"stage{layer}": stages.widths[layer] for layer in layers}

    def front(self, pixels_BCHW: Tensor) -> Tensor:
        """Feature map after the first adapted stage, (B, channels, H, W)."""
        x = self._stages.stem(pixels_BCHW)
        for stage in self._stages.stages[: self._first + 1]:
            x = stage(x)
        return x

    def tail(self, x: Tensor, sites: Sites, noise: Sequence[SiteNoise]) -> TailOutput:
        """Site after the first adapted stage, remaining stages with their sites, head."""
        noise_of = dict(zip(sites, noise, strict=True)) if noise else {}
        logits = []
        for index in range(self._first, len(self._stages.stages)):
            if index > self._first:
                x = self._stages.stages[index](x)
            site = sites.get(f"stage{index}")
            if site is None:
                continue
            tokens_BTD = x.flatten(2).transpose(1, 2)
            added_BTD, logits_BE = site(tokens_BTD, tokens_BTD.mean(1), noise_of.get(f"stage{index}"))
            x = x + added_BTD.transpose(1, 2).unflatten(2, x.shape[2:])
            if logits_BE is not None:
                logits.append(logits_BE)
        return self._stages.head(x), tuple(logits)


class BlockTower(ImageTower):
    """Sites parallel to the MLPs of chosen ViT blocks.

    Args:
        visual: open_clip's ViT.
        layers: blocks that get a site, ascending; may be empty.
        first_trained: first block in which something is trained, when that is not ``layers[0]`` (LoRA).
    """

    def __init__(self, visual: VisionTransformer, layers: Sequence[int], first_trained: int | None = None) -> None:
        self._visual = visual
        self._first = layers[0] if first_trained is None else first_trained
        self.front_key = f"block{self._first}" if self._first else "pixels"
        width = visual.class_embedding.shape[0]
        self.site_widths = {f"block{layer}": width for layer in layers}

    def front(self, pixels_BCHW: Tensor) -> Tensor:
        """Tokens before the first adapted block (B, T, width), or the pixels."""
        if not self._first:
            return pixels_BCHW
        x = self._visual._embeds(pixels_BCHW)
        for block in self._visual.transformer.resblocks[: self._first]:
            x = block(x)
        return x

    def tail(self, x: Tensor, sites: Sites, noise: Sequence[SiteNoise]) -> TailOutput:
        """Remaining blocks with their sites, pooling and projection."""
        visual = self._visual
        noise_of = dict(zip(sites, noise, strict=True)) if noise else {}
        if not self._first:
            x = visual._embeds(x)
        logits = []
        for index, block in enumerate(visual.transformer.resblocks):
            if index < self._first:
                continue
            name = f"block{index}"
            x, logits_BE = block_forward(block, x, site=sites.get(name), noise=noise_of.get(name))
            if logits_BE is not None:
                logits.append(logits_BE)
        pooled, _ = visual._pool(x)
        return pooled if visual.proj is None else pooled @ visual.proj, tuple(logits)


def _layers(config: AdapterConfig, count: int, default: tuple[int, ...], what: str) -> tuple[int, ...]:
    layers = tuple(sorted(set(config.image_layers))) or default
    if not all(0 <= layer < count for layer in layers):
        raise ConfigError(
            f"model.adapter.image_layers={list(config.image_layers)}: this tower has {what} 0..{count - 1}"
        )
    return layers


def _last_batch_norm(stage: nn.Module) -> int:
    norms = [module for module in stage.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    # A residual branch's projection comes after the block's own norms but has the same width.
    return norms[-1].num_features


def _misplaced(visual: Any, placement: str) -> str:
    from open_clip.transformer import VisionTransformer

    works = ["embedding"]
    if isinstance(visual, VisionTransformer):
        works.append("blocks")
    if conv_stages(visual) is not None:
        works.append("stages")
    return (
        f"model.adapter.placement='{placement}' does not fit the image tower {type(visual).__name__}; "
        f"use one of: {', '.join(works)}"
    )


__all__ = [
    "BlockTower",
    "ConvStages",
    "EmbeddingTower",
    "ImageTower",
    "PooledTower",
    "StageTower",
    "adapted_image_tower",
    "conv_stages",
]
