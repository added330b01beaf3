"""A reward that scores nothing: the run ends and says so, rather than go on without learning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rollplex.data.records import Group
from rollplex.rewards.runner import RewardFailure
from rollplex.tasks.base import VLMTask

PATIENCE = 3
"""Rollout batches in a row without any reward, until the run ends: a server may be away for a while, and a small batch
may hold only rows that a reward does not apply to."""


@dataclass(frozen=True)
class Scored:
    """What one rank's rewards of a rollout batch came to."""

    rewards: int
    """Responses that have one."""
    failures: int
    first: RewardFailure | None
    """The first that is no None, else the first; None without failures."""


def scored(groups: Iterable[Group], failures: Sequence[RewardFailure]) -> Scored:
    broken = [failure for failure in failures if failure.reason != "none"]
    first = next(iter([*broken, *failures]), None)
    return Scored(sum(int((~torch.isnan(g.rewards)).sum()) for g in groups), len(failures), first)


class RewardWatch:
    """Asked after each rollout batch. Every rank comes to the same verdict: it is given what all of them have."""

    def __init__(self, task: VLMTask) -> None:
        self.task = task
        self._in_a_row = 0
        self._worked = False

    def check(self, everywhere: Sequence[Scored]) -> None:
        """ValueError when no response of the batch has a reward: at once where some failed and none was ever given,
        else after `PATIENCE` batches in a row."""
        first = next((s.first for s in everywhere if s.first is not None and s.first.reason != "none"), None)
        first = first or next((s.first for s in everywhere if s.first is not None), None)
        if first is None or any(s.rewards for s in everywhere):
            self._worked |= any(s.rewards for s in everywhere)
            self._in_a_row = 0
            return
        self._in_a_row += 1
        patient = first.reason == "none" or self._worked
        if patient and self._in_a_row < PATIENCE:
            return
        total = sum(s.failures for s in everywhere)
        of = f"the {PATIENCE} last rollout batches (this one: " if patient else "this rollout batch ("
        raise ValueError(
            f"{reward_names(self.task)} gave no usable reward for any response of {of}{total} responses), so there is "
            f"nothing to learn from. The first: row {first.sample_id}, response {first.index}: {first.reason} "
            f"({first.message}). {ADVICE[first.reason]}; the checkpoints saved so far are untouched"
        )


ADVICE = {
    "none": "None means that a reward does not apply; return a number for rows it is meant for (is a return missing?)",
    "nan": "A reward is a finite number; return None for what cannot be scored",
    "raised": "Mend the reward and start again, or go on from the last checkpoint with --ckpt_path last",
    "timeout": "Raise model.reward_timeout, or make the reward faster; what calls a server needs that server up",
    "bad_type": "A reward is a number (or a dict of named numbers); return None for what cannot be scored",
    "incomplete": "Return every named reward for every response of a group",
}
"""What to do, by the reason of the first failure."""


def reward_names(task: VLMTask) -> str:
    """The rewards of a task as a reader knows them."""
    named = ", ".join(f"{reward.name} ({type(reward).__name__})" for reward in task.rewards)
    return f"rewards {named} of {type(task).__name__}" if named else f"{type(task).__name__}.reward"
