"""Which rows make which rollout batch, and which rank's they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from rollplex.data.records import Prompt


class RolloutBatchSampler:
    """Row numbers of each rollout batch.

    The rollouts of a run are numbered 0, 1, 2, ...; rollout k uses slot k % len(self) of epoch k // len(self), and the
    order within an epoch is drawn from (seed, epoch). So the rows of rollout k never depend on how the run came there:
    by resuming in the middle, by `limit_train_batches`, or straight.

    Each iteration gives len(self) batches, beginning with rollout `start_rollout` (a number, or a function asked at
    the start of each iteration; a number is advanced by len(self) per iteration, to the next epoch's start). Lightning
    ends a resumed epoch itself, at the batch where it would have ended.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        start_rollout: int | Callable[[], int] = 0,
    ) -> None:
        """n: rows. drop_last: leave out the n % batch_size rows that would make a smaller last batch of an epoch
        (others each epoch, as the order changes)."""
        if batch_size < 1 or n < (batch_size if drop_last else 1):
            raise ValueError(f"batch_size={batch_size} must be at least 1 and give at least one batch of n={n} rows")
        self.n, self.batch_size, self.seed, self.shuffle = n, batch_size, seed, shuffle
        self.batches = n // batch_size if drop_last else -(-n // batch_size)
        self.start_rollout = start_rollout

    def __len__(self) -> int:
        return self.batches

    def rows(self, rollout: int) -> list[int]:
        """Row numbers of one rollout, by its global number."""
        epoch, slot = divmod(rollout, self.batches)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.n) if self.shuffle else np.arange(self.n)
        return [int(row) for row in order[slot * self.batch_size : (slot + 1) * self.batch_size]]

    def further_rows(self, rollout: int) -> list[int]:
        """All rows but those of a rollout, in an order drawn from (seed, rollout); without shuffling those that come
        after it first."""
        own = self.rows(rollout)
        taken = set(own)
        if self.shuffle:
            order = np.random.default_rng([self.seed, rollout, 1]).permutation(self.n)
        else:
            order = np.roll(np.arange(self.n), -(own[-1] + 1))
        return [int(row) for row in order if row not in taken]

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so nothing is counted until the first batch is asked for: loaders make iterators they never use.
        if callable(self.start_rollout):
            start = self.start_rollout()
        else:
            start = self.start_rollout
            self.start_rollout = (start // self.batches + 1) * self.batches
        for i in range(self.batches):
            yield self.rows(start + i)


class RankRows(list[Prompt]):
    """A rank's prompts of a batch, and their places among all rows of it, bad ones counted."""

    def __init__(self, prompts: Sequence[Prompt], places: Sequence[int]) -> None:
        super().__init__(prompts)
        self.places = tuple(places)


class ShareSampler:
    """A rank's rows of each batch: every world-th, none of a small batch."""

    def __init__(self, batches: RolloutBatchSampler, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (rows[self.rank :: self.world] for rows in self.batches)
