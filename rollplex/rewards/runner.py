"""Scores the responses of a group with the user's reward: isolated per response, in bounded time.

Shape legend: G responses of a group.
"""

from __future__ import annotations

import atexit
import logging
import math
import pickle
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

import torch

from rollplex.data.records import Rollout, Sample
from rollplex.grpo.advantages import combine_rewards
from rollplex.rewards.outcome import Outcome, Reason, TimeLimit
from rollplex.rewards.scorers import merge, named, score, scorers_of
from rollplex.rewards.worker import Worker
from rollplex.tasks.base import VLMTask

log = logging.getLogger(__name__)

Job = tuple[int, list[int]]
"""Number of a scorer, and the places of the responses it scores in one call."""

START_LIMIT = 300.0
"""Seconds a worker may take to import the task. It is not part of any reward's time limit."""


@dataclass(frozen=True)
class RewardFailure:
    """One response without a reward."""

    sample_id: str
    """Row of the task."""

    index: int
    """Of the response in its group."""

    reason: Reason
    """ "none" (the task said: cannot be scored), "nan" (NaN or infinite), "raised", "timeout", "bad_type",
    "incomplete" (a reward that other responses of the group have was not returned)."""

    message: str


@dataclass(frozen=True)
class RewardResult:
    """The rewards of one group."""

    rewards: torch.Tensor
    """(G,) float64 weighted total; NaN where the reward is missing or no response was given."""

    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Each named reward of this group, (G,) float64, NaN where missing. Empty if no call gave any."""

    failures: tuple[RewardFailure, ...] = ()
    """In index order, at most one per response."""

    @property
    def counts(self) -> dict[str, int]:
        """Failures by reason."""
        return dict(Counter(failure.reason for failure in self.failures))


class RewardRunner:
    """Calls `task.reward`, or each of `task.rewards`, for the responses of a group.

    A call that raises, is late, or returns None, NaN, an infinity or something that is not a number costs only its
    own response, which gets a missing reward (NaN) and is counted and logged with its row. KeyboardInterrupt and
    SystemExit in the trainer's process pass through. Use as a context manager, or call `close`.

    workers=0 calls the reward inline, interrupting it by a timer signal: cheapest, but it needs the main thread and
    a system with setitimer (`score` raises RuntimeError otherwise, unless timeout is None). It cannot interrupt a C
    extension that never looks for signals, nor a reward that uses SIGALRM itself.

    workers >= 1 spreads the responses over spawned processes; a late one is killed and replaced, whatever it does.
    The task must then be picklable, cannot keep state between responses, and may start threads and subprocesses but
    no multiprocessing children.

    One call is made for each response and each reward; where a reward is async or scores groups, one for each group:
    the responses of an async reward then wait together, each with the time limit of its own, while a reward for groups
    has one limit, and one failure, for all.
    """

    def __init__(
        self,
        task: VLMTask,
        *,
        num_generations: int,
        timeout: float | None = 60.0,
        workers: int = 0,
        reward_weights: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            num_generations: G.
            timeout: seconds one response's reward may take; None is no limit.
            workers: processes; 0 is inline.
            reward_weights: weight of every named reward ("reward" for a plain number); None weighs each by 1, or as
                `task.rewards` say.

        Raises:
            ValueError: a setting out of range, weights here and in `task.rewards`, two rewards of one name, or a task
                that cannot be pickled with workers >= 1.
        """
        if num_generations < 1:
            raise ValueError(f"num_generations={num_generations} must be at least 1")
        if timeout is not None and not (math.isfinite(timeout) and timeout > 0):
            raise ValueError(f"reward timeout={timeout} must be a positive number of seconds, or None")
        if workers < 0:
            raise ValueError(f"reward workers={workers} must be 0 (inline) or more")
        self.task = task
        self.num_generations = num_generations
        self.timeout = timeout
        self.scorers = scorers_of(task)
        self.reward_weights = _weights(task, reward_weights)
        self._num_workers = workers
        self._workers: list[Worker] = []
        self._closed = False
        self._at_exit = False
        self._names_checked = reward_weights is None
        self._task_bytes = b"" if workers == 0 else _pickle(task, f"task {type(task).__name__}")
        if hanging := [reward.name for reward in task.rewards if reward.may_hang and workers == 0 and timeout]:
            warnings.warn(
                f"{', '.join(hanging)} may spin in code that reward_timeout cannot interrupt in this process; set "
                "reward_workers to 1 or more",
                stacklevel=2,
            )

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start missing worker processes without waiting for them, so that they load while the models do."""
        if self._closed:
            raise RuntimeError("this RewardRunner is closed")
        if self._num_workers and not self._at_exit:
            # Runs before multiprocessing's own exit handler, whose SIGTERM the workers ignore.
            atexit.register(self.close)
            self._at_exit = True
        while len(self._workers) < self._num_workers:
            self._workers.append(Worker(self._task_bytes, self.timeout, START_LIMIT))

    def close(self) -> None:
        """End the worker processes. May be called twice; the runner cannot be used afterwards."""
        self._closed = True
        atexit.unregister(self.close)
        while self._workers:
            self._workers.pop().stop()

    def score(self, sample: Sample, rollouts: Sequence[Rollout]) -> RewardResult:
        """Score responses of one group; their rewards are placed by `rollout.index`.

        There may be fewer than G: an index without a response stays NaN and is no failure.

        Raises:
            ValueError: responses of several groups, an index twice or out of range, names that do not fit
                `reward_weights`, or (workers) a sample that cannot be pickled.
            RuntimeError: closed, a time limit that cannot be kept here, or workers that do not start.
        """
        if self._closed:
            raise RuntimeError("this RewardRunner is closed")
        self._check(sample, rollouts)
        jobs = [
            (s, indices)
            for s, scorer in enumerate(self.scorers)
            for indices in ([[*range(len(rollouts))]] if scorer.together else [[i] for i in range(len(rollouts))])
            if indices
        ]
        run = self._inline if self._num_workers == 0 else self._spread
        found: list[list[Outcome]] = [[] for _ in rollouts]
        for (_, indices), outcomes in zip(jobs, run(sample, rollouts, jobs), strict=True):
            for i, outcome in zip(indices, outcomes, strict=True):
                found[i].append(outcome)
        return self._collect(sample, [rollout.index for rollout in rollouts], [merge(row) for row in found])

    def _check(self, sample: Sample, rollouts: Sequence[Rollout]) -> None:
        if len({rollout.group for rollout in rollouts}) > 1:
            raise ValueError(f"row {sample.id}: responses of several groups were given for one sample")
        indices = [rollout.index for rollout in rollouts]
        if len(set(indices)) != len(indices) or not all(0 <= index < self.num_generations for index in indices):
            raise ValueError(
                f"row {sample.id}: response indices {indices} must be distinct and below "
                f"num_generations={self.num_generations}"
            )

    def _inline(self, sample: Sample, rollouts: Sequence[Rollout], jobs: Sequence[Job]) -> list[list[Outcome]]:
        with TimeLimit(self.timeout) as limit:
            return [score(self.scorers[s], sample, [rollouts[i] for i in indices], limit) for s, indices in jobs]

    def _spread(self, sample: Sample, rollouts: Sequence[Rollout], jobs: Sequence[Job]) -> list[list[Outcome]]:
        sample_bytes = _pickle(sample, f"row {sample.id}")
        outcomes: list[list[Outcome] | Outcome | None] = [None] * len(jobs)
        pending = list(range(len(jobs)))[::-1]
        try:
            while any(outcome is None for outcome in outcomes):
                self.start()
                for worker in list(self._workers):
                    if pending and worker.idle:
                        job = pending.pop()
                        number, indices = jobs[job]
                        work = pickle.dumps((number, _pickle_rollouts([rollouts[i] for i in indices])))
                        try:
                            worker.submit(job, sample_bytes, work, self.scorers[number].extra_seconds)
                        except OSError:
                            outcomes[job] = self._bury(worker)
                self._harvest(outcomes)
        except BaseException:
            # Whatever runs now would answer into the next group.
            for worker in [worker for worker in self._workers if not worker.idle]:
                self._drop(worker)
            raise
        return [self._of_job(outcome, *job) for outcome, job in zip(outcomes, jobs, strict=True) if outcome is not None]

    def _of_job(self, outcome: list[Outcome] | Outcome, number: int, indices: Sequence[int]) -> list[Outcome]:
        """One outcome for each response of a job; a failure of the whole is that of each."""
        return outcome if isinstance(outcome, list) else [named(self.scorers[number], outcome)] * len(indices)

    def _harvest(self, outcomes: list[list[Outcome] | Outcome | None]) -> None:
        """Wait for the next answer or deadline, and deal with all that are there."""
        waiting = [worker for worker in self._workers if not worker.idle]
        deadlines = [worker.deadline for worker in waiting if worker.deadline is not None]
        patience = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        answered = wait([worker.conn for worker in waiting], patience) if waiting else []
        for worker in waiting:
            job = worker.job
            if worker.conn in answered:
                outcome: list[Outcome] | Outcome | None
                try:
                    outcome = worker.receive()
                except (EOFError, OSError):
                    outcome = self._bury(worker)
                if job is not None:
                    outcomes[job] = outcome
            elif worker.deadline is not None and time.monotonic() >= worker.deadline:
                self._drop(worker)
                if job is None:
                    raise RuntimeError(f"a reward worker did not start within {START_LIMIT:.0f} s")
                outcomes[job] = Outcome(reason="timeout", message=f"no reward within {self.timeout} s")

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.kill()

    def _bury(self, worker: Worker) -> Outcome:
        """A worker that died by itself: the response it had is missing; one that never started is an error."""
        worker.process.join(1.0)
        code = worker.process.exitcode
        self._drop(worker)
        if not worker.ready:
            raise RuntimeError(
                f"a reward worker ended with exit code {code} before it was ready; the script that starts training "
                "needs `if __name__ == '__main__':` around it, or set workers to 0"
            )
        return Outcome(reason="raised", message=f"the reward ended its process, exit code {code}")

    def _collect(self, sample: Sample, indices: Sequence[int], outcomes: Sequence[Outcome]) -> RewardResult:
        names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.values))
        matrix = {name: [math.nan] * self.num_generations for name in names}
        failures: list[RewardFailure] = []
        for index, outcome in sorted(zip(indices, outcomes, strict=True), key=lambda pair: pair[0]):
            for name, value in outcome.values.items():
                matrix[name][index] = value
            reason, message = outcome.reason, outcome.message
            if reason is None and len(outcome.values) < len(names) and (lacking := self._lacking(names, outcome)):
                reason, message = "incomplete", f"component {lacking!r} was not returned, other responses have it"
            if reason is not None:
                failures.append(RewardFailure(sample.id, index, reason, message))
        components = {name: torch.tensor(values, dtype=torch.float64) for name, values in matrix.items()}
        if components:
            rewards = combine_rewards(components, self._weights_for(names))
        else:
            rewards = torch.full((self.num_generations,), torch.nan, dtype=torch.float64)
        self._report(sample, failures)
        return RewardResult(rewards, components, tuple(failures))

    def _lacking(self, names: Sequence[str], outcome: Outcome) -> str | None:
        """A weighted component that this response lacks."""
        weights = self.reward_weights
        lacking = (name for name in names if name not in outcome.values)
        return next((name for name in lacking if weights is None or weights.get(name, 1.0) != 0.0), None)

    def _weights_for(self, names: Sequence[str]) -> dict[str, float] | None:
        """Weights of the rewards this group has: rows of another kind may have others.

        A reward without a weight is an error in `combine_rewards`. A weight without a reward may be a typing error
        that the former does not show, so it is named once.
        """
        if self.reward_weights is None or not set(names) <= set(self.reward_weights):
            return self.reward_weights
        unused = sorted(set(self.reward_weights) - set(names))
        if unused and not self._names_checked:
            warnings.warn(
                f"reward_weights names {', '.join(unused)}, but the first row's rewards are: {', '.join(names)}; "
                "that is right only if other rows have them",
                stacklevel=4,
            )
        self._names_checked = True
        return {name: weight for name, weight in self.reward_weights.items() if name in names}

    def _report(self, sample: Sample, failures: Sequence[RewardFailure]) -> None:
        unexpected = [failure for failure in failures if failure.reason != "none"]
        if failures:
            first = (unexpected or list(failures))[0]
            log.log(
                logging.WARNING if unexpected else logging.DEBUG,
                "row %s: %d of %d rewards missing; response %d: %s (%s)",
                *(sample.id, len(failures), self.num_generations, first.index, first.reason, first.message),
            )


def _pickle(thing: Any, what: str) -> bytes:
    try:
        return pickle.dumps(thing)
    except Exception as error:
        raise ValueError(
            f"reward workers need a picklable {what} ({error}); set workers to 0, or make it so"
        ) from error


def _pickle_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    # A view would be pickled with the whole storage it looks at.
    own = [(r, r.token_ids.detach().cpu().clone(), r.logps.detach().cpu().clone()) for r in rollouts]
    return pickle.dumps([replace(r, token_ids=ids, logps=logps) for r, ids, logps in own])


def _weights(task: VLMTask, given: Mapping[str, float] | None) -> dict[str, float] | None:
    own = {reward.name: reward.weight for reward in task.rewards}
    if given is None:
        return own or None
    if any(weight != 1.0 for weight in own.values()):
        raise ValueError(
            f"reward_weights={dict(given)} and the task's rewards have weights too ({own}); set them in one place"
        )
    return dict(given)
