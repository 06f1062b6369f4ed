"""Folders of images as devices have them: pictures of the generated world, each client its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from edgeduet_shared import world

SHAPES = ("circle", "square", "triangle", "star")


def write_images(
    folder: Path, counts: Mapping[str, int], *, style: str = "photo", seed: int = 0, first: int = 0
) -> None:
    """Write ``counts[shape]`` pictures into ``folder/shape/``, named by number from ``first`` on."""
    for shape, count in counts.items():
        pictures, _ = world.world_images(style, (shape,), first + count, seed)
        (folder / shape).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + count):
            Image.fromarray(pictures[number]).save(folder / shape / f"{number:04d}.png")
