"""The train lane: a graph of work units, and the one place that decides when a unit may start.

Every schedule runs the same units with the same arithmetic; a schedule only says when. Without help a unit waits
until the rollout has drained (serial colocation). An *opener*, installed by a callback, may admit it earlier, while
the engine is still decoding.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence

from rollplex.admission import Admission
from rollplex.before_rollout import BeforeRollout
from rollplex.cores import LaneThreads
from rollplex.data.records import Request, Rollout
from rollplex.exchange import Exchange
from rollplex.lane_progress import LaneProgress
from rollplex.lanes import Drained, EngineError, Event, Failed, Finished, RolloutLane, WindowClosed, WindowOpened
from rollplex.lockstep import Lockstep
from rollplex.phases import Notify, Phase, PhaseMachine
from rollplex.ranks import Ranks
from rollplex.schedule_state import Opener, ScheduleState
from rollplex.streams import LaneStreams
from rollplex.timeline import PHASES, ROLLOUT_LANE, TRAIN_LANE, Timeline
from rollplex.units import ORDERED_KINDS, PREFIX_KINDS, Unit, UnitKind, by_order
from rollplex.whereabouts import Whereabouts


class UnitError(RuntimeError):
    """A unit raised; names the unit and its groups, the cause is chained."""


class StopRequested(KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C, SIGTERM) and the current step was given up before any update."""


