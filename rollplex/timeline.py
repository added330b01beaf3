"""Spans of units, engine steps and phases, per lane, on one clock."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLLOUT_LANE = "rollout"
TRAIN_LANE = "train"
PHASES = "phase"
RELEASE_KV, RESTORE_KV = "release_kv", "restore_kv"
"""Spans of the rollout lane in which K/V memory is given back and taken again (argument `bytes`)."""
GROUPS = "groups"
"""Marks of no length: when a group's responses were complete."""


@dataclass(frozen=True)
class Span:
    lane: str
    name: str
    start: float
    """Seconds on `time.perf_counter`."""
    end: float
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Timeline:
    """Thread-safe recorder; `clear` once per step keeps it small."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, lane: str, name: str, **arguments: Any) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, start, time.perf_counter(), **arguments)

    def add(self, lane: str, name: str, start: float, end: float, **arguments: Any) -> None:
        with self._lock:
            self._spans.append(Span(lane, name, start, end, arguments))

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def clear(self) -> None:
        with self._lock:
            self._spans.clear()

    def seconds(self, lane: str, name: str | None = None) -> float:
        """Total span time on a lane, of one name or of all."""
        return sum(s.seconds for s in self.spans() if s.lane == lane and name in (None, s.name))

    def to_trace(self) -> dict[str, Any]:
        """Chrome/Perfetto trace events (https://ui.perfetto.dev opens the file): times in microseconds."""
        spans = self.spans()
        origin = min((s.start for s in spans), default=0.0)
        lanes = {lane: i for i, lane in enumerate(sorted({s.lane for s in spans}))}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}} for lane, i in lanes.items()
        ]
        events = [
            {
                "ph": "X", "name": s.name, "pid": 0, "tid": lanes[s.lane], "ts": (s.start - origin) * 1e6,
                "dur": s.seconds * 1e6, "args": s.arguments,
            }
            for s in spans
        ]  # fmt: skip
        return {"traceEvents": names + events, "displayTimeUnit": "ms"}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_trace()))
