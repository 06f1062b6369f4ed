"""A plain CLIP text tower and tokenizer without importing open_clip's package.

open_clip's package imports every kind of tower it knows, and with them torchvision, timm and
transformers: on the machine where this was measured 1.6 CPU seconds and 260 MB, in every simulation and,
on a device, for every message. A client whose image features are cached needs none of it but the text
side. Built here is the text tower of a *plain* configuration (:func:`is_plain`); every other one is
left to open_clip.

:class:`ClipText` gives the same bits as open_clip's ``encode_text``: the same torch modules under the
same parameter names, called in the same order. The tokenizer is open_clip's own.

Shape suffixes: N sequences, T tokens, W text width, D joint width.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import LongTensor, Tensor, nn
from torch.nn import functional

_PLAIN_MODEL = {"embed_dim", "vision_cfg", "text_cfg"}
_PLAIN_TEXT = {"context_length", "vocab_size", "width", "heads", "layers", "tokenizer_kwargs"}
_MLP_RATIO = 4
_TEXT_PARAMETERS = ("token_embedding.", "positional_embedding", "transformer.", "ln_final.", "text_projection")


def is_plain(model_config: Mapping[str, Any]) -> bool:
    """Whether :class:`ClipText` computes what open_clip's configuration ``model_cfg`` describes.

    Plain is: causal, GELU, pooled at the end-of-text token, projected without bias, open_clip's own tokenizer.
    """
    text = model_config["text_cfg"]
    return (
        model_config.keys() == _PLAIN_MODEL
        and text.keys() <= _PLAIN_TEXT
        and {"context_length", "vocab_size", "width", "heads", "layers"} <= text.keys()
        and text.get("tokenizer_kwargs", {}).keys() <= {"bpe_path"}
    )


class ClipText(nn.Module):
    """The text tower of a plain open_clip ``CLIP``; parameters as there, frozen.

    Args:
        embed_dim: D.
        config: ``text_cfg`` of the open_clip configuration.
    """

    text_pool_type = "argmax"

    def __init__(self, embed_dim: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, length = config["width"], config["context_length"]
        self.token_embedding = nn.Embedding(config["vocab_size"], width)
        self.positional_embedding = nn.Parameter(torch.empty(length, width))
        self.transformer = nn.Module()
        blocks = [_Block(width, config["heads"]) for _ in range(config["layers"])]
        self.transformer.resblocks = nn.ModuleList(blocks)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, embed_dim))
        mask_TT = torch.full((length, length), float("-inf")).triu_(1)
        self.register_buffer("attn_mask", mask_TT, persistent=False)

    @classmethod
    def load(cls, embed_dim: int, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ClipText:
        """Build it from the weights of the whole ``CLIP``; those of other parts are left out.

        Raises:
            RuntimeError: a weight is missing or of another shape.
        """
        # Every value drawn here is replaced; on the meta device torch would import its compiler to draw none.
        with torch.random.fork_rng(devices=[]):
            tower = cls(embed_dim, config)
        own = {name: value.float() for name, value in weights.items() if is_text_parameter(name)}
        tower.load_state_dict(own, assign=True)
        return tower.eval().requires_grad_(False)

    def encode_text(self, ids_NT: Tensor, normalize: bool = False) -> Tensor:
        """Text features (N, D) of token ids, padded to the context length."""
        x_NTW = self.token_embedding(ids_NT) + self.positional_embedding
        for block in self.transformer.resblocks:  # type: ignore[union-attr]
            x_NTW = block(x_NTW, self.attn_mask)
        x_NTW = self.ln_final(x_NTW)
        pooled_NW = x_NTW[torch.arange(x_NTW.shape[0], device=x_NTW.device), ids_NT.argmax(dim=-1)]
        features_ND = pooled_NW @ self.text_projection
        return functional.normalize(features_ND, dim=-1) if normalize else features_ND


class _Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ls_1 = nn.Identity()
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(width, _MLP_RATIO * width), gelu=nn.GELU(), c_proj=nn.Linear(_MLP_RATIO * width, width)
            )
        )
        self.ls_2 = nn.Identity()

    def forward(self, x_NTW: Tensor, mask_TT: Tensor) -> Tensor:
        normed_NTW = self.ln_1(x_NTW)
        attended_NTW = self.attn(normed_NTW, normed_NTW, normed_NTW, need_weights=False, attn_mask=mask_TT)[0]
        x_NTW = x_NTW + attended_NTW
        return x_NTW + self.mlp(self.ln_2(x_NTW))


def is_text_parameter(name: str) -> bool:
    """Whether a parameter of a plain ``CLIP`` belongs to its text tower."""
    return name.startswith(_TEXT_PARAMETERS)


def clip_tokenizer(context_length: int, bpe_path: Path | None = None) -> Callable[..., LongTensor]:
    """Return open_clip's own tokenizer, for a vocabulary file or for the one that open_clip brings."""
    options = {} if bpe_path is None else {"bpe_path": str(bpe_path)}
    tokenizer: Callable[..., LongTensor] = _open_clip_module("tokenizer").SimpleTokenizer(
        context_length=context_length, **options
    )
    return tokenizer


def imagenet_class_names() -> list[str]:
    """The 1000 ImageNet class names that come with open_clip."""
    return list(_open_clip_module("zero_shot_metadata").IMAGENET_CLASSNAMES)


@cache
def _open_clip_module(name: str) -> ModuleType:
    """Load one module of open_clip that needs no other one, without its package.

    Should a later open_clip give it a relative import, the package is imported after all: slower, the same result.
    """
    package = importlib.util.find_spec("open_clip")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'open_clip'", name="open_clip")
    file = Path(package.submodule_search_locations[0]) / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"open_clip_{name}_alone", file)
    if spec is None or spec.loader is None:
        return importlib.import_module(f"open_clip.{name}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return importlib.import_module(f"open_clip.{name}")
    # The tokenizer's module makes one with open_clip's full vocabulary, 30 MB that nobody uses in this copy of it.
    vars(module).pop("_tokenizer", None)
    return module
