"""What a training step of a GRPOModule hands on: its metrics to the loggers, its rewards to the watch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollplex.data.prompt_loader import no_usable_row
from rollplex.metrics import check_names, without_gaps
from rollplex.rewards.missing import RewardWatch, scored
from rollplex.step import GRPOStep
from rollplex.tasks.base import VLMTask

ON_THE_BAR = ("reward", "tokens_per_second")


class StepLog:
    """Of one run."""

    def __init__(self, module: Any, task: VLMTask) -> None:
        self._module = module
        self._watch = RewardWatch(task)
        self._names: set[str] = set()
        """Metrics logged so far."""
        self._empty = 0
        """Batches in a row without a usable row."""

    def log(self, metrics: Mapping[str, float], batch_size: int = 1) -> None:
        """metrics: of all ranks; empty for a batch without a usable row. Lightning repeats a name that was logged
        before and is left out now, with its old value."""
        self._empty = 0 if metrics else self._empty + 1
        check_names(metrics)
        for name, value in without_gaps(metrics, self._names).items():
            self._module.log(name, value, batch_size=batch_size, prog_bar=name in ON_THE_BAR)
        self._names |= metrics.keys()

    def no_rows(self) -> None:
        """Of a batch in which all rows of all ranks were bad. ValueError on every rank after an epoch of them."""
        self.log({})
        if self._empty == len(self._module.trainer.train_dataloader):
            bad = self._module.trainer.datamodule.bad_rows[-1:]
            last = "".join(f"; the last one of this rank: row {row!r}: {why}" for row, why in bad)
            raise ValueError(no_usable_row("train", self._empty) + last)

    def check_rewards(self, rounds: Sequence[GRPOStep]) -> None:
        """ValueError on every rank when no response has a reward (`RewardWatch`). rounds: of a rank's batch; one, or
        with `dynamic_sample` all of them. A collective."""
        groups = [group for part in rounds for group in part.groups.values()]
        mine = scored(groups, [failure for part in rounds for failure in part.failures])
        self._watch.check(self._module.ranks.gather(mine))
