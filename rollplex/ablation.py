"""What a run did, step by step, and which of its work was hidden: the material of `comparison.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from rollplex.data.records import Rollout
from rollplex.grpo.importance import MismatchStats
from rollplex.timeline import ROLLOUT_LANE, TRAIN_LANE, Timeline
from rollplex.units import ACCUMULATING_KINDS, PREFILL_KINDS, PREFIX_KINDS, UnitKind


@dataclass(frozen=True)
class Schedule:
    """What the YAML's list of callbacks makes of the same work."""

    name: str
    callbacks: tuple[str, ...] = ()
    deterministic: bool = True
    """False: gradients are summed in whatever order groups finish."""


@dataclass(frozen=True)
class Work:
    """Train-lane units of one sort, and how many ran while the engine was generating."""

    units: int = 0
    hidden_units: int = 0
    seconds: float = 0.0
    hidden_seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.units + other.units,
            self.hidden_units + other.hidden_units,
            self.seconds + other.seconds,
            self.hidden_seconds + other.hidden_seconds,
        )


@dataclass(frozen=True)
class StepTrace:
    """One rollout batch."""

    rollouts: Mapping[tuple[int, int], Rollout] = field(default_factory=dict)
    rewards: Tensor = field(default_factory=lambda: torch.zeros(0))
    """(prompts * G,), NaN where missing."""
    advantages: Tensor = field(default_factory=lambda: torch.zeros(0))
    norms: tuple[float, ...] = ()
    """Gradient norm before clipping, of each update."""
    prefix: Work = Work()
    rewards_work: Work = Work()
    suffix: Work = Work()
    """What the model computes of responses: scoring, loss and backward."""
    reused: int = 0
    """Prefix passes that served as the engine's prefill."""
    order: tuple[tuple[str, int], ...] = ()
    """Gradient-accumulating units as they ran."""
    decode_seconds: float = 0.0
    mismatch: MismatchStats | None = None
    """Trainer against engine, both at the rollout's weights, over the batch's kept tokens."""
    ratio_error: float = 0.0
    """Largest |ratio - 1| before the batch's first update: 0 unless something is stale."""
    kl: float | None = None
    """Mean per-token KL to the reference before the batch's first update; None without a reference."""


@dataclass
class RunTrace:
    """One schedule's run. Gradients are those the optimizer got, rescaled and clipped; updates without any left out."""

    steps: list[StepTrace] = field(default_factory=list)
    first_gradient: dict[str, Tensor] = field(default_factory=dict)
    last_gradient: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last update."""

    def work(self, name: str) -> Work:
        """Sum of `prefix`, `rewards_work` or `suffix` over the steps."""
        return sum((getattr(step, name) for step in self.steps), Work())

    @property
    def advantaged(self) -> int:
        """Responses with an advantage: the others teach nothing, and no fault in their gradients shows."""
        return sum(int((step.advantages != 0).sum()) for step in self.steps)

    @property
    def mismatch(self) -> dict[str, float]:
        """|trainer - engine| at the rollout's weights over all steps: mean, max (nats; NaN without tokens), tokens."""
        parts = [step.mismatch for step in self.steps if step.mismatch is not None]
        tokens = sum(float(m.tokens) for m in parts)
        mean = sum(float(m.abs_diff) for m in parts) / tokens if tokens else math.nan
        return {"mean": mean, "max": max((float(m.abs_diff_max) for m in parts), default=math.nan), "tokens": tokens}


