"""Runs with dynamic_sample that several ranks must go through as one does. Settings and rows by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zero_runs as z
from lightning.pytorch import Callback
from runs import PictureTask

from rollplex import Rollout, Sample
from rollplex.data.batches import RolloutBatchSampler
from rollplex.ranks import Ranks


def order_of(rows: int, rollout: int = 0) -> list[int]:
    """Rows as a run of `runs.run` takes them with batches of 4: its batch, then the further ones."""
    sampler = RolloutBatchSampler(rows, 4, seed=3)
    return sampler.rows(rollout) + sampler.further_rows(rollout)


class FlatTask(PictureTask):
    """All responses to `flat` rows are worth the same; `bad` rows cannot become prompts."""

    def __init__(self, rows: int, flat: Sequence[int], bad: Sequence[int] = ()) -> None:
        super().__init__(rows=rows)
        self.flat, self.bad = set(flat), set(bad)

    def samples(self, split: str) -> list[Sample]:
        return [
            Sample(s.id, {**s.columns, "flat": i in self.flat, "bad": i in self.bad})
            for i, s in enumerate(super().samples(split))
        ]

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        if sample["bad"]:
            raise ValueError("no prompt")
        return super().messages(sample)

    def reward(self, sample: Sample, response: Rollout) -> Any:
        return 0.5 if sample["flat"] else super().reward(sample, response)


NAMES = ("rounds", "bundled", "one_sided", "run_out", "nothing", "few_rows", "bad_rows")


def scenario(name: str) -> tuple[FlatTask, dict[str, Any]]:
    """A task and the settings it is run with."""
    settings: dict[str, Any] = dict(dynamic_sample=True, beta=0.1, entropy_coef=0.05)
    first, second, third = (order_of(12, k) for k in range(3))
    some = [first[1], first[2], first[4], second[0], third[3]]  # and one of those drawn
    if name == "rounds":  # something to replace in each of three steps
        return FlatTask(12, some), settings
    if name == "bundled":
        return FlatTask(12, some), settings | dict(loss_type="grpo", prompts_per_pass=4, max_resample_times=2)
    if name == "one_sided":  # of two ranks, the first keeps all that it has of the first batch, the other nothing
        return FlatTask(12, [first[1], first[3]]), settings | dict(steps=2)
    if name == "run_out":  # and the second rank keeps nothing in any round of the first step
        kept = {first[0], second[1]}
        return FlatTask(12, [i for i in range(12) if i not in kept]), settings | dict(steps=2, max_resample_times=1)
    if name == "nothing":
        return FlatTask(12, range(12)), settings | dict(steps=2, max_resample_times=2, weight_decay=0.5)
    if name == "few_rows":  # three further ones, of which the last round would take more
        return FlatTask(7, [i for i in range(7) if i != order_of(7)[2]]), settings | dict(steps=1, max_resample_times=9)
    assert name == "bad_rows"  # three are lacking, and two of the next ones are bad
    return FlatTask(12, first[:3], bad=[first[5], first[7]]), settings | dict(steps=1)


class Groups(Callback):
    """Of each step: place of a group -> its row, and the places of those with spread."""

    def __init__(self) -> None:
        self.rows: list[dict[int, str]] = []
        self.spread: list[list[int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows.append({g.index: g.prompt.sample.id for g in outputs["groups"]})
        self.spread.append([g.index for g in outputs["groups"] if float(g.rewards.std()) > 0])


def resample(model: str, root: Path, stage: int, name: str, **more: Any) -> dict[str, Any]:
    """A run, and the groups of all ranks."""
    task, settings = scenario(name)
    groups = Groups()
    kept = z.train(model, root, stage, extra=[groups], task=task, **settings, **more)
    ranks = Ranks.connect()
    return kept | {"rows": ranks.gather(groups.rows), "spread": ranks.gather(groups.spread)}
