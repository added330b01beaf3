"""What a strategy that owns a colocated engine has in common: lane, executor, timeline, publishing of weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rollplex.admission import Admission
from rollplex.checks import check_engine_degree
from rollplex.cores import LaneThreads
from rollplex.data.records import Request, Rollout
from rollplex.engines.base import EngineContext, RolloutEngine
from rollplex.engines.torch_engine import TorchEngine
from rollplex.lanes import STUCK_AFTER, RolloutLane
from rollplex.offload import HostCopies
from rollplex.phases import Phase, dispatch
from rollplex.ranks import Ranks
from rollplex.schedule import Executor
from rollplex.streams import LaneStreams
from rollplex.timeline import Timeline
from rollplex.units import Unit
from rollplex.watch import MemoryWatch, ReferenceHolder
from rollplex.whereabouts import tell_of_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from rollplex.models.split_model import SplitModel
    from rollplex.step import GRPOStep
    from rollplex.tensor_parallel import Shards

log = logging.getLogger(__name__)


class EngineHolder:
    """The engine in the memory ledger. Its bytes are those of the rollout lane's last look; nobody else calls it."""

    def __init__(self, lane: RolloutLane) -> None:
        self._lane = lane

    def state_bytes(self) -> dict[str, int]:
        return self._lane.memory

    def peak_bytes(self) -> dict[str, int]:
        return self._lane.memory_peak or self._lane.memory

    def state_tensors(self) -> dict[str, list[Tensor]]:
        return self._lane.call(lambda engine: engine.state_tensors(), limit=STUCK_AFTER) if self._lane.running else {}


def make_colocation(
    engine: RolloutEngine | None,
    *,
    threads: int | None,
    rollout_threads: int | None,
    train_threads: int | None,
    pin_cores: bool,
    train_sms: int | None,
    prefix_budget_bytes: int | None,
    admission: str,
    rollout_timeout: float | None,
    memory_limit_bytes: int | None = None,
) -> Colocation:
    """From a strategy's settings (`RollplexStrategy` says what they mean)."""
    if rollout_timeout is not None and not rollout_timeout > 0:
        raise ValueError(f"rollout_timeout={rollout_timeout} must be above 0 seconds, or null to wait forever")
    if admission not in ("measure", "always"):
        raise ValueError(f"admission={admission!r} is unknown; set measure or always")
    return Colocation(
        engine,
        threads=LaneThreads(threads, rollout_threads, train_threads, pin_cores=pin_cores),
        streams=LaneStreams(train_sms),
        admission=Admission(prefix_budget_bytes, limit_bytes=memory_limit_bytes, measure=admission == "measure"),
        timeout=rollout_timeout,
    )


def check_trainer(trainer: Any, precision: str, colocation: Colocation, *, split_engine: bool = False) -> None:
    """What a strategy with a colocated engine cannot do, said before a model is touched. split_engine: an engine may
    have several ranks."""
    if precision != "32-true":
        raise ValueError(
            f"trainer.precision={precision} is not supported: trainer and engine would no longer "
            "agree; leave precision at 32-true and set the model's dtype (float32 or bfloat16)"
        )
    if not split_engine:
        check_engine_degree(getattr(colocation.engine, "tensor_parallel_size", 1))
    if trainer.overfit_batches:
        raise ValueError(
            f"trainer.overfit_batches={trainer.overfit_batches} has no effect: rows follow the rollout's number. "
            "Give the task that many training rows instead"
        )


def check_module(module: Any, strategy: str) -> None:
    if not hasattr(module, "actor"):
        raise ValueError(
            f"strategy={strategy} drives a GRPOModule, but the model is a {type(module).__name__}: subclass that"
        )


def check_same(module: Any, datamodule: Any, ranks: Ranks) -> None:
    """ValueError on every rank unless all have the same model, settings and rows. A collective."""
    check_same_model(module, ranks)
    check_same_settings(module, datamodule, ranks)


def check_same_model(module: Any, ranks: Ranks) -> None:
    """Ranks load the model themselves: a node with an older folder would train another one."""
    prints = ranks.gather(module._reference_print)
    other = next((rank for rank, found in enumerate(prints) if found != prints[0]), None)
    if other is not None:
        raise ValueError(
            f"model={module.hparams['model']!r} holds other weights on rank {other} than on rank 0: give all nodes the "
            "same folder"
        )


def check_same_settings(module: Any, datamodule: Any, ranks: Ranks) -> None:
    """Ranks read their own files, too: with other settings or rows they would train different models, unnoticed."""
    plain = (str, int, float, list, tuple, type(None))  # others may print their address
    mine = {name: repr(value) for name, value in module.hparams.items() if isinstance(value, plain)}
    if hasattr(datamodule, "state_dict"):
        mine |= {f"data's {name}": repr(value) for name, value in datamodule.state_dict().items()}
    everywhere = ranks.gather(mine)
    for rank, theirs in enumerate(everywhere):
        for name in everywhere[0]:
            if theirs.get(name) != everywhere[0][name]:
                raise ValueError(
                    f"{name} is {theirs.get(name)} on rank {rank} and {everywhere[0][name]} on rank 0: give all ranks "
                    "the same settings and files"
                )


