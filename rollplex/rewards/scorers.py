"""What scores a response: the task's own `reward`, or its list of rewards; and how one call of each is made.

Shape legend: G responses of a group.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from rollplex.data.records import Rollout, Sample
from rollplex.rewards import waiting
from rollplex.rewards.outcome import Outcome, TimeLimit, describe, guarded, read_score, read_value
from rollplex.tasks.base import VLMTask

TOGETHER = 1.0
"""Seconds beyond the time limit that responses waiting together have, so that each can be cut off by itself first."""


@dataclass(frozen=True)
class Scorer:
    """One thing that scores."""

    call: Callable[..., Any]
    """(sample, response) -> value, or (sample, responses) -> values; a coroutine function where is_async."""

    name: str | None = None
    """Of the component; None: the value may be a dict of named numbers, or a number called "reward"."""

    by_group: bool = False
    is_async: bool = False

    @property
    def together(self) -> bool:
        """Whether all responses of a group go into one job."""
        return self.by_group or self.is_async

    @property
    def extra_seconds(self) -> float:
        return TOGETHER if self.is_async else 0.0


def scorers_of(task: VLMTask) -> tuple[Scorer, ...]:
    """Raises ValueError for two rewards of one name: their components could not be told apart."""
    if not task.rewards:
        return (Scorer(task.reward, is_async=inspect.iscoroutinefunction(task.reward)),)
    names = [reward.name for reward in task.rewards]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two rewards are called {', '.join(twice)}; give one another name")
    return tuple(Scorer(r.score_group if r.by_group else r.score, r.name, r.by_group, r.is_async) for r in task.rewards)


def score(scorer: Scorer, sample: Sample, rollouts: Sequence[Rollout], limit: TimeLimit) -> list[Outcome]:
    """Outcome of each response, in order. Never raises for what the reward does, except KeyboardInterrupt."""
    if not scorer.together:
        assert len(rollouts) == 1
        return [_single(scorer, sample, rollouts[0], limit)]
    if scorer.is_async and _loop_is_running():
        message = "an async reward cannot run inside a running event loop (a notebook's); set reward_workers to 1"
        return [named(scorer, Outcome(reason="raised", message=message))] * len(rollouts)
    run = _group if scorer.by_group else _gather
    outcomes, failure = guarded(lambda: run(scorer, sample, rollouts, limit.allowed), limit, scorer.extra_seconds)
    if failure is not None:
        return [named(scorer, failure)] * len(rollouts)
    return [named(scorer, outcome) for outcome in outcomes]


def merge(outcomes: Sequence[Outcome]) -> Outcome:
    """Of one response: all components, and the first failure. A reward that does not apply counts as none."""
    if len(outcomes) == 1:
        return outcomes[0]
    values = {name: value for outcome in outcomes for name, value in outcome.values.items()}
    failed = next((o for o in outcomes if o.reason not in (None, "none")), None)
    if failed is None and not values:
        failed = outcomes[0]
    return Outcome(values) if failed is None else Outcome(values, failed.reason, failed.message)


def _single(scorer: Scorer, sample: Sample, rollout: Rollout, limit: TimeLimit) -> Outcome:
    value, failure = guarded(lambda: scorer.call(sample, rollout), limit)
    return named(scorer, failure if failure is not None else _read(scorer, value))


def _read(scorer: Scorer, value: Any) -> Outcome:
    return read_value(value) if scorer.name is None else read_score(scorer.name, value)


def named(scorer: Scorer, outcome: Outcome) -> Outcome:
    """A failed reward that has a name leaves its component missing, not away: the total must not be one without it."""
    if scorer.name is None or outcome.values or outcome.reason in (None, "none"):
        return outcome
    return Outcome({scorer.name: float("nan")}, outcome.reason, f"{scorer.name}: {outcome.message}")


def _gather(scorer: Scorer, sample: Sample, rollouts: Sequence[Rollout], seconds: float | None) -> list[Outcome]:
    """All responses of an async reward at once, each with the time limit of its own."""

    async def one(rollout: Rollout) -> Outcome:
        try:
            return _read(scorer, await asyncio.wait_for(scorer.call(sample, rollout), seconds))
        except TimeoutError as error:
            return Outcome(reason="timeout", message=str(error) or f"no reward within {seconds} s")
        except (Exception, asyncio.CancelledError) as error:
            return Outcome(reason="raised", message=describe(error))

    async def every() -> list[Outcome]:
        return list(await asyncio.gather(*map(one, rollouts)))

    return waiting.run(every())


def _group(scorer: Scorer, sample: Sample, rollouts: Sequence[Rollout], seconds: float | None) -> list[Outcome]:
    values = scorer.call(sample, list(rollouts))
    if scorer.is_async:
        values = waiting.run(_within(values, seconds))
    if isinstance(values, Mapping | Set | str) or not hasattr(values, "__iter__"):
        raise TypeError(
            f"expected a list of {len(rollouts)} scores in the responses' order, got {type(values).__name__}"
        )
    values = list(values)
    if len(values) != len(rollouts):
        raise ValueError(f"expected {len(rollouts)} scores, got {len(values)}")
    return [_read(scorer, value) for value in values]


async def _within(values: Awaitable[Any], seconds: float | None) -> Any:
    return await asyncio.wait_for(values, seconds)


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
