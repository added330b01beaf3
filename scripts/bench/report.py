"""From the rounds' raw numbers to medians, ratios and tables. Pure but for `show`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

Round = dict[str, Any]
"""{"load": float, "others": float, "steps": {contender: what its step said}}."""

SECONDS = ("step", "rollout", "score", "train", "update", "hidden")
COUNTS = ("pictures", "vision_calls", "prompt_tokens", "language_tokens", "language_calls", "response_tokens")

PAPER = "on 32 H800 the paper measured 1.57 to 2.24 over disaggregation (arXiv 2608.14498)"

BASELINES_FIRST = (
    "trl", "trl_tuned", "disaggregated", "disaggregated_overlap", "serial_unshared", "serial", "overlap",
    "overlap_streaming", "reuse_streaming",
)  # fmt: skip
"""A ratio's first name is the baseline: above 1 the second one is faster."""

UNITS = ("units_admitted", "units_refused")


def median_of(rounds: Sequence[Round], contender: str, name: str) -> float | None:
    """Median of one number over the rounds; None when the contender does not report it."""
    return median(r["steps"][contender].get(name) for r in rounds)


def summary(rounds: Sequence[Round], contenders: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Per contender: medians of what it reports, spread of the step time, and what is derived from them."""
    out: dict[str, dict[str, float | None]] = {}
    for name in contenders:
        steps = [r["steps"][name]["step"] for r in rounds]
        row = {key: median_of(rounds, name, key) for key in (*SECONDS, *COUNTS, *UNITS, "inner", "peak_rss_mib")}
        row["step_min"], row["step_max"] = min(steps), max(steps)
        row["overlap_efficiency"] = median(share(r, name, "prefix_hidden", "prefix") for r in rounds)
        row["overhead"] = median(share(r, name, "overhead", "inner") for r in rounds)
        row["decode_slowdown"] = median(slowdown(r, name) for r in rounds)
        out[name] = row
    return out


def share(round_: Round, contender: str, part: str, whole: str) -> float | None:
    """part / whole of one step; None without both."""
    step = round_["steps"][contender]
    if step.get(part) is None or not step.get(whole):
        return None
    return step[part] / step[whole]


def slowdown(round_: Round, contender: str) -> float | None:
    """Decode seconds of this contender over those of `serial` in the same round (same tokens), minus 1."""
    steps = round_["steps"]
    if "serial" not in steps or contender == "serial" or not steps[contender].get("decode"):
        return None
    return steps[contender]["decode"] / steps["serial"]["decode"] - 1


def ratios(rounds: Sequence[Round], contenders: Sequence[str]) -> list[dict[str, Any]]:
    """For each pair of contenders: median, least and largest over the rounds of step(baseline) / step(other)."""
    out = []
    known = [name for name in BASELINES_FIRST if name in contenders]
    for base, other in itertools.combinations(known, 2):
        values = [r["steps"][base]["step"] / r["steps"][other]["step"] for r in rounds]
        out.append(
            {"of": base, "over": other, "median": statistics.median(values), "min": min(values), "max": max(values)}
        )
    return out


def median(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


# ---- tables ----------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Print a run's result."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    rounds, names = result["rounds"], result["contenders"]
    w, m = result["workload"], result["machine"]
    what = f"R={w['R']}" if w["lengths"] == "fixed" else f"lognormal lengths (sigma {w['sigma']:g}, mean {w['mean']:g})"
    console.print(
        f"model {w['model']} ({result['parameters'] / 1e6:.1f} M parameters), {w['visual_tokens']} visual tokens, "
        f"B={w['B']}, G={w['G']}, {what}, beta={w['beta']:g}; {len(rounds)} interleaved rounds"
    )
    loads, others = [r["load"] for r in rounds], [r["others"] for r in rounds]
    console.print(
        f"{m['cpus']} CPUs, torch {m['torch']}; 1-minute load {min(loads):.1f} to {max(loads):.1f} (this benchmark "
        f"included), CPUs taken by others: median {statistics.median(others):.2f}, at most {max(others):.2f}"
    )
    for name, reason in result["left_out"].items():
        console.print(f"left out: {name}: {reason}")
    for table in (times_table, ratio_table, counts_table, lanes_table):
        console.print(table(result["summary"], result["ratios"], names))
    if "disaggregated" in names:
        console.print(PAPER, highlight=False)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def times_table(rows: dict[str, Any], pairs: list[Any], names: Sequence[str]) -> Any:
    columns = ("contender", "step s", "min", "max", "rollout", "score", "train", "update", "hidden", "peak RSS MiB")
    return _table(
        "Seconds (medians)", columns,
        [
            [name, *(_text(rows[name][k], ".2f") for k in ("step", "step_min", "step_max", *SECONDS[1:])),
             _text(rows[name]["peak_rss_mib"], ".0f")]
            for name in names
        ],
    )  # fmt: skip


def ratio_table(rows: dict[str, Any], pairs: list[Any], names: Sequence[str]) -> Any:
    return _table(
        "Step time ratios, within rounds", ("pair", "median", "min", "max"),
        [[f"{p['of']} / {p['over']}", *(_text(p[k], ".2f") for k in ("median", "min", "max"))] for p in pairs],
    )  # fmt: skip


def counts_table(rows: dict[str, Any], pairs: list[Any], names: Sequence[str]) -> Any:
    columns = ("contender", "pictures", "tower calls", "prompt tokens", "all tokens", "model calls", "response tokens")
    return _table("Forward work of a step", columns, [[n, *(_text(rows[n][k], ".0f") for k in COUNTS)] for n in names])


def lanes_table(rows: dict[str, Any], pairs: list[Any], names: Sequence[str]) -> Any:
    columns = ("contender", "overlap efficiency", "decode slow-down", "scheduler overhead", "admitted", "refused")
    own = [n for n in names if rows[n]["overhead"] is not None]
    return _table(
        "Lanes", columns,
        [
            [n, _text(rows[n]["overlap_efficiency"], ".0%"), _text(rows[n]["decode_slowdown"], "+.0%"),
             _text(rows[n]["overhead"], ".2%"), *(_text(rows[n][k], ".0f") for k in UNITS)]
            for n in own
        ],
    )  # fmt: skip
