"""Opening pictures: one rule that turns any picture into 8-bit RGB, used by every reader of a prompt.

| Pillow mode | rule |
|---|---|
| RGB | unchanged (the same object) |
| 1, L, CMYK, YCbCr, HSV, LAB, RGBX, P without transparency | Pillow's own conversion to RGB |
| RGBA, LA, PA, RGBa, La, and any 8-bit picture with a transparent colour | composited over white |
| I;16 (16-bit, either byte order) | v / 257, so that 65535 becomes 255 |
| I (32-bit) | 8-bit values (all at most 255) stay, else 16-bit values as above; other values are an error |
| F (float) | values all within 0..1 are multiplied by 255, else taken as 0..255; other values are an error |

Before that the EXIF orientation is applied, and of an animation or of several pages the first is taken. Results are
rounded to the nearest level; colour profiles are not applied. Nothing is ever resized here: that is the processor's
work, which also enlarges pictures with a narrow side and refuses those it has no size for (Qwen's refuse a side more
than 200 times the other).

Files are read in the formats of `FORMATS` only, and not at all when they hold more pixels than allowed: the size stands
in the header and is read before a pixel is decoded.
"""

from __future__ import annotations

import io
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""What is read. Pillow knows more, some of which are programs (EPS starts Ghostscript) or hold whatever they like."""

MAX_IMAGE_PIXELS = 89_478_485
"""Most pixels of a picture as it is stored: where Pillow's decompression-bomb guard begins to warn. (Its error comes at
twice as many, whatever is allowed here.)"""

_ORIENTATION = 0x0112


def open_image(source: Any, *, max_pixels: int = MAX_IMAGE_PIXELS) -> Image.Image:
    """A PIL picture, a path or encoded bytes -> a loaded RGB picture (see `to_rgb`).

    max_pixels: most pixels as stored, before any resize.
    Raises ValueError or OSError for what cannot be read: truncated or broken data, more pixels than max_pixels or than
    Pillow's decompression-bomb guard allows, a format that is not in `FORMATS`, something that is no regular file, a
    URL (nothing is fetched), another type.
    """
    if isinstance(source, Image.Image):
        check_pixels(source.width, source.height, max_pixels)
        return to_rgb(source)
    if isinstance(source, str | Path):
        with open_file(source) as file:
            return _decode(file, max_pixels)
    if isinstance(source, bytes | bytearray | memoryview):
        return _decode(io.BytesIO(source), max_pixels)
    raise ValueError(f"an image must be a PIL picture, a path or bytes, not {type(source).__name__}")


def open_file(path: str | Path) -> io.BufferedReader:
    """A regular file, for reading. ValueError for a URL or anything else: a pipe would never end, a device neither."""
    if "://" in str(path):
        raise ValueError(f"{str(path)[:80]!r} is a URL; nothing is fetched: give a local path")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{str(path)[-200:]!r} is not a regular file")
    return open(path, "rb")


def check_pixels(width: int, height: int, most: int) -> None:
    """Raise ValueError for a picture that is larger than allowed."""
    if width * height > most:
        raise ValueError(f"the picture has {width}x{height} = {width * height} pixels; {most} are allowed")


def _decode(file: Any, max_pixels: int) -> Image.Image:
    with Image.open(file, formats=_formats()) as image:
        check_pixels(image.width, image.height, max_pixels)
        return to_rgb(image)


@cache
def _formats() -> tuple[str, ...]:
    """Those of `FORMATS` that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


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
    values = np.asarray(image)
    low, high = int(values.min()), int(values.max())
    if image.mode == "I" and low >= 0 and high <= 255:
        return _from_levels(values)
    if low < 0 or high > 65535:
        raise ValueError(f"mode {image.mode} holds values {low}..{high}; they must be in 0..65535")
    return _from_levels(_EIGHT_BITS[values])  # a table, because floats of a large picture would need much memory


def _from_floats(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 255):
        raise ValueError(f"mode F holds values {low:g}..{high:g}; they must be in 0..1 or 0..255")
    return _from_levels(np.rint(values * np.float32(255) if high <= 1 else values))


_EIGHT_BITS = np.rint(np.arange(65536) / 257).astype(np.uint8)
"""Level 0..65535 -> level 0..255."""


def _from_levels(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")
