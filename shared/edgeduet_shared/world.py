"""The generated caption world: small pictures with known content, made from a seed.

It is the data source that always works (no download, no licence question) and what the
``clip-world`` backbone is trained on. A picture shows one to three copies of one shape with a
colour and a texture on a background, drawn in one of four styles:

* ``photo`` and ``cartoon`` are what ``clip-world`` was trained on;
* ``sketch`` and ``painting`` it has never seen, so the four styles are a domain-incremental stream
  with a real domain shift;
* 24 of the 120 shape-colour pairs (:data:`HELD_OUT_PAIRS`) never appear in its training, so they
  measure composition;
* :data:`NOVEL_SHAPES` never appear either, neither as pictures nor as words: with them a
  class-incremental stream holds classes on which zero-shot is near chance.

Everything is a pure function of its arguments: the same generator state gives the same bytes.
numpy and Pillow only, so that a device can make test pictures without torch.

Array shapes: ``S`` is the working edge (``SUPERSAMPLING * IMAGE_SIZE``), ``H = W = IMAGE_SIZE``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from edgeduet_shared.errors import DataError, nearest

IMAGE_SIZE = 32
"""Edge of a picture in pixels."""

SUPERSAMPLING = 3
"""Pictures are composed this many times larger and box-filtered down: anti-aliased edges."""

TRAINED_SHAPES = (
    "circle",
    "square",
    "triangle",
    "star",
    "heart",
    "cross",
    "ring",
    "moon",
    "diamond",
    "hexagon",
    "arrow",
    "flower",
)
NOVEL_SHAPES = ("house", "tree", "fish", "mushroom", "cup", "bolt", "hourglass", "crown")
SHAPES = TRAINED_SHAPES + NOVEL_SHAPES

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 36, 36),
    "orange": (245, 134, 18),
    "yellow": (248, 220, 40),
    "green": (36, 158, 52),
    "cyan": (40, 206, 214),
    "blue": (36, 74, 214),
    "purple": (128, 44, 178),
    "pink": (250, 130, 184),
    "brown": (122, 74, 36),
    "white": (244, 244, 244),
}
TEXTURES = ("plain", "striped", "dotted", "checkered")
BACKGROUNDS: dict[str, tuple[str, tuple[int, int, int]]] = {
    "grass": ("on grass", (112, 150, 74)),
    "sky": ("in the sky", (150, 190, 230)),
    "sand": ("on sand", (212, 190, 146)),
    "night": ("at night", (34, 36, 62)),
    "water": ("in water", (54, 104, 142)),
    "bricks": ("on bricks", (150, 96, 84)),
}
COUNT_WORDS = ("one", "two", "three")
TRAINED_STYLES = ("photo", "cartoon")
NOVEL_STYLES = ("sketch", "painting")
STYLES = TRAINED_STYLES + NOVEL_STYLES

HELD_OUT_PAIRS: frozenset[tuple[str, str]] = frozenset(
    (shape, colour)
    for s, shape in enumerate(TRAINED_SHAPES)
    for c, colour in enumerate(COLOURS)
    if (3 * s + c) % 5 == 0
)
"""24 of the 120 trained shape-colour pairs, two colours of each shape, never shown in training."""


class CaptionLevel(IntEnum):
    """How much of the picture a caption tells.

    Full captions alone let a CLIP loss be solved by background, colour and count; a level drawn per
    batch forces the model to learn the shape as well (clip-and-data.md, section 4).
    """

    SHAPE = 0
    COLOUR = 1
    TEXTURE = 2
    COUNT = 3
    FULL = 4


TEMPLATES = ("{}", "a photo of {}.", "a picture of {}.", "this is {}.")
"""Wordings of a caption; they say nothing about the style, so all are true of every picture."""


@dataclass(frozen=True)
class Spec:
    """What one picture shows. ``count`` is 1 to 3 copies of the same object."""

    shape: str
    colour: str
    texture: str = "plain"
    background: str = "sand"
    count: int = 1
    style: str = "photo"

    def __post_init__(self) -> None:
        for field, value, known in (
            ("shape", self.shape, SHAPES),
            ("colour", self.colour, tuple(COLOURS)),
            ("texture", self.texture, TEXTURES),
            ("background", self.background, tuple(BACKGROUNDS)),
            ("style", self.style, STYLES),
        ):
            if value not in known:
                hint = nearest(value, known)
                raise DataError(f"the generated world has no {field} '{value}'{hint}")
        if not 1 <= self.count <= len(COUNT_WORDS):
            raise DataError(f"the generated world draws 1 to 3 objects, not {self.count}")


def captions(spec: Spec, level: CaptionLevel | int) -> tuple[str, ...]:
    """Return the wordings of one caption, in the order of :data:`TEMPLATES`.

    All wordings mean the same, so a batch must use one index for all its pictures: two wordings of
    one meaning in a contrastive batch would be a false negative.
    """
    level = CaptionLevel(level)
    shape, count = spec.shape, spec.count
    where = BACKGROUNDS[spec.background][0]
    texture = "" if spec.texture == "plain" else f"{spec.texture} "
    if level is CaptionLevel.SHAPE:
        phrase = _with_article(shape)
    elif level is CaptionLevel.COLOUR:
        phrase = _with_article(f"{spec.colour} {shape}")
    elif level is CaptionLevel.TEXTURE:
        phrase = _with_article(f"{spec.texture} {shape}")
    elif level is CaptionLevel.COUNT:
        phrase = f"{COUNT_WORDS[count - 1]} {_plural(shape, count)}"
    else:
        noun = _plural(shape, count)
        phrase = f"{COUNT_WORDS[count - 1]} {texture}{spec.colour} {noun} {where}"
    return tuple(template.format(phrase) for template in TEMPLATES)


def random_spec(
    rng: np.random.Generator,
    *,
    shapes: Sequence[str] = TRAINED_SHAPES,
    styles: Sequence[str] = TRAINED_STYLES,
    held_out: bool | None = None,
) -> Spec:
    """Draw a spec uniformly over everything that is not fixed by the arguments.

    ``held_out`` True draws only from :data:`HELD_OUT_PAIRS`, False only outside them, None ignores
    them.
    """
    pairs = _pairs(tuple(shapes), held_out)
    shape, colour = pairs[rng.integers(len(pairs))]
    return Spec(
        shape=shape,
        colour=colour,
        texture=TEXTURES[rng.integers(len(TEXTURES))],
        background=_BACKGROUND_NAMES[rng.integers(len(_BACKGROUND_NAMES))],
        count=int(rng.integers(1, len(COUNT_WORDS) + 1)),
        style=styles[int(rng.integers(len(styles)))],
    )


def world_images(
    style: str, classes: Sequence[str], per_class: int, seed: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return ``(images [N, 32, 32, 3] uint8, labels [N] int64)`` of one style, class after class.

    Classes are shapes; ``labels[i]`` indexes ``classes``. A picture depends only on ``(style, its
    shape, seed, its index within the class)``: asking for more classes, more pictures or another
    order of classes never changes a picture, so a partition saved once stays valid.
    """
    if style not in STYLES:
        raise DataError(f"the generated world has no style '{style}'{nearest(style, STYLES)}")
    images = np.empty((len(classes) * per_class, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    for position, shape in enumerate(classes):
        if shape not in SHAPES:
            raise DataError(f"the generated world has no shape '{shape}'{nearest(shape, SHAPES)}")
        for index in range(per_class):
            key = (seed, STYLES.index(style), SHAPES.index(shape), index)
            rng = np.random.default_rng(key)
            spec = random_spec(rng, shapes=(shape,), styles=(style,))
            images[position * per_class + index] = render(spec, rng)
    labels = np.repeat(np.arange(len(classes), dtype=np.int64), per_class)
    return images, labels


def render(spec: Spec, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw ``spec``; place, size, rotation, light and noise come from ``rng``.

    Returns ``[H, W, 3]`` uint8.
    """
    scene = _compose(spec, rng)
    return _STYLE_PAINTERS[spec.style](spec, scene, rng)


# --- composition: where things are, before any style ---------------------------------------------


@dataclass(frozen=True)
class _Scene:
    """Masks and coordinates of one picture at working resolution.

    ``cover`` [S, S] float32 in 0..1: how much an object covers each point. ``ink`` [S, S] bool:
    where the texture puts its second colour. ``local`` [2, S, S] float32: coordinates in units of
    the radius of the object nearest in drawing order (x to the right, y down), for shading.
    """

    cover: NDArray[np.float32]
    ink: NDArray[np.bool_]
    local: NDArray[np.float32]


_S = IMAGE_SIZE * SUPERSAMPLING
_GRID_Y, _GRID_X = np.mgrid[0:_S, 0:_S].astype(np.float32)
_BACKGROUND_NAMES = tuple(BACKGROUNDS)

# Centres as fractions of the edge, and the radius range, by number of objects.
_LAYOUTS: dict[int, tuple[tuple[tuple[float, float], ...], tuple[float, float]]] = {
    1: (((0.5, 0.5),), (0.30, 0.40)),
    2: (((0.27, 0.32), (0.73, 0.68)), (0.20, 0.25)),
    3: (((0.27, 0.27), (0.73, 0.36), (0.42, 0.76)), (0.17, 0.21)),
}


def _compose(spec: Spec, rng: np.random.Generator) -> _Scene:
    centres, (low, high) = _LAYOUTS[spec.count]
    mirror_x, mirror_y = rng.random(2) < 0.5
    cover = np.zeros((_S, _S), np.float32)
    ink = np.zeros((_S, _S), np.bool_)
    local = np.zeros((2, _S, _S), np.float32)
    for fx, fy in centres:
        radius = _S * rng.uniform(low, high)
        wobble = rng.uniform(-0.06, 0.06, 2)
        centre_x = _S * ((1 - fx if mirror_x else fx) + wobble[0])
        centre_y = _S * ((1 - fy if mirror_y else fy) + wobble[1])
        angle = rng.uniform(-0.3, 0.3)
        squeeze = rng.uniform(0.88, 1.0)
        mask = _mask(spec.shape, centre_x, centre_y, radius, angle, squeeze)
        x, y = (_GRID_X - centre_x) / radius, (_GRID_Y - centre_y) / radius
        inside = mask > 0.5
        ink[inside] = _texture(spec.texture, x, y, angle, spec.count)[inside]
        local[0, inside], local[1, inside] = x[inside], y[inside]
        np.maximum(cover, mask, out=cover)
    return _Scene(cover, ink, local)


def _mask(
    shape: str, centre_x: float, centre_y: float, radius: float, angle: float, squeeze: float
) -> NDArray[np.float32]:
    """Rasterise a shape to [S, S] float32 in {0, 1}."""
    picture = Image.new("L", (_S, _S), 0)
    draw = ImageDraw.Draw(picture)
    cos, sin = math.cos(angle), math.sin(angle)
    turn = np.array(((cos, -sin), (sin, cos)))
    for points, fill in _outline(shape):
        placed = (points * (squeeze, 1.0)) @ turn.T * radius + (centre_x, centre_y)
        draw.polygon([(float(x), float(y)) for x, y in placed], fill=fill)
    return np.asarray(picture, np.float32) / 255.0


def _texture(
    texture: str,
    x: NDArray[np.float32],
    y: NDArray[np.float32],
    angle: float,
    count: int,
) -> NDArray[np.bool_]:
    """Second-colour pattern [S, S] in object coordinates.

    Periods shrink in proportion to the object, so smaller objects get fewer, not finer, marks: at
    32 px a mark must stay wider than one pixel.
    """
    marks = 2.6 if count == 1 else 1.7
    u = (x * math.cos(angle) + y * math.sin(angle)) * marks
    v = (y * math.cos(angle) - x * math.sin(angle)) * marks
    if texture == "striped":
        return np.mod(u + 0.25, 1.0) < 0.5
    if texture == "dotted":
        return (np.mod(u + 0.5, 1.0) - 0.5) ** 2 + (np.mod(v + 0.5, 1.0) - 0.5) ** 2 < 0.09
    if texture == "checkered":
        return (np.floor(u).astype(np.int32) + np.floor(v).astype(np.int32)) % 2 == 0
    return np.zeros(x.shape, np.bool_)


# --- outlines: polygons in a unit disc, y down ---------------------------------------------------

_Polygons = tuple[tuple[NDArray[np.float64], int], ...]


@functools.cache
def _outline(shape: str) -> _Polygons:
    """Polygons of a shape, each with its fill (255 adds, 0 cuts a hole)."""
    if shape == "ring":
        return (_regular(32, 1.0), 255), (_regular(24, 0.55), 0)
    if shape == "moon":
        return (_regular(32, 1.0), 255), (_regular(32, 0.86) + np.array((0.48, -0.12)), 0)
    if shape == "flower":
        petals = tuple((_regular(16, 0.38) + 0.66 * _polar(k / 5), 255) for k in range(5))
        return (*petals, (_regular(16, 0.40), 255))
    return ((_POLYGONS[shape](), 255),)


def _polar(turns: float, start: float = -0.25) -> NDArray[np.float64]:
    a = 2 * math.pi * (turns + start)
    return np.array((math.cos(a), math.sin(a)))


def _regular(corners: int, radius: float) -> NDArray[np.float64]:
    return radius * np.array([_polar(k / corners) for k in range(corners)])


def _star() -> NDArray[np.float64]:
    return np.array([(1.08 if k % 2 == 0 else 0.44) * _polar(k / 10) for k in range(10)])


def _heart() -> NDArray[np.float64]:
    t = np.linspace(0, 2 * math.pi, 40, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack((x / 16.0, -(y + 2.5) / 15.0), axis=1)


def _points(*xy: tuple[float, float]) -> Callable[[], NDArray[np.float64]]:
    return lambda: np.array(xy)


def _mirrored(*half: tuple[float, float]) -> Callable[[], NDArray[np.float64]]:
    """A symmetric outline from its right half, listed from top to bottom."""
    return _points(*half, *((-x, y) for x, y in reversed(half)))


def _fish() -> NDArray[np.float64]:
    t = np.linspace(0.18, 2 * math.pi - 0.18, 28)
    body = np.stack((0.68 * np.cos(t) - 0.28, 0.55 * np.sin(t)), axis=1)
    return np.concatenate((body, np.array(((0.98, -0.52), (0.80, 0.0), (0.98, 0.52)))))


def _mushroom() -> NDArray[np.float64]:
    t = np.linspace(math.pi, 2 * math.pi, 16)
    cap = np.stack((np.cos(t), 0.95 * np.sin(t) + 0.1), axis=1)
    stem = np.array(((0.30, 0.1), (0.36, 0.95), (-0.36, 0.95), (-0.30, 0.1)))
    return np.concatenate((cap, stem))


_POLYGONS: dict[str, Callable[[], NDArray[np.float64]]] = {
    "circle": lambda: _regular(32, 0.95),
    "square": _points((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "triangle": _points((0.0, -1.0), (0.98, 0.8), (-0.98, 0.8)),
    "star": _star,
    "heart": _heart,
    "cross": _mirrored((0.32, -0.95), (0.32, -0.32), (0.95, -0.32), (0.95, 0.32), (0.32, 0.32), (0.32, 0.95)),
    "diamond": _points((0.0, -1.1), (0.66, 0.0), (0.0, 1.1), (-0.66, 0.0)),
    "hexagon": lambda: _regular(6, 1.0),
    "arrow": _points((-0.95, -0.26), (0.1, -0.26), (0.1, -0.8), (1.0, 0.0), (0.1, 0.8), (0.1, 0.26), (-0.95, 0.26)),
    "house": _mirrored((0.0, -1.0), (0.95, -0.15), (0.68, -0.15), (0.68, 0.9)),
    "tree": _mirrored((0.0, -1.05), (0.55, -0.3), (0.3, -0.3), (0.85, 0.5), (0.18, 0.5), (0.18, 1.0)),
    "fish": _fish,
    "mushroom": _mushroom,
    "cup": _points(
        (-0.85, -0.8), (0.5, -0.8), (0.5, -0.5), (0.98, -0.5), (0.98, 0.35), (0.42, 0.35), (0.46, 0.1),
        (0.74, 0.1), (0.74, -0.25), (0.5, -0.25), (0.34, 0.85), (-0.66, 0.85),
    ),
    "bolt": _points((0.2, -1.05), (-0.68, 0.18), (-0.08, 0.18), (-0.28, 1.05), (0.68, -0.25), (0.06, -0.25)),
    "hourglass": _mirrored((0.75, -0.95), (0.12, 0.0), (0.75, 0.95)),
    "crown": _points(
        (-0.95, -0.6), (-0.45, 0.05), (0.0, -0.9), (0.45, 0.05), (0.95, -0.6), (0.8, 0.75), (-0.8, 0.75)
    ),
}  # fmt: skip


# --- styles: how a scene becomes pixels ----------------------------------------------------------

_Float = NDArray[np.float32]


def _jitter(colour: Iterable[float], rng: np.random.Generator, amount: float) -> _Float:
    return (np.asarray(tuple(colour)) + rng.uniform(-amount, amount, 3)).astype(np.float32)


def _second_colour(colour: _Float) -> _Float:
    """A texture's second colour: darker, or lighter for dark colours, of the same hue."""
    return colour * 0.45 if colour.mean() > 90 else colour * 0.45 + 140


def _smooth_noise(rng: np.random.Generator, cells: int) -> _Float:
    """Low-frequency noise [S, S] in about -1..1."""
    coarse = Image.fromarray(rng.uniform(-1, 1, (cells, cells)).astype(np.float32))
    return np.asarray(coarse.resize((_S, _S), Image.Resampling.BICUBIC), np.float32)


def _background(name: str, colour: _Float, rng: np.random.Generator) -> _Float:
    """Background [S, S, 3] float32 in 0..255, recognisable by pattern as well as by colour."""
    phase = rng.uniform(0, 2 * math.pi)
    if name == "grass":
        pattern = np.sin(_GRID_X * 0.9 + 2.5 * np.sin(_GRID_Y * 0.11 + phase)) * 0.13
    elif name == "sky":
        pattern = np.clip(_smooth_noise(rng, 4), 0, 1) * 0.35 + (0.5 - _GRID_Y / _S) * 0.1
    elif name == "sand":
        pattern = rng.uniform(-0.12, 0.12, (_S // 3, _S // 3)).repeat(3, 0).repeat(3, 1)
    elif name == "night":
        stars = rng.random((_S // 3, _S // 3)) > 0.985
        pattern = stars.repeat(3, 0).repeat(3, 1) * 3.0
    elif name == "water":
        pattern = np.sin(_GRID_Y * 0.5 + np.sin(_GRID_X * 0.15 + phase)) * 0.16
    else:
        row = np.floor(_GRID_Y / 12)
        mortar = (np.mod(_GRID_Y, 12) < 2.5) | (np.mod(_GRID_X + 12 * (row % 2), 24) < 2.5)
        pattern = mortar * 0.35
    return (colour * (1 + pattern.astype(np.float32))[..., None]).astype(np.float32)


def _fill(scene: _Scene, colour: _Float) -> _Float:
    """Object colour [S, S, 3] with its texture, everywhere (masking comes later)."""
    return np.where(scene.ink[..., None], _second_colour(colour), colour).astype(np.float32)


def _over(below: _Float, above: _Float, cover: _Float) -> _Float:
    return below + (above - below) * cover[..., None]


def _grow(cover: _Float, pixels: int) -> _Float:
    picture = Image.fromarray((cover * 255).astype(np.uint8))
    grown = picture.filter(ImageFilter.MaxFilter(2 * pixels + 1))
    return np.asarray(grown, np.float32) / 255.0


def _edges(cover: _Float, width: int) -> _Float:
    return _grow(cover, width) - cover


def _shrink(picture: _Float) -> _Float:
    """Box-filter [S, S, 3] down to [H, W, 3]."""
    k = SUPERSAMPLING
    return picture.reshape(IMAGE_SIZE, k, IMAGE_SIZE, k, 3).mean(axis=(1, 3))


def _to_uint8(picture: _Float) -> NDArray[np.uint8]:
    return np.clip(np.rint(picture), 0, 255).astype(np.uint8)


def _photo_canvas(spec: Spec, scene: _Scene, rng: np.random.Generator) -> _Float:
    """Lit object with a soft shadow on a textured ground, [S, S, 3] before the camera."""
    ground = _background(spec.background, _jitter(BACKGROUNDS[spec.background][1], rng, 16), rng)
    ground = ground * (1 + 0.12 * _smooth_noise(rng, 3))[..., None]
    shift = int(rng.integers(3, 7))
    shadow = np.zeros_like(scene.cover)
    shadow[shift:, shift:] = scene.cover[:-shift, :-shift]
    ground = ground * (1 - 0.45 * shadow)[..., None]
    direction = rng.uniform(0, 2 * math.pi)
    light = 1 - 0.25 * (scene.local[0] * math.cos(direction) + scene.local[1] * math.sin(direction))
    body = _fill(scene, _jitter(COLOURS[spec.colour], rng, 18)) * light[..., None]
    return _over(ground, body, scene.cover)


def _photo(spec: Spec, scene: _Scene, rng: np.random.Generator) -> NDArray[np.uint8]:
    picture = _shrink(_photo_canvas(spec, scene, rng))
    exposure = rng.uniform(0.85, 1.12)
    return _to_uint8(picture * exposure + rng.normal(0, 6, picture.shape).astype(np.float32))


def _cartoon(spec: Spec, scene: _Scene, rng: np.random.Generator) -> NDArray[np.uint8]:
    colour = _jitter(COLOURS[spec.colour], rng, 8)
    vivid = np.clip(colour + 0.25 * (colour - colour.mean()), 0, 255)
    flat = _jitter(BACKGROUNDS[spec.background][1], rng, 12) * 0.85 + 40
    ground = _background(spec.background, flat, rng)
    outline = np.full(3, 16, np.float32)
    picture = _over(ground, _fill(scene, vivid), scene.cover)
    return _to_uint8(_shrink(_over(picture, outline, _edges(scene.cover, 3))))


def _sketch(spec: Spec, scene: _Scene, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Coloured pencil on toned paper: outline, hatched body, texture lines, a hint of the ground."""
    tone = 0.5 * np.asarray(BACKGROUNDS[spec.background][1], np.float32) + 105
    paper = tone + 8 * _smooth_noise(rng, 6)[..., None]
    pencil = 0.6 * _jitter(COLOURS[spec.colour], rng, 14) + 6
    ground = _background(spec.background, np.full(3, 1, np.float32), rng)[..., 0]
    hint = np.clip(np.abs(ground - np.median(ground)), 0, 0.4) * (1 - scene.cover)
    marks = _edges(scene.ink.astype(np.float32), 1) * scene.cover
    hatch = (0.4 + 0.3 * (np.mod(_GRID_X + _GRID_Y, 9) < 3)) * scene.cover
    pressure = 0.85 + 0.15 * _smooth_noise(rng, 8)
    lines = np.clip(np.maximum.reduce((_edges(scene.cover, 2), marks, hatch)), 0, 1) * pressure
    picture = _over(paper, 0.6 * tone, hint.astype(np.float32))
    return _to_uint8(_shrink(_over(picture, pencil, lines.astype(np.float32))))


def _painting(spec: Spec, scene: _Scene, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Brush strokes: colours smeared along a swirl, few tones, a warm palette, woven canvas."""
    canvas = _photo_canvas(spec, scene, rng)
    swirl = 3.5
    source_x = np.clip(_GRID_X + swirl * _smooth_noise(rng, 9), 0, _S - 1).astype(np.int32)
    source_y = np.clip(_GRID_Y + swirl * _smooth_noise(rng, 9), 0, _S - 1).astype(np.int32)
    smeared = canvas[source_y, source_x]
    tones = np.rint(smeared / 42) * 42
    warm = tones * np.array((1.04, 0.94, 0.74), np.float32) + np.array((18, 12, 8), np.float32)
    weave = 1 + 0.08 * np.sin(_GRID_X * 1.05) * np.sin(_GRID_Y * 1.05)
    picture = _shrink(warm * weave[..., None])
    return _to_uint8(picture + rng.normal(0, 4, picture.shape).astype(np.float32))


_STYLE_PAINTERS: dict[
    str, Callable[[Spec, _Scene, np.random.Generator], NDArray[np.uint8]]
] = {"photo": _photo, "cartoon": _cartoon, "sketch": _sketch, "painting": _painting}  # fmt: skip


# --- words ---------------------------------------------------------------------------------------


def _with_article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _plural(noun: str, count: int) -> str:
    if count == 1 or noun == "fish":
        return noun
    return noun + ("es" if noun.endswith(("s", "h", "x")) else "s")


@functools.cache
def _pairs(shapes: tuple[str, ...], held_out: bool | None) -> tuple[tuple[str, str], ...]:
    pairs = tuple(
        (shape, colour)
        for shape in shapes
        for colour in COLOURS
        if held_out is None or ((shape, colour) in HELD_OUT_PAIRS) is held_out
    )
    if not pairs:
        raise DataError(f"no shape-colour pair left to draw from for the shapes {', '.join(shapes)}")
    return pairs
