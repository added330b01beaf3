"""A built-in task: say where a shape is, as a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

import regex
from PIL import Image, ImageDraw

from rollplex.data.records import Rollout, Sample
from rollplex.kinds import check_number, check_whole
from rollplex.rewards.boxes import BoxIoU
from rollplex.tasks.generated import GeneratedTask
from rollplex.tasks.scenes import BACKGROUNDS, COLOURS, check_names
from rollplex.tasks.settings import check_image_size

Box = tuple[int, int, int, int]
NUMBERS = 4
DIGITS = tuple("0123456789")
BRACKETS = regex.compile(r"\[\d+, ?\d+, ?\d+, ?\d+\]")


@dataclass(frozen=True)
class GroundingScene:
    """The box that is asked for and the others, each with its colour. Corners in cells of the grid, x1, y1, x2, y2."""

    box: Box
    colour: str
    others: tuple[tuple[Box, str], ...]


class Grounding(GeneratedTask):
    """Show rectangles of different colours and ask for the box around one; the reward is the overlap of the response's
    box with the right one (`rollplex.rewards.BoxIoU`).

    Corners lie on a grid. With `answer_form: digits` a response is the four digits x1 y1 x2 y2 in cells of the grid, as
    "1368": short enough for a model that knows no language. Nothing after them is looked at, so `max_completion_length:
    4` is enough; a random model that has learnt to write digits ends after four of them too rarely to learn it. With
    `brackets` it is [x1, y1, x2, y2] in pixels and the end token, as models write it that have learnt grounding.

    The reward has two named parts: `iou`, and `format`. With digits `format` grows with each of the four places that
    holds a digit; with brackets it is all or nothing.
    """

    names = ("colour",)

    def __init__(
        self,
        grid: int = 8,
        min_cells: int = 2,
        max_cells: int = 5,
        answer_form: Literal["digits", "brackets"] = "digits",
        colours: Sequence[str] = ("red", "blue"),
        targets: Sequence[str] | None = None,
        max_others: int = 1,
        right_iou: float = 0.5,
        image_size: int = 56,
        question: str = "{colour}?",
        **settings: Any,
    ) -> None:
        """
        Args:
            grid: cells on each side of the picture, 3 or more; at most 9 for digits.
            min_cells: smallest side of a rectangle, in cells.
            max_cells: largest side of a rectangle, in cells.
            answer_form: four digits in cells of the grid, or [x1, y1, x2, y2] in pixels.
            colours: of red, green, blue, yellow, purple, black; no two rectangles of a picture share one.
            targets: colours that are asked for; None: every one.
            max_others: further rectangles, 0 to this many, none over another.
            right_iou: overlap from which validation counts a response as right.
            image_size: side of the picture in pixels, a multiple of grid.
            question: {colour} is that of the rectangle asked for.
        """
        if answer_form not in ("digits", "brackets"):
            raise ValueError(f"answer_form={answer_form!r} must be digits or brackets")
        for name, value, least in (
            ("grid", grid, 3), ("min_cells", min_cells, 1), ("max_cells", max_cells, 1), ("max_others", max_others, 0),
        ):  # fmt: skip
            check_whole(name, value, least)
        check_image_size(image_size)
        check_number("right_iou", right_iou)
        if grid < 3 or (answer_form == "digits" and grid > 9):
            raise ValueError(f"grid={grid} must be 3 or more, and at most 9 where one digit says a place")
        if not 1 <= min_cells <= max_cells < grid:
            raise ValueError(
                f"min_cells={min_cells} must be 1 to max_cells={max_cells}, and that less than grid={grid}"
            )
        if image_size % grid:
            raise ValueError(f"image_size={image_size} must be a multiple of grid={grid}")
        if not 0 < right_iou <= 1:
            raise ValueError(f"right_iou={right_iou} must be in (0, 1]")
        super().__init__(image_size=image_size, question=question, **settings)
        self.colours = check_names("colours", colours, tuple(COLOURS))
        self.targets = self.colours if targets is None else check_names("targets", targets, self.colours)
        if not 0 <= max_others < len(self.colours):
            raise ValueError(f"max_others={max_others} must be 0 to {len(self.colours) - 1}: no two share a colour")
        self.grid, self.min_cells, self.max_cells, self.max_others = grid, min_cells, max_cells, max_others
        self.answer_form, self.right_iou = answer_form, right_iou
        self.iou = BoxIoU()

    def row(self, rng: Random, number: int) -> tuple[GroundingScene, list[int]]:
        colour = rng.choice(self.targets)
        box = self._box(rng)
        rest = [name for name in self.colours if name != colour]
        others: list[tuple[Box, str]] = []
        for other in rng.sample(rest, rng.randint(0, self.max_others)):
            for _ in range(50):  # where there is no room, one fewer
                place = self._box(rng)
                if not any(_overlap(place, taken) for taken in (box, *(b for b, _ in others))):
                    others.append((place, other))
                    break
        answer = list(box) if self.answer_form == "digits" else self._pixels(box)
        return GroundingScene(box, colour, tuple(sorted(others))), answer

    def _box(self, rng: Random) -> Box:
        wide, high = (rng.randint(self.min_cells, self.max_cells) for _ in range(2))
        x, y = rng.randint(0, self.grid - wide), rng.randint(0, self.grid - high)
        return x, y, x + wide, y + high

    def asked(self, scene: GroundingScene) -> str:
        return self.question.format(colour=scene.colour)

    def media(self, scene: GroundingScene) -> dict[str, Any]:
        image = Image.new("RGB", (self.image_size, self.image_size), BACKGROUNDS[self.background])
        pen = ImageDraw.Draw(image)
        for box, colour in ((scene.box, scene.colour), *scene.others):
            x1, y1, x2, y2 = self._pixels(box)
            pen.rectangle((x1, y1, x2 - 1, y2 - 1), fill=COLOURS[colour])
        return {"type": "image", "image": image}

    def _pixels(self, box: Box) -> list[int]:
        cell = self.image_size // self.grid
        return [cell * v for v in box]

    def reward(self, sample: Sample, response: Rollout) -> dict[str, float]:
        return {"iou": self._overlap(sample, response), "format": self.format_reward * self._format(response)}

    def correct(self, sample: Sample, response: Rollout) -> bool:
        return self._overlap(sample, response) >= self.right_iou

    def _overlap(self, sample: Sample, response: Rollout) -> float:
        text = response.text
        if self.answer_form == "digits":
            if self._format(response) < 1:
                return 0.0
            text = f"[{','.join(text[:NUMBERS])}]"
        return self.iou.score(sample, replace(response, text=text))

    def _format(self, response: Rollout) -> float:
        if self.answer_form == "brackets":
            ended = response.finish_reason == "stop"
            return float(ended and BRACKETS.fullmatch(response.text.strip()) is not None)
        return sum(letter in DIGITS for letter in response.text[:NUMBERS]) / NUMBERS


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
