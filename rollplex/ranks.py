"""The data-parallel processes of a run, and the small things they tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from rollplex.whereabouts import Whereabouts

T = TypeVar("T")


class Ranks:
    """This process among its data-parallel peers; alone it is `Ranks()`.

    What goes through here is small (flags, lengths, rewards, sums of metrics) and travels over sockets of the CPU in a
    group of its own, so that it never waits in line with device collectives. Only the Trainer's thread calls it, and
    every rank makes the same calls in the same order.
    """

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None, where: Whereabouts | None = None) -> None:
        self.rank, self.world = rank, world
        self.where = where or Whereabouts()
        self._group = group

    @classmethod
    def connect(cls, timeout: timedelta | None = None) -> Ranks:
        """Of the initialised default process group. A collective: every rank calls it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        group = dist.new_group(backend="gloo", timeout=timeout)
        rank, world = dist.get_rank(), dist.get_world_size()
        return cls(rank, world, group, Whereabouts.connect(rank, world))

    @classmethod
    def among(
        cls, groups: Sequence[Sequence[int]], timeout: timedelta | None = None, where: Whereabouts | None = None
    ) -> Ranks:
        """This process among those of its group. groups: every process is in one. A collective of all processes."""
        found = cls()
        if all(len(members) == 1 for members in groups):
            return found
        for members in groups:
            group = dist.new_group(list(members), backend="gloo", timeout=timeout)
            if dist.get_rank() in members and len(members) > 1:
                found = cls(list(members).index(dist.get_rank()), len(members), group, where)
        return found

    @property
    def alone(self) -> bool:
        return self.world == 1

    def gather(self, thing: T) -> list[T]:
        """Every rank's `thing`, by rank. What can be pickled can be sent.

        RankError when a rank does not come within the group's time limit, or is gone.
        """
        if self.alone:
            return [thing]
        things: list[Any] = [None] * self.world
        with self.collective("a word with the other ranks"):
            dist.all_gather_object(things, thing, group=self._group)
        return things

    def collective(self, what: str) -> AbstractContextManager[None]:
        """Around a collective of any group: its failure says which rank did not come (`RankError`)."""
        return self.where.collective(what)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self.gather(flag))

    def share(self, rows: Sequence[T]) -> list[T]:
        """This rank's part of rows that all ranks know: every world-th, so that consecutive parts of them
        (mini-batches) are shared evenly too."""
        return list(rows[self.rank :: self.world])
