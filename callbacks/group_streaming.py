"""Suffix work of complete groups in the decode window, while other groups still decode."""

from __future__ import annotations

import warnings
from typing import Any

from rollplex.callbacks.prefill_reuse import PrefillReuse
from rollplex.callbacks.prefix_overlap import PrefixOverlap
from rollplex.phases import PhaseCallback
from rollplex.schedule import ScheduleState
from rollplex.units import PREFIX_KINDS, Unit


class GroupStreaming(PhaseCallback):
    """Rewards, reference scoring, loss and backward of a group start as soon as its G responses are complete.

    Valid because advantages need the group only, the loss is an unnormalised sum that is rescaled once before the
    optimizer step, and no weight changes before that step.

    Args:
        deterministic: Keep the serial order of gradient sums (bundle after bundle) and of rewards (which may draw
            random numbers), so that the weights are bit-identical to the serial schedule's. False lets any complete
            group go first.
    """

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            if sum(isinstance(c, GroupStreaming) for c in trainer.callbacks) > 1:
                raise ValueError("callbacks: GroupStreaming is listed twice, and what one refuses the other admits")
            if not any(isinstance(c, PrefixOverlap | PrefillReuse) for c in trainer.callbacks):
                warnings.warn(
                    "GroupStreaming without PrefixOverlap hides rewards only: suffix work needs its prefix, which then "
                    "waits for the end of the rollout. Add rollplex.callbacks.PrefixOverlap",
                    stacklevel=2,
                )
            pl_module.colocation.executor.openers.append(self.admits)

    def admits(self, unit: Unit, state: ScheduleState) -> bool:
        if unit.kind in PREFIX_KINDS or not state.window_open:
            return False
        return not self.deterministic or state.is_next_in_order(unit)
