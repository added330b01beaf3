"""One named part of a task's reward, as an object that a YAML file can name.

Shape legend: G responses of a group.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Sequence
from typing import ClassVar

from rollplex.data.records import Rollout, Sample

Score = float | None


class Reward:
    """Subclass this and define `score`, or `score_group` where one call for a whole group is cheaper. Either may be
    `async`: the responses of a group then wait together.

    A score is a number, or None: this reward does not apply. None for every response of a group leaves the reward out
    of that group's totals; None for some makes these responses missing (see `RewardRunner`).

    Args:
        weight: what its score is multiplied by in the total; 0 only logs it.
        name: in metrics and logs; None takes the class's, ExactMatch as exact_match.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that a row must have. A row of a `FileTask` without one is a bad row."""

    judges: ClassVar[bool] = False
    """Whether 1 means that the response is right: validation's accuracy is then taken from this reward."""

    may_hang: ClassVar[bool] = False
    """Whether it calls code that a timer signal cannot interrupt, so that only worker processes bound its time."""

    def __init__(self, weight: float = 1.0, name: str | None = None) -> None:
        if not math.isfinite(weight):
            raise ValueError(f"{type(self).__name__}: weight={weight} must be a finite number")
        self.weight = weight
        self.name = name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()

    def score(self, sample: Sample, response: Rollout) -> Score | Awaitable[Score]:
        """Of one response."""
        raise NotImplementedError(f"{type(self).__name__} must define score or score_group")

    def score_group(self, sample: Sample, responses: Sequence[Rollout]) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """Of the given responses of one group (at most G), in their order. Only called where a subclass defines it; the
        time limit then holds for the whole call, and a failure costs all of them."""
        raise NotImplementedError

    @property
    def by_group(self) -> bool:
        """Whether `score_group` is called rather than `score`."""
        return type(self).score_group is not Reward.score_group

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.score_group if self.by_group else self.score)
