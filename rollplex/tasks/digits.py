"""The built-in first task: read a handwritten digit (scikit-learn's 1,797 scans of real handwriting)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from PIL import Image

from rollplex.data.records import Rollout, Sample
from rollplex.tasks import one_letter
from rollplex.tasks.base import Split, VLMTask

CLASSES = 10
DIGITS = tuple("0123456789")


class Digits(VLMTask):
    """Show one digit and ask which it is; the right response is that one digit and then the end token.

    The scans come with scikit-learn (8 x 8 pixels, 17 grey levels, public domain; E. Alpaydin and C. Kaynak, "Optical
    Recognition of Handwritten Digits", UCI, 1998): nothing is downloaded. Level v becomes round(255 * v / 16), the
    picture is enlarged with Pillow's bicubic filter and repeated over the three channels.

    The split is stratified: every digit has the same share of the validation rows, give or take one. `seed` decides it
    alone. Validation rows never appear in training; "test" is the validation split, as there is no third one.

    The reward has two named parts, so that their curves can be told apart:

    - `correct`: 1 when the response is well formed and the digit is right, else 0.
    - `format`: `format_reward` when the response is well formed (one digit, then the end token), whatever the digit;
      half of it when only a part is (`rollplex.tasks.one_letter`); else 0.

    What cannot be gained: listing several digits (then nothing is well formed), never ending, or answering one
    constant digit, which earns 0.1 on average plus the format. Keep `format_reward` well below 1, or being well formed
    pays as much as reading the picture.
    """

    def __init__(
        self,
        image_size: int = 56,
        train_size: int | None = None,
        validation_size: int = 297,
        seed: int = 0,
        question: str = "digit?",
        format_reward: float = 0.2,
    ) -> None:
        """
        Args:
            image_size: side in pixels after enlarging; the vision tower of the tiny model sees (image_size / 28)^2
                tokens.
            train_size: rows used for training; None for all that validation leaves (1,500 by default).
            validation_size: rows held out, 10 to 1,787.
            seed: of the split.
            question: the prompt's text. Short, because a byte-level tokenizer pays for every letter.
            format_reward: what a well formed response is worth, whatever the digit.
        """
        total = len(_scans()[1])
        if not CLASSES <= validation_size <= total - CLASSES:
            raise ValueError(f"validation_size={validation_size} must be between {CLASSES} and {total - CLASSES}")
        if train_size is not None and not 1 <= train_size <= total - validation_size:
            raise ValueError(
                f"train_size={train_size} must be between 1 and {total - validation_size} "
                f"({total} scans less validation_size={validation_size})"
            )
        if image_size < 8:
            raise ValueError(f"image_size={image_size} must be at least 8, the size of the scans")
        if not 0 <= format_reward < 1:
            raise ValueError(f"format_reward={format_reward} must be in [0, 1): less than a right answer is worth")
        self.image_size = image_size
        self.train_size = train_size
        self.validation_size = validation_size
        self.seed = seed
        self.question = question
        self.format_reward = format_reward

    def samples(self, split: Split) -> Sequence[Sample]:
        return self._train if split == "train" else self._validation

    @cached_property
    def _order(self) -> np.ndarray:
        """Row numbers of all scans: validation first. Any stretch holds the digits in their overall shares.

        Each digit's rows are shuffled and spread evenly over [0, 1); sorting by that place interleaves the digits.
        """
        _, labels = _scans()
        rng = np.random.default_rng(self.seed)
        place = np.empty(len(labels))
        for digit in range(CLASSES):
            rows = rng.permutation(np.flatnonzero(labels == digit))
            place[rows] = (np.arange(len(rows)) + rng.random()) / len(rows)
        return np.argsort(place, kind="stable")

    @cached_property
    def _validation(self) -> tuple[Sample, ...]:
        return self._rows(self._order[: self.validation_size])

    @cached_property
    def _train(self) -> tuple[Sample, ...]:
        end = None if self.train_size is None else self.validation_size + self.train_size
        return self._rows(self._order[self.validation_size : end])

    def _rows(self, numbers: np.ndarray) -> tuple[Sample, ...]:
        scans, labels = _scans()
        rows = []
        for number in numbers:
            grey = np.rint(scans[number] * (255 / 16)).astype(np.uint8)
            image = Image.fromarray(grey).resize((self.image_size, self.image_size), Image.Resampling.BICUBIC)
            columns = {"image": image.convert("RGB"), "answer": str(labels[number])}
            rows.append(Sample(id=f"digits-{number}", columns=columns))
        return tuple(rows)

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": sample["image"]}, {"type": "text", "text": self.question}]
        return [{"role": "user", "content": parts}]

    def reward(self, sample: Sample, response: Rollout) -> dict[str, float]:
        return one_letter.score(response, sample["answer"], DIGITS, self.format_reward)

    def correct(self, sample: Sample, response: Rollout) -> bool:
        return one_letter.well_formed(response, DIGITS) and response.text == sample["answer"]


@cache
def _scans() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8) levels 0..16 and (1797,) labels; read once."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.asarray(data.images), np.asarray(data.target)
