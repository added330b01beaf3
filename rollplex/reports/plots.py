"""Pictures of memory per phase and of the lanes' timeline, from a plan and from a run. Needs matplotlib."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex.planner.calibrate import traces_of
from rollplex.planner.simulate import SCHEDULES, Model, lane_spans
from rollplex.reports.tables import unit_for
from rollplex.residency import Profile, profile_from_json, profile_totals
from rollplex.timeline import GROUPS, PHASES, ROLLOUT_LANE, TRAIN_LANE, Span

if TYPE_CHECKING:
    from rollplex.planner.plan import Plan


def pyplot() -> Any:
    """matplotlib's, drawing to files; ValueError when it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plots need matplotlib, which is not installed: pip install 'rollplex[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as found

    return found


def plot_memory(profile: Profile, title: str, path: Path, *, limit: float | None = None) -> Path:
    """A stacked bar for each stage. limit: bytes of the device, drawn as a line."""
    plt = pyplot()
    totals = profile_totals(profile)
    size, unit = unit_for(max([*totals.values(), limit or 0.0], default=0.0))
    figure, axes = plt.subplots(figsize=(1.5 + 1.4 * len(totals), 5))
    colours = plt.get_cmap("tab20").colors
    bottom = {stage: 0.0 for stage in totals}
    for i, (name, row) in enumerate(profile.items()):
        heights = [row.get(stage, 0.0) / size for stage in totals]
        if not any(heights):
            continue
        axes.bar(
            [stage.value for stage in totals], heights, bottom=list(bottom.values()), label=name.replace("_", " "),
            color=colours[i % len(colours)], width=0.7,
        )  # fmt: skip
        bottom = {stage: base + height for (stage, base), height in zip(bottom.items(), heights, strict=True)}
    if limit is not None:
        axes.axhline(limit / size, color="black", linestyle="--", label="device")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.tick_params(axis="x", rotation=20)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    return _saved(figure, path)


def plot_timeline(rows: Mapping[str, Sequence[Span]], title: str, path: Path) -> Path:
    """A row of bars for each lane; spans of one name have one colour. Units beside the decode are hatched."""
    plt = pyplot()
    names = sorted({s.name for spans in rows.values() for s in spans})
    colours = dict(zip(names, plt.get_cmap("tab20").colors * (1 + len(names) // 20), strict=False))
    figure, axes = plt.subplots(figsize=(11, 1.2 + 0.7 * len(rows)))
    seen: set[str] = set()
    for y, spans in enumerate(rows.values()):
        for s in spans:
            label = None if s.name in seen else s.name
            seen.add(s.name)
            hatch = "//" if s.arguments.get("hidden") else None
            axes.barh(
                y, max(s.seconds, 0.0), left=s.start, height=0.7, color=colours[s.name], label=label, hatch=hatch,
                edgecolor="white" if hatch else None, linewidth=0.2,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    return _saved(figure, path)


def lanes_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Phase, rollout and train lane of a recorded step, from zero on."""
    spans = [s for s in spans if s.lane != GROUPS]
    start = min((s.start for s in spans), default=0.0)
    moved = [Span(s.lane, s.name, s.start - start, s.end - start, s.arguments) for s in spans]
    return {lane: [s for s in moved if s.lane == lane] for lane in (PHASES, ROLLOUT_LANE, TRAIN_LANE)}


def write_plots(folder: Path, plan: Plan | None, run_dir: Path | None) -> list[Path]:
    """Everything there is to draw of a plan and of a recorded run; returns the files."""
    pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if plan is not None:
        title = f"{plan.shape.name} on {plan.place.gpus} {plan.gpu.name}, planned"
        memory = plot_memory(plan.ledger.planned(), title, folder / "plan_memory.png", limit=plan.gpu.memory)
        rows: dict[str, list[Span]] = {}
        for schedule in SCHEDULES:
            spans = lane_spans(Model(plan.shape, plan.gpu, plan.rates), plan.workload, plan.place, schedule)
            rows |= {f"{schedule}: {lane}": [s for s in spans if s.lane == lane] for lane in (ROLLOUT_LANE, TRAIN_LANE)}
        written += [memory, plot_timeline(rows, f"{title}: one replica", folder / "plan_timeline.png")]
    if run_dir is not None:
        ledgers = sorted(run_dir.glob("memory*.json"), key=lambda path: path.stat().st_mtime)
        if ledgers:
            profile = _recorded(ledgers[-1])
            written.append(plot_memory(profile, f"{run_dir.name}, recorded", folder / "run_memory.png"))
        name, spans = next(reversed(traces_of(run_dir).items()))
        written.append(plot_timeline(lanes_of(spans), f"{run_dir.name}, {name}", folder / "run_timeline.png"))
    return written


def _recorded(path: Path) -> Profile:
    try:
        return profile_from_json(json.loads(path.read_text())["states"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of MemoryReport: {error!r}") from error


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot().close(figure)
    return path
