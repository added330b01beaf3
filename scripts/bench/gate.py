"""A contender's side of the conversation: one step each time the parent asks for it, blocked on a pipe in between."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from bench.counts import ForwardCounts


class Stop(BaseException):
    """The parent has all it wants. Not an Exception: trainers must not catch it as a failed step."""


class Missing(Exception):
    """This contender cannot run here; the message says why."""


class Gate:
    """A trainer's loop calls `arrive` at one place, just before each step.

    A step's seconds go from being let through to coming back: the whole loop counts, data loading and the trainer's
    own work between steps included, for every contender alike.
    """

    def __init__(self, connection: Connection, counts: ForwardCounts) -> None:
        self._connection = connection
        self.counts = counts
        self.elsewhere: Callable[[], float] = lambda: 0.0
        """CPU seconds of other processes that work for this contender."""
        self._start: tuple[float, float] | None = None
        self._idle_cpu = 0.0

    def arrive(self, details: Callable[[], dict[str, Any]]) -> None:
        """Send the results of the step that just ended, if any; block until the next one is asked for.

        `details` gives what the contender says about its step. Raises Stop.
        """
        if self._start is not None:
            seconds = time.perf_counter() - self._start[0]
            cpu = self._cpu() - self._start[1]
            self._start = None
            result = {
                "step": seconds,
                "cpu": cpu,
                "idle_cpu": self._idle_cpu,
                **self.counts.result(),
                **details(),
                **memory(),
            }
            self._connection.send(("done", result))
        else:
            self._connection.send(("ready", None))
        asleep = self._cpu()
        if self._connection.recv() == "stop":
            raise Stop
        self._idle_cpu = self._cpu() - asleep
        self.counts.reset()
        self._start = (time.perf_counter(), self._cpu())

    def _cpu(self) -> float:
        return time.process_time() + self.elsewhere()


def memory() -> dict[str, float]:
    """Peak resident memory of this process so far, MiB."""
    return {"peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
