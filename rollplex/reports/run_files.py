"""What a run left in its folder, read back: scalars, config, environment, a step's trace, memory, samples.

Every part may be absent, or damaged: then it is named with what would have written it, and the rest is read.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rollplex.planner.calibrate import read_trace
from rollplex.reports.scalars import Curves, NothingWhole, Series, newest, read_curves
from rollplex.residency import Profile, profile_from_json
from rollplex.timeline import Span

T = TypeVar("T")


@dataclass(frozen=True)
class Memory:
    """MemoryReport's file."""

    profile: Profile
    classes: Mapping[str, str]


@dataclass(frozen=True)
class Trace:
    """TimelineLogger's last file."""

    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class SampleSet:
    """RolloutLogger's samples of one rollout batch."""

    step: int
    split: str
    records: tuple[Mapping[str, Any], ...]
    folder: Path
    """Where the names of its pictures begin."""


@dataclass(frozen=True)
class Missing:
    """A part that could not be read."""

    what: str
    why: str
    """What writes it, or what is wrong with it."""


@dataclass(frozen=True)
class RunFiles:
    """A run folder's content."""

    folder: Path
    curves: Curves | None = None
    config: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace | None = None
    memory: Memory | None = None
    samples: tuple[SampleSet, ...] = ()
    missing: tuple[Missing, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def scalars(self) -> Mapping[str, Series]:
        return self.curves.scalars if self.curves is not None else {}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The config as nested mappings; empty without one."""
        try:
            found = yaml.safe_load(self.config) if self.config else {}
        except (yaml.YAMLError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def callbacks(self) -> list[str]:
        """Class names of the config's callbacks."""
        trainer = self.settings.get("trainer")
        listed = (trainer.get("callbacks") if isinstance(trainer, dict) else None) or []
        paths = [c.get("class_path", "") if isinstance(c, dict) else c for c in listed if isinstance(c, dict | str)]
        return [str(path).rpartition(".")[2] for path in paths]


HOW = {
    "curves": "no metrics.csv and no TensorBoard events: add lightning.pytorch.loggers.CSVLogger to trainer.logger, "
    "with save_dir in the run's folder",
    "timeline": "no timeline/step_*.json: add rollplex.callbacks.TimelineLogger to trainer.callbacks",
    "memory": "no memory.json: add rollplex.callbacks.MemoryReport to trainer.callbacks; it writes when the run ends",
    "samples": "no rollouts/step_*.jsonl: add rollplex.callbacks.RolloutLogger to trainer.callbacks",
    "config": "no config.yaml beside the logger's files: `rollplex fit` writes one; a run from Python has none",
    "environment": "no environment.json: `rollplex fit` writes one; from Python add "
    "rollplex.callbacks.EnvironmentLogger to the Trainer's callbacks",
}
"""Part -> what writes it."""


def read_run(folder: Path, *, sample_sets: int = 3) -> RunFiles:
    """Everything that is there.

    Args:
        sample_sets: Rollout batches of which samples are read: the first, the last, and some between.

    Raises:
        ValueError: the folder does not exist, or nothing in it was written by a run.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the default_root_dir of a run")
    missing: list[Missing] = []

    def part(name: str, read: Callable[[Path], T | None]) -> T | None:
        try:
            found = read(folder)
        except NothingWhole as error:
            missing.append(Missing(name, str(error)))
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
            missing.append(Missing(name, f"damaged: {type(error).__name__}: {error}"))
            return None
        if not found:
            missing.append(Missing(name, HOW[name]))
        return found

    run = RunFiles(
        folder,
        curves=part("curves", read_curves),
        trace=part("timeline", _last_trace),
        memory=part("memory", _memory),
        samples=part("samples", lambda f: _samples(f, sample_sets)) or (),
        config=part("config", _config),
        environment=part("environment", _environment) or {},
    )
    if len(missing) == len(HOW) and all(m.why == HOW[m.what] for m in missing):
        raise ValueError(
            f"{folder} is no run: it holds none of metrics.csv, TensorBoard events, timeline/, memory.json, rollouts/, "
            "config.yaml, environment.json. Give the default_root_dir of a run of `rollplex fit`"
        )
    return RunFiles(**{**run.__dict__, "missing": tuple(missing)})


# ---- the other parts ----


def _last_trace(folder: Path) -> Trace | None:
    files = newest(folder.rglob("timeline/step_*.json"))
    return Trace(files[-1].stem, tuple(read_trace(files[-1]))) if files else None


def _memory(folder: Path) -> Memory | None:
    files = newest(folder.rglob("memory*.json"))
    if not files:
        return None
    content = json.loads(files[-1].read_text())
    return Memory(profile_from_json(content["states"]), dict(content.get("classes", {})))


def _config(folder: Path) -> str | None:
    """The YAML that LightningCLI saved. A model's config.json, and another program's YAML, are none."""
    files = [f for f in newest(folder.rglob("config.yaml")) if "class_path" in f.read_text(errors="replace")]
    return files[-1].read_text(errors="replace") if files else None


def _environment(folder: Path) -> dict[str, Any]:
    files = newest(folder.rglob("environment*.json"))
    content = json.loads(files[-1].read_text()) if files else {}
    if not isinstance(content, dict):
        raise ValueError(f"{files[-1].name} holds no mapping")
    return content


def _samples(folder: Path, sets: int) -> tuple[SampleSet, ...]:
    """Of the first, the last and evenly chosen rollout batches between, train and validation apart. Where several runs
    wrote into the folder, of the one that started training last (and of validations after that)."""
    files = sorted(folder.rglob("rollouts/step_*.jsonl"), key=lambda path: _step_of(path))
    runs = {path: {(_run_of(r), _split_of(r)) for r in _records(path)} for path in files}  # there may be thousands
    if files and not any(runs.values()):
        raise NothingWhole(files, "whole line of samples")
    newest = max((run for found in runs.values() for run, split in found if split == "train"), default="")
    files = [path for path in files if any(run >= newest for run, _ in runs[path])]
    out = []
    for path in [files[i] for i in spread(len(files), sets)]:
        by_split: dict[str, list[Mapping[str, Any]]] = {}
        for record in _records(path):
            if _run_of(record) >= newest:
                by_split.setdefault(_split_of(record), []).append(record)
        out += [SampleSet(_step_of(path), split, tuple(r), path.parent) for split, r in by_split.items()]
    return tuple(out)


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Lines end at newlines alone: texts may hold Unicode's other ends of lines."""
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from filter(None, map(_record, file))


def _run_of(record: Mapping[str, Any]) -> str:
    """When its run started; "" in files that do not say."""
    return str(record.get("run", ""))


def _split_of(record: Mapping[str, Any]) -> str:
    return str(record.get("split", "train"))


def _record(line: str) -> Mapping[str, Any] | None:
    """None for half a line of a run that was killed, and for what is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # also a number of more digits than Python reads, and brackets without end
        return None
    return record if isinstance(record, dict) and isinstance(record.get("responses"), list) else None


def _step_of(path: Path) -> int:
    found = re.search(r"step_(\d+)", path.stem)
    return int(found.group(1)) if found else 0


def spread(total: int, wanted: int) -> list[int]:
    """At most `wanted` of 0..total-1, evenly, first and last among them."""
    if total <= wanted:
        return list(range(total))
    if wanted == 1:
        return [total - 1]
    return sorted({round(i * (total - 1) / (wanted - 1)) for i in range(wanted)})
