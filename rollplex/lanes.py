"""The rollout lane: one thread that owns every call of the engine.

Commands go in through a queue and are applied between engine steps; events come out through another one, which the
executor on the train lane reads. No other thread touches the engine, so engines need no locks.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollplex.cores import LaneThreads
from rollplex.data.records import Request, Rollout
from rollplex.engines.base import EngineContext, RolloutEngine, WindowState
from rollplex.streams import LaneStreams
from rollplex.timeline import RELEASE_KV, RESTORE_KV, ROLLOUT_LANE, Timeline

log = logging.getLogger(__name__)

STUCK_AFTER = 30.0
"""Seconds that an engine may take to come back from a step when it is asked to stop."""


class EngineError(RuntimeError):
    """The engine raised; the cause is chained."""


@dataclass(frozen=True)
class WindowOpened:
    """Every prompt is prefilled, rows are decoding."""


@dataclass(frozen=True)
class WindowClosed:
    """A prefill came back, or nothing is left to decode."""


@dataclass(frozen=True)
class Finished:
    rollout: Rollout


@dataclass(frozen=True)
class Drained:
    """Everything submitted is finished or aborted."""


@dataclass(frozen=True)
class Failed:
    error: BaseException


Event = WindowOpened | WindowClosed | Finished | Drained | Failed


class RolloutLane:
    """Start it, submit, read events, close it. A lane that failed stays up only to be closed."""

    def __init__(
        self,
        engine: RolloutEngine,
        timeline: Timeline,
        threads: LaneThreads | None = None,
        streams: LaneStreams | None = None,
    ) -> None:
        self.engine = engine
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._timeline = timeline
        self._threads = threads or LaneThreads()
        self._streams = streams or LaneStreams()
        self._commands: queue.SimpleQueue[tuple[Callable[[RolloutEngine], Any], Future[Any]] | None]
        self._commands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._window_open = False
        self._busy = False
        self._failed: BaseException | None = None
        self._lost: threading.Thread | None = None
        self.during: Callable[[], str] = lambda: ""
        """The present phase, for errors."""
        self.last_sign = time.monotonic()
        """When the engine last got on (time.monotonic): a decode without events is a sign of life too."""
        self.memory: dict[str, int] = {}
        """The engine's `state_bytes` after its last command or step."""
        self.memory_peak: dict[str, int] = {}
        """When their sum was largest since the last `submit`."""

    # ---- called from the train lane ----

    def start(self, context: EngineContext) -> None:
        """Start the thread and the engine in it; returns when the engine is ready."""
        assert self._thread is None, "the rollout lane is already running"
        if self._lost is not None and self._lost.is_alive():
            raise EngineError("the engine of the last run never came back; start a new process")
        self.events, self._commands = queue.SimpleQueue(), queue.SimpleQueue()
        self._lost = self._failed = None
        self._busy = self._window_open = False
        self._thread = threading.Thread(target=self._run, name="rollplex-rollout", daemon=True)
        self._thread.start()
        try:
            self.call(lambda engine: engine.start(context))
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def call(self, command: Callable[[RolloutEngine], Any], *, limit: float | None = None) -> Any:
        """Run `command(engine)` on the lane between two steps; returns its result or raises its error.

        EngineError after `limit` seconds: the engine is stuck in a step or in the command, and counts as failed.
        """
        future = self.post(command)
        try:
            return future.result(timeout=limit)
        except TimeoutError as error:
            if future.done():  # the command's own
                raise
            self._failed = EngineError(f"the engine did not answer within {limit:g} s {self.during()}".rstrip())
            raise self._failed from error

    def post(self, command: Callable[[RolloutEngine], Any]) -> Future[Any]:
        """As `call`, without waiting."""
        if not self.running:
            raise EngineError("the rollout lane is not running")
        if self._failed is not None:
            raise EngineError(f"the engine failed before: {self._failed!r}") from self._failed
        future: Future[Any] = Future()
        self._commands.put((command, future))
        return future

    def submit(self, requests: Sequence[Request], *, limit: float | None = None) -> None:
        """Hand requests over; the engine's refusal (ValueError) is raised here."""
        event = self._streams.hand_over()
        passes = {id(r.prefix): r.prefix for r in requests if r.prefix is not None}
        tensors = [t for given in passes.values() for t in given.tensors()]

        def submit(engine: RolloutEngine) -> None:
            self._streams.take(event, tensors)
            self._move_kv(RESTORE_KV, engine.restore_kv)
            self.memory_peak = {}
            engine.submit(requests)

        self.call(submit, limit=limit)

    def release_kv(self, *, limit: float | None = None) -> int:
        """The engine, which is idle, gives the memory of its K/V pool back until the next `submit`; returns the bytes
        freed, 0 when they were already. The move is a span of the timeline."""
        return int(self.call(lambda engine: self._move_kv(RELEASE_KV, engine.release_kv), limit=limit))

    def publish(self, version: int, *, limit: float | None = None) -> None:
        """The trainer's weights are at `version`: the engine takes them over."""
        event = self._streams.hand_over()

        def publish(engine: RolloutEngine) -> None:
            self._streams.take(event)
            engine.publish(version)

        self.call(publish, limit=limit)

    def abort(self) -> None:
        """End what is unfinished; the responses so far come as `Finished` events, then `Drained`."""
        if self.running and self._failed is None:
            self.call(self._abort, limit=STUCK_AFTER)

    def give_up(self, error: BaseException) -> None:
        """Count the engine as failed, so that nobody waits for it again."""
        self._failed = self._failed or error

    def drain_events(self) -> None:
        """Forget events of an aborted rollout."""
        while not self.events.empty():
            self.events.get_nowait()

    def close(self) -> None:
        """Stop the thread and the engine. Safe to call twice, and after a failure.

        A thread that is stuck in the engine is left behind: it is a daemon and ends with the process.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._commands.put(None)
        thread.join(timeout=2.0 if self._failed is not None else STUCK_AFTER)
        if thread.is_alive():
            self._lost = thread
            log.warning("the engine is stuck; its thread is left behind and ends with this process")

    # ---- on the lane's own thread ----

    def _move_kv(self, name: str, move: Callable[[], int]) -> int:
        """Run `move` (it returns bytes); a span of its time and bytes unless nothing moved."""
        start = time.perf_counter()
        moved = move()
        if moved:
            self._timeline.add(ROLLOUT_LANE, name, start, time.perf_counter(), bytes=moved)
        return moved

    def _abort(self, engine: RolloutEngine) -> None:
        for rollout in engine.abort():
            self.events.put(Finished(rollout))
        self._settle(engine)

    def _run(self) -> None:
        self._threads.apply(ROLLOUT_LANE)
        with self._streams.rollout_lane():
            try:
                while self._apply_commands():
                    if self._busy and self._failed is None:
                        self._step()
            finally:
                self.engine.close()

    def _apply_commands(self) -> bool:
        """Apply what waits; when there is nothing to step, wait for more. False: stop."""
        while True:
            try:
                item = self._commands.get(block=not self._busy or self._failed is not None)
            except queue.Empty:
                return True
            if item is None:
                return False
            self._apply(*item)
            if self._busy:
                return True

    def _apply(self, command: Callable[[RolloutEngine], Any], future: Future[Any]) -> None:
        """Whoever waits for the command reads `memory` next: it is up to date before they are told."""
        result, failed = None, None
        try:
            result = command(self.engine)
        except BaseException as error:
            failed = error
        self._busy = self.engine_busy()
        self._note_memory()
        if failed is None:
            future.set_result(result)
        else:
            future.set_exception(failed)

    def _note_memory(self) -> None:
        try:
            self.memory = now = self.engine.state_bytes()
        except Exception:  # of an engine that failed, or is closed
            return
        if sum(now.values()) >= sum(self.memory_peak.values()):
            self.memory_peak = now

    def engine_busy(self) -> bool:
        try:
            return self.engine.window is not WindowState.IDLE
        except BaseException:
            return False

    def _step(self) -> None:
        beside = self._threads.co_running
        self._threads.apply(ROLLOUT_LANE)
        start = time.perf_counter()
        try:
            before, rows, progress = self.engine.window, self.engine.num_running, self.engine.progress
            finished = list(self.engine.step())
            after, moved = self.engine.window, self.engine.progress != progress
        except BaseException as error:
            self._failed = error
            self.events.put(Failed(error))
            return
        # A step that a unit began or ended in counts for neither side.
        if moved:
            self.last_sign = time.monotonic()
        co = beside if beside == self._threads.co_running else None
        self._timeline.add(ROLLOUT_LANE, before.value, start, time.perf_counter(), rows=rows, co=co)
        self._note_memory()
        for rollout in finished:
            self.events.put(Finished(rollout))
        self._announce(after)
        if after is WindowState.IDLE:
            self._settle(self.engine)

    def _announce(self, window: WindowState) -> None:
        is_open = window is WindowState.DECODE
        if is_open != self._window_open:
            self._window_open = is_open
            self.events.put(WindowOpened() if is_open else WindowClosed())

    def _settle(self, engine: RolloutEngine) -> None:
        self._announce(engine.window)
        if self._busy:
            self._busy = False
            self.events.put(Drained())
