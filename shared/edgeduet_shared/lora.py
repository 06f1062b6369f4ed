"""LoRA through ``peft``: the alternative to adapters that the ``fedavg-lora`` baseline trains.

Low-rank updates (Hu et al. 2022, arXiv 2106.09685) ``W + (alpha / r) B A`` with alpha = 2 r, A
Kaiming-uniform (a = sqrt 5) and B zero. They sit in

* the two MLP projections of every text block,
* the image tower's final linear projection where there is one (timm towers: ``visual.head.proj``), so
  that the cut is the pooled feature and caching works as well as with adapters; or the two MLP
  projections of every ViT block, whose cut is the pixels. Other image towers get none.

``peft`` replaces modules inside the model it is given, so it is given a private copy: every module
object is new, every tensor is shared with the backbone. The backbone never sees a LoRA layer, the
copy costs no memory worth mentioning, and dropping it restores everything.

The A and B layers of the copy are the very modules that the duet model registers as its parameters
(``lora.<path of the linear>.lora_A.weight``): swapping values into the duet model therefore swaps them
inside ``peft``'s own forward pass.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from open_clip.hf_model import HFTextEncoder
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from edgeduet_shared.adapters import kaiming_uniform
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.image_tower import BlockTower, EmbeddingTower, ImageTower, PooledTower

if TYPE_CHECKING:
    from edgeduet_shared.duet import DuetModel

_ADAPTER = "default"


class LoraUpdates(nn.Module):
    """The A and B matrices, registered under the paths of the linears they update."""

    def __init__(self, layers: Mapping[str, LoraLayer]) -> None:
        super().__init__()
        for path, layer in layers.items():
            node: nn.Module = self
            for part in path.split("."):
                if not hasattr(node, part):
                    node.add_module(part, nn.Module())
                node = getattr(node, part)
            node.add_module("lora_A", layer.lora_A[_ADAPTER])
            node.add_module("lora_B", layer.lora_B[_ADAPTER])

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh values: A Kaiming-uniform, B zero."""
        return {
            name: kaiming_uniform(tuple(value.shape), generator) if "lora_A" in name else torch.zeros(value.shape)
            for name, value in self.named_parameters()
        }


class LoraCopy:
    """A private copy of a frozen open_clip model with LoRA layers in it.

    Args:
        model: the shared frozen model; not changed.
        rank: r.

    Attributes:
        model: the copy, same interface as ``model``.
        updates: its A and B matrices.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        shared = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
        private = copy.deepcopy(model, shared)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=lora_targets(private), lora_dropout=0.0)
        with torch.random.fork_rng(devices=[]):  # peft draws values, all of which initial() replaces
            self._peft: PeftModel = get_peft_model(private, config, adapter_name=_ADAPTER)
        self.model: Any = private
        layers = {name: module for name, module in private.named_modules() if isinstance(module, LoraLayer)}
        self.updates = LoraUpdates(layers)

    def image_tower(self, embed_dim: int) -> ImageTower:
        """The image tower cut where its first LoRA layer is."""
        visual = self.model.visual
        if _has_projection(visual):
            return PooledTower(visual)
        if isinstance(visual, VisionTransformer):
            return BlockTower(visual, (), first_trained=0)
        return EmbeddingTower(self.model.encode_image, embed_dim, adapted=False)

    @torch.no_grad()
    def save(self, values: Mapping[str, Tensor], folder: Path) -> None:
        """Write ``values`` (names as in :attr:`updates`) in PEFT's format."""
        for name, parameter in self.updates.named_parameters():
            parameter.copy_(values[name])
        self._peft.save_pretrained(str(folder), safe_serialization=True)


def save_lora(model: DuetModel, params: Mapping[str, Tensor], folder: Path) -> None:
    """Write the LoRA part of ``params`` as ``adapter_config.json`` and ``adapter_model.safetensors`` in ``folder``.

    ``peft.PeftModel.from_pretrained(open_clip_model, folder)`` opens it.

    Raises:
        ConfigError: the model was built without LoRA.
    """
    if model.lora_copy is None:
        raise ConfigError("there is no LoRA to save: the model was built without parts.lora")
    values = {name.removeprefix("lora."): value for name, value in params.items() if name.startswith("lora.")}
    model.lora_copy.save(values, folder)


def lora_targets(model: Any) -> list[str]:
    """Full names of the linears that get an update, see the module docstring."""
    text = getattr(model, "text", model)
    prefix = "text." if text is not model else ""
    if isinstance(text, HFTextEncoder):
        # Across encoder families, the projections of the MLP are those that change the width.
        names = [
            f"{prefix}transformer.{name}"
            for name, module in text.transformer.named_modules()
            if isinstance(module, nn.Linear) and module.in_features != module.out_features
        ]
    else:
        names = _block_projections(f"{prefix}transformer", len(text.transformer.resblocks))
    visual = model.visual
    if _has_projection(visual):
        names.append("visual.head.proj")
    elif isinstance(visual, VisionTransformer):
        names += _block_projections("visual.transformer", len(visual.transformer.resblocks))
    return names


def _block_projections(transformer: str, blocks: int) -> list[str]:
    return [f"{transformer}.resblocks.{index}.mlp.{layer}" for index in range(blocks) for layer in ("c_fc", "c_proj")]


def _has_projection(visual: Any) -> bool:
    # After peft's replacement the projection is a LoraLayer around the linear.
    return isinstance(visual, TimmModel) and isinstance(getattr(visual.head, "proj", None), nn.Linear | LoraLayer)
