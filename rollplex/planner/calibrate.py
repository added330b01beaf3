"""The simulation fitted to a recorded run: unit seconds, decode steps, alpha and r from the traces of TimelineLogger.

The traces say how long each unit and each engine step took, alone and beside the other lane. From their means the same
lanes that `simulate` plans with (`run_lanes`) are run again, with the recorded numbers of units and decode steps; the
seconds that come out stand beside the recorded ones.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rollplex.admission import Measurements
from rollplex.phases import Phase
from rollplex.planner.simulate import SCHEDULES, Rates, Unit, run_lanes
from rollplex.timeline import GROUPS, PHASES, ROLLOUT_LANE, TRAIN_LANE, Span
from rollplex.units import PHASE_OF, PREFIX_KINDS, UnitKind

KIND_ORDER = {kind: i for i, kind in enumerate(UnitKind)}


def read_trace(path: Path) -> list[Span]:
    """The spans of a file that TimelineLogger wrote; ValueError for another."""
    try:
        content: Any = json.loads(path.read_text())
        lanes = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["ph"] == "M"}
        spans = [
            Span(lanes[e["tid"]], str(e["name"]), e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, dict(e.get("args", {})))
            for e in content["traceEvents"]
            if e["ph"] == "X"
        ]
        for span in spans:
            _check(span)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no trace of TimelineLogger: {error!r}") from error
    if not any(s.lane == PHASES and s.name == Phase.ROLLOUT for s in spans):
        raise ValueError(f"{path} is no trace of a whole step: it has no rollout phase")
    return spans


def _check(span: Span) -> None:
    """What is read of a span later is there."""
    if span.lane == TRAIN_LANE:
        UnitKind(span.name), int(span.arguments["index"])
    elif span.lane == ROLLOUT_LANE and span.name == "decode":
        int(span.arguments["rows"])
    elif span.lane == GROUPS:
        int(span.name)


def traces_of(folder: Path) -> dict[str, list[Span]]:
    """Name of each recorded step -> its spans. The first step of a run is left out where there are others: it warms
    up."""
    files = sorted(folder.glob("timeline/step_*.json")) or sorted(folder.glob("step_*.json"))
    if not files:
        raise ValueError(
            f"{folder} has no timeline/step_*.json: record a run with rollplex.callbacks.TimelineLogger among its "
            "callbacks"
        )
    later = [f for f in files if not f.stem.startswith("step_000001")]
    return {f.stem: read_trace(f) for f in later or files}


@dataclass
class Measured:
    """Mean seconds of one thing."""

    alone: float | None
    beside: float | None
    count: int


@dataclass(frozen=True)
class StepFit:
    """One recorded step and the simulation of it, in seconds."""

    name: str
    schedule: str
    recorded: float
    predicted: float
    rollout_recorded: float
    rollout_predicted: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.recorded - 1.0


@dataclass
class Calibration:
    measured: dict[str, Measured]
    alpha: float | None
    r: float | None
    update: float
    """Seconds of update and publishing in a step."""
    steps: list[StepFit] = field(default_factory=list)
    schedules: dict[str, float] = field(default_factory=dict)
    """Schedule -> predicted mean seconds of the recorded steps under it."""
    logged: float | None = None
    """Mean of time/step in the run's metrics file, if there is one."""

    @property
    def rates(self) -> dict[str, float]:
        """What `simulate.Rates` takes over: how the lanes hinder each other on this machine."""
        found = {"alpha": self.alpha, "r": self.r}
        return {name: value for name, value in found.items() if value is not None}

    def shown(self, name: str) -> str:
        value = getattr(self, name)
        return f"{value:.3f}" if value is not None else f"not measured, {getattr(Rates(), name)} assumed"

    def to_dict(self) -> dict[str, Any]:
        return {
            "alpha": self.alpha, "r": self.r, "update": self.update, "logged": self.logged,
            "measured": {name: vars(m) for name, m in self.measured.items()},
            "steps": [vars(s) | {"error": s.error} for s in self.steps], "schedules": self.schedules,
        }  # fmt: skip


