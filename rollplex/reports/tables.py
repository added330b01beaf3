"""A residency profile as a table: of a plan and of a run alike."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from rollplex.residency import Profile, profile_totals

UNITS = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"), (1, "bytes"))


def unit_for(largest: float) -> tuple[int, str]:
    """The largest unit in which the largest figure is at least 1."""
    return next((unit for unit in UNITS if largest >= unit[0]), UNITS[-1])


def amount(size: float, unit: tuple[int, str]) -> str:
    """A size in a given unit."""
    return f"{size / unit[0]:,.1f} {unit[1]}"


def ledger_table(
    title: str, profile: Profile, classes: Mapping[str, str], *, whole: Mapping[str, float] | None = None
) -> Table:
    """A row per state, a column per stage. whole: state -> bytes if everything were resident, a column of its own."""
    totals = profile_totals(profile)
    size, unit = unit_for(max([*totals.values(), sum((whole or {}).values())], default=0.0))
    table = Table(title=f"{title}, in {unit}")
    columns = ["state", "class", *(["naive"] if whole is not None else []), *(stage.value for stage in totals)]
    for name in columns:
        table.add_column(name, justify="left" if name in ("state", "class") else "right")

    def shown(value: float) -> str:
        return f"{value / size:.1f}" if value else ""

    for name, row in profile.items():
        first = [shown(whole.get(name, 0.0))] if whole is not None else []
        table.add_row(
            name.replace("_", " "), classes.get(name, ""), *first, *(shown(row.get(stage, 0.0)) for stage in totals)
        )
    table.add_section()
    first = [shown(sum(whole.values()))] if whole is not None else []
    table.add_row("total", "", *first, *(shown(total) for total in totals.values()))
    return table
