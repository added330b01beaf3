"""Opening pictures: one rule that turns any picture into 8-bit RGB, used by every reader of a prompt.

| Pillow mode | rule |
|---|---|
| RGB | unchanged (the same object) |
| 1, L, CMYK, YCbCr, HSV, P without transparency | Pillow's own conversion to RGB |
| RGBA, LA, PA, RGBa, La, and any 8-bit picture with a transparent colour | composited over white |
| I;16 (16-bit) | v / 257, so that 65535 becomes 255 |
| I (32-bit) | 8-bit values (all at most 255) stay, else 16-bit values as above; other values are an error |
| F (float) | values all within 0..1 are multiplied by 255, else taken as 0..255; other values are an error |

Before that the EXIF orientation is applied, and of an animation the first frame is taken. Results are rounded to the
nearest level. Nothing is ever resized here: that is the processor's work.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

_ORIENTATION = 0x0112


def open_image(source: Any) -> Image.Image:
    """A PIL picture, a path or encoded bytes -> a loaded RGB picture (see `to_rgb`).

    Raises ValueError or OSError for what cannot be read: truncated or broken data, a size that Pillow's
    decompression-bomb guard refuses, a URL (nothing is fetched), another type.
    """
    if isinstance(source, Image.Image):
        return to_rgb(source)
    if isinstance(source, str | Path):
        if "://" in str(source):
            raise ValueError(f"{str(source)[:80]!r} is a URL; nothing is fetched: give a local path")
        with Image.open(source) as image:
            return to_rgb(image)
    if isinstance(source, bytes | bytearray | memoryview):
        with Image.open(io.BytesIO(source)) as image:
            return to_rgb(image)
    raise ValueError(f"an image must be a PIL picture, a path or bytes, not {type(source).__name__}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Any picture as 8-bit RGB by the table above. An upright RGB picture is returned as it is."""
    if image.width < 1 or image.height < 1:
        raise ValueError(f"the picture is empty ({image.width}x{image.height})")
    image.load()
    if image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_wide_integers(image)
    if image.mode == "F":
        return _from_floats(image)
    if image.has_transparency_data:
        straight = image.convert("LA") if image.mode == "La" else image
        return _over_white(straight.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _over_white(image: Image.Image) -> Image.Image:
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _from_wide_integers(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if image.mode == "I" and values.max() <= 255 and values.min() >= 0:
        return _from_levels(values)
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"mode {image.mode} holds values {values.min()}..{values.max()}; they must be in 0..65535")
    return _from_levels(np.rint(values / 257))


def _from_floats(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):
        raise ValueError(f"mode F holds values {low:g}..{high:g}; they must be in 0..1 or 0..255")
    return _from_levels(np.rint(values * 255 if high <= 1 else values))


def _from_levels(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
