"""Decode one image or say why it cannot be decoded."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from edgeduet_shared.errors import DataError

CORRUPT_REMEDY = "repair or remove it, or leave such images out (counted) with --set data.skip_corrupt=true"

# What Pillow raises on damaged files: UnidentifiedImageError and truncation are OSErrors, damaged PNG
# chunks are SyntaxErrors, absurd headers ValueErrors or bomb errors.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


def decode(file: Path | BinaryIO, name: str) -> Image.Image:
    """Return the decoded image in RGB; :class:`DataError` names it when that fails."""
    try:
        with Image.open(file) as image:
            return image.convert("RGB")
    except _DAMAGE as error:
        raise DataError(f"{name}: corrupt image ({_reason(error)}); {CORRUPT_REMEDY}") from error


def problem(data: bytes, *, full: bool) -> str:
    """Why ``data`` is no image, or ``""``.

    Without ``full`` only what is cheap is looked at: the header, and the checksums of a PNG. A JPEG
    cut short passes that; ``full`` decodes and finds it.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if full:
                image.load()
            else:
                image.verify()
    except _DAMAGE as error:
        return _reason(error)
    return ""


def _reason(error: BaseException) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
