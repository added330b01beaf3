"""Units that run before the engine starts, because it is handed what they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollplex.checks import check_reuse
from rollplex.units import PREFILL_KINDS, Unit, UnitKind

if TYPE_CHECKING:
    from rollplex.schedule import ScheduleState


class BeforeRollout:
    """The part of the executor that runs them."""

    def _vision(self: Any, pending: list[Unit], state: ScheduleState) -> None:
        """The engine waits for these; what does not fit the budget holds no graph meanwhile. Where ranks make the same
        module calls (ZeRO-3), these are such calls, and a graph is held on all ranks or on none."""
        for unit in [u for u in pending if u.kind is UnitKind.VISION and self._ready(u, state)]:
            self.check_stop()
            pending.remove(unit)
            room = self._agreed(self.admission.has_room(unit.sort, unit.work, unit.density, self.held_bytes()))
            self._run(unit if room else replace(unit, run=unit.lean or unit.run), state, before=True)
            if unit.lean is not None and not self._agreed(self.admission.within_budget(self.held_bytes())):
                unit.lean()

    def _agreed(self: Any, here: bool) -> bool:
        """Whether it holds on every rank that runs the same units. A collective of them."""
        return here if self.lockstep is None else all(self.lockstep.ranks.gather(here))

    def _prefill(self: Any, pending: list[Unit], state: ScheduleState) -> None:
        if not (self.reuse_prefill and self.lane.engine.takes_prefix):
            return
        check_reuse(self.lockstep is not None)
        for unit in [u for u in pending if u.kind in PREFILL_KINDS and self._ready(u, state)]:
            self.check_stop()
            if self.admission.fits(unit.id, unit.sort, unit.work, unit.density, self.held_bytes()):
                pending.remove(unit)
                self._run(unit, state, before=True)
