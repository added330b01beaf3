"""A built-in task: count the shapes of a colour or kind in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from rollplex.kinds import check_whole
from rollplex.tasks.generated import ChoiceTask
from rollplex.tasks.scenes import COLOURS, KINDS, Shape, check_names, check_sizes, draw, random_shapes


@dataclass(frozen=True)
class CountingScene:
    """What is asked for (None: any) and all shapes of the picture, sorted, apart from each other."""

    kind: str | None
    colour: str | None
    shapes: tuple[Shape, ...]

    @property
    def what(self) -> str:
        return " ".join(word for word in (self.colour, self.kind) if word) or "all"


class Counting(ChoiceTask):
    """Show some shapes and ask how many there are of one colour, of one kind, or of one kind in one colour; the right
    response is that one digit and then the end token. The others in the picture do not count.
    """

    names = ("what",)

    def __init__(
        self,
        min_count: int = 1,
        max_count: int = 4,
        ask: Literal["colour", "kind", "both", "all"] = "colour",
        targets: Sequence[str] | None = None,
        colours: Sequence[str] = ("red", "blue"),
        kinds: Sequence[str] = KINDS,
        max_others: int = 3,
        shape_size: Sequence[int] = (9, 12),
        question: str = "{what}?",
        **settings: Any,
    ) -> None:
        """
        Args:
            min_count: fewest shapes that count, 0 to 9.
            max_count: most shapes that count, 0 to 9.
            ask: what a question is about: a colour, a kind, both, or all shapes.
            targets: the colours (kinds, for `ask: kind`) that are asked for; None: every one.
            colours: of red, green, blue, yellow, purple, black.
            kinds: of circle, square, triangle.
            max_others: shapes that do not count, 0 to this many; none with `ask: all`.
            shape_size: [smallest, largest] side in pixels.
            question: {what} is what is asked for. Short, because a byte-level tokenizer pays for every letter.
        """
        for name, value in (("min_count", min_count), ("max_count", max_count), ("max_others", max_others)):
            check_whole(name, value, 0)
        if not 0 <= min_count < max_count <= 9:
            raise ValueError(
                f"min_count={min_count} must be below max_count={max_count}, both in 0..9: one digit answers"
            )
        if ask not in ("colour", "kind", "both", "all"):
            raise ValueError(f"ask={ask!r} must be colour, kind, both or all")
        self.choices = [str(count) for count in range(min_count, max_count + 1)]
        super().__init__(question=question, **settings)
        self.colours = check_names("colours", colours, tuple(COLOURS))
        self.kinds = check_names("kinds", kinds, KINDS)
        self.ask, self.max_others = ask, 0 if ask == "all" else max_others
        askable = self.kinds if ask == "kind" else self.colours
        self.targets = askable if targets is None else check_names("targets", targets, askable)
        if ask == "all" and targets is not None:
            raise ValueError(f"targets={list(self.targets)} has no meaning with ask=all: leave it out")
        self.sizes = check_sizes(shape_size, self.image_size, max_count + self.max_others)
        if self.max_others and not self._names(askable[0], self.kinds[0], counted=False):
            raise ValueError(
                f"max_others={max_others} needs a second of what ask={ask} asks for: add one, or set it to 0"
            )

    def scene(self, rng: Random, answer: str) -> CountingScene:
        target = rng.choice(self.targets)
        kind = rng.choice(self.kinds)
        names = rng.choices(self._names(target, kind, counted=True), k=int(answer))
        if self.max_others:
            names += rng.choices(self._names(target, kind, counted=False), k=rng.randint(0, self.max_others))
        shapes = random_shapes(rng, names, self.sizes, self.image_size)
        asked_kind = {"kind": target, "both": kind}.get(self.ask)
        asked_colour = target if self.ask in ("colour", "both") else None
        return CountingScene(asked_kind, asked_colour, tuple(sorted(shapes)))

    def _names(self, target: str, kind: str, counted: bool) -> list[tuple[str, str]]:
        """All (kind, colour) that count for the question, or all that do not."""

        def counts(k: str, c: str) -> bool:
            return {"colour": c == target, "kind": k == target, "both": c == target and k == kind, "all": True}[
                self.ask
            ]

        return [(k, c) for k in self.kinds for c in self.colours if counts(k, c) == counted]

    def asked(self, scene: CountingScene) -> str:
        return self.question.format(what=scene.what)

    def media(self, scene: CountingScene) -> dict[str, Any]:
        return {"type": "image", "image": draw(scene.shapes, self.image_size, self.background)}
