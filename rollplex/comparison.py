"""How far another schedule's run is from the serial one, and the tables that say so.

The serial schedule is the yardstick: another one runs the same units at other times, so whatever differs is a fault, or
the rounding of gradient sums where their order is free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from rollplex.ablation import RunTrace, Schedule, StepTrace, Work, emptiness

FLOOR = 1e-3
"""A parameter's gradient is measured against its own norm, but at least against this share of the whole gradient's:
where the exact value is 0 (a key bias), everything is rounding."""


@dataclass(frozen=True)
class Difference:
    """One quantity of a run against the serial one."""

    quantity: str
    identical: bool
    """Bit by bit."""
    max_abs: float
    """Of responses: how many differ."""
    relative: float
    """l2 of the difference over l2 of the serial value; of gradients the largest such number of any parameter."""
    drifts: bool = False
    """It depends on weights already updated, so in free order it carries their rounding, amplified by the optimizer."""
    parameter: str = ""
    """The one in which it is largest."""
    first_step: int = 0
    """Of responses: the first rollout batch with one that differs."""

    def within(self, tolerance: float | None) -> bool:
        """None: bit-identity."""
        return self.identical if tolerance is None else self.identical or self.relative <= tolerance

    def __str__(self) -> str:
        if self.identical:
            return "identical"
        if self.quantity == RESPONSES:
            return f"{self.max_abs:.0f} ({self.relative:.0%}), from step {self.first_step} on"
        return f"{self.max_abs:.1e} (rel {self.relative:.1e})"


RESPONSES = "responses that differ"


def compare(serial: RunTrace, other: RunTrace) -> list[Difference]:
    """Every quantity, in the order in which a fault would show."""
    out = [_responses(serial, other)]
    first, later = ([s.steps[:1] for s in (serial, other)], [s.steps[1:] for s in (serial, other)])
    out.append(_values("engine log-probs, first step", *map(_logps, first)))
    if later[0]:
        out.append(_values("engine log-probs, later steps", *map(_logps, later), drifts=True))
    for name in ("rewards", "advantages"):
        out.append(_values(name, *({i: getattr(s, name) for i, s in enumerate(t.steps)} for t in (serial, other))))
    norms = [torch.tensor([norm for step in t.steps for norm in step.norms]).double() for t in (serial, other)]
    out.append(_values("gradient norm, first update", *({"": x[:1]} for x in norms)))
    out.append(_gradients("gradients, first update", serial.first_gradient, other.first_gradient))
    if len(norms[0]) > 1:
        out.append(_values("gradient norm, later updates", *({"": x[1:]} for x in norms), drifts=True))
        out.append(_gradients("gradients, last update", serial.last_gradient, other.last_gradient, drifts=True))
    out.append(_values("weights", serial.weights, other.weights))
    return out


def _responses(serial: RunTrace, other: RunTrace) -> Difference:
    total = wrong = first = 0
    for number, (a, b) in enumerate(zip(serial.steps, other.steps, strict=True), 1):
        for key in a.rollouts.keys() | b.rollouts.keys():
            same = key in a.rollouts and key in b.rollouts
            same = same and torch.equal(a.rollouts[key].token_ids, b.rollouts[key].token_ids)
            same = same and a.rollouts[key].finish_reason == b.rollouts[key].finish_reason
            total, wrong = total + 1, wrong + (not same)
            first = first or (0 if same else number)
    return Difference(RESPONSES, wrong == 0, wrong, wrong / max(total, 1), first_step=first)


def _logps(steps: list[StepTrace]) -> dict[Any, Tensor]:
    """By what was sampled: other tokens are another difference."""
    return {
        (i, key, tuple(r.token_ids.tolist())): r.logps
        for i, step in enumerate(steps)
        for key, r in step.rollouts.items()
    }


def _values(quantity: str, serial: Mapping[Any, Tensor], other: Mapping[Any, Tensor], **more: Any) -> Difference:
    """All tensors as one vector."""
    logps = quantity.startswith("engine")
    identical, largest, square, whole, where = True, 0.0, 0.0, 0.0, ""
    for key, a, b in _pairs(serial, other, common=logps):
        identical = identical and _same(a, b)
        d = _delta(a, b)
        if d.numel() and not float(d.abs().max()) <= largest:
            largest, where = float(d.abs().max()), key if isinstance(key, str) else ""
        square, whole = square + float(d.square().sum()), whole + float(a.double().nan_to_num().square().sum())
    return Difference(
        quantity, identical, largest, _ratio(math.sqrt(square), math.sqrt(whole)), parameter=where, **more
    )


def _gradients(quantity: str, serial: Mapping[str, Tensor], other: Mapping[str, Tensor], **more: Any) -> Difference:
    """Parameter by parameter."""
    floor = FLOOR * math.sqrt(sum(float(g.double().square().sum()) for g in serial.values()))
    identical, largest, relative, where = True, 0.0, 0.0, ""
    for name, a, b in _pairs(serial, other):
        identical = identical and _same(a, b)
        d = _delta(a, b)
        ratio = _ratio(float(d.norm()), max(float(a.double().norm()), floor))
        if not ratio <= relative:
            relative, where = ratio, name
        largest = largest if float(d.abs().max()) <= largest else float(d.abs().max())
    return Difference(quantity, identical, largest, relative, parameter=where, **more)


def _pairs(
    serial: Mapping[Any, Tensor], other: Mapping[Any, Tensor], *, common: bool = False
) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """What only one run has stands against zeros, or is left out with `common`."""
    for key in [*serial, *(k for k in other if k not in serial)]:
        if key in serial and key in other:
            yield key, serial[key], other[key]
        elif not common:
            value = serial.get(key, other.get(key))
            assert value is not None
            zeros = torch.zeros_like(value)
            yield key, serial.get(key, zeros), other.get(key, zeros)


def _same(a: Tensor, b: Tensor) -> bool:
    """Missing rewards (NaN) are equal to each other."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _delta(a: Tensor, b: Tensor) -> Tensor:
    """a - b in float64: 0 where equal or both NaN, inf where only one is NaN or the shapes differ."""
    if a.shape != b.shape:
        return torch.full((1,), math.inf, dtype=torch.float64)
    a, b = a.double(), b.double()
    d = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
    return torch.where(d.isnan(), math.inf, d)