class Recorder(Callback):
    """Writes a RunTrace during `fit`, and ends it after `steps` rollout batches."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.trace = RunTrace()
        self._rounds: list[Any] = []
        self._norms: list[float] = []

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        new_step, update = pl_module.new_step, pl_module._update

        def keep_step(*arguments: Any, **more: Any) -> Any:
            step = new_step(*arguments, **more)
            self._rounds, self._norms = getattr(step, "rounds", [step]), []
            return step

        def keep_norm(*arguments: Any) -> Any:
            metrics = update(*arguments)
            self._norms.append(metrics["grad_norm"])
            return metrics

        pl_module.new_step, pl_module._update = keep_step, keep_norm

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        named = [(n, p.grad) for n, p in pl_module.policy.named_parameters() if p.grad is not None]
        if not any(bool(g.any()) for _, g in named):
            return
        self.trace.last_gradient = {n: g.detach().to("cpu", copy=True) for n, g in named}
        self.trace.first_gradient = self.trace.first_gradient or self.trace.last_gradient

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trace = StepTrace()  # of a batch in which no row was usable
        if self._rounds:
            trace = trace_step(self._rounds, self._norms, pl_module.colocation.timeline)
        self.trace.steps.append(trace)
        self._rounds = []
        if len(self.trace.steps) == self.steps:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.trace.weights = {n: p.detach().to("cpu", copy=True) for n, p in pl_module.policy.named_parameters()}


def trace_step(rounds: list[Any], norms: list[float], timeline: Timeline) -> StepTrace:
    """Of a finished step's rounds (one, but with dynamic_sample) and the timeline of its units."""
    step, groups = rounds[0], [(part, g) for part in rounds for g in sorted(part.groups)]
    works = {"prefix": Work(), "rewards_work": Work(), "suffix": Work()}
    order, reused = [], 0
    for span in timeline.spans():
        if span.lane != TRAIN_LANE or span.name not in set(UnitKind):
            continue
        kind, hidden = UnitKind(span.name), bool(span.arguments.get("hidden"))
        sort = "prefix" if kind in PREFIX_KINDS else "rewards_work" if kind is UnitKind.REWARD else "suffix"
        works[sort] += Work(1, int(hidden), span.seconds, span.seconds if hidden else 0.0)
        reused += kind in PREFILL_KINDS and bool(span.arguments.get("prefill"))
        if kind in ACCUMULATING_KINDS:
            order.append((kind.value, int(span.arguments["index"])))
    # Of a round in which every group was left out there are none.
    passes = [part.totals[u].mismatch for part in rounds for u in range(step.num_mini_batches)]
    first_pass = [found for found in passes if found is not None]
    sums = [part.totals[0].sums for part in rounds if part.totals[0].sums is not None]
    tokens = max(sum(float(s.tokens) for s in sums), 1.0)
    ratios = [r for s in sums if float(s.tokens) for r in (float(s.ratio_max), float(s.ratio_min))] or [1.0]
    return StepTrace(
        rollouts={(part.number(g), r.index): r for part, g in groups for r in part.groups[g].rollouts},
        rewards=torch.cat([part.groups[g].rewards for part, g in groups]),
        advantages=torch.cat([part.advantages(g).advantages_BG[part._row(g)] for part, g in groups]),
        norms=tuple(norms), order=tuple(order), reused=reused, **works,
        decode_seconds=timeline.seconds(ROLLOUT_LANE, "decode"),
        mismatch=sum(first_pass[1:], first_pass[0]) if first_pass else None,
        ratio_error=max(abs(ratio - 1) for ratio in ratios),
        kl=sum(float(s.kl) for s in sums) / tokens if step.reference is not None else None,
    )  # fmt: skip


def emptiness(serial: RunTrace, schedule: Schedule, trace: RunTrace) -> str:
    """Why a comparison proves little: it may be serial with itself. "" if it does not."""
    hidden = {name: trace.work(name).hidden_units for name in ("prefix", "rewards_work", "suffix")}
    why = []
    reused = any(step.reused for step in trace.steps)
    if not any(hidden.values()) and not reused:
        why.append("nothing overlapped: no unit ran while the engine was generating")
    elif "GroupStreaming" in schedule.callbacks and not hidden["suffix"]:
        why.append("nothing but rewards streamed: no bundle was complete before the rollout ended")
    elif not schedule.deterministic and all(a.order == b.order for a, b in zip(serial.steps, trace.steps, strict=True)):
        why.append("nothing reordered: gradients were summed as in serial")
    if "PrefillReuse" in schedule.callbacks and not reused:
        why.append("nothing reused: the engine computed every prompt itself")
    if not serial.first_gradient:
        why.append("nothing learnt: no update had a gradient")
    return "; ".join(why)
