"""The head of the report: the few figures that a reader asks for first."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rollplex.reports.charts import number
from rollplex.reports.run_files import RunFiles
from rollplex.reports.scalars import Series
from rollplex.reports.tables import unit_for
from rollplex.residency import profile_totals

Tile = tuple[str, str, str]
"""(label, value, remark)."""


def tiles(run: RunFiles) -> list[Tile]:
    found = [_reward(run), _accuracy(run), _median(run, "Step", "time/step", "seconds")]
    found += [_median(run, "Throughput", "tokens_per_second", "tokens/s"), _hidden(run), _mismatch(run), _memory(run)]
    found += [_skipped(run)]
    return [tile for tile in found if tile is not None]


def _reward(run: RunFiles) -> Tile | None:
    reward = run.scalars.get("reward")
    if reward is None:
        return None
    first, last = ends(reward)
    batches = _batches(reward.steps[-1])
    began = "" if len(reward) == 1 else f"from {number(first, 3)}; "
    return "Reward", number(last, 3), f"{began}over {batches}"


def _accuracy(run: RunFiles) -> Tile | None:
    accuracy = run.scalars.get("val/accuracy")
    if accuracy is None:
        return None
    best = max(accuracy.values)
    when = accuracy.steps[accuracy.values.index(best)]  # the first of equals
    return "Validation accuracy", number(accuracy.values[-1], 3), f"best {number(best, 3)} after batch {when:.0f}"


def _median(run: RunFiles, label: str, name: str, unit: str) -> Tile | None:
    series = run.scalars.get(name)
    if series is None:
        return None
    return label, f"{float(f'{median(series.values):.3g}'):,g}", f"{unit}, median of the run"


def _hidden(run: RunFiles) -> Tile | None:
    """Of the seconds of the whole run: a share per batch is often 0 or 1, which no median sums up."""
    shares, seconds = run.scalars.get("overlap_efficiency"), run.scalars.get("time/prefix")
    if shares is None:
        return None
    weights = dict(zip(seconds.steps, seconds.values, strict=True)) if seconds is not None else {}
    if all(step in weights for step in shares.steps):
        total = sum(weights[step] for step in shares.steps)
        hidden = sum(weights[s] * share for s, share in zip(shares.steps, shares.values, strict=True))
        share, remark = hidden / total if total > 0 else 0.0, "of its seconds in the whole run"
    else:  # a run of an earlier version, which did not log the seconds
        share, remark = sum(shares.values) / len(shares), "mean over the rollout batches"
    return "Prefix work hidden", f"{100 * share:.0f} %", "; ".join([remark, *_stopped(run, shares)])


def _stopped(run: RunFiles, shares: Series) -> list[str]:
    """In words, from when on nothing was hidden any more because it did not pay."""
    paid = [step for step, share in zip(shares.steps, shares.values, strict=True) if share > 0]
    last = paid[-1] if paid else 0.0
    slow = run.scalars.get("units_refused/slow")
    refused = [s for s, n in zip(slow.steps, slow.values, strict=True) if s > last and n > 0] if slow else []
    if not refused or shares.steps[-1] <= last:
        return []
    slower = run.scalars.get("decode_slowdown")
    why = f": a decode step takes {100 * slower.values[-1]:.0f} % longer beside it" if slower else ""
    return [f"none after batch {last:.0f}, where it was measured not to pay{why}"]


def _mismatch(run: RunFiles) -> Tile | None:
    mismatch = run.scalars.get("mismatch_max")
    if mismatch is None:
        return None
    return "Engine against trainer", f"{max(mismatch.values):.1e}", "nats: the largest difference of the run"


def _memory(run: RunFiles) -> Tile | None:
    if run.memory is None or not run.memory.profile:
        return None
    totals = profile_totals(run.memory.profile)
    stage = max(totals, key=lambda s: totals[s])
    size, unit = unit_for(totals[stage])
    return "Memory", f"{totals[stage] / size:.1f} {unit}", f"most, in {stage.value}"


def _skipped(run: RunFiles) -> Tile | None:
    skipped = run.scalars.get("rows_skipped")
    if skipped is None or not skipped.values[-1]:
        return None
    return "Rows skipped", f"{skipped.values[-1]:,.0f}", "bad rows, left out; the run's output names each"


def ends(series: Series) -> tuple[float, float]:
    """Means of the first and the last tenth."""
    n = max(1, len(series) // 10)
    return _mean(series.values[:n]), _mean(series.values[-n:])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _batches(count: float) -> str:
    return f"{count:.0f} rollout batch{'' if count == 1 else 'es'}"