def _ratio(difference: float, value: float) -> float:
    if difference == 0:
        return 0.0
    return difference / value if value > 0 else math.inf


@dataclass(frozen=True)
class Result:
    """One schedule against serial."""

    schedule: Schedule
    trace: RunTrace
    differences: tuple[Difference, ...]
    faults: tuple[Difference, ...]
    """Those out of tolerance."""
    empty: str
    """Why the comparison proves little, if so."""

    @property
    def verdict(self) -> str:
        if self.faults:
            return "DIFFERS: " + ", ".join(d.quantity for d in self.faults)
        if all(d.identical for d in self.differences):
            return "identical"
        worst = max((d.relative for d in self.differences if not d.drifts), default=0.0)
        return f"within tolerance ({worst:.1e})"

    @property
    def summary(self) -> str:
        """The verdict, and a line for each fault."""
        text = f"{self.schedule.name}: {self.verdict}" + (f" ({self.empty})" if self.empty else "")
        return "\n".join([text, *(f"  {d.quantity}: {d} {d.parameter}".rstrip() for d in self.faults)])


def judge(serial: RunTrace, schedule: Schedule, trace: RunTrace, tolerance: float | None) -> Result:
    """Every quantity against its bar: a relative tolerance where it can be judged so; None: bit-identity of all."""
    differences = tuple(compare(serial, trace))
    faults = tuple(d for d in differences if not (d.drifts and tolerance is not None) and not d.within(tolerance))
    return Result(schedule, trace, differences, faults, emptiness(serial, schedule, trace))


