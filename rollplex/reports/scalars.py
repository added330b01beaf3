"""A run's scalars, read back from what its loggers wrote."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Series:
    """One scalar of a run."""

    steps: tuple[float, ...]
    """Rollout batches done when it was logged, ascending."""
    values: tuple[float, ...]
    """Finite."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Curves:
    """The scalars of one run, and where they were."""

    scalars: Mapping[str, Series]
    files: tuple[Path, ...]
    """Those that were read, oldest first: a resumed run has several."""
    left_out: tuple[Path, ...] = ()
    """Of earlier runs in the same folder."""


class NothingWhole(ValueError):
    """Files of a part are there, and nothing in them can be read."""

    def __init__(self, files: list[Path], what: str) -> None:
        super().__init__(
            f"empty or damaged: no {what} in {files[-1].name}"
            + (f", nor in {len(files) - 1} more" if len(files) > 1 else "")
            + ". A run that was killed early leaves such a file"
        )


def newest(paths: Iterator[Path]) -> list[Path]:
    """Oldest first."""
    return sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))


def read_curves(folder: Path) -> Curves | None:
    """Of CSVLogger's files, else of TensorBoard's; None without any.

    A version that begins later than the one before it continues that one (a resumed run); one that begins anew is
    another run, and only the newest counts. Versions that trained go before those that only evaluated.
    """
    files = newest(folder.rglob("metrics.csv"))
    read = _csv_points
    if not files:
        files, read = newest(folder.rglob("*tfevents*")), _event_points
    if not files:
        return None
    known = {path: read(path) for path in files}
    files.sort(key=lambda path: "reward" in known[path])  # `validate` after a run writes a version too
    parts: list[dict[str, dict[float, float]]] = []
    begins = math.inf
    for path in reversed(files):
        points = known[path]
        first = min((step for by_step in points.values() for step in by_step), default=math.inf)
        if first >= begins:
            break
        parts.append({name: {s: v for s, v in by_step.items() if s < begins} for name, by_step in points.items()})
        begins = first
        if begins <= 1:
            break
    merged: dict[str, dict[float, float]] = {}
    for points in reversed(parts):
        for name, by_step in points.items():
            merged.setdefault(name, {}).update(by_step)
    series = {n: sorted((s, v) for s, v in by_step.items() if math.isfinite(v)) for n, by_step in merged.items()}
    out = {n: Series(tuple(s for s, _ in p), tuple(v for _, v in p)) for n, p in series.items() if p}
    if not out:
        raise NothingWhole(files, "row with a step and a finite value")
    return Curves(out, tuple(files[len(files) - len(parts) :]), tuple(files[: len(files) - len(parts)]))


def read_scalars(folder: Path) -> Mapping[str, Series]:
    """As `read_curves`, the scalars alone."""
    found = read_curves(folder)
    return found.scalars if found is not None else {}


def _csv_points(path: Path) -> dict[str, dict[float, float]]:
    """name -> rollout batches done -> value. Lightning counts batches from 0, and leaves cells empty."""
    out: dict[str, dict[float, float]] = {}
    with path.open(newline="", errors="replace") as file:
        for row in csv.DictReader(file):
            step = _float(row.get("step"))
            if step is None:
                continue
            for name, text in row.items():
                value = _float(text) if name not in (None, "step", "epoch") else None
                if value is not None:
                    out.setdefault(name, {})[step + 1] = value
    return out


def _event_points(path: Path) -> dict[str, dict[float, float]]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(path), size_guidance={SCALARS: 20_000})
    events.Reload()
    names = [name for name in events.Tags()[SCALARS] if name not in ("epoch", "hp_metric")]
    return {name: {float(e.step + 1): float(e.value) for e in events.Scalars(name)} for name in names}


def _float(text: Any) -> float | None:
    try:
        return float(text) if text not in (None, "") else None
    except (TypeError, ValueError):
        return None
