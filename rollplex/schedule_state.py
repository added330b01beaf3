"""Where a step's schedule stands, and who may open a unit early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rollplex.units import ORDERED_KINDS, Unit, UnitId


@dataclass
class ScheduleState:
    """What openers may look at."""

    window_open: bool = False
    drained: bool = False
    finished_groups: set[int] = field(default_factory=set)
    done: set[UnitId] = field(default_factory=set)
    fixed_order: list[UnitId] = field(default_factory=list)
    """Units whose order shows in the result, as the serial schedule runs them."""

    def is_next_in_order(self, unit: Unit) -> bool:
        """True unless a unit of ORDERED_KINDS would overtake an earlier one of its sort."""
        sort = next((kinds for kinds in ORDERED_KINDS if unit.kind in kinds), frozenset())
        return next((i for i in self.fixed_order if i[0] in sort and i not in self.done), unit.id) == unit.id


Opener = Callable[[Unit, ScheduleState], bool]
"""Says whether a unit whose needs are met may start before the rollout has drained."""
