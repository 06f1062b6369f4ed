"""Zero-shot accuracy of a backbone: the numbers in the model cards come from here.

Shape suffixes: B images, C classes, D joint embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from edgeduet_shared import world
from edgeduet_shared.backbone import Backbone
from edgeduet_shared.errors import DataError
from edgeduet_sim.backbone_build.progress import counted

TEMPLATE = "a photo of a {}."
_PACS_DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
_IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png"}


def class_words(folder_name: str) -> str:
    """``sea_horse`` -> ``sea horse``: the only clean-up done to a folder name."""
    return folder_name.replace("_", " ").lower()


@torch.no_grad()
def text_features(backbone: Backbone, texts: Sequence[str]) -> Tensor:
    """Unit text features ``[C, D]``."""
    features_CD = backbone.model.encode_text(backbone.tokenizer(list(texts)))
    return torch.nn.functional.normalize(features_CD, dim=-1)


@torch.no_grad()
def image_features(
    backbone: Backbone, pictures: Iterable[Image.Image], *, total: int, label: str, batch: int = 64
) -> Tensor:
    """Unit image features ``[B, D]``; a progress bar when the work takes long enough to see."""
    chunks: list[Tensor] = []
    pending: list[Tensor] = []

    def flush() -> None:
        features_BD = backbone.model.encode_image(torch.stack(pending))
        chunks.append(torch.nn.functional.normalize(features_BD, dim=-1))
        pending.clear()

    for picture in counted(pictures, label, total=total):
        pending.append(backbone.transform(picture.convert("RGB")))
        if len(pending) == batch:
            flush()
    if pending:
        flush()
    return torch.cat(chunks)


def accuracy(image_BD: Tensor, text_CD: Tensor, label_B: Tensor) -> float:
    """Top-1 accuracy in percent."""
    return 100.0 * (image_BD @ text_CD.T).argmax(-1).eq(label_B).float().mean().item()


def folder_features(backbone: Backbone, root: Path, label: str) -> tuple[Tensor, Tensor, list[str]]:
    """Features ``[B, D]``, labels ``[B]`` and class words of an image folder ``root/class/*``."""
    if not root.is_dir():
        raise DataError(f"no image folder '{root}'")
    classes = sorted(path.name for path in root.iterdir() if path.is_dir())
    files = [
        (file, index)
        for index, name in enumerate(classes)
        for file in sorted((root / name).iterdir())
        if file.suffix.lower() in _IMAGE_SUFFIXES
    ]
    pictures = (Image.open(file) for file, _ in files)
    features_BD = image_features(backbone, pictures, total=len(files), label=label)
    return features_BD, torch.tensor([index for _, index in files]), [class_words(c) for c in classes]


def zero_shot_table(backbone: Backbone, data_root: Path) -> dict[str, float]:
    """Zero-shot accuracy in percent on PACS (per domain, then all images) and Caltech-101.

    ``data_root`` holds ``pacs/domain/class/*`` and ``caltech101/class/*``. Every image is used,
    squashed to the backbone's input size; the prompt is :data:`TEMPLATE`.
    """
    table: dict[str, float] = {}
    hits = images = 0.0
    for domain in _PACS_DOMAINS:
        image_BD, label_B, words = folder_features(backbone, data_root / "pacs" / domain, domain)
        text_CD = text_features(backbone, [TEMPLATE.format(word) for word in words])
        table[f"pacs/{domain}"] = accuracy(image_BD, text_CD, label_B)
        hits += table[f"pacs/{domain}"] * len(label_B)
        images += len(label_B)
    table["pacs"] = hits / images
    image_BD, label_B, words = folder_features(backbone, data_root / "caltech101", "caltech101")
    text_CD = text_features(backbone, [TEMPLATE.format(word) for word in words])
    table["caltech101"] = accuracy(image_BD, text_CD, label_B)
    return table


def world_table(backbone: Backbone, *, images: int = 600, seed: int = 90_001) -> dict[str, float]:
    """Zero-shot accuracy in percent on generated pictures that no training run draws.

    ``shape`` is one of the 12 trained words, ``pair`` one of 120 colour-shape phrases, ``count``
    one of three. The ``held-out`` rows use only shape-colour pairs that training never showed; the
    ``sketch`` and ``painting`` rows use styles it never showed.
    """
    table: dict[str, float] = {}
    level = world.CaptionLevel
    splits = (
        ("photo seen", "photo", False),
        ("photo held-out", "photo", True),
        ("cartoon held-out", "cartoon", True),
        ("sketch", "sketch", None),
        ("painting", "painting", None),
    )
    for name, style, held_out in splits:
        rng = np.random.default_rng(seed)
        specs = [world.random_spec(rng, styles=(style,), held_out=held_out) for _ in range(images)]
        pictures = (Image.fromarray(world.render(spec, rng)) for spec in specs)
        image_BD = image_features(backbone, pictures, total=images, label=name)
        for task, caption_level in (("shape", level.SHAPE), ("pair", level.COLOUR), ("count", level.COUNT)):
            table[f"{name}/{task}"] = _caption_accuracy(backbone, image_BD, specs, caption_level)
    return table


def _caption_accuracy(
    backbone: Backbone, image_BD: Tensor, specs: Sequence[world.Spec], level: world.CaptionLevel
) -> float:
    """Pick the true caption among all captions of a level (for COUNT: among those of the shape)."""
    template = world.TEMPLATES.index("a photo of {}.")
    if level is world.CaptionLevel.COUNT:
        hits = 0.0
        for shape in world.TRAINED_SHAPES:
            rows = [i for i, spec in enumerate(specs) if spec.shape == shape]
            if not rows:
                continue
            options = [world.Spec(shape, "red", count=count) for count in (1, 2, 3)]
            text_CD = text_features(backbone, [world.captions(o, level)[template] for o in options])
            label_B = torch.tensor([specs[i].count - 1 for i in rows])
            hits += accuracy(image_BD[rows], text_CD, label_B) * len(rows)
        return hits / len(specs)
    colours = list(world.COLOURS) if level is world.CaptionLevel.COLOUR else ["red"]
    options = [world.Spec(shape, colour) for shape in world.TRAINED_SHAPES for colour in colours]
    texts = [world.captions(option, level)[template] for option in options]
    index = {text: i for i, text in enumerate(texts)}
    label_B = torch.tensor([index[world.captions(spec, level)[template]] for spec in specs])
    return accuracy(image_BD, text_features(backbone, texts), label_B)
