"""What a strategy that owns a colocated engine has in common: lane, executor, timeline, publishing of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rollplex.admission import Admission
from rollplex.cores import LaneThreads
from rollplex.data.records import Request, Rollout
from rollplex.engines.base import EngineContext, RolloutEngine
from rollplex.engines.torch_engine import TorchEngine
from rollplex.lanes import RolloutLane
from rollplex.phases import Phase, dispatch
from rollplex.schedule import Executor
from rollplex.streams import LaneStreams
from rollplex.timeline import Timeline
from rollplex.units import Unit

if TYPE_CHECKING:
    from rollplex.models.split_model import SplitModel


class Colocation:
    """The engine and both lanes. A strategy holds one and forwards its set-up and teardown."""

    def __init__(
        self,
        engine: RolloutEngine | None,
        *,
        threads: LaneThreads | None = None,
        streams: LaneStreams | None = None,
        admission: Admission | None = None,
        timeout: float | None = None,
    ) -> None:
        self.engine = engine or TorchEngine()
        self.timeline = Timeline()
        self.threads = threads or LaneThreads()
        self._trainer: Any = None
        self.streams = streams or LaneStreams()
        self.lane = RolloutLane(self.engine, self.timeline, self.threads, self.streams)
        self.executor = Executor(
            self.lane, self.timeline, self._notify, timeout=timeout, admission=admission, threads=self.threads,
            streams=self.streams,
        )  # fmt: skip
        self._model: SplitModel | None = None
        self._published: int | None = None
        self._started = False

    def start(self, trainer: Any, model: SplitModel, processor: Any, device: Any) -> None:
        """Start the engine on the rollout lane; the model must be where it stays."""
        self._trainer, self._model = trainer, model
        self._published = None
        self.threads.settle()
        self.streams.start(device)
        self._started = True
        self.lane.start(EngineContext(model=model, processor=processor, device=device))

    def close(self) -> None:
        if self._started:
            self._started = False
            self.lane.close()
            self.threads.restore()
        self.lane.drain_events()
        # Here and not in the callbacks: after an error Lightning calls no callback's teardown, and a later run must not
        # inherit this one's schedule.
        self.executor.reset()

    def rollout(
        self, requests: Callable[[], Sequence[Request]], units: Sequence[Unit], collect: Callable[[Rollout], int | None]
    ) -> None:
        """A rollout with the units of the first update before, beside or after it."""
        self.publish()
        self.executor.rollout(requests, units, collect)

    def generate(self, requests: Sequence[Request], collect: Callable[[Rollout], int | None]) -> None:
        """A rollout alone."""
        self.publish()
        self.executor.generate(requests, collect)

    def publish(self) -> None:
        """Make the engine sample with the model's present weights, if it does not already."""
        assert self._model is not None, "the engine is not started"
        version = self._model.version
        if self._published == version:
            return
        self.executor.enter(Phase.PUBLISH)
        self.lane.publish(version, limit=self.executor.timeout)
        self._published = version
        self._notify("on_weights_published", version)
        self.executor.enter(Phase.IDLE)

    def _notify(self, event: str, *arguments: Any) -> None:
        dispatch(self._trainer, event, *arguments)
