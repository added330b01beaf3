"""Runs beside each other, and what `scripts/bench_step.py` and `rollplex verify` measured of schedules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rollplex.reports.charts import Chart, CurveSpec, Table, bar_chart, line_chart, number
from rollplex.reports.run_files import RunFiles, Series, read_run

PARTS = ("rollout", "score", "train", "update", "publish")
"""Phases of a step whose times are logged."""
SCHEDULE_CALLBACKS = ("PrefixOverlap", "GroupStreaming", "PrefillReuse")
WARM_UP = 1
"""Rollout batches at the start that no median counts."""


@dataclass(frozen=True)
class Comparison:
    charts: tuple[Chart, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()


@dataclass(frozen=True)
class Others:
    """What --compare named."""

    runs: tuple[RunFiles, ...] = ()
    files: tuple[tuple[Path, Mapping[str, Any]], ...] = ()


def read_others(paths: Sequence[Path]) -> Others:
    """Run folders and JSON files. ValueError for anything else."""
    runs, files = [], []
    for path in paths:
        if path.is_dir():
            runs.append(read_run(path, sample_sets=0))
            continue
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--compare {path}: neither a run's folder nor a JSON file: {error}") from error
        if not isinstance(content, dict) or not ({"summary", "case"} & content.keys()):
            raise ValueError(
                f"--compare {path}: neither a run's folder nor what scripts/bench_step.py --json or rollplex verify "
                "--json (with its schedules) wrote"
            )
        files.append((path, content))
    return Others(tuple(runs), tuple(files))


def schedule_of(run: RunFiles) -> str:
    """As the config's callbacks make it."""
    names = [name for name in SCHEDULE_CALLBACKS if name in run.callbacks]
    return " + ".join(names) or ("serial" if run.config else "unknown, no config")


def compare_runs(run: RunFiles, others: Sequence[RunFiles]) -> Comparison:
    """This run beside others: seconds of a step by phase, reward over rollout batches and over time."""
    runs = _named([run, *others])
    bars = {name: _phases(one) for name, one in runs.items()}
    bars = {name: row for name, row in bars.items() if row}
    charts = []
    if bars:
        note = "Median over rollout batches, the first left out: it warms up."
        charts.append(bar_chart("compare-seconds", "Seconds of a step, by phase", note, bars, "s"))
    rewards = {name: one.scalars["reward"] for name, one in runs.items() if "reward" in one.scalars}
    if rewards:
        spec = CurveSpec("compare-reward", "Reward of the runs", (), "reward", "")
        charts.append(line_chart(spec, rewards))
    columns = (
        "run",
        "schedule",
        "rollout batches",
        "s per step",
        "beside the rollout, s (mean)",
        "tokens/s",
        "last reward",
    )
    table = Table(columns, tuple(_row(name, one) for name, one in runs.items()))
    return Comparison(tuple(charts), (("Runs", table),))


def _named(runs: Sequence[RunFiles]) -> dict[str, RunFiles]:
    """By folder name; by more of the path where names are equal."""
    names = [one.name for one in runs]
    return {
        one.name if names.count(one.name) == 1 else f"{one.folder.resolve().parent.name}/{one.name} ({i + 1})": one
        for i, one in enumerate(runs)
    }


def _phases(run: RunFiles) -> dict[str, float]:
    found = {part: _median(run.scalars.get(f"time/{part}")) for part in PARTS}
    return {part: value for part, value in found.items() if value is not None}


def _median(series: Series | None) -> float | None:
    if series is None or not len(series):
        return None
    return median(series.values[WARM_UP:] or series.values)


def _row(name: str, run: RunFiles) -> tuple[str, ...]:
    def told(metric: str) -> str:
        value = _median(run.scalars.get(metric))
        return "" if value is None else number(value)

    reward = run.scalars.get("reward")
    batches = str(len(reward)) if reward else ""
    last = number(reward.values[-1]) if reward else ""
    step, rate = told("time/step"), told("tokens_per_second")
    beside = run.scalars.get("time/hidden")  # 0 in many batches: a mean, where a median would be all or nothing
    hidden = "" if beside is None else number(sum(beside.values) / len(beside))
    return (name, schedule_of(run), batches, step, hidden, rate, last)


def compare_file(path: Path, content: Mapping[str, Any], index: int) -> Comparison:
    """A benchmark's or a verification's file. ValueError where it is damaged."""
    try:
        return _bench(path, content, index) if "summary" in content else _verified(path, content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"--compare {path}: damaged: {type(error).__name__}: {error}") from error


def _bench(path: Path, content: Mapping[str, Any], index: int) -> Comparison:
    summary = content["summary"]
    parts = ("rollout", "score", "train", "update", "publish")
    bars = {}
    for name, row in summary.items():
        known = {p: float(row[p]) for p in parts if isinstance(row.get(p), int | float)}
        bars[name] = known if known else {"step": float(row["step"])}
    note = f"{path.name}: medians of {len(content.get('rounds', []))} interleaved rounds on {_machine(content)}."
    chart = bar_chart(f"bench-{index}", "Benchmark: seconds of a step", note, bars, "s")
    rows = []
    for name, row in summary.items():
        cells = [row.get(k) for k in ("step", "step_min", "step_max", "overlap_efficiency")]
        rows.append((name, *(number(float(c)) if isinstance(c, int | float) else "" for c in cells)))
    table = Table(("contender", "s per step, median", "least", "most", "prefix work hidden, share"), tuple(rows))
    return Comparison((chart,), ((f"Benchmark {path.name}", table),))


def _machine(content: Mapping[str, Any]) -> str:
    machine = content.get("machine")
    known = machine if isinstance(machine, Mapping) else {}
    return ", ".join(str(known[k]) for k in ("cpu", "gpu") if known.get(k)) or "an unnamed machine"


def _verified(path: Path, content: Mapping[str, Any]) -> Comparison:
    schedules = content["case"]["schedules"]
    quantities = list(dict.fromkeys(q for row in schedules.values() for q in row["differences"]))
    rows = [
        (q, *(_difference(row["differences"].get(q)) for row in schedules.values())) for q in quantities
    ]  # fmt: skip
    rows.append(("verdict", *(str(row["verdict"]) for row in schedules.values())))
    title = f"rollplex verify, {path.name}: largest difference from the serial schedule"
    passed = "All within tolerance." if content.get("passed") else "Something differs."
    return Comparison((), ((title, Table(("", *schedules), tuple(rows), passed)),))


def _difference(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    return "identical" if found["identical"] else f"{float(found['max_abs']):.1e}"
