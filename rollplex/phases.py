"""The phases of a step, which may follow which, and the callbacks that hear of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from rollplex.units import Unit


class Phase(StrEnum):
    IDLE = "idle"
    """Between steps: nothing of a step is alive."""
    ROLLOUT = "rollout"
    """The engine has unfinished requests. Admitted units run beside it."""
    SCORE = "score"
    """Rewards, reference log-probs, log-probs at the rollout's weights for later mini-batches."""
    TRAIN = "train"
    """Actor prefix, suffix and backward of one mini-batch."""
    UPDATE = "update"
    """Gradient rescaling, clipping, optimizer step."""
    PUBLISH = "publish"
    """The engine takes over the new weights and drops its caches."""
    EVALUATE = "evaluate"
    """Validation, test or prediction rollouts."""


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.ROLLOUT, Phase.EVALUATE, Phase.PUBLISH}),
    Phase.ROLLOUT: frozenset({Phase.SCORE}),
    Phase.SCORE: frozenset({Phase.TRAIN}),
    Phase.TRAIN: frozenset({Phase.UPDATE, Phase.ROLLOUT}),  # back to the rollout: another round of dynamic_sample
    Phase.UPDATE: frozenset({Phase.TRAIN, Phase.PUBLISH}),
    Phase.PUBLISH: frozenset({Phase.IDLE}),
    Phase.EVALUATE: frozenset({Phase.IDLE}),
}
"""Legal successors. A failed or stopped step goes back to IDLE from anywhere, through `PhaseMachine.reset`."""


class PhaseCallback(Callback):
    """A Lightning callback that also hears the events of a step.

    Events come on the Trainer's thread, in the order of the `callbacks` list, to instances of this class only:

        on_phase_start(ROLLOUT) on_window_open [on_unit_start on_unit_end]* on_group_finished* on_window_close
        on_phase_end(ROLLOUT) on_phase_start(SCORE) ... on_phase_end(UPDATE) on_phase_start(PUBLISH)
        on_weights_published on_phase_end(PUBLISH)

    The window may open and close several times in a rollout (prompts admitted late).
    """

    def on_phase_start(self, trainer: Trainer, phase: Phase) -> None:
        """A phase begins."""

    def on_phase_end(self, trainer: Trainer, phase: Phase) -> None:
        """A phase is over."""

    def on_window_open(self, trainer: Trainer) -> None:
        """Every prompt is prefilled and rows are decoding."""

    def on_window_close(self, trainer: Trainer) -> None:
        """A prefill came back, or the rollout is over."""

    def on_group_finished(self, trainer: Trainer, group: int) -> None:
        """All G responses of a group (its index in the rollout batch) are complete."""

    def on_unit_start(self, trainer: Trainer, unit: Unit) -> None:
        """A work unit starts on the train lane."""

    def on_unit_end(self, trainer: Trainer, unit: Unit) -> None:
        """A work unit is done."""

    def on_weights_published(self, trainer: Trainer, version: int) -> None:
        """The engine samples with weights `version` from now on."""


Notify = Callable[..., None]
"""notify("on_phase_start", phase): how the schedule tells whoever listens."""


class PhaseMachine:
    """Holds the current phase; refuses what the table does not allow."""

    def __init__(self, notify: Notify) -> None:
        self.phase = Phase.IDLE
        self._notify = notify

    def to(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase.value} -> {phase.value} is not in TRANSITIONS"
        if self.phase is not Phase.IDLE:
            self._notify("on_phase_end", self.phase)
        self.phase = phase
        if phase is not Phase.IDLE:
            self._notify("on_phase_start", phase)

    def reset(self) -> None:
        """Back to IDLE after a failure, without events: callbacks of a failed step hear `on_exception`."""
        self.phase = Phase.IDLE


def dispatch(trainer: Any, event: str, *arguments: Any) -> None:
    """Call a phase event on every PhaseCallback, in list order.

    Lightning's own dispatcher refuses hook names that it does not know. It also keeps the running hook's name, which
    decides where `self.log` may be called: that of the hook we are inside of stays valid.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, PhaseCallback):
            getattr(callback, event)(trainer, *arguments)