def calibrate(folder: Path) -> Calibration:
    """Raises ValueError when the folder holds no traces."""
    traces = traces_of(folder)
    fit = _Fit()
    for spans in traces.values():
        fit.add(spans)
    found = Calibration(fit.table(), fit.measurements.alpha, fit.r, fit.mean_update)
    replays = {name: _Replay(spans, fit) for name, spans in traces.items()}
    found.steps = [replay.compared(name) for name, replay in replays.items()]
    found.schedules = {
        schedule: _mean([replay.predict(schedule)[0] for replay in replays.values()]) for schedule in SCHEDULES
    }
    found.logged = _logged(folder)
    return found


class _Fit:
    """Means over all traces."""

    def __init__(self) -> None:
        self.measurements = Measurements()
        self._units: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        self._decode: dict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        self._prefill: list[float] = []
        self._gaps: dict[str, list[float]] = defaultdict(list)
        self._update: list[float] = []

    def add(self, spans: Sequence[Span]) -> None:
        for s in spans:
            if s.lane == TRAIN_LANE:
                self._units[s.name][bool(s.arguments.get("hidden"))].append(s.seconds)
                self.measurements.add_unit(s.name, s.seconds, 1.0, bool(s.arguments.get("hidden")))
            elif s.lane == ROLLOUT_LANE and s.name == "decode":
                rows, co = int(s.arguments["rows"]), s.arguments.get("co")
                if co is not None:
                    self._decode[_bucket(rows)][bool(co)].append(s.seconds)
                    self.measurements.add_decode(s.seconds, rows, bool(co))
            elif s.lane == ROLLOUT_LANE and s.name == "prefill":
                self._prefill.append(s.seconds)
        for lane, names in ((ROLLOUT_LANE, ("decode", "prefill")), (TRAIN_LANE, None)):
            self._gaps[lane] += _gaps(
                [s for s in spans if s.lane == lane and (names is None or s.name in names)], spans
            )
        ends = [s.seconds for s in spans if s.lane == PHASES and s.name in (Phase.UPDATE, Phase.PUBLISH)]
        self._update.append(sum(ends))

    @property
    def mean_update(self) -> float:
        return _mean(self._update)

    @property
    def r(self) -> float | None:
        """Over the kinds of units that were seen alone and hidden, by how often they were hidden."""
        both = [(a, b) for a, b in self._units.values() if a and b]
        hidden = sum(len(b) for _, b in both)
        return sum(_mean(a) / _mean(b) * len(b) for a, b in both) / hidden if hidden else None

    @property
    def rates(self) -> Rates:
        alpha = self.measurements.alpha
        known = {"alpha": alpha, "r": self.r}
        return replace(Rates(), **{name: value for name, value in known.items() if value is not None})

    def unit(self, kind: str) -> float:
        """Seconds alone."""
        alone, hidden = self._units[kind]
        return _mean(alone) if alone else _mean(hidden) * self.rates.r

    def decode(self, rows: int) -> float:
        """Seconds alone, with the pause after it."""
        bucket = min(self._decode, key=lambda b: abs(b - _bucket(rows)))
        alone, beside = self._decode[bucket]
        seconds = _mean(alone) if alone else _mean(beside) / (1 + self.rates.alpha)
        return seconds + self.gap(ROLLOUT_LANE)

    def prefill(self) -> float:
        return _mean(self._prefill) + self.gap(ROLLOUT_LANE)

    def gap(self, lane: str) -> float:
        return _mean(self._gaps[lane])

    def table(self) -> dict[str, Measured]:
        out = {}
        for kind in UnitKind:
            alone, hidden = self._units.get(kind.value, ([], []))
            if alone or hidden:
                out[kind.value] = Measured(_or_none(alone), _or_none(hidden), len(alone) + len(hidden))
        if self._prefill:
            out["prefill"] = Measured(_mean(self._prefill), None, len(self._prefill))
        for bucket, (alone, beside) in sorted(self._decode.items()):
            name = f"decode, {2 ** (bucket - 1)} to {2**bucket - 1} rows" if bucket > 1 else "decode, 1 row"
            out[name] = Measured(_or_none(alone), _or_none(beside), len(alone) + len(beside))
        return out


