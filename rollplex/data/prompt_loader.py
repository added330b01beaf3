"""What Lightning iterates: the good rows of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from rollplex.data.batches import RankRows
from rollplex.data.encode import BadRow
from rollplex.data.records import Prompt
from rollplex.tasks.base import Split
from rollplex.whereabouts import Whereabouts


def no_usable_row(split: Split, batches: int) -> str:
    return f"the {split} split has not one usable row in {batches} batches, a whole epoch"


class PromptLoader:
    """What Lightning iterates: lists of prompts, bad rows of its split taken out and reported."""

    def __init__(
        self,
        loader: DataLoader[Any],
        report: Callable[[BadRow, Split], None],
        split: Split,
        ranks: tuple[int, int],
        where: Whereabouts,
    ) -> None:
        self.loader, self.report, self.split = loader, report, split
        (self.rank, self.world), self.where = ranks, where

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[list[Prompt]]:
        return self._lists(iter(self.loader))

    def _lists(self, batches: Iterator[list[Prompt | BadRow]]) -> Iterator[list[Prompt]]:
        empty = 0
        while True:
            with self.where.inside("data"):
                batch = next(batches, None)
            if batch is None:
                return
            bad = [row for row in batch if isinstance(row, BadRow)]
            for row in bad:
                self.report(row, self.split)
            prompts = [row for row in batch if isinstance(row, Prompt)]
            empty = 0 if prompts or not batch else empty + 1
            if empty == len(self) and self.world == 1:  # else other ranks may have rows, and they ask each other
                raise ValueError(f"{no_usable_row(self.split, empty)}; the last one: {bad[-1]}")
            if self.world > 1:
                places = [self.rank + self.world * i for i, row in enumerate(batch) if isinstance(row, Prompt)]
                prompts = RankRows(prompts, places)
            yield prompts

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position comes from the module's rollout counter. (Lightning asks whether it can resume.)"""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load; see `state_dict`."""
