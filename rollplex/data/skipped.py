"""What a run says at its end of the rows it left out."""

from __future__ import annotations

import re
from collections.abc import Mapping

OWN = re.compile(r"'[^']*'|\"[^\"]*\"|<[^>]*>|\S*[/\\]\S*|\d+")
"""What is a row's own in a reason: names, paths, numbers."""
KINDS = 5
"""Of reasons that are told apart."""


def summary(bad: Mapping[str, str]) -> str:
    """One line. bad: row id -> reason, at least one. Reasons that differ in names, paths and numbers alone count as
    one; each is told by its first row."""
    kinds: dict[str, list[str]] = {}
    for row, reason in bad.items():
        kinds.setdefault(OWN.sub("", reason), []).append(row)
    most = sorted(kinds.values(), key=len, reverse=True)
    told = [f"{len(rows)} as row {rows[0]!r}: {' '.join(bad[rows[0]].split())}" for rows in most[:KINDS]]
    told += [f"{sum(map(len, most[KINDS:]))} for other reasons"] if most[KINDS:] else []
    return f"{len(bad)} row{' was' if len(bad) == 1 else 's were'} skipped: {'; '.join(told)}"
