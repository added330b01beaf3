"""Which unit runs next when all ranks must run the same one.

Each rank's decode, and so what is ready when, is its own. In a round every rank names the units that it could start
now, and all start the first one (in rank 0's order) that all of them named. A unit that one rank has no memory for, or
whose responses one rank still waits for, waits on all.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.ranks import Ranks
from rollplex.units import UnitId


class Lockstep:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.rounds = 0

    def choose(self, ready: Sequence[UnitId], *, drained: bool) -> tuple[UnitId | None, bool]:
        """The unit to start now (None: none that all could), and whether the rollouts of all ranks are over.

        A collective: blocks until every rank has come to it.
        """
        self.rounds += 1
        everywhere = self.ranks.gather((list(ready), drained))
        first = next((unit for unit in everywhere[0][0] if all(unit in there for there, _ in everywhere)), None)
        return first, all(over for _, over in everywhere)
