"""From a picture to what the classifier reads, without torch: the deterministic test transform of a backbone.

open_clip's transform is a chain of torchvision steps on a PIL image: resize (bicubic, antialiased), maybe a
centre crop, RGB, scale to 0..1, normalise. PIL does the resizing in both, so the numbers are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from edgeduet_shared.errors import ConfigError

_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True)
class Preprocessing:
    """The steps, as plain values that go into ``classifier.json``.

    Attributes:
        resize: ``(height, width)`` to resize to, or one number: the shorter side.
        crop: side of the centre crop, or ``None``.
        mean, std: per channel, of values in 0..1.
    """

    resize: tuple[int, ...]
    crop: int | None
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of_transform(cls, transform: Any) -> Preprocessing:
        """Read a torchvision transform.

        Raises:
            ConfigError: it has a step that this class does not know.
        """
        resize: tuple[int, ...] = ()
        crop: int | None = None
        interpolation = "bicubic"
        mean: tuple[float, ...] = (0.0, 0.0, 0.0)
        std: tuple[float, ...] = (1.0, 1.0, 1.0)
        for step in transform.transforms:
            kind = type(step).__name__
            if kind == "Resize":
                resize = (step.size,) if isinstance(step.size, int) else tuple(step.size)
                interpolation = str(step.interpolation.value)
            elif kind == "CenterCrop":
                crop = int(step.size[0])
            elif kind == "Normalize":
                mean, std = tuple(map(float, step.mean)), tuple(map(float, step.std))
            elif kind not in ("MaybeConvertMode", "MaybeToTensor", "ToTensor", "_convert_to_rgb", "function"):
                raise ConfigError(f"the backbone's image transform has a step '{kind}' that cannot be exported")
        if interpolation not in _FILTERS or not resize:
            raise ConfigError(f"the backbone's image transform cannot be exported: {transform}")
        return cls(resize, crop, interpolation, mean, std)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Preprocessing:
        """Read what ``dataclasses.asdict`` and JSON made of one."""
        lists: dict[str, Any] = {name: tuple(values[name]) for name in ("resize", "mean", "std")}
        return cls(**{**values, **lists})

    def pixels(self, image: Image.Image) -> np.ndarray:
        """Return ``(3, H, W)`` float32 of a picture of any mode and size."""
        resized = image.convert("RGB").resize(self._size(image), _FILTERS[self.interpolation])
        cut = self._cropped(resized) if self.crop else resized
        values_HWC = np.asarray(cut, np.float32) / np.float32(255)
        normalised = (values_HWC - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(normalised.transpose(2, 0, 1))

    def _size(self, image: Image.Image) -> tuple[int, int]:
        """Width and height after resizing."""
        if len(self.resize) == 2:
            return self.resize[1], self.resize[0]
        width, height = image.size
        shorter = self.resize[0]
        if width <= height:
            return shorter, int(shorter * height / width)
        return int(shorter * width / height), shorter

    def _cropped(self, image: Image.Image) -> Image.Image:
        assert self.crop is not None
        left, top = round((image.width - self.crop) / 2), round((image.height - self.crop) / 2)
        return image.crop((left, top, left + self.crop, top + self.crop))
