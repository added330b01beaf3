"""Which process is which rank of what, when trainer and engine have tensor-parallel degrees of their own.

Processes come in *blocks* of max(train_tp, rollout_tp) neighbours. In a block, process g is trainer rank
floor(g * train_tp / block) and engine rank floor(g * rollout_tp / block): with this pairing one side's shard of a
tensor lies inside the other's, as the layout plan (rollplex.weights.layout) has it. The side with the smaller degree
has several groups in a block, each with every n-th process of it:

    train_tp 4, rollout_tp 2:  one trainer {0, 1, 2, 3},          engines {0, 2} and {1, 3}
    train_tp 2, rollout_tp 4:  trainers {0, 2} and {1, 3},        one engine {0, 1, 2, 3}
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.kinds import check_whole

Groups = list[list[int]]
"""Processes by group; every process is in one. Ascending within a group, which is the order of the ranks in it."""


@dataclass(frozen=True)
class Topology:
    world: int
    train_tp: int = 1
    rollout_tp: int = 1

    def __post_init__(self) -> None:
        for name, degree in (("train_tp", self.train_tp), ("tensor_parallel_size", self.rollout_tp)):
            check_whole(name, degree)
        if self.block % min(self.train_tp, self.rollout_tp):
            raise ValueError(
                f"train_tp={self.train_tp} and the engine's tensor_parallel_size={self.rollout_tp}: one must divide "
                "the other, so that a shard of one lies inside a shard of the other"
            )
        if self.world % self.block:
            raise ValueError(
                f"train_tp={self.train_tp} and the engine's tensor_parallel_size={self.rollout_tp} need a multiple of "
                f"{self.block} processes, but {self.world} were started (devices * num_nodes); set one of the three"
            )

    @property
    def block(self) -> int:
        """Processes that share trainers and engines with each other."""
        return max(self.train_tp, self.rollout_tp)

    @property
    def trainers(self) -> int:
        """Data-parallel trainers of a block."""
        return self.block // self.train_tp

    @property
    def engines(self) -> int:
        """Engines of a block."""
        return self.block // self.rollout_tp

    # ---- what a process is ----

    def gpu(self, process: int) -> int:
        """Its place in its block: the layout plan's GPU."""
        return process % self.block

    def train_rank(self, process: int) -> int:
        return self.gpu(process) // self.trainers

    def rollout_rank(self, process: int) -> int:
        return self.gpu(process) // self.engines

    def trainer(self, process: int) -> int:
        """Its trainer among those of the block."""
        return self.gpu(process) % self.trainers

    def engine(self, process: int) -> int:
        """Its engine among those of the block."""
        return self.gpu(process) % self.engines

    def data_rank(self, process: int) -> int:
        """Of its trainer among all; process // train_tp unless the engine's degree is larger."""
        return process // self.block * self.trainers + self.trainer(process)

    # ---- groups ----

    def _groups(self, key: object) -> Groups:
        assert callable(key)
        found: dict[object, list[int]] = {}
        for process in range(self.world):
            found.setdefault(key(process), []).append(process)
        return list(found.values())

    def blocks(self) -> Groups:
        return self._groups(lambda p: p // self.block)

    def train_groups(self) -> Groups:
        """The ranks of each tensor-parallel trainer."""
        return self._groups(self.data_rank)

    def data_groups(self) -> Groups:
        """Processes with the same shard, which gradients are averaged over."""
        return self._groups(self.train_rank)

    def engine_groups(self) -> Groups:
        """The ranks of each engine."""
        return self._groups(lambda p: (p // self.block, self.engine(p)))

    def gather_groups(self) -> Groups:
        """Processes whose trainer shards together are one engine shard: they exchange them after an update."""
        return self._groups(lambda p: (p // self.block, self.rollout_rank(p) if self.engines > 1 else self.gpu(p)))
