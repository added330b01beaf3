"""The report's pictures: matplotlib figures as SVG text that takes its colours from the page, each with its figures.

Colours are drawn as placeholders and replaced by CSS variables, so one picture reads on light and on dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollplex.reports.run_files import Memory, Series, Trace, spread
from rollplex.reports.tables import unit_for
from rollplex.residency import profile_totals
from rollplex.timeline import GROUPS, PHASES, ROLLOUT_LANE, TRAIN_LANE, Span

NARROW = (5.0, 2.5)
"""Inches: of a curve, two or one of which fit beside each other."""
WIDE = 10.8
POINTS = 300
"""Points of a drawn line; more are averaged into so many."""
ROWS = 20
"""Rows of a curve's table."""
SERIES = 14
"""Colours that the page has for series, and most lines of a chart."""
INK, MUTED, GRID = "#010101", "#020202", "#030303"
PLACEHOLDERS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"} | {
    f"#0a0a{i:02x}": f"var(--s{i})" for i in range(SERIES)
}
HATCH = "////"


@dataclass(frozen=True)
class Table:
    """Figures of a chart, as texts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure of the page."""

    key: str
    title: str
    note: str
    """What the reader should know to read it."""
    alt: str
    """What it shows, in words."""
    svg: str
    """Well-formed SVG of our own making; texts in it are escaped."""
    table: Table
    wide: bool = False


def colour(number: int) -> str:
    return f"#0a0a{number % SERIES:02x}"


