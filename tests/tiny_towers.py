"""Tiny, randomly initialised open_clip models of every kind that the model parts support.

They are real open_clip objects (no mocks); only their sizes are small. Values come from a seed, so two
calls give the same weights.
"""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from torch import Tensor, nn

from edgeduet_shared.backbone import Backbone

EMBED_DIM = 32
CLASS_NAMES = ("dog", "red tree", "house", "rhinoceros beetle", "cup")
BERT_WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "photo",
    "of",
    "dog",
    "red",
    "tree",
    "house",
    "cup",
    ".",
)

VISION: dict[str, dict[str, Any]] = {
    "vit": {"layers": 3, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 32},
    "resnet": {"layers": (1, 1, 1, 1), "width": 8, "head_width": 64, "image_size": 64},
    "efficientnet": {
        "timm_model_name": "tf_efficientnet_lite0",
        "timm_pool": "avg",
        "timm_proj": "linear",
        "timm_proj_bias": True,
        "image_size": 64,
    },
}
TEXT: dict[str, Any] = {"context_length": 24, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}


@functools.cache
def tiny_backbone(vision: str, text: str = "native") -> Backbone:
    """A frozen tiny CLIP; ``vision`` as in VISION, ``text`` one of native, custom (``model.text``), bert."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vision_cfg = CLIPVisionCfg(**VISION[vision])
        tokenizer: Any = SimpleTokenizer(context_length=TEXT["context_length"])
        if text == "native":
            model: nn.Module = CLIP(EMBED_DIM, vision_cfg, CLIPTextCfg(**TEXT))
        elif text == "custom":
            settings = {**TEXT, "pool_type": "eos", "eos_id": tokenizer.eot_token_id}
            model = CustomTextCLIP(EMBED_DIM, vision_cfg, CLIPTextCfg(**settings))
        else:
            folder = _bert_folder()
            tokenizer = HFTokenizer(folder, context_length=20)
            bert = CLIPTextCfg(hf_model_name=folder, hf_model_pretrained=False, hf_proj_type="mlp", hf_pooler_type=text)
            model = CustomTextCLIP(EMBED_DIM, vision_cfg, bert)
        _shake(model)
    size = vision_cfg.image_size
    model.logit_scale.data.fill_(math.log(20.0))
    transform = open_clip.image_transform(size, is_train=False)
    name = f"tiny-{vision}-{text}"
    return Backbone.of_model(name, model, transform, tokenizer, embed_dim=EMBED_DIM, fingerprint="0" * 16)


def pictures(backbone: Backbone, count: int = 4, seed: int = 0) -> Tensor:
    """Random pixels (count, 3, H, W) of the size the backbone takes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, backbone.image_size, backbone.image_size, generator=generator)


def _shake(model: nn.Module) -> None:
    # Fresh ResNets end their branches in zero weights and fresh norms have trivial statistics: bugs would hide.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
        elif isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_bias, std=0.1)
            nn.init.normal_(module.out_proj.bias, std=0.1)


def _bert_folder() -> str:
    from transformers import BertConfig, BertTokenizer

    folder = Path(tempfile.mkdtemp(prefix="tiny-bert-"))
    BertTokenizer(vocab={word: index for index, word in enumerate(BERT_WORDS)}).save_pretrained(folder)
    BertConfig(
        vocab_size=len(BERT_WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    ).save_pretrained(folder)
    return str(folder)
