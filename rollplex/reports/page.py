"""The report of a run as one HTML page that needs nothing else: no script, no network, no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rollplex.reports.charts import Chart, CurveSpec, Table, curve, memory_chart, timeline_chart
from rollplex.reports.compare import Comparison, Others, compare_file, compare_runs, schedule_of
from rollplex.reports.run_files import Missing, RunFiles
from rollplex.reports.samples import SampleView, printable, sample_views
from rollplex.reports.tiles import tiles

LEARNING = (
    CurveSpec("reward", "Reward", ("reward", "val/reward"), "reward", "Mean total reward of a rollout batch."),
    CurveSpec("parts", "Reward by part", ("reward/*",), "reward", "Each named reward, before its weight."),
    CurveSpec("accuracy", "Accuracy", ("val/accuracy", "val/pass@*"), "share", "On the validation split."),
    CurveSpec(
        "length", "Response length", ("completion_length", "completion_length_max", "val/completion_length"),
        "tokens", "Mean and longest response.",
    ),
    CurveSpec("cut", "Responses cut off, groups without spread", ("completions_truncated", "groups_without_spread"),
              "share", "Cut responses may teach brevity; a group of equal rewards teaches nothing."),
    CurveSpec("entropy", "Entropy", ("entropy",), "nats per token", "How undecided the policy is. A fall to 0: it has "
              "stopped exploring."),
    CurveSpec("resampled", "Groups drawn again", ("groups_resampled", "groups_dropped"), "groups",
              "dynamic_sample: groups without spread that were left out, and groups drawn in their place."),
)  # fmt: skip
SAFETY = (
    CurveSpec(
        "mismatch", "Engine against trainer", ("mismatch_abs", "mismatch_max", "mismatch_kl"), "nats",
        "Difference of log-probabilities at the same weights: rounding, or something is wrong.", log=True,
    ),
    CurveSpec("kl", "KL to the reference", ("kl",), "nats per token", "How far the policy has moved.", log=False),
    CurveSpec("ratio", "Probability ratio", ("ratio_min", "ratio_max"), "ratio", "Current over rollout probability: 1 "
              "on the first update of a rollout batch."),
    CurveSpec("norm", "Gradient norm", ("grad_norm",), "norm", "Before clipping."),
    CurveSpec("lr", "Learning rate", ("lr",), "", "Of the last update."),
)  # fmt: skip
SPEED = (
    CurveSpec(
        "seconds", "Seconds of a step", ("time/step", "time/rollout", "time/train", "time/hidden"), "s",
        "Whole step, two phases, and train work that ran beside the rollout.",
    ),
    CurveSpec("hidden", "Prefix work hidden", ("overlap_efficiency",), "share of its seconds",
              "Beside the engine's work. Batches in which hiding is measured, or does not pay, have 0."),
    CurveSpec("rate", "Tokens per second", ("tokens_per_second", "rollout_tokens_per_second"), "tokens/s",
              "Of the whole step, and of the rollout alone."),
)  # fmt: skip


LINES = 2000
"""Of a config that are shown."""


@dataclass(frozen=True)
class Limits:
    """How much of the samples is shown."""

    samples: int = 4
    """Of each set."""
    side: int = 320
    """Longest side of a picture, in pixels."""


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    intro: str = ""
    charts: tuple[Chart, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    samples: tuple[tuple[str, list[SampleView]], ...] = ()
    code: tuple[tuple[str, str], ...] = ()
    """(title, text), folded."""
    missing: tuple[Missing, ...] = ()


def render(run: RunFiles, others: Others | None = None, limits: Limits | None = None) -> str:
    """The whole page.

    Raises:
        ValueError: jinja2 or matplotlib is not installed, or a compared file is damaged.
    """
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError as error:
        raise ValueError(
            "rollplex report needs jinja2, which is not installed: pip install 'rollplex[report]'"
        ) from error
    environment = Environment(
        loader=PackageLoader("rollplex.reports", "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    sections = [s for s in _sections(run, others or Others(), limits or Limits()) if s is not None]
    page = environment.get_template("report.html.j2").render(
        name=run.name, subtitle=_subtitle(run), tiles=tiles(run), shown=shown_of(run), sections=sections,
        written=datetime.now().strftime("%Y-%m-%d %H:%M"),
    )  # fmt: skip
    return page.encode("utf-8", "replace").decode()


def write_report(target: Path, run: RunFiles, others: Others | None = None, limits: Limits | None = None) -> Path:
    """Render, then write; a page that cannot be made leaves the old one."""
    text = render(run, others, limits)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def _sections(run: RunFiles, others: Others, limits: Limits) -> list[Section | None]:
    return [
        _curves("learning", "Learning", LEARNING, run),
        _curves("safety", "Is the update sound?", SAFETY, run),
        _curves("speed", "Speed", SPEED, run),
        _step(run),
        _memory(run),
        _samples(run, limits),
        _comparison(run, others),
        _setup(run),
        Section("missing", "What this run did not record", missing=run.missing) if run.missing else None,
    ]


def _curves(key: str, title: str, specs: Sequence[CurveSpec], run: RunFiles) -> Section | None:
    charts, notes = [], []
    for spec in specs:
        if spec.key == "kl" and not any(_values(run, "kl")):
            notes.append("No KL curve: it is 0 throughout, as without a reference model (beta: 0).")
            continue
        if spec.key == "hidden" and not any(_values(run, "overlap_efficiency")):
            continue
        chart = curve(spec, run.scalars)
        if chart is not None:
            charts.append(chart)
    return Section(key, title, " ".join(notes) if charts else "", tuple(charts)) if charts else None


def _values(run: RunFiles, name: str) -> tuple[float, ...]:
    return run.scalars[name].values if name in run.scalars else ()


def _step(run: RunFiles) -> Section | None:
    if run.trace is None or not run.trace.spans:
        return None
    return Section("step", "One step", charts=(timeline_chart(run.trace),))


def _memory(run: RunFiles) -> Section | None:
    if run.memory is None or not run.memory.profile:
        return None
    return Section("memory-section", "Memory", charts=(memory_chart(run.memory),))


def _samples(run: RunFiles, limits: Limits) -> Section | None:
    views = sample_views(run.samples, limits.samples, limits.side)
    intro = "What the model saw and said. Special tokens and control characters are shown as they came."
    return Section("samples", "Samples", intro, samples=tuple(views)) if views else None


def _comparison(run: RunFiles, others: Others) -> Section | None:
    parts = [compare_runs(run, others.runs)] if others.runs else []
    parts += [compare_file(path, content, i) for i, (path, content) in enumerate(others.files)]
    if not parts:
        return None
    whole = Comparison(tuple(c for p in parts for c in p.charts), tuple(t for p in parts for t in p.tables))
    return Section("comparison", "Schedules compared", charts=whole.charts, tables=whole.tables)


def _setup(run: RunFiles) -> Section | None:
    rows = [(name, printable(text)) for name, text in _flat(run.environment)]
    tables = (("Environment", Table(("", ""), tuple(rows))),) if rows else ()
    code = (("Config, as the run resolved it", printable_whole(run.config)),) if run.config else ()
    if not tables and not code:
        return None
    return Section("setup", "Config and environment", tables=tables, code=code)


def printable_whole(text: str) -> str:
    lines = text.splitlines()
    left = [f"... ({len(lines) - LINES:,} lines more)"] if len(lines) > LINES else []
    return "\n".join([*map(printable, lines[:LINES]), *left])


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    out = []
    for name, value in content.items():
        if isinstance(value, Mapping):
            out += _flat(value, f"{prefix}{name} ")
        else:
            listed = isinstance(value, list)
            out.append((f"{prefix}{name}".replace("_", " "), ", ".join(map(str, value)) if listed else str(value)))
    return out


# ---- the head ----


def _subtitle(run: RunFiles) -> str:
    model: Any = run.settings.get("model")
    options = model.get("init_args") if isinstance(model, dict) else None
    name = options.get("model") if isinstance(options, dict) else None
    parts = [f"model {name}" if name else "", f"schedule {schedule_of(run)}" if run.config else ""]
    return printable(", ".join(part for part in parts if part))


def shown_of(run: RunFiles) -> str:
    """Which of several runs in the folder the curves are of; "" where there is one."""
    if run.curves is None or not run.curves.left_out:
        return ""
    shown, others = (
        ", ".join(str(path.parent.relative_to(run.folder)) for path in files)
        for files in (run.curves.files, run.curves.left_out)
    )
    return printable(f"The folder holds several runs. The curves are of the newest, {shown}; not shown: {others}.")
