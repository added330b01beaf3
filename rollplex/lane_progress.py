"""How far both lanes are in the step, for whoever shows it. Written on the Trainer's thread, read from any."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollplex.data.records import Rollout


@dataclass
class LaneProgress:
    """Plain numbers: a reader may see them a moment old, never broken."""

    responses: int = 0
    """Asked for in this rollout."""
    finished: int = 0
    tokens: int = 0
    """Of finished responses."""
    units: int = 0
    """Of the train lane, to be done until the next update."""
    units_done: int = 0
    unit: str = ""
    """Running now; "" is none."""
    _start: float = 0.0
    _end: float = 0.0

    def submitted(self, responses: int) -> None:
        self.responses, self.finished, self.tokens = responses, 0, 0
        self._start = self._end = time.monotonic()

    def received(self, rollout: Rollout) -> None:
        self.finished += 1
        self.tokens += len(rollout)
        self._end = time.monotonic()

    def planned(self, units: int) -> None:
        self.units, self.units_done, self.unit = units, 0, ""

    def started(self, unit: str) -> None:
        self.unit = unit

    def done(self) -> None:
        self.units_done += 1
        self.unit = ""

    @property
    def tokens_per_second(self) -> float:
        """Of the responses that are finished, until the last of them came; 0 before the first."""
        seconds = self._end - self._start
        return self.tokens / seconds if seconds > 0 else 0.0
