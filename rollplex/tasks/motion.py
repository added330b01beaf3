"""A built-in task: say which way a shape moves in a short video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from rollplex.kinds import check_flag, check_number, check_whole
from rollplex.tasks.generated import ChoiceTask
from rollplex.tasks.scenes import COLOURS, KINDS, Shape, check_names, draw
from rollplex.tasks.settings import check_image_size, check_range

DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Steps in the picture, x to the right and y down."""


@dataclass(frozen=True)
class MotionScene:
    """The shape in the first frame, and pixels that it moves from one frame to the next."""

    shape: Shape
    step: tuple[int, int]


class Motion(ChoiceTask):
    """Show a short video of a shape and ask which way it moves: left, right, up or down. The right response is the
    first letter of that word (l, r, u, d) and then the end token.

    With `wrap` the ground has no edges: what leaves on one side comes back on the other. So a shape is anywhere in any
    frame, whichever way it moves, and no single frame tells the answer: it is in the order of the frames alone. Without
    it a shape starts where it can move any way and stay inside. Its first frame then tells nothing, but the later ones
    tell more and more by where the shape has come to: an easier task.
    """

    names = ("colour", "kind")

    def __init__(
        self,
        directions: Sequence[str] = tuple(DIRECTIONS),
        num_frames: int = 4,
        speed: Sequence[int] = (6, 10),
        wrap: bool = True,
        fps: float = 2.0,
        colours: Sequence[str] = ("red", "blue"),
        kinds: Sequence[str] = KINDS,
        shape_size: Sequence[int] = (16, 24),
        image_size: int = 56,
        question: str = "?",
        **settings: Any,
    ) -> None:
        """
        Args:
            directions: of left, right, up, down, two or more.
            num_frames: frames of the video, two or more.
            speed: [slowest, fastest] in pixels from one frame to the next. Not so fast that the way to the same place
                through the edge is as short: at most a third of image_size.
            wrap: what leaves on one side comes back on the other, so that no single frame tells the answer.
            fps: frames per second that the model is told.
            colours: of red, green, blue, yellow, purple, black.
            kinds: of circle, square, triangle.
            shape_size: [smallest, largest] side in pixels.
            image_size: side of the frames in pixels.
            question: {colour} and {kind} are the shape's. Short, because a byte-level tokenizer pays for every letter.
        """
        self.directions = check_names("directions", directions, tuple(DIRECTIONS), least=2)
        check_whole("num_frames", num_frames, 2)  # one frame shows no motion
        check_flag("wrap", wrap)
        check_number("fps", fps)
        check_image_size(image_size)
        speeds = check_range("speed", speed, "[slowest, fastest] in pixels", least=1)
        sizes = check_range("shape_size", shape_size, "[smallest, largest] in pixels", least=4)
        if speeds[1] > image_size / 3:
            raise ValueError(
                f"speed={list(speed)} must be [slowest, fastest], from 1 to a third of image_size={image_size}"
            )
        if not fps > 0:
            raise ValueError(f"fps={fps} must be positive")
        if sizes[1] > image_size / 2:
            raise ValueError(
                f"shape_size={list(shape_size)} must be [smallest, largest], 4 to half of image_size={image_size}"
            )
        room = 2 * speeds[1] * (num_frames - 1) + sizes[1]
        if not wrap and room > image_size:
            raise ValueError(
                f"wrap=False needs {room} pixels for a shape to move either way, image_size={image_size} has fewer: "
                "lower speed, num_frames or shape_size"
            )
        self.choices = [direction[0] for direction in self.directions]
        super().__init__(image_size=image_size, question=question, **settings)
        self.num_frames, self.wrap, self.fps = num_frames, wrap, fps
        self.speed, self.sizes = speeds, sizes
        self.colours = check_names("colours", colours, tuple(COLOURS))
        self.kinds = check_names("kinds", kinds, KINDS)

    def scene(self, rng: Random, answer: str) -> MotionScene:
        size, speed = rng.randint(*self.sizes), rng.randint(*self.speed)
        reach = speed * (self.num_frames - 1)
        low, high = (0, self.image_size - 1) if self.wrap else (reach, self.image_size - size - reach)
        x, y = rng.randint(low, high), rng.randint(low, high)
        shape = Shape(rng.choice(self.kinds), rng.choice(self.colours), x, y, size)
        way = next(step for name, step in DIRECTIONS.items() if name[0] == answer)
        return MotionScene(shape, (way[0] * speed, way[1] * speed))

    def asked(self, scene: MotionScene) -> str:
        return self.question.format(colour=scene.shape.colour, kind=scene.shape.kind)

    def media(self, scene: MotionScene) -> dict[str, Any]:
        frames = [self.frame(scene, number) for number in range(self.num_frames)]
        return {"type": "video", "video": frames, "fps": self.fps}

    def frame(self, scene: MotionScene, number: int) -> Any:
        """One frame as a picture."""
        side = self.image_size
        x = (scene.shape.x + number * scene.step[0]) % side
        y = (scene.shape.y + number * scene.step[1]) % side
        # What hangs over an edge is drawn once more on the other side.
        return draw(
            [replace(scene.shape, x=x - dx, y=y - dy) for dx in (0, side) for dy in (0, side)], side, self.background
        )
