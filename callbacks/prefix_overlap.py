"""Prefix work in the decode window: the schedule of the paper (arXiv 2608.14498)."""

from __future__ import annotations

from typing import Any

from rollplex.phases import PhaseCallback
from rollplex.schedule import ScheduleState
from rollplex.units import PREFIX_KINDS, Unit


class PrefixOverlap(PhaseCallback):
    """Runs prefix units (vision tower and prompt, under actor and reference) while the engine decodes.

    They need no response, so nothing about the update changes: the same units run with the same arithmetic, earlier.
    Take the callback out of the list and they run after the rollout.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            pl_module.colocation.executor.openers.append(self.admits)

    def admits(self, unit: Unit, state: ScheduleState) -> bool:
        """Only while every prompt is prefilled: a prefill is as heavy as the work we would put beside it."""
        return state.window_open and unit.kind in PREFIX_KINDS
