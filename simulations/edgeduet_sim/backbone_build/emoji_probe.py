"""The pictures on which two choices of ``clip-lite0`` were made: emoji of a colour font, against their names.

The mix of the two kernels that say where a word points, and the width of the joint space, had to be chosen
on something that is neither a benchmark nor a picture of the training: the glyphs of Noto Color Emoji
(Debian package fonts-noto-color-emoji), whose Unicode names are the labels. This script selects them,
encodes them with the classifier's trunk, and prints how often the nearest name is the right one, for the
alternatives that were looked at. It trains nothing and changes nothing::

    edgeduet-sim backbone choices clip-lite0

A glyph counts when its name is a noun of WordNet that mostly means something that can be photographed.

Shape suffixes: N glyphs, W names, K classes, F trunk features, D joint embedding, E MiniLM width.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from edgeduet_shared.errors import BackboneError
from edgeduet_sim.backbone_build import lite0
from edgeduet_sim.backbone_build.progress import counted
from edgeduet_sim.backbone_build.wordnet import VISUAL_TOPICS, WordNet, read_wordnet

FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
CODE_POINTS = (range(0x1F300, 0x1FAFF), range(0x2600, 0x27BF))
"""Where Unicode keeps pictographs, emoji and dingbats."""

_FONT_SIZE = 109
"""The only size in which the font holds its bitmaps."""
_CANVAS = (136, 128)
_SIDE = 128
_LEAST_INK = 0.02
_LEAST_VISUAL = 0.3
# "Things in general" cannot be drawn.
_DRAWABLE_TOPICS = VISUAL_TOPICS - {3}

MIXES = (
    (20.0, 0.0),
    (10.0, 0.0),
    (0.0, 15.0),
    (10.0, 10.0),
    (10.0, 15.0),
    (10.0, 20.0),
    (20.0, 10.0),
    (20.0, 15.0),
    (20.0, 20.0),
)
"""Sharpness of the language kernel and of the graph kernel; 0 leaves the kernel out."""
WIDTHS = (128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Glyphs:
    """Pictures ``[N]`` and, for each, the row of its name in ``names`` (sorted, W of them)."""

    pictures: list[Image.Image]
    label_N: Tensor
    names: list[str]


def choose_glyphs(wordnet: WordNet, font: Path = FONT) -> Glyphs:
    """Draw the font's emoji and keep those whose name is a drawable noun.

    Raises:
        BackboneError: the font is not installed, or has none of them.
    """
    named = ((noun(wordnet, name), picture) for name, picture in _drawn(font))
    found = [(name, picture) for name, picture in named if drawable(wordnet, name)]
    if not found:
        raise BackboneError(f"{font} holds no emoji that can be named; use Noto Color Emoji")
    names = sorted({name for name, _ in found})
    rows = {name: row for row, name in enumerate(names)}
    return Glyphs([picture for _, picture in found], torch.tensor([rows[name] for name, _ in found]), names)


def noun(wordnet: WordNet, name: str) -> str:
    """The noun in a glyph's name: "cat face" is a cat."""
    shorter = name.removesuffix(" face")
    return shorter if shorter in wordnet.senses else name


def drawable(wordnet: WordNet, name: str) -> bool:
    """Whether ``name`` is a noun with a meaning that can be drawn and makes up more than 30 % of its uses."""
    senses = wordnet.senses.get(name, ())
    return any(wordnet.synsets[s].topic in _DRAWABLE_TOPICS and share > _LEAST_VISUAL for s, share in senses)


def _drawn(path: Path) -> Iterator[tuple[str, Image.Image]]:
    """Lower-case Unicode names and pictures of everything that the font draws."""
    try:
        font = ImageFont.truetype(str(path), _FONT_SIZE)
    except OSError as error:
        raise BackboneError(
            f"the emoji font is not at {path} ({error}); install it with: apt-get install fonts-noto-color-emoji"
        ) from error
    for code_point in (code for block in CODE_POINTS for code in block):
        name = unicodedata.name(chr(code_point), "").lower()
        canvas = Image.new("RGB", _CANVAS, "white")
        ImageDraw.Draw(canvas).text((0, 0), chr(code_point), font=font, embedded_color=True)
        if name and (np.asarray(canvas) < 250).mean() >= _LEAST_INK:
            yield name, canvas.resize((_SIDE, _SIDE))


@dataclass(frozen=True)
class Choice:
    """One alternative and how it does: share of glyphs whose name comes first, or among the first five."""

    what: str
    first: float
    first_five: float


def compare_choices() -> tuple[Glyphs, list[Choice]]:
    """Measure every mix of :data:`MIXES` at the shipped width, and every width at the shipped mix.

    Raises:
        BackboneError: a build ingredient or the font is missing.
    """
    lite0.require_packages()
    wordnet = read_wordnet()
    glyphs = choose_glyphs(wordnet)
    model = lite0.new_model()
    space = lite0.load_image_tower(model)
    feature_NF = lite0.trunk_features(model.visual.trunk, glyphs.pictures, "encoding emoji")
    classes = lite0.class_offsets()
    kernels = lite0.Kernels.of_words(wordnet, glyphs.names, classes)
    found = []
    shipped = (lite0.LANGUAGE_SHARPNESS, lite0.GRAPH_SHARPNESS)
    for language, graph in counted(MIXES, "mixing kernels"):
        target_WD = kernels.targets(space.prototype_KD, language, graph)
        name = f"language {language:g}, graph {graph:g}".replace(" 0", " none")
        mark = ", shipped" if (language, graph) == shipped else ""
        found.append(_measured(f"mix: {name}{mark}", feature_NF, space.mean_F, space.axes_FD, target_WD, glyphs))
    for width in WIDTHS:
        axes_FD, prototype_KD = lite0.joint_space(space.rows_KF, width)
        target_WD = kernels.targets(prototype_KD, *shipped)
        mark = ", shipped" if width == space.axes_FD.shape[1] else ""
        found.append(_measured(f"width: {width}{mark}", feature_NF, space.mean_F, axes_FD, target_WD, glyphs))
    return glyphs, found


def _measured(
    what: str, feature_NF: Tensor, mean_F: Tensor, axes_FD: Tensor, target_WD: Tensor, glyphs: Glyphs
) -> Choice:
    cosine_NW = F.normalize((feature_NF - mean_F) @ axes_FD, dim=-1) @ target_WD.T
    right_N5 = cosine_NW.topk(5, -1).indices == glyphs.label_N.unsqueeze(-1)
    return Choice(what, float(right_N5[:, 0].float().mean()), float(right_N5.any(-1).float().mean()))
