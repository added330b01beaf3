"""Evaluation rollouts and their metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rollplex.data.prompt_loader import no_usable_row
from rollplex.data.records import Group, Prompt, Request, Rollout, Sample, SamplingParams
from rollplex.metrics import check_names, pass_at_k
from rollplex.ranks import Ranks
from rollplex.rewards.runner import RewardRunner
from rollplex.seeds import request_seed
from rollplex.tasks.base import Split, VLMTask


class Groups:
    """The groups of one predict batch. Opaque to Lightning, which rebuilds lists and refuses frozen dataclasses."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Group:
        return self._groups[index]


EVALUATION = -1
"""Stands in the seed where training puts its step: evaluation samples the same way whenever it runs."""


def rollout_groups(
    colocation: Any, prompts: Sequence[Prompt], sampling: SamplingParams, rewards: RewardRunner, *, seed: int
) -> list[Group]:
    """Generate `rewards.num_generations` responses per prompt and score them. Seeds follow the row's id."""
    n = rewards.num_generations
    requests = [
        Request(g, i, prompt, sampling, request_seed(seed, EVALUATION, _number(prompt.sample.id), i))
        for g, prompt in enumerate(prompts)
        for i in range(n)
    ]
    done: dict[tuple[int, int], Rollout] = {}

    def collect(rollout: Rollout) -> None:
        done[rollout.key] = rollout

    colocation.generate(requests, collect)
    groups = []
    for g, prompt in enumerate(prompts):
        rollouts = tuple(done[g, i] for i in range(n))
        result = rewards.score(prompt.sample, rollouts)
        groups.append(Group(g, prompt, rollouts, result.rewards, result.components))
    return groups


def _number(name: str) -> int:
    """Of a row id; Python's own hash changes from run to run."""
    number = 0
    for byte in name.encode():
        number = (number * 257 + byte + 1) & (2**63 - 1)
    return number


def evaluation_metrics(groups: Sequence[Group], task: VLMTask) -> dict[str, tuple[float, int]]:
    """name -> (mean over this batch, how many things it is a mean of), so that batches average right."""
    out: dict[str, tuple[float, int]] = {}
    if not groups:
        return out

    def put(name: str, values: Sequence[float]) -> None:
        values = [v for v in values if not math.isnan(v)]
        if values:
            out[name] = (sum(values) / len(values), len(values))

    put("reward", torch.cat([g.rewards for g in groups]).tolist())
    for name in sorted({name for g in groups for name in g.components}):
        put(f"reward/{name}", [v for g in groups if name in g.components for v in g.components[name].tolist()])
    rollouts = [r for g in groups for r in g.rollouts]
    put("completion_length", [float(len(r)) for r in rollouts])
    put("completions_truncated", [float(r.finish_reason == "length") for r in rollouts])
    verdicts = [_verdicts(task, g) for g in groups]
    judged = [[v for v in row if v is not None] for row in verdicts if any(v is not None for v in row)]
    put("accuracy", [float(v) for row in judged for v in row])
    k = 1
    while k <= len(groups[0].rollouts) and len(groups[0].rollouts) > 1:
        put(f"pass@{k}", [pass_at_k(len(row), sum(row), k) for row in judged if len(row) >= k])
        k *= 2
    return out


def merge_means(parts: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """`evaluation_metrics` of several ranks' groups as those of all groups. A rank without groups has none."""
    out: dict[str, tuple[float, int]] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        means = [part[name] for part in parts if name in part]
        weight = sum(w for _, w in means)
        out[name] = (means[0][0] if len(means) == 1 else sum(v * w for v, w in means) / weight, weight)
    return out


def _verdicts(task: VLMTask, group: Group) -> list[bool | None]:
    """Whether each response is right: by the first reward that judges and was given, else by `task.correct`."""
    for reward in task.rewards:
        if reward.judges and reward.name in group.components:
            return [None if math.isnan(v) else v >= 1.0 for v in group.components[reward.name].tolist()]
    return [_verdict(task, group.prompt.sample, rollout) for rollout in group.rollouts]


def _verdict(task: VLMTask, sample: Sample, rollout: Rollout) -> bool | None:
    """`task.correct`, isolated: what raises or is no truth value is left out, with a warning that names the row."""
    try:
        verdict = task.correct(sample, rollout)
        if verdict is None or isinstance(verdict, bool | np.bool_):
            return None if verdict is None else bool(verdict)
        problem = f"returned {type(verdict).__name__}, expected True, False or None"
    except Exception as error:
        problem = f"raised {type(error).__name__}: {error}"
    warnings.warn(f"row {sample.id!r}: {type(task).__name__}.correct {problem}; left out of accuracy", stacklevel=2)
    return None


class WithEvaluation:
    """The part of GRPOModule that answers without learning: validation, test, prediction."""

    hparams: Any

    @property
    def ranks(self) -> Ranks:
        raise NotImplementedError

    colocation: Any
    trainer: Any
    task: VLMTask
    _runners: dict[int, RewardRunner]
    sampling: Callable[..., SamplingParams]
    log: Callable[..., None]
    _empty = 0
    """Batches of the evaluation in progress without a usable row."""

    def rewards(self, num_generations: int) -> Any:
        """The `RewardRunner` of groups of that size, as the strategy's ranks share it."""
        runner = self._runners[num_generations]
        share = getattr(self.trainer.strategy, "shared_rewards", None)
        return runner if share is None else share(runner)

    def evaluate(self, prompts: list[Prompt]) -> list[Group]:
        """Rollouts and rewards of evaluation prompts, `eval_num_generations` each."""
        executor = self.colocation.executor
        if executor.stops_together:
            executor.stop_together(self.ranks)
            self.colocation.publish()
        if not prompts and executor.exchange is None:  # else its engine may be another rank's too
            return []
        n = self.hparams["eval_num_generations"]
        return rollout_groups(
            self.colocation, prompts, self.sampling(evaluate=True), self.rewards(n), seed=self.hparams["seed"]
        )

    def validation_step(self, batch: list[Prompt], batch_idx: int) -> Any:
        return self._score(batch, "val/", batch_idx)

    def test_step(self, batch: list[Prompt], batch_idx: int) -> Any:
        return self._score(batch, "test/", batch_idx)

    def predict_step(self, batch: list[Prompt], batch_idx: int) -> Groups:
        return Groups(self.evaluate(batch))

    def _score(self, batch: list[Prompt], prefix: str, batch_idx: int) -> list[Group]:
        groups = self.evaluate(batch)
        means = merge_means(self.ranks.gather(evaluation_metrics(groups, self.task)))
        self._check_rows(prefix, batch_idx, empty=not means)
        for name, (value, weight) in means.items():
            check_names({prefix + name: value})
            shown = name in ("reward", "accuracy")
            self.log(prefix + name, value, on_epoch=True, batch_size=weight, prog_bar=shown)
        return groups

    def _check_rows(self, prefix: str, batch_idx: int, *, empty: bool) -> None:
        """ValueError on every rank when none has had a usable row of the whole split."""
        self._empty = (self._empty if batch_idx else 0) + empty
        if not empty:
            return
        split: Split = "validation" if prefix == "val/" else "test"
        loader = self.trainer.val_dataloaders if split == "validation" else self.trainer.test_dataloaders
        if self._empty == len(loader):
            raise ValueError(no_usable_row(split, self._empty))
