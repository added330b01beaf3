"""States leave the device in the phases that do not need them: memory by lifetime (arXiv 2608.14498)."""

from __future__ import annotations

import warnings
from typing import Any, Literal

from rollplex.callbacks.group_streaming import GroupStreaming
from rollplex.checks import check_offload
from rollplex.engines.base import RolloutEngine
from rollplex.phases import Phase, PhaseCallback
from rollplex.residency import ACTIVATIONS, KV_POOL, LIFETIMES, MASTERS, MOMENTS, REFERENCE, SUFFIX
from rollplex.units import Unit, UnitKind
from rollplex.watch import REFERENCE_KINDS

PERMANENT = (MOMENTS, MASTERS)
WITHIN = {SUFFIX: "each suffix pass makes and reads its own within one unit"}


class PhaseOffload(PhaseCallback):
    """Keeps on the device what the phase needs; the rest waits in host memory, or is given back.

    | state | on the device in |
    |---|---|
    | optimizer_moments, masters | the update; with `update_chunk_bytes` a part at a time |
    | reference_weights | the window until the actor's prefixes begin, and scoring; with GroupStreaming all along |
    | kv_pool | the rollout; its content is given up |
    | prefix_activations | the backward, tensor by tensor (the module's `prefix_on_host`) |

    What is needed next is brought back asynchronously on CUDA: the optimizer states while the gradients are scaled and
    clipped, the reference from the moment the window opens. No bit of the training changes.

    Args:
        offload: "auto" is every state of the table that this run has; or a list of them. A state of the list that
            cannot leave the device is an error that says why.
        update_chunk_bytes: The update brings the optimizer states in parts of at most this size, two at once; None
            brings them whole.
        pin: Use pinned host memory with CUDA. Without it copies do not run beside computation.
    """

    def __init__(
        self,
        offload: Literal["auto"] | list[str] = "auto",
        update_chunk_bytes: int | None = None,
        pin: bool = True,
    ) -> None:
        check_offload(offload, update_chunk_bytes, pin)
        self.offload = offload
        self.update_chunk_bytes = update_chunk_bytes
        self.pin = pin
        self.states: tuple[str, ...] = ()
        """What leaves the device in this run."""
        self._permanent: tuple[str, ...] = ()
        self._reference: Any = None
        self._pool = self._streaming = self._scored = False
        self._phase: Phase | None = None
        self._undo: list[Any] = []

    # ---- set-up ----

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if sum(isinstance(c, PhaseOffload) for c in trainer.callbacks) > 1:
            raise ValueError("callbacks: PhaseOffload is listed twice; name all states in one")
        self._streaming = any(isinstance(c, GroupStreaming) for c in trainer.callbacks)
        self._scored, self._phase, self._reference = False, None, None
        self._pool = self._wants(KV_POOL, _pool_refusal(pl_module.colocation.engine))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The models are on the device, nothing has been trained."""
        strategy, colocation, actor = trainer.strategy, pl_module.colocation, pl_module.actor
        colocation.copies.pin = self.pin
        refusals = self._strategy_refusals(strategy)
        self._permanent = tuple(n for n in PERMANENT if self._wants(n, refusals.get(n)))
        for name in LIFETIMES:
            if name not in (*PERMANENT, REFERENCE, KV_POOL, ACTIVATIONS):
                self._wants(
                    name, refusals.get(name, WITHIN.get(name, "later phases of the step read it on the device"))
                )
        if self._wants(
            REFERENCE, None if colocation.reference else "there is none with weights of its own (beta=0, or lora)"
        ):
            self._reference = colocation.reference
        if self._wants(ACTIVATIONS, None) and not actor.prefix_on_host:
            self._undo.append(lambda: setattr(actor, "prefix_on_host", False))
            actor.prefix_on_host = True
        self._set_up_update(strategy, refusals)
        chosen = {*self._permanent, *([REFERENCE] if self._reference else [])}
        chosen |= {KV_POOL} if self._pool else set()
        chosen |= {ACTIVATIONS} if actor.prefix_on_host else set()
        self.states = tuple(name for name in LIFETIMES if name in chosen)
        if not self.states:
            warnings.warn("PhaseOffload finds nothing in this run that can leave the device", stacklevel=2)

    def _wants(self, name: str, refusal: str | None) -> bool:
        """Whether a state is to leave the device; ValueError when it was named and cannot."""
        if self.offload != "auto" and name in self.offload and refusal is not None:
            raise ValueError(f"PhaseOffload: {name!r} cannot leave the device: {refusal}; take it out of offload")
        return refusal is None and (self.offload == "auto" or name in self.offload)

    @staticmethod
    def _strategy_refusals(strategy: Any) -> dict[str, str]:
        if not hasattr(strategy, "offload"):
            why = f"{type(strategy).__name__} cannot move states"
            return dict.fromkeys(LIFETIMES, why)
        return strategy.refusals() if hasattr(strategy, "refusals") else {}

    def _set_up_update(self, strategy: Any, refusals: dict[str, str]) -> None:
        if self.update_chunk_bytes is not None:
            left = [n for n in PERMANENT if n not in refusals and n not in self._permanent]
            if left or not self._permanent:
                missing = ", ".join(left or PERMANENT[:1])
                raise ValueError(
                    f"update_chunk_bytes={self.update_chunk_bytes} streams all optimizer states, but {missing} is not "
                    "offloaded: add it to offload, or set update_chunk_bytes to null"
                )
            if not hasattr(strategy, "stream_update"):
                raise ValueError(
                    f"update_chunk_bytes={self.update_chunk_bytes} needs strategy rollplex or rollplex_ddp: "
                    f"{type(strategy).__name__} steps all its states at once; set it to null"
                )
        if self._permanent and hasattr(strategy, "stream_update"):
            strategy.stream_update(self.update_chunk_bytes)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A checkpoint has been loaded by now, if there is one."""
        if self._permanent:
            trainer.strategy.offload(self._permanent)
        if self._reference is not None:
            self._reference.out()

    # ---- a step ----

    def on_phase_start(self, trainer: Any, phase: Phase) -> None:
        self._phase = phase
        if phase is Phase.ROLLOUT:
            self._scored = False
        elif phase is Phase.SCORE and self._reference is not None:
            self._reference.back()
        elif phase is Phase.UPDATE and self._permanent and self.update_chunk_bytes is None:
            trainer.strategy.reload(self._permanent)

    def on_window_open(self, trainer: Any) -> None:
        prefixes_run_now = bool(trainer.strategy.colocation.executor.openers)
        if self._reference is not None and self._phase is Phase.ROLLOUT and prefixes_run_now and not self._scored:
            self._reference.back()

    def on_unit_start(self, trainer: Any, unit: Unit) -> None:
        if self._reference is None:
            return
        if unit.kind in REFERENCE_KINDS:
            self._scored = True
            self._reference.back()
            self._reference.wait()
        elif unit.kind is UnitKind.ACT_PREFIX and self._phase is Phase.ROLLOUT and not self._streaming:
            self._reference.out()  # the window's reference prefixes come first

    def on_phase_end(self, trainer: Any, phase: Phase) -> None:
        if phase is Phase.ROLLOUT and self._pool:  # it is idle, and takes its memory again with the next requests
            colocation = trainer.strategy.colocation
            colocation.lane.release_kv(limit=colocation.executor.timeout)
        elif phase is Phase.SCORE and self._reference is not None:
            self._reference.out()
        elif phase is Phase.UPDATE and self._permanent:
            trainer.strategy.offload(self._permanent)

    # ---- the end ----

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._put_back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._put_back()  # Lightning calls no teardown then

    def _put_back(self) -> None:
        """Settings of engine and model, as they were; states come back when the strategy closes the engine."""
        while self._undo:
            self._undo.pop()()


def _pool_refusal(engine: Any) -> str | None:
    if type(engine).release_kv is RolloutEngine.release_kv:
        return f"{type(engine).__name__} has no pool that it can give back"
    if not getattr(engine, "release_kv_cache", True):
        return "the engine was set up with release_kv_cache=false"
    return None