def figure(width: float, height: float) -> tuple[Any, Any]:
    """(figure, axes) in the report's plain style; ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "rollplex report needs matplotlib, which is not installed: pip install 'rollplex[report]'"
        ) from error
    drawn = Figure(figsize=(width, height), layout="constrained")
    axes = drawn.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(GRID)
    axes.tick_params(colors=MUTED, labelsize=9.5, length=3)
    return drawn, axes


def as_svg(drawn: Any, key: str, alt: str) -> str:
    """Ids get the chart's own prefix: the page holds many pictures."""
    import matplotlib

    buffer = io.StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": key, "text.parse_math": False}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the page's font has it; only its width is guessed
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{key}-", text)
    for placeholder, variable in PLACEHOLDERS.items():
        text = text.replace(placeholder, variable)
    # The size comes from the page; the fonts are the page's.
    for size in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    text = re.sub(r"font: ([^;\"]*?)(\d+(?:\.\d+)?px) [^;\"]*", r"font: \1\2 system-ui, sans-serif", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{_attribute(alt)}"', 1)


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")


def number(value: float, digits: int = 4) -> str:
    """Short, for people: so many significant digits."""
    if value == 0 or value != value:
        return "0" if value == 0 else "-"
    size = abs(value)
    if size >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if size >= 1e-3 else f"{value:.2e}"


# ---- curves ----


@dataclass(frozen=True)
class CurveSpec:
    """Which scalars share axes."""

    key: str
    title: str
    names: tuple[str, ...]
    """Metrics, or a prefix that ends in *."""
    unit: str
    note: str
    log: bool = False


def curve(spec: CurveSpec, scalars: Mapping[str, Series]) -> Chart | None:
    """None where the run has none of its scalars."""
    names = _names(spec, scalars)
    left = f" {len(names) - SERIES} more are not drawn." if len(names) > SERIES else ""
    lines = {name: scalars[name] for name in names[:SERIES]}
    return line_chart(replace(spec, note=spec.note + left), lines) if lines else None


def _names(spec: CurveSpec, scalars: Mapping[str, Series]) -> list[str]:
    found = []
    for name in spec.names:
        if name.endswith("*"):
            found += sorted(n for n in scalars if n.startswith(name[:-1]))
        elif name in scalars:
            found.append(name)
    return [n for n in dict.fromkeys(found) if any(scalars[n].values) or not spec.log]


def line_chart(spec: CurveSpec, lines: Mapping[str, Series]) -> Chart:
    drawn, axes = figure(*NARROW)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    averaged = 0
    for i, (name, series) in enumerate(lines.items()):
        steps, values, per_point = thinned(series)
        averaged = max(averaged, per_point)
        marker = "o" if len(steps) <= 12 else None
        axes.plot(steps, values, color=colour(i), linewidth=1.6, marker=marker, markersize=3.5, label=shown(name))
    if spec.log and any(v > 0 for s in lines.values() for v in s.values):
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("rollout batch", color=MUTED, fontsize=9.5)
    axes.set_ylabel(spec.unit, color=MUTED, fontsize=9.5)
    if len(lines) > 1:
        columns = max(1, min(3, 60 // (max(map(len, lines)) + 5)))
        drawn.legend(
            *axes.get_legend_handles_labels(), loc="outside upper left", ncols=columns, fontsize=9.5, frameon=False,
            labelcolor=INK, handlelength=1.2, columnspacing=1.2,
        )  # fmt: skip
    note = spec.note + (f" A point is the mean of {averaged} rollout batches." if averaged > 1 else "")
    alt = f"{spec.title}. " + " ".join(f"{shown(name)}: {words(series)}." for name, series in lines.items())
    return Chart(spec.key, spec.title, note, alt, as_svg(drawn, spec.key, alt), _curve_table(lines))


def shown(name: str) -> str:
    """A label that begins with an underscore would be left out of legends."""
    return name.lstrip("_") or name


def thinned(series: Series) -> tuple[list[float], list[float], int]:
    """(steps, values, values that each is the mean of)."""
    per_point = -(-len(series) // POINTS)
    starts = range(0, len(series), per_point)
    steps = [_mean(series.steps[a : a + per_point]) for a in starts]
    return steps, [_mean(series.values[a : a + per_point]) for a in starts], per_point


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def words(series: Series) -> str:
    """A line in words."""
    if len(series) == 1:
        return f"{number(series.values[0])} at {series.steps[0]:.0f}"
    ends = f"{number(series.values[0])} at {series.steps[0]:.0f}, {number(series.values[-1])} at {series.steps[-1]:.0f}"
    return f"{ends}, between {number(min(series.values))} and {number(max(series.values))}"


def _curve_table(lines: Mapping[str, Series]) -> Table:
    steps = sorted({step for series in lines.values() for step in series.steps})
    chosen = [steps[i] for i in spread(len(steps), ROWS)]
    # What is logged more rarely (validation) would fall between the rows.
    rare = sorted({s for series in lines.values() if len(series) < len(steps) for s in series.steps})
    chosen = sorted({*chosen, *(rare[i] for i in spread(len(rare), ROWS))})
    by_step = {name: dict(zip(series.steps, series.values, strict=True)) for name, series in lines.items()}
    rows = tuple((f"{step:.0f}", *(number(v[step]) if step in v else "" for v in by_step.values())) for step in chosen)
    note = f"{len(chosen)} of {len(steps)} rollout batches." if len(chosen) < len(steps) else ""
    return Table(("rollout batch", *lines), rows, note)


# ---- a step, memory ----


def timeline_chart(trace: Trace) -> Chart:
    """Phases and both lanes of one step; units beside the decode are hatched."""
    spans = [s for s in trace.spans if s.lane != GROUPS]
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    lanes = [lane for lane in (PHASES, ROLLOUT_LANE, TRAIN_LANE) if any(s.lane == lane for s in spans)]
    drawn, axes = figure(WIDE, 1.5 + 0.62 * len(lanes))
    names = list(dict.fromkeys(s.name for lane in lanes for s in spans if s.lane == lane))
    rows = []
    for y, lane in enumerate(lanes):
        for name in names:
            for hidden in (False, True):
                mine = [s for s in spans if (s.lane, s.name, _hidden(s)) == (lane, name, hidden)]
                if not mine:
                    continue
                _bars(axes, mine, (start, end), y, colour(names.index(name)), hatch=HATCH if hidden else None)
                seconds = f"{sum(s.seconds for s in mine):.4f}"
                rows.append((lane, name, "yes" if hidden else "no", str(len(mine)), seconds))
    axes.set_yticks(range(len(lanes)), [f"{lane} lane" if lane != PHASES else "phase" for lane in lanes], color=INK)
    axes.set_xlim(0, (end - start) * 1.005)
    axes.invert_yaxis()
    axes.set_xlabel("seconds", color=MUTED, fontsize=9.5)
    _name_legend(drawn, names)
    hidden_seconds = sum(s.seconds for s in spans if _hidden(s))
    units = sum(s.seconds for s in spans if s.lane == TRAIN_LANE)
    alt = (
        f"Timeline of {trace.name}: {end - start:.3f} seconds; units of the train lane take {units:.3f} seconds, "
        f"of which {hidden_seconds:.3f} beside the rollout."
    )
    note = (
        f"{trace.name.replace('_', ' ')}: what each lane did when. Hatched work ran while the engine was decoding. "
        f"Gaps under {(end - start) / 2:.1f} ms are closed."
    )
    table = Table(("lane", "work", "beside the rollout", "pieces", "seconds"), tuple(rows))
    return Chart("timeline", "Timeline of one step", note, alt, as_svg(drawn, "timeline", alt), table, wide=True)


def _bars(
    axes: Any, spans: Iterable[Span], limits: tuple[float, float], y: float, face: str, hatch: str | None
) -> None:
    start, end = limits
    bars = _joined([(s.start - start, s.seconds) for s in spans], (end - start) / 2000)
    axes.broken_barh(
        bars, (y - 0.36, 0.72), facecolors=face, edgecolor=INK if hatch else "none", hatch=hatch, linewidth=0
    )


def _hidden(span: Span) -> bool:
    return bool(span.arguments.get("hidden"))


def _joined(bars: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """(start, length) of bars; neighbours closer than `gap` become one."""
    out: list[tuple[float, float]] = []
    for begin, length in sorted(bars):
        if out and begin - (out[-1][0] + out[-1][1]) <= gap:
            out[-1] = (out[-1][0], max(out[-1][1], begin + length - out[-1][0]))
        else:
            out.append((begin, length))
    return out


def _name_legend(drawn: Any, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour(i), label=shown(name).replace("_", " ")) for i, name in enumerate(names)]
    drawn.legend(
        handles=handles, loc="outside upper left", ncols=8, fontsize=9.5, frameon=False, labelcolor=INK,
        handlelength=1, columnspacing=1.2,
    )  # fmt: skip


def memory_chart(memory: Memory) -> Chart:
    """Stacked bytes of each stage at its largest sum."""
    totals = profile_totals(memory.profile)
    size, unit = unit_for(max(totals.values(), default=0.0))
    states = [name for name, row in memory.profile.items() if any(row.values())]
    drawn, axes = figure(WIDE, 1.3 + 0.42 * len(totals))
    for i, name in enumerate(states):
        left = [sum(memory.profile[n].get(stage, 0.0) for n in states[:i]) / size for stage in totals]
        widths = [memory.profile[name].get(stage, 0.0) / size for stage in totals]
        axes.barh(range(len(totals)), widths, left=left, height=0.66, color=colour(i))
    axes.set_yticks(range(len(totals)), [stage.value for stage in totals], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel(unit, color=MUTED, fontsize=9.5)
    _name_legend(drawn, states)
    rows = [
        (
            n.replace("_", " "),
            memory.classes.get(n, ""),
            *(number(memory.profile[n].get(s, 0.0) / size) for s in totals),
        )
        for n in states
    ]
    rows.append(("total", "", *(number(total / size) for total in totals.values())))
    largest = max(totals, key=lambda stage: totals[stage])
    alt = f"Memory by phase: most in {largest.value}, {number(totals[largest] / size)} {unit}."
    note = "Bytes on the device of every large state, at each phase's largest sum over the run."
    table = Table(("state", "class", *(s.value for s in totals)), tuple(rows), f"In {unit}.")
    return Chart("memory", "Memory by phase", note, alt, as_svg(drawn, "memory", alt), table, wide=True)


# ---- bars ----


def bar_chart(key: str, title: str, note: str, bars: Mapping[str, Mapping[str, float]], unit: str) -> Chart:
    """A horizontal bar for each name, stacked of parts: name -> part -> value."""
    parts = list(dict.fromkeys(part for row in bars.values() for part in row))
    drawn, axes = figure(WIDE, 1.3 + 0.46 * len(bars))
    for i, part in enumerate(parts):
        left = [sum(row.get(p, 0.0) for p in parts[:i]) for row in bars.values()]
        axes.barh(
            range(len(bars)), [row.get(part, 0.0) for row in bars.values()], left=left, height=0.66, color=colour(i)
        )
    axes.set_yticks(range(len(bars)), [shown(name) for name in bars], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel(unit, color=MUTED, fontsize=9.5)
    _name_legend(drawn, parts)
    alt = f"{title}. " + " ".join(f"{name}: {number(sum(row.values()))} {unit}." for name, row in bars.items())
    rows = tuple(
        (name, *(number(row.get(p, 0.0)) for p in parts), number(sum(row.values()))) for name, row in bars.items()
    )
    return Chart(key, title, note, alt, as_svg(drawn, key, alt), Table(("", *parts, f"sum, {unit}"), rows), wide=True)
