"""Which unit runs next when all ranks must run the same one.

Each rank's decode, and so what is ready when, is its own. In a round every rank names the units that it could start
now, and all start the first one (in rank 0's order) that all of them named. A unit that one rank has no memory for, or
whose responses one rank still waits for, waits on all.

The ranks of a tensor-parallel trainer are all about the same groups. Where several engines generate for it, a round
also tells every rank the responses that have come since the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollplex.data.records import Rollout
from rollplex.ranks import Ranks
from rollplex.units import ACTOR_KINDS, UnitId, UnitKind


class Lockstep:
    def __init__(
        self,
        ranks: Ranks,
        kinds: frozenset[UnitKind] = ACTOR_KINDS,
        *,
        same_groups: bool = False,
        after_decode: bool = False,
    ) -> None:
        """kinds: units with collectives. same_groups: all ranks have the same groups (tensor parallel), so none must
        make up for what it lacks. after_decode: no such unit starts before the decode is over on all ranks."""
        self.ranks = ranks
        self.kinds = kinds
        self.same_groups = same_groups
        self.after_decode = after_decode
        self.rounds = 0
        self.news: list[Rollout] = []
        """Responses that the last round brought."""

    def choose(
        self, ready: Sequence[UnitId], *, drained: bool, news: Sequence[Rollout] = ()
    ) -> tuple[UnitId | None, bool]:
        """The unit to start now (None: none that all could), and whether the rollouts of all ranks are over.

        A collective: blocks until every rank has come to it.
        """
        self.rounds += 1
        everywhere = self.ranks.gather((list(ready), drained, list(news)))
        first = next((unit for unit in everywhere[0][0] if all(unit in there for there, _, _ in everywhere)), None)
        self.news = [rollout for _, _, there in everywhere for rollout in there]
        return first, all(over for _, over, _ in everywhere)
