"""A layout plan on the tensors of a tensor-parallel trainer's rank: what lies here, and what other ranks send.

Where the engine's shard is larger than the trainer's, the plan's `home` is the engine's tensor. DeepSpeed keeps a
rank's parameters in a flat buffer of its own, though, and points them back to it at each step; they cannot lie in an
engine tensor. So an engine tensor is *read in parts* instead: the rank's own part in place, the other ranks' parts from
buffers that hold these and nothing else. The bytes are the plan's: what is gathered has storage, nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollplex.weights.layout import Entry, LayoutPlan

Fetched = tuple[str, int]
"""A trainer tensor, and the trainer rank whose shard of it is meant."""


def foreign(plan: LayoutPlan, gpu: int) -> list[Fetched]:
    """The shards of other trainer ranks that the GPU's engine tensors are made of, in the plan's order."""
    here = plan.train_rank(gpu)
    found = [
        (piece.source, piece.owners[0])
        for entry in plan.on(gpu)
        for piece in entry.pieces
        if piece.owners and here not in piece.owners
    ]
    return list(dict.fromkeys(found))


class Gathering:
    """The other ranks' parts of one process's engine tensors."""

    def __init__(self, plan: LayoutPlan, gpu: int, processes: Sequence[int], group: Any, device: Any) -> None:
        """processes: of the ranks whose shards make an engine shard, by their order; this one among them."""
        self.plan, self.gpu = plan, gpu
        self._processes, self._group = list(processes), group
        self.buffers: dict[Fetched, Tensor] = {
            (name, rank): torch.empty(
                plan.sources[name].local_shape(rank), dtype=plan.sources[name].dtype, device=device
            )
            for name, rank in foreign(plan, gpu)
        }
        ranks = [plan.train_rank(p % plan.gpus) for p in self._processes]
        assert {rank for _, rank in self.buffers} <= set(ranks), "a part lies outside the small group"
        self._process_of = dict(zip(ranks, self._processes, strict=True))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.buffers.values())

    @torch.no_grad()
    def refresh(self, tensors: Mapping[str, Tensor]) -> int:
        """Fetch the other ranks' present parts, in place; returns their bytes. A collective of the small group.

        tensors: the trainer rank's own.
        """
        names = list(dict.fromkeys(name for name, _ in self.buffers))
        for name in names:
            for rank, process in self._process_of.items():
                part = self.buffers.get((name, rank), tensors[name])
                dist.broadcast(part.detach(), src=process, group=self._group)
        return self.nbytes

    def parts(self, entry: Entry, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """What an engine tensor is made of, in order: (its position along `entry.dim`, the part)."""
        here = self.plan.train_rank(self.gpu)
        for piece in sorted(entry.pieces, key=lambda piece: piece.engine_start):
            assert piece.owners, "padding is part of no tensor that is fetched"
            rank = here if here in piece.owners else piece.owners[0]
            held = tensors[piece.source].detach() if rank == here else self.buffers[piece.source, rank]
            local = self.plan.sources[piece.source].shards[rank].local(piece.start, piece.start + piece.length)
            assert local is not None, "a piece lies in one span of each of its owners"
            yield piece.engine_start, held.narrow(entry.dim, local, piece.length)
