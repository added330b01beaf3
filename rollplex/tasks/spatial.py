"""A built-in task: say where one shape is, seen from another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rollplex.kinds import check_whole
from rollplex.tasks.generated import ChoiceTask
from rollplex.tasks.scenes import COLOURS, KINDS, Shape, check_names, check_sizes, draw, random_shapes
from rollplex.tasks.settings import check_question

RELATIONS = {"left": (-1, 0), "right": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Directions in the picture, x to the right and y down."""


@dataclass(frozen=True)
class SpatialScene:
    """The shape that is asked for, the one it is seen from, and others (sorted), all apart from each other."""

    first: Shape
    second: Shape
    others: tuple[Shape, ...] = ()


class Spatial(ChoiceTask):
    """Show two shapes of different colours and ask where one is, seen from the other: left, right, above or below. The
    right response is the first letter of that word (l, r, a, b) and then the end token.

    The way between their centres is at least twice as long in the right direction as across it, so no answer is in
    doubt.
    """

    names = ("first", "second", "first_kind", "second_kind")

    def __init__(
        self,
        relations: Sequence[str] = tuple(RELATIONS),
        colours: Sequence[str] = ("red", "blue"),
        kinds: Sequence[str] = KINDS,
        targets: Sequence[str] | None = None,
        others: int = 0,
        shape_size: Sequence[int] = (10, 16),
        question: str = "{first}?",
        **settings: Any,
    ) -> None:
        """
        Args:
            relations: of left, right, above, below, two or more.
            colours: of red, green, blue, yellow, purple, black, two or more; no two shapes of a picture share one.
            kinds: of circle, square, triangle.
            targets: colours of the shape that is asked for; None: every one. With a single one the question tells
                nothing, and the task is easier.
            others: further shapes, which are not asked about.
            shape_size: [smallest, largest] side in pixels.
            question: {first} and {second} are the colours, {first_kind} and {second_kind} the kinds of shape. Short,
                because a byte-level tokenizer pays for every letter; where there are no others, {first} is enough.
        """
        self.relations = check_names("relations", relations, tuple(RELATIONS), least=2)
        self.colours = check_names("colours", colours, tuple(COLOURS), least=2)
        self.kinds = check_names("kinds", kinds, KINDS)
        self.targets = self.colours if targets is None else check_names("targets", targets, self.colours)
        check_whole("others", others, 0)
        check_question(question, self.names)
        if not 0 <= others <= len(self.colours) - 2:
            raise ValueError(
                f"others={others} must be 0 to {len(self.colours) - 2}: no two shapes share one of the "
                f"{len(self.colours)} colours"
            )
        if others and "{second" not in question:
            raise ValueError(
                f"question={question!r} does not say from where: with others={others} it must name {{second}}"
            )
        self.choices = [relation[0] for relation in self.relations]
        super().__init__(question=question, **settings)
        self.others = others
        self.sizes = check_sizes(shape_size, self.image_size, 2 + others)

    def scene(self, rng: Random, answer: str) -> SpatialScene:
        first = rng.choice(self.targets)
        rest = [colour for colour in self.colours if colour != first]
        colours = [first, *rng.sample(rest, 1 + self.others)]
        names = [(rng.choice(self.kinds), colour) for colour in colours]
        shapes = random_shapes(rng, names, self.sizes, self.image_size, lambda s: relation(s[0], s[1]) == answer)
        return SpatialScene(shapes[0], shapes[1], tuple(sorted(shapes[2:])))

    def asked(self, scene: SpatialScene) -> str:
        first, second = scene.first, scene.second
        return self.question.format(
            first=first.colour, second=second.colour, first_kind=first.kind, second_kind=second.kind
        )

    def media(self, scene: SpatialScene) -> dict[str, Any]:
        return {
            "type": "image",
            "image": draw([scene.first, scene.second, *scene.others], self.image_size, self.background),
        }


def relation(first: Shape, second: Shape) -> str | None:
    """First letter of where `first` is, seen from `second`; None if that is in doubt."""
    dx, dy = (a - b for a, b in zip(first.centre, second.centre, strict=True))
    for name, (along_x, along_y) in RELATIONS.items():
        along, across = dx * along_x + dy * along_y, dx * along_y - dy * along_x
        if along > 0 and along >= 2 * abs(across):
            return name[0]
    return None