class Executor(BeforeRollout):
    """Runs a step's units on the calling (train) thread, beside the rollout lane."""

    def __init__(
        self,
        lane: RolloutLane,
        timeline: Timeline,
        notify: Notify,
        *,
        timeout: float | None = None,
        admission: Admission | None = None,
        threads: LaneThreads | None = None,
        streams: LaneStreams | None = None,
    ) -> None:
        self.lane = lane
        self.timeline = timeline
        self.admission = admission or Admission(measure=False)
        self.threads = threads or LaneThreads()
        self.streams = streams or LaneStreams()
        self.held_bytes: Callable[[], int] = lambda: 0
        """Bytes of prefix state alive now; set for each step."""
        self.progress = LaneProgress()
        self.machine = PhaseMachine(notify)
        self.openers: list[Opener] = []
        self.reuse_prefill = False
        """Run the units of PREFILL_KINDS before the engine starts, which then takes their prefixes."""
        self.stop_requested: str | None = None
        """Why to stop ("SIGTERM", "SIGINT"); read between units."""
        self.stops_together = False
        """With several ranks: stop only where all of them ask (`stop_together`)."""
        self.where = Whereabouts()
        """What the other ranks are told of this one."""
        lane.during = lambda: self.where.during
        self.lockstep: Lockstep | None = None
        """Set where actor units are collectives: they start in one order on every rank."""
        self.exchange: Exchange | None = None
        """Set where trainers and engines are not the same processes (tensor parallel)."""
        self.everyone: Ranks | None = None
        """All processes, where those of data parallelism are only some."""
        self.timeout = timeout
        """Seconds without any engine event after which a rollout counts as stalled; None waits forever."""
        self._notify = notify
        self._phase_start = 0.0

    def reset(self) -> None:
        """Back to the serial schedule, holding nothing of the last step."""
        self.openers.clear()
        self.reuse_prefill = False
        self.held_bytes = lambda: 0
        self.machine.reset()

    # ---- a step, phase by phase ----

    def rollout(
        self,
        requests: Callable[[], Sequence[Request]],
        units: Iterable[Unit],
        collect: Callable[[Rollout], int | None],
    ) -> None:
        """ROLLOUT, SCORE and TRAIN of the first mini-batch.

        `requests` is asked once what the engine is handed (features, prefixes) is there. `collect` takes each finished
        response and returns the group's index when that group is now complete.
        """
        pending = by_order(units)
        self.progress.planned(len(pending))
        ordered = frozenset().union(*ORDERED_KINDS)
        state = ScheduleState(fixed_order=[u.id for u in pending if u.kind in ordered])
        if self.machine.phase is Phase.IDLE:  # and no further round of a step
            self.admission.start_step()
        began = time.perf_counter()
        with self._guard():
            self.enter(Phase.ROLLOUT)
            self._vision(pending, state)
            self._prefill(pending, state)
            self._submit(requests(), state)
            self._overlapped(pending, state, collect)
            self._learn_decode_times(began)
            if self.lane.engine.releases_kv:
                self.lane.release_kv(limit=self.timeout)
            self.enter(Phase.SCORE)
            self._finish(pending, state, Phase.SCORE)
            self.enter(Phase.TRAIN)
            self._finish(pending, state, Phase.TRAIN)
            assert not pending, f"units left over: {[str(u) for u in pending]}"

    def train(self, units: Iterable[Unit]) -> None:
        """TRAIN of a later mini-batch: everything it needs is known. A wish to stop waits until the step is whole."""
        pending = by_order(units)
        self.progress.planned(len(pending))
        state = ScheduleState(drained=True, finished_groups={g for u in pending for g in u.groups})
        with self._guard(stoppable=False):
            self.enter(Phase.TRAIN)
            self._finish(pending, state, Phase.TRAIN, stoppable=False)
            assert not pending, f"units left over: {[str(u) for u in pending]}"

    def generate(self, requests: Sequence[Request], collect: Callable[[Rollout], int | None]) -> None:
        """EVALUATE: rollouts only."""
        with self._guard():
            self.enter(Phase.EVALUATE)
            state = ScheduleState()
            self._submit(requests, state)
            self._overlapped([], state, collect)
            self.enter(Phase.IDLE)

    def enter(self, phase: Phase) -> None:
        now = time.perf_counter()
        if self.machine.phase is not Phase.IDLE:
            self.timeline.add(PHASES, self.machine.phase.value, self._phase_start, now)
        self._phase_start = now
        self.where.note(phase)
        self.machine.to(phase)

    def enter_update(self) -> None:
        """From here on the step is no longer given up: the weights are about to change."""
        self.enter(Phase.UPDATE)

    def check_stop(self) -> None:
        if self.stop_requested is not None and not self.stops_together:
            raise StopRequested(self.stop_requested)

    def stop_together(self, ranks: Ranks) -> None:
        """Stop on every rank if one was asked to. A collective; between steps."""
        reasons = [reason for reason in (self.everyone or ranks).gather(self.stop_requested) if reason is not None]
        if reasons:
            raise StopRequested(reasons[0])

    # ---- inside ----

    def _guard(self, *, stoppable: bool = True) -> _Guard:
        if stoppable:
            self.check_stop()
        return _Guard(self)

    def _submit(self, requests: Sequence[Request], state: ScheduleState) -> None:
        if self.exchange is not None:
            self.exchange.forget()
            requests = self.exchange.requests(requests)
        self.progress.submitted(len(requests))
        if requests:
            self.lane.submit(requests, limit=self.timeout)
        state.drained = not requests  # a rank may have no group of a small batch

    def _overlapped(self, pending: list[Unit], state: ScheduleState, collect: Callable[[Rollout], int | None]) -> None:
        last_event = time.monotonic()
        lockstep = self.lockstep if pending or (self.exchange is not None and self.exchange.shares) else None
        while True:
            self.check_stop()
            while not state.drained and (event := self._poll(0.0)) is not None:
                last_event = time.monotonic()
                self._handle(event, state, collect)
            if state.drained and lockstep is None:
                break
            unit, over = self._choose(pending, state, lockstep)
            for rollout in lockstep.news if lockstep is not None else ():
                self._collect(rollout, state, collect)
            if unit is not None:
                pending.remove(unit)
                self._run(unit, state)
            if over:
                break
            if unit is not None or state.drained:
                continue
            if (event := self._poll(0.1 if lockstep is None else 0.02)) is not None:
                last_event = time.monotonic()
                self._handle(event, state, collect)
            elif self.timeout is not None and time.monotonic() - max(last_event, self.lane.last_sign) > self.timeout:
                error = EngineError(f"the engine gave no sign of life for {self.timeout:g} s {self.where.during}")
                self.lane.give_up(error)
                raise error

    def _choose(self, pending: list[Unit], state: ScheduleState, lockstep: Lockstep | None) -> tuple[Unit | None, bool]:
        """The next unit that may start before the rollout is over, and whether it is over on all ranks."""
        ready = (u for u in pending if self._ready(u, state))
        if lockstep is None:
            return next((u for u in ready if self._admitted(u, state)), None), False
        could = list(ready)
        own = next((u for u in could if u.kind not in lockstep.kinds and self._admitted(u, state)), None)
        if own is not None:
            lockstep.news = []
            return own, False
        before = self.admission.admitted
        could = [u for u in could if u.kind in lockstep.kinds and self._could_start(u, state)]
        could = [] if lockstep.after_decode else could
        news = self.exchange.take_news() if self.exchange is not None else []
        chosen, over = lockstep.choose([u.id for u in could], drained=state.drained, news=news)
        self.admission.admitted = before + (chosen is not None)
        return next((u for u in could if u.id == chosen), None), over

    def _could_start(self, unit: Unit, state: ScheduleState) -> bool:
        """A rank whose own rollout is over slows nobody down; it only keeps the order."""
        if state.drained:
            return bool(self.openers) and (unit.kind in PREFIX_KINDS or state.is_next_in_order(unit))
        return self._admitted(unit, state)

    def _learn_decode_times(self, began: float) -> None:
        for span in self.timeline.spans():
            if span.lane == ROLLOUT_LANE and span.name == "decode" and span.start >= began:
                rows, co = span.arguments["rows"], span.arguments["co"]
                if co is not None:
                    self.admission.measurements.add_decode(span.seconds, rows, co)

    def _poll(self, wait: float) -> Event | None:
        try:
            return self.lane.events.get(timeout=wait) if wait else self.lane.events.get_nowait()
        except queue.Empty:
            if not self.lane.running:
                raise EngineError("the rollout lane ended while requests were unfinished") from None
            return None

    def _handle(self, event: Event, state: ScheduleState, collect: Callable[[Rollout], int | None]) -> None:
        if isinstance(event, Finished):
            self.progress.received(event.rollout)
            arrived = [event.rollout] if self.exchange is None else self.exchange.arrived(event.rollout)
            for rollout in arrived:
                self._collect(rollout, state, collect)
        elif isinstance(event, WindowOpened):
            state.window_open = True
            self._notify("on_window_open")
        elif isinstance(event, WindowClosed):
            state.window_open = False
            self._notify("on_window_close")
        elif isinstance(event, Drained):
            state.drained = True
        else:
            assert isinstance(event, Failed)
            done = len(state.finished_groups)
            what = f"the engine failed {self.where.during} with {done} groups complete: {event.error!r}"
            raise EngineError(what) from event.error

    def _collect(self, rollout: Rollout, state: ScheduleState, collect: Callable[[Rollout], int | None]) -> None:
        group = collect(rollout)
        if group is not None:
            state.finished_groups.add(group)
            self._notify("on_group_finished", group)

    def _ready(self, unit: Unit, state: ScheduleState) -> bool:
        return all(need in state.done for need in unit.needs) and (
            not unit.needs_responses or all(g in state.finished_groups for g in unit.groups)
        )

    def _admitted(self, unit: Unit, state: ScheduleState) -> bool:
        if not any(opener(unit, state) for opener in self.openers):
            return False
        held = self.held_bytes() if unit.kind in PREFIX_KINDS else None
        return self.admission.admits(unit.id, unit.sort, unit.work, unit.density, held)

    def _finish(self, pending: list[Unit], state: ScheduleState, phase: Phase, *, stoppable: bool = True) -> None:
        while any(u.phase is phase for u in pending):
            if stoppable:
                self.check_stop()
            unit = next((u for u in pending if u.phase is phase and self._ready(u, state)), None)
            assert unit is not None, f"nothing can run of {[str(u) for u in pending if u.phase is phase]}"
            pending.remove(unit)
            self._run(unit, state)

    def _run(self, unit: Unit, state: ScheduleState, *, before: bool = False) -> None:
        """before: the engine is handed the result, and stands still until then."""
        self.where.note(self.machine.phase, str(unit))
        self.progress.started(unit.kind.value)
        self._notify("on_unit_start", unit)
        hidden = self.machine.phase is Phase.ROLLOUT and not before
        held, sort = self.held_bytes(), unit.sort
        self.threads.co_running = hidden
        self.threads.apply(TRAIN_LANE)
        start = time.perf_counter()
        try:
            with self.streams.unit(hidden=hidden):
                unit.run()
        except Exception as error:
            groups = ", ".join(map(str, unit.groups))
            what = f"{self.where.prefix}unit {unit} (groups {groups}) failed: {type(error).__name__}: {error}"
            raise UnitError(what) from error
        finally:
            self.threads.co_running = False
            self.threads.apply(TRAIN_LANE)
            end = time.perf_counter()
            self.timeline.add(TRAIN_LANE, unit.kind.value, start, end, index=unit.index, hidden=hidden, prefill=before)
        self.admission.measurements.add_unit(sort, end - start, unit.work, hidden)
        if unit.kind in PREFIX_KINDS and (self.openers or self.reuse_prefill or unit.kind is UnitKind.VISION):
            grown = self.held_bytes() - held
            early = (hidden or before) and unit.kind is not UnitKind.VISION  # which can do without its graph
            self.admission.learn_bytes(str(unit), sort, unit.work, unit.density, grown, early=early)
        state.done.add(unit.id)
        self.progress.done()
        self._notify("on_unit_end", unit)
        self.where.note(self.machine.phase)


class _Guard:
    """Leaves both lanes clean when a step ends by an exception."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            return
        executor = self.executor
        try:
            executor.lane.abort()
        except Exception:
            pass  # the engine is broken: the first error is the one to tell
        executor.lane.drain_events()
        executor.machine.reset()