@dataclass(frozen=True)
class Case:
    """All schedules under one choice of settings."""

    settings: Mapping[str, Any]
    serial: RunTrace
    results: tuple[Result, ...]
    reproducible: bool
    """Serial equals itself; looked at only when something differs."""

    @property
    def passed(self) -> bool:
        return not any(r.faults for r in self.results)

    def as_json(self) -> dict[str, Any]:
        """Everything the tables show."""
        schedules = {
            r.schedule.name: _run_json(r.trace) | {
                "verdict": r.verdict, "faults": [d.quantity for d in r.faults], "caveat": r.empty,
                "differences": {d.quantity: asdict(d) for d in r.differences},
            }
            for r in self.results
        }  # fmt: skip
        head = {"settings": dict(self.settings), "passed": self.passed, "reproducible": self.reproducible}
        return head | {"serial": _run_json(self.serial), "schedules": schedules}


def _run_json(trace: RunTrace) -> dict[str, Any]:
    works = {sort: asdict(trace.work(sort)) for sort in ("prefix", "rewards_work", "suffix")}
    steps: dict[str, Any] = {"kl": [s.kl for s in trace.steps], "ratio_error": [s.ratio_error for s in trace.steps]}
    steps |= {"mismatch": trace.mismatch, "responses_with_advantage": trace.advantaged}
    return works | steps | {"decode_seconds": sum(s.decode_seconds for s in trace.steps)}


# ---- what is shown ----


def difference_table(case: Case) -> Table:
    """A row per quantity, a column per schedule."""
    steps, results = case.serial.steps, case.results
    count = f"{sum(len(step.rollouts) for step in steps)} responses, {case.serial.advantaged} with an advantage"
    table = Table(title=f"Against the serial schedule: {len(steps)} rollout batches, {count}")
    table.add_column("largest difference")
    for result in results:
        table.add_column(result.schedule.name)
    for row in zip(*(r.differences for r in results), strict=True):
        cells = []
        for result, d in zip(results, row, strict=True):
            judged = "" if d.identical or not d.drifts else " *"
            cells.append(f"{d} <-- DIFFERS" if d in result.faults else f"{d}{judged}")
        table.add_row(row[0].quantity, *cells)
    if any(d.drifts and not d.identical and d not in r.faults for r in results for d in r.differences):
        table.caption = "* not judged: carries the rounding of weights already updated"
    return table


def work_table(case: Case) -> Table:
    """What was hidden, and engine against trainer."""
    table = Table(title="What ran")
    for name in (
        "schedule", "prefix hidden", "reused", "rewards hidden", "suffix hidden", "decode", "|trainer - engine|", "max",
        "tokens", "|ratio-1|", "KL at start",
    ):  # fmt: skip
        table.add_column(name)
    for name, trace in (("serial", case.serial), *((r.schedule.name, r.trace) for r in case.results)):
        m = trace.mismatch
        kl = next((step.kl for step in trace.steps), None)
        table.add_row(
            name, _hidden(trace.work("prefix")), str(sum(step.reused for step in trace.steps)),
            *(_hidden(trace.work(sort)) for sort in ("rewards_work", "suffix")),
            f"{sum(s.decode_seconds for s in trace.steps):.2f} s", f"{m['mean']:.1e}", f"{m['max']:.1e}",
            f"{m['tokens']:.0f}", f"{max(s.ratio_error for s in trace.steps):.1e}", "-" if kl is None else f"{kl:.1e}",
        )  # fmt: skip
    return table


def case_table(cases: Sequence[Case]) -> Table:
    """A row per case of a sweep."""
    table = Table(title="Cases")
    for name in (*cases[0].settings, *(r.schedule.name for r in cases[0].results), "prefix hidden", "suffix hidden"):
        table.add_column(name)
    for case in cases:
        verdicts = [r.verdict + (f" ({r.empty.partition(':')[0]})" if r.empty else "") for r in case.results]
        prefix, suffix = case.results[0].trace.work("prefix"), case.results[-1].trace.work("suffix")
        hidden = [f"{w.hidden_units}/{w.units}" for w in (prefix, suffix)]
        table.add_row(*map(str, case.settings.values()), *verdicts, *hidden)
    return table


def _hidden(work: Work) -> str:
    return f"{work.hidden_units}/{work.units} ({work.hidden_seconds:.2f}/{work.seconds:.2f} s)"


def dumps(report: Any) -> str:
    """JSON text; it has no inf and NaN, so they become strings."""
    return json.dumps(_finite(report), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
