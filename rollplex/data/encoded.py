"""A task's rows as prompts, encoded when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset

from rollplex.data.encode import BadRow, PromptEncoder
from rollplex.data.records import Prompt, Sample
from rollplex.tasks.base import Split, VLMTask


class EncodedRows(Dataset[Any]):
    """Row number -> Prompt, or the BadRow that says why not (as a value: it must pass from a worker to the parent)."""

    def __init__(self, task: VLMTask, split: Split, encoder: PromptEncoder, cache: bool) -> None:
        self.task, self.split, self.encoder = task, split, encoder
        self.rows = task.samples(split)
        self.cache: dict[int, Prompt] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self.rows)

    def sample(self, number: int) -> Sample:
        try:
            return self.rows[number]
        except Exception as error:
            names = getattr(self.rows, "row_ids", None)
            name = f"{self.split}[{number}]" if names is None else names[number]
            # What a reader says about its row is said for people; of other errors the type tells more.
            reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            raise BadRow(name, reason) from error

    def __getitem__(self, number: int) -> Prompt | BadRow:
        if self.cache is not None and number in self.cache:
            return self.cache[number]
        try:
            prompt = self.encoder.encode(self.task, self.sample(number))
        except BadRow as bad:
            place = getattr(self.rows, "place", None)  # of rows in a file
            return BadRow(bad.row_id, bad.reason, "" if place is None else place(number))
        if self.cache is not None:
            self.cache[number] = prompt
        return prompt

    def ids(self) -> Iterator[str]:
        """Of all rows that can be read. Rows with a sequence `row_ids` are not read for it."""
        names = getattr(self.rows, "row_ids", None)
        if names is not None:
            yield from names
            return
        for number in range(len(self)):
            try:
                yield self.sample(number).id
            except BadRow:
                continue