class LastWords:
    """The part of a strategy that tells the other ranks why this one fails, and of them where they are."""

    colocation: Colocation

    def on_exception(self, exception: BaseException) -> None:
        tell_of_ranks(exception, self.colocation.executor.where)
        super().on_exception(exception)  # type: ignore[misc]


class WithColocation(LastWords):
    """The part of a strategy with whole weights that owns a colocation."""

    lightning_module: Any

    def whole_model(self) -> SplitModel:
        """The policy with whole weights."""
        return self.lightning_module.actor

    def teardown(self) -> None:
        self.colocation.executor.where.close()
        self.colocation.close()
        if hasattr(self.lightning_module, "close_rewards"):
            self.lightning_module.close_rewards()
        super().teardown()  # type: ignore[misc]


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
        self.watch = MemoryWatch()
        self.executor.admission.resident = self.watch.device_bytes
        self.copies: HostCopies
        """What moves states to the host and back; exists while the engine runs."""
        self.reference: ReferenceHolder | None = None
        self._model: SplitModel | None = None
        self._refresh: Callable[[], None] | None = None
        self._published: int | None = None
        self._started = False

    def start(
        self,
        trainer: Any,
        model: SplitModel,
        processor: Any,
        device: Any,
        *,
        served: SplitModel | None = None,
        refresh: Callable[[], None] | None = None,
        shards: Shards | None = None,
    ) -> None:
        """Start the engine on the rollout lane; the model must be where it stays.

        served: what the engine reads instead of the trainer's model, where that has its weights in shards; `refresh`
        brings it up to date, on the Trainer's thread. shards: what this process is among others with which it shares
        trainers or engines.
        """
        self._trainer, self._model, self._refresh = trainer, model, refresh
        self._published = None
        self.threads.settle()
        self.streams.start(device)
        self.copies = HostCopies(device)
        self._started = True
        self._watch(trainer, device)
        self.lane.start(EngineContext(served or model, processor, device, shards))

    def _watch(self, trainer: Any, device: Any) -> None:
        """Who holds memory: the strategy, the engine, the reference model; the step comes later."""
        self.watch.start(device)
        holders = self.watch.holders
        holders["engine"] = EngineHolder(self.lane)
        if hasattr(trainer.strategy, "state_bytes"):
            holders["strategy"] = trainer.strategy
        reference = getattr(trainer.lightning_module, "reference", None)
        if reference is not None and trainer.lightning_module.actor.lora is not None:
            reference = None  # it is the policy's own weights
        self.reference = ReferenceHolder(reference.hf, self.copies) if reference is not None else None
        if self.reference is not None:
            holders["reference"] = self.reference

    def close(self) -> None:
        if self._started:
            self._started = False
            self.lane.close()
            self.threads.restore()
            self._bring_back()
        self.lane.drain_events()
        # Here and not in the callbacks: after an error Lightning calls no callback's teardown, and a later run must not
        # inherit this one's schedule.
        self.executor.reset()

    def _bring_back(self) -> None:
        """Whoever uses the models after the run finds them whole."""
        self.watch.stop()
        try:
            self.copies.bring_all()
        except torch.OutOfMemoryError as error:  # perhaps the very reason for the end, which must not be hidden
            log.warning("states that wait in host memory stay there: %s", error)

    def begin(self, step: GRPOStep, *, again: bool = False) -> None:
        """A rollout batch begins. again: a further round of it."""
        if not again:
            self.timeline.clear()
            self.watch.new_step()
        self.executor.held_bytes = lambda: step.held_bytes
        self.watch.passes_of(lambda: step.prefixes, lambda: step.vision.held, lambda: step.suffix_bytes)
        step.at_peak = self.watch.inside_unit

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
        if self._refresh is not None:
            self._refresh()
        self.lane.publish(version, limit=self.executor.timeout)
        self._published = version
        self._notify("on_weights_published", version)
        self.executor.enter(Phase.IDLE)

    def _notify(self, event: str, *arguments: Any) -> None:
        """The ledger looks before callbacks move what a phase leaves, and after they have brought what one needs."""
        if event == "on_phase_end":
            self.watch.phase_ended(*arguments)
        elif event == "on_unit_end":
            self.watch.unit_ended(arguments[0].kind)
        dispatch(self._trainer, event, *arguments)
        if event == "on_phase_start":
            self.watch.phase_started(*arguments)
        elif event == "on_window_open":
            self.watch.sample()
