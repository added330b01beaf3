"""A reward for grounding: how well boxes in a response lie over the row's."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import regex

from rollplex.data.records import Rollout, Sample
from rollplex.rewards.base import Reward
from rollplex.rewards.extract import SECONDS, check_pattern, extract_answer

MOST_BOXES = 64
"""Boxes of a response that are compared; one with more than that many gets 0."""

_NUMBER = r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
_BOX = regex.compile(rf"[\[(]{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}[\])]")
_PAIRS = regex.compile(rf"[\[(]{_NUMBER},{_NUMBER}[\])]\s*,\s*[\[(]{_NUMBER},{_NUMBER}[\])]")


class BoxIoU(Reward):
    """Intersection over union of the boxes in a response with those of the column `answer`.

    Boxes are four numbers in brackets, [x1, y1, x2, y2] or ((x1, y1), (x2, y2)), in whatever unit the answer has. With
    several, the pairing that makes the sum of overlaps largest counts, divided by the larger number of boxes: one too
    many costs as much as one too few.
    """

    columns = ("answer",)

    def __init__(
        self,
        threshold: float | None = None,
        extract: str | None = None,
        box_format: Literal["xyxy", "xywh"] = "xyxy",
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        """
        Args:
            threshold: 1 for an IoU of at least this much, 0 below; null gives the IoU itself. With a threshold the
                reward also judges: validation's accuracy is its share of ones.
            extract: as of `ExactMatch`.
            box_format: of answers and responses: two corners, or a corner with width and height.
        """
        super().__init__(weight, name)
        if threshold is not None and not 0 < threshold <= 1:
            raise ValueError(f"BoxIoU: threshold={threshold} must be in (0, 1], or null for the IoU itself")
        if box_format not in ("xyxy", "xywh"):
            raise ValueError(f"BoxIoU: box_format={box_format!r} must be xyxy or xywh")
        if extract not in (None, "boxed", "tag"):
            check_pattern(extract, "BoxIoU: extract")
        self.threshold, self.extract, self.box_format = threshold, extract, box_format
        self.judges = threshold is not None  # type: ignore[misc]

    def score(self, sample: Sample, response: Rollout) -> float:
        wanted = self._corners(_boxes_of(sample["answer"]))
        if not len(wanted) or not _sound(wanted).all():
            raise ValueError(f"the answer {str(sample['answer'])[:80]!r} holds no boxes, or one without an area")
        text = extract_answer(response.text, self.extract)
        given = self._corners(find_boxes(text or ""))
        if not 0 < len(given) <= MOST_BOXES:
            return 0.0
        overlap = mean_iou(given, wanted)
        return overlap if self.threshold is None else float(overlap >= self.threshold)

    def _corners(self, boxes: Sequence[Sequence[float]]) -> np.ndarray:
        corners = np.asarray(boxes, dtype=np.float64).reshape(-1, 4)
        if self.box_format == "xywh":
            corners[:, 2:] += corners[:, :2]
        return corners


def find_boxes(text: str) -> list[list[float]]:
    """Every box in a text, in order."""
    matches = [*_BOX.finditer(text, timeout=SECONDS), *_PAIRS.finditer(text, timeout=SECONDS)]
    return [[float(number) for number in match.groups()] for match in sorted(matches, key=lambda m: m.start())]


def mean_iou(given: np.ndarray, wanted: np.ndarray) -> float:
    """Sum of the best pairing's IoUs over the larger number of boxes. given: (N, 4), wanted: (M, 4), corners."""
    from scipy.optimize import linear_sum_assignment

    table = iou(given, wanted)
    rows, columns = linear_sum_assignment(table, maximize=True)
    return float(table[rows, columns].sum() / max(len(given), len(wanted)))


def iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(N, 4) and (M, 4) corners -> (N, M) intersection over union; 0 for a box without an area."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=-1)
    area_a, area_b = (np.clip(box[:, 2:] - box[:, :2], 0, None).prod(axis=-1) for box in (a, b))
    union = area_a[:, None] + area_b[None] - shared
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((shared > 0) & np.isfinite(union), shared / union, 0.0)


def _sound(boxes: np.ndarray) -> np.ndarray:
    return np.isfinite(boxes).all(axis=-1) & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])


def _boxes_of(answer: Any) -> list[list[float]]:
    """A box (four numbers, or two corners), a list of boxes, or text that holds them."""
    if isinstance(answer, str):
        try:
            return _boxes_of(json.loads(answer))
        except ValueError:
            return find_boxes(answer)
    if not isinstance(answer, list | tuple) or not answer:
        return []
    single = not isinstance(answer[0], list | tuple) or _is_pair(answer)
    boxes = [_flat(box) for box in ([answer] if single else answer)]
    if any(len(box) != 4 or not all(isinstance(v, int | float) and math.isfinite(v) for v in box) for box in boxes):
        return []
    return [[float(value) for value in box] for box in boxes]


def _is_pair(box: Any) -> bool:
    """Whether it is two corners, [[x1, y1], [x2, y2]]."""
    return (
        isinstance(box, list | tuple) and len(box) == 2
        and all(isinstance(corner, list | tuple) and len(corner) == 2 for corner in box)
        and not any(isinstance(value, list | tuple) for corner in box for value in corner)
    )  # fmt: skip


def _flat(box: Any) -> list[Any]:
    """The four numbers of a box; anything else gives no four."""
    if _is_pair(box):
        return [value for corner in box for value in corner]
    return list(box) if isinstance(box, list | tuple) else []
