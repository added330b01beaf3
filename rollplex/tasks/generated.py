"""Tasks whose rows are drawn by a seeded generator: as many as wanted, nothing downloaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from functools import cached_property
from random import Random
from typing import Any, ClassVar

from rollplex.data.records import Rollout, Sample
from rollplex.kinds import check_whole
from rollplex.tasks import one_letter
from rollplex.tasks.base import Split, VLMTask
from rollplex.tasks.scenes import BACKGROUNDS
from rollplex.tasks.settings import check_format_reward, check_image_size, check_question

TRIES = 200
"""Scenes drawn in a row that are all in the set already, before the settings are said to have too few."""


class GeneratedTask(VLMTask):
    """Rows drawn from (seed, number of the row). A scene never comes twice, in a split or in two: the one that would is
    drawn again.

    Validation has the first rows, so it does not depend on `train_size`; "test" is the validation split, as there is no
    third one. Pictures are drawn when a row is asked for; only scenes are held in memory.
    """

    names: ClassVar[Sequence[str]] = ()
    """What `question` may name in braces."""

    def __init__(
        self,
        image_size: int = 56,
        background: str = "white",
        train_size: int = 2000,
        validation_size: int = 320,
        seed: int = 0,
        question: str = "?",
        format_reward: float = 0.2,
    ) -> None:
        """
        Args:
            image_size: side of pictures and frames in pixels.
            background: white, grey or black; grey is what a model sees least of.
            train_size: training rows.
            validation_size: validation rows.
            seed: of all scenes.
            question: short, because a byte-level tokenizer pays for every letter.
            format_reward: what a well formed response is worth, however right or wrong.
        """
        check_whole("train_size", train_size, self.least_rows)
        check_whole("validation_size", validation_size, self.least_rows)
        check_whole("seed", seed, 0)
        check_format_reward(format_reward)
        check_image_size(image_size)
        check_question(question, self.names)
        if background not in tuple(BACKGROUNDS):
            raise ValueError(f"background={background!r} must be one of {', '.join(BACKGROUNDS)}")
        self.train_size, self.validation_size, self.seed = train_size, validation_size, seed
        self.image_size, self.background = image_size, background
        self.question, self.format_reward = question, format_reward

    @property
    def least_rows(self) -> int:
        """That a split must have."""
        return 1

    @abstractmethod
    def row(self, rng: Random, number: int) -> tuple[Hashable, Any]:
        """A random scene, with its right answer. Equal scenes must look equal, and only they."""

    @abstractmethod
    def asked(self, scene: Any) -> str:
        """The question about a scene."""

    @abstractmethod
    def media(self, scene: Any) -> dict[str, Any]:
        """The scene's picture or video, as a part of a chat message."""

    def samples(self, split: Split) -> Sequence[Sample]:
        return self._rows[self.validation_size :] if split == "train" else self._rows[: self.validation_size]

    @cached_property
    def _rows(self) -> tuple[Sample, ...]:
        seen: set[Hashable] = set()
        return tuple(self._sample(number, seen) for number in range(self.validation_size + self.train_size))

    def _sample(self, number: int, seen: set[Hashable]) -> Sample:
        rng = Random(f"{self.seed}-{number}")
        for _ in range(TRIES):
            scene, answer = self.row(rng, number)
            if scene not in seen:
                seen.add(scene)
                columns = {"scene": scene, "question": self.asked(scene), "answer": answer}
                return Sample(f"{type(self).__name__.lower()}-{self.seed}-{number}", columns)
        raise ValueError(
            f"these settings have too few different scenes for train_size={self.train_size} and validation_size="
            f"{self.validation_size} ({len(seen)} found): lower them, or allow more sizes, colours or shapes"
        )

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        parts = [self.media(sample["scene"]), {"type": "text", "text": sample["question"]}]
        return [{"role": "user", "content": parts}]


class ChoiceTask(GeneratedTask):
    """A generated task whose right answers are one character each.

    Row i shows a scene whose right answer is `choices[i % len(choices)]`, so that every answer has its share of each
    split: one constant answer is right in 1 / len(choices) of the rows.

    The reward has two named parts, so that their curves can be told apart:

    - `correct`: 1 when the response is one token that is the right answer, and the end token; else 0.
    - `format`: `format_reward` when the response is any one of the choices and the end token, half of it when only a
      part of that is there (`rollplex.tasks.one_letter`). Keep it well below 1, or being well formed pays as much as
      looking at the picture.
    """

    choices: Sequence[str]
    """Set before GeneratedTask's `__init__` runs."""

    @property
    def least_rows(self) -> int:
        return len(self.choices)

    @abstractmethod
    def scene(self, rng: Random, answer: str) -> Hashable:
        """A random scene to which `answer` is the right answer."""

    def row(self, rng: Random, number: int) -> tuple[Hashable, str]:
        answer = self.choices[number % len(self.choices)]
        return self.scene(rng, answer), answer

    def reward(self, sample: Sample, response: Rollout) -> dict[str, float]:
        return one_letter.score(response, sample["answer"], self.choices, self.format_reward)

    def correct(self, sample: Sample, response: Rollout) -> bool:
        return one_letter.well_formed(response, self.choices) and response.text == sample["answer"]
