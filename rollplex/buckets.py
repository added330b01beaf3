"""Tensors in buckets, for collectives that move many small ones together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor

T = TypeVar("T", bound=Tensor)


def buckets(
    tensors: Iterable[T], most_bytes: int, *, nbytes: Callable[[T], int] = lambda tensor: tensor.nbytes
) -> Iterator[list[T]]:
    """Consecutive tensors of one dtype, at most `most_bytes` together (a larger one goes alone).

    nbytes: of a tensor whose own storage does not say (a shard's whole).
    """
    bucket: list[T] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + nbytes(tensor) > most_bytes or bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes(tensor)
    if bucket:
        yield bucket