class _Replay:
    """One recorded step, ready to be simulated."""

    def __init__(self, spans: Sequence[Span], fit: _Fit) -> None:
        self._fit = fit
        phases = [s for s in spans if s.lane == PHASES]
        rollout = next(s for s in phases if s.name == Phase.ROLLOUT)
        self.recorded = max(s.end for s in phases) - rollout.start
        self.rollout = rollout.seconds
        self.update = sum(s.seconds for s in phases if s.name == Phase.UPDATE) + sum(
            s.seconds for s in phases if s.name == Phase.PUBLISH and s.start >= rollout.end
        )
        units = [s for s in spans if s.lane == TRAIN_LANE]
        self.first = sum(fit.unit(s.name) for s in units if s.arguments.get("prefill"))
        self._units = sorted((s for s in units if not s.arguments.get("prefill")), key=_order)
        steps = sorted((s for s in spans if s.lane == ROLLOUT_LANE and s.name in ("prefill", "decode")),
                       key=lambda s: s.start)  # fmt: skip
        self._progress, self.opens = self._decoded(steps)
        self._finish = self._finishes(spans, steps)
        hidden = {UnitKind(s.name) for s in units if s.arguments.get("hidden")}
        self.schedule = SCHEDULES[2] if hidden - PREFIX_KINDS else SCHEDULES[1] if hidden else SCHEDULES[0]

    def _decoded(self, steps: Sequence[Span]) -> tuple[list[float], float]:
        """(decode seconds without co-runner at the end of each engine step, and when the window opens)."""
        now, opens, progress = 0.0, 0.0, []
        for s in steps:
            now += self._fit.prefill() if s.name == "prefill" else self._fit.decode(int(s.arguments["rows"]))
            progress.append(now)
            if s.name == "prefill":
                opens = now
        return progress or [0.0], opens

    def _finishes(self, spans: Sequence[Span], steps: Sequence[Span]) -> list[float]:
        """By bundle: decode seconds at which its groups are complete."""
        bundles = 1 + max((int(s.arguments["index"]) for s in self._units if s.name != UnitKind.REWARD), default=0)
        marks = {int(s.name): s.start for s in spans if s.lane == GROUPS}
        done = {g: self._at(t, steps) for g, t in marks.items()}
        if len(done) == bundles:
            return [done[g] for g in sorted(done)]
        ordered = sorted(done.values()) or [self._progress[-1]]
        share = len(ordered) / bundles
        return [ordered[min(len(ordered), math.ceil((b + 1) * share)) - 1] for b in range(bundles)]

    def _at(self, moment: float, steps: Sequence[Span]) -> float:
        ended = sum(s.end <= moment for s in steps)
        return self._progress[max(0, min(ended, len(self._progress)) - 1)]

    def predict(self, schedule: str) -> tuple[float, float]:
        """(step, rollout) seconds."""
        pause, last = self._fit.gap(TRAIN_LANE), len(self._finish) - 1
        units = [
            Unit(self._fit.unit(s.name) + pause, min(int(s.arguments["index"]), last),
                 UnitKind(s.name) not in PREFIX_KINDS)
            for s in self._units
        ]  # fmt: skip
        finish = [*self._finish, self._progress[-1]]
        end, decoded, _ = run_lanes(units, finish, self.opens, schedule, self._fit.rates)
        return self.first + end + self.update, self.first + decoded

    def compared(self, name: str) -> StepFit:
        step, rollout = self.predict(self.schedule)
        return StepFit(name, self.schedule, self.recorded, step, self.rollout, rollout)


def _order(s: Span) -> tuple[bool, bool, int, int]:
    """As the executor has its units: scoring before training, bundle after bundle."""
    kind = UnitKind(s.name)
    return PHASE_OF[kind] is Phase.TRAIN, kind is not UnitKind.REWARD, int(s.arguments["index"]), KIND_ORDER[kind]


def _bucket(rows: int) -> int:
    return max(rows, 1).bit_length()


def _gaps(mine: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Pauses between neighbouring spans of a lane inside one phase."""
    mine = sorted(mine, key=lambda s: s.start)
    edges = [s.start for s in spans if s.lane == PHASES]
    inside = [(a, b) for a, b in pairwise(mine) if not any(a.end <= edge <= b.start for edge in edges)]
    if not inside:
        return []
    found = sorted(max(0.0, b.start - a.end) for a, b in inside)
    return found[: max(1, len(found) * 3 // 4)]  # waiting for the other lane is no pause


def _logged(folder: Path) -> float | None:
    files = sorted(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    if not files:
        return None
    with open(files[-1]) as file:
        seconds = [float(row["time/step"]) for row in csv.DictReader(file) if row.get("time/step")]
    return _mean(seconds[1:] or seconds) if seconds else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _or_none(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None
