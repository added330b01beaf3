"""Flat shapes of one colour on a plain ground: what the generated tasks draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw

from rollplex.tasks.settings import check_range

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 200, 30),
    "purple": (150, 60, 180),
    "black": (20, 20, 20),
}
KINDS = ("circle", "square", "triangle")
BACKGROUNDS = {"white": (255, 255, 255), "grey": (122, 116, 104), "black": (0, 0, 0)}
"""Grey is the mean that the processors of Qwen's and most other families subtract: such a ground is 0 for the model."""


@dataclass(frozen=True, order=True)
class Shape:
    """One shape. Its box is x..x+size by y..y+size, in pixels from the upper left corner of the picture."""

    kind: str
    colour: str
    x: int
    y: int
    size: int

    @property
    def centre(self) -> tuple[float, float]:
        return self.x + self.size / 2, self.y + self.size / 2

    @property
    def name(self) -> str:
        return f"{self.colour} {self.kind}"


def draw(shapes: Sequence[Shape], image_size: int, background: str = "white") -> Image.Image:
    """An RGB picture, image_size on each side, later shapes over earlier ones. A shape looks the same wherever it is,
    also where a part of it lies outside."""
    image = Image.new("RGB", (image_size, image_size), BACKGROUNDS[background])
    for shape in shapes:
        image.paste(COLOURS[shape.colour], (shape.x, shape.y), _stencil(shape.kind, shape.size))
    return image


@lru_cache(maxsize=256)
def _stencil(kind: str, size: int) -> Image.Image:
    stencil = Image.new("L", (size, size), 0)
    pen, last = ImageDraw.Draw(stencil), size - 1  # Pillow counts the last pixel in
    if kind == "circle":
        pen.ellipse((0, 0, last, last), fill=255)
    elif kind == "square":
        pen.rectangle((0, 0, last, last), fill=255)
    else:
        pen.polygon([(last // 2, 0), (size // 2, 0), (last, last), (0, last)], fill=255)
    return stencil


def place(
    rng: Random, sizes: Sequence[int], image_size: int, gap: int = 2, tries: int = 200
) -> list[tuple[int, int]] | None:
    """Upper left corners (x, y) for boxes of these sides, none nearer than `gap` pixels to another or to the border.

    Each is drawn evenly over the picture and drawn again while it is too near. None if that fails `tries` times.
    """
    corners: list[tuple[int, int]] = []
    for _ in range(tries):
        if len(corners) == len(sizes):
            return corners
        size = sizes[len(corners)]
        x, y = (rng.randint(gap, image_size - size - gap) for _ in range(2))
        taken = zip(corners, sizes, strict=False)  # sizes has those still to be placed too
        if not any(-size - gap < x - ox < side + gap and -size - gap < y - oy < side + gap for (ox, oy), side in taken):
            corners.append((x, y))
    return None


def check_names(setting: str, names: Sequence[str], known: Sequence[str], least: int = 1) -> tuple[str, ...]:
    """The names as a tuple. Raises ValueError for an unknown one, one given twice, or fewer than `least`."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{setting}={names!r} must be a list of names, e.g. [{', '.join(known[:2])}]")
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{setting} has {', '.join(unknown)}; known are {', '.join(known)}")
    if len(set(names)) < len(names) or len(names) < least:
        raise ValueError(f"{setting}={list(names)} must hold {least} or more, each once")
    return tuple(names)


def check_sizes(shape_size: Sequence[int], image_size: int, most: int, gap: int = 2) -> tuple[int, int]:
    """(smallest, largest) side of shapes. Raises ValueError where `most` of the largest would not fit well.

    Random places find room while the boxes, with the gaps around them, cover at most half of the picture.
    """
    low, high = check_range("shape_size", shape_size, "[smallest, largest] in pixels", least=4)
    if most * (high + gap) ** 2 > 0.5 * image_size**2 or high + 2 * gap > image_size:
        raise ValueError(
            f"{most} shapes of {high} pixels do not fit well into image_size={image_size}: raise image_size, or lower "
            "shape_size or the number of shapes"
        )
    return low, high


def random_shapes(
    rng: Random, names: Sequence[tuple[str, str]], sizes: tuple[int, int], image_size: int,
    accept: Callable[[list[Shape]], bool] = lambda shapes: True, tries: int = 1000,
) -> list[Shape]:  # fmt: skip
    """Shapes of these (kind, colour) at random places and of random sizes, apart from each other.

    accept: says whether a scene will do; another is drawn until one does.
    Raises ValueError if none does in `tries`.
    """
    for _ in range(tries):
        sides = [rng.randint(*sizes) for _ in names]
        corners = place(rng, sides, image_size)
        if corners is None:
            continue
        rows = zip(names, corners, sides, strict=True)
        shapes = [Shape(kind, colour, x, y, side) for (kind, colour), (x, y), side in rows]
        if accept(shapes):
            return shapes
    raise ValueError(
        f"no room found for {len(names)} shapes of {sizes[0]} to {sizes[1]} pixels in image_size={image_size}: raise "
        "image_size, or lower shape_size or the number of shapes"
    )
