"""A built-in task: read a bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from PIL import Image, ImageDraw

from rollplex.kinds import check_flag, check_whole
from rollplex.tasks.generated import ChoiceTask
from rollplex.tasks.scenes import BACKGROUNDS, COLOURS, check_names

LETTERS = "abcdefghi"
LINES = (170, 170, 170)


@dataclass(frozen=True)
class Chart:
    """Heights of the bars from left to right, in units of the grid; colour of each; the bar asked for (None: the
    tallest or the shortest)."""

    heights: tuple[int, ...]
    colours: tuple[str, ...]
    bar: int | None


class Charts(ChoiceTask):
    """Show a bar chart and ask which bar is the tallest or the shortest (the right response is its letter, a for the
    leftmost, and then the end token), or how tall one is (a digit, in units of the grid lines).
    """

    names = ("what",)

    def __init__(
        self,
        num_bars: int = 4,
        max_height: int = 9,
        ask: Literal["tallest", "shortest", "height"] = "tallest",
        colours: Sequence[str] = ("red", "blue", "green"),
        labels: bool = True,
        grid_lines: bool = True,
        image_size: int = 84,
        question: str = "{what}?",
        **settings: Any,
    ) -> None:
        """
        Args:
            num_bars: 2 to 9.
            max_height: of a bar, 2 to 9; the lowest has 1.
            ask: which bar, or how tall one is. No two bars of a chart share the largest (smallest) height if that is
                asked for.
            colours: of red, green, blue, yellow, purple, black; each bar has a random one.
            labels: write a letter under each bar.
            grid_lines: one for each unit of height. Not to be left out with `ask: height`.
            image_size: side of the picture in pixels.
            question: {what} is `tallest`, `shortest`, or the letter of the bar. Short, because a byte-level tokenizer
                pays for every letter.
        """
        check_whole("num_bars", num_bars, 2)
        check_whole("max_height", max_height, 2)
        check_flag("labels", labels)
        check_flag("grid_lines", grid_lines)
        if not 2 <= num_bars <= len(LETTERS) or not 2 <= max_height <= 9:
            raise ValueError(f"num_bars={num_bars} and max_height={max_height} must be in 2..9")
        if ask not in ("tallest", "shortest", "height"):
            raise ValueError(f"ask={ask!r} must be tallest, shortest or height")
        if ask == "height" and not grid_lines:
            raise ValueError("grid_lines=False leaves no unit to say a height in: set it to true, or ask otherwise")
        self.choices = [str(h) for h in range(1, max_height + 1)] if ask == "height" else LETTERS[:num_bars]
        super().__init__(image_size=image_size, question=question, **settings)
        self.num_bars, self.max_height, self.ask = num_bars, max_height, ask
        self.labels, self.grid_lines = labels, grid_lines
        self.colours = check_names("colours", colours, tuple(COLOURS))
        self.foot = 12 if labels else 2
        if image_size < max(self.foot + 2 + 3 * max_height, 8 * num_bars):
            raise ValueError(
                f"image_size={image_size} is too small for {num_bars} bars of up to {max_height} units: set "
                f"{max(self.foot + 2 + 3 * max_height, 8 * num_bars)} or more"
            )

    def scene(self, rng: Random, answer: str) -> Chart:
        colours = tuple(rng.choices(self.colours, k=self.num_bars))
        if self.ask == "height":
            bar, height, allowed = rng.randrange(self.num_bars), int(answer), range(1, self.max_height + 1)
        elif self.ask == "tallest":
            bar, height = LETTERS.index(answer), rng.randint(2, self.max_height)
            allowed = range(1, height)
        else:
            bar, height = LETTERS.index(answer), rng.randint(1, self.max_height - 1)
            allowed = range(height + 1, self.max_height + 1)
        heights = rng.choices(allowed, k=self.num_bars)
        heights[bar] = height
        return Chart(tuple(heights), colours, bar if self.ask == "height" else None)

    def asked(self, scene: Chart) -> str:
        return self.question.format(what=self.ask if scene.bar is None else LETTERS[scene.bar])

    def media(self, scene: Chart) -> dict[str, Any]:
        side = self.image_size
        image = Image.new("RGB", (side, side), BACKGROUNDS[self.background])
        pen = ImageDraw.Draw(image)
        base, unit, pitch = side - self.foot, (side - self.foot - 2) // self.max_height, side // self.num_bars
        for height in range(self.max_height + 1 if self.grid_lines else 1):
            pen.line((0, base - height * unit, side - 1, base - height * unit), fill=LINES)
        for number, (height, colour) in enumerate(zip(scene.heights, scene.colours, strict=True)):
            left, right = number * pitch + pitch // 5, (number + 1) * pitch - pitch // 5 - 1
            pen.rectangle((left, base - height * unit, right, base), fill=COLOURS[colour])
            if self.labels:
                pen.text(((left + right) // 2 - 2, base), LETTERS[number], fill=COLOURS["black"])
        return {"type": "image", "image": image}
