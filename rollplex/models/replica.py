"""A model's whole weights beside shards of it: what an engine computes with when the trainer's tensors are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from rollplex.buckets import buckets
from rollplex.models.split_model import SplitModel

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[object]]
"""A context in which these parameters are whole on every rank; entered by all ranks together."""


def whole_shape(parameter: nn.Parameter, name: str, source: SplitModel) -> torch.Size:
    """ZeRO-3 leaves the shape of a sharded parameter in `ds_shape`."""
    if source.shards is not None:
        return torch.Size(source.shards.whole_shape(name, parameter))
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


class Replica:
    """Tensors of its own, one for each parameter of `source`, at addresses that never change.

    `refresh` gathers in buckets, so at most `bucket_bytes` of the source (or its largest parameter) are whole at once
    besides. Parameters that are not trained are gathered by the first refresh only.
    """

    def __init__(self, source: SplitModel, bucket_bytes: int) -> None:
        self.source = source
        self.bucket_bytes = bucket_bytes
        self.peak_bytes = 0
        """Most bytes of gathered parameters held at once by the last refresh."""
        self._own: dict[int, Tensor] = {}
        self._parameters: list[nn.Parameter] = []
        self.filled = False
        self._names = {id(p): name for name, p in source.hf.named_parameters()}
        self.model = source.twin(self._allocate)
        self.model.shards = None

    def _allocate(self, parameter: nn.Parameter) -> Tensor:
        """A tied parameter gets one tensor."""
        if id(parameter) not in self._own:
            self._parameters.append(parameter)
            shape = whole_shape(parameter, self._names[id(parameter)], self.source)
            self._own[id(parameter)] = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        return self._own[id(parameter)]

    @property
    def tensors(self) -> list[Tensor]:
        """Each once."""
        return list(self._own.values())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @torch.no_grad()
    def refresh(self, gather: Gather) -> None:
        """Take over the source's present weights. A collective."""
        self.peak_bytes = 0
        stale = [p for p in self._parameters if p.requires_grad or not self.filled]
        for bucket in buckets(stale, self.bucket_bytes, nbytes=lambda p: self._own[id(p)].nbytes):
            with gather(bucket):
                for parameter in bucket:
                    self._own[id(parameter)].copy_(parameter.data)
            self.peak_bytes = max(self.peak_bytes, sum(self._own[id(p)].nbytes for p in bucket))
        self.filled = True
        self.model.version = self.source.version
