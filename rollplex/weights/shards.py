"""How a full tensor is split over tensor-parallel ranks, trainer's or engine's."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.weights.families import TRAINER_TOWERS, VOCAB_MULTIPLE, Heads, Kind

Shape = tuple[int, ...]

Span = tuple[int, int]
"""First position and the one after the last."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a full tensor: spans along `dim`, one after the other in its own tensor."""

    dim: int
    spans: tuple[Span, ...]

    @property
    def length(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def local(self, start: int, stop: int) -> int | None:
        """Position of the full tensor's [start, stop) in this rank's tensor; None when it is not all here, in a run."""
        offset = 0
        for first, last in self.spans:
            if first <= start and stop <= last:
                return offset + start - first
            offset += last - first
        return None


def shard_of(kind: Kind, position: int, name: str, shape: Shape, heads: Heads, tp: int, rank: int) -> Shard:
    """What rank `rank` of `tp` holds of a tensor; position: its place in its fused group."""
    dim = int(kind == "row" and len(shape) > 1)  # also of a whole tensor, so that both sides count along the same
    if tp == 1 or kind == "replicated" or (kind == "row" and dim == 0):
        return Shard(dim, ((0, shape[dim]),))
    if kind == "row":
        return Shard(dim, (_even(name, shape[dim], tp, rank),))
    if kind == "qkv":
        count = heads.query if position == 0 else heads.kv
        return Shard(0, (_by_heads(name, shape[0], count, tp, rank, may_repeat=position > 0),))
    if kind == "vision_qkv":
        return Shard(0, (_by_heads(name, shape[0], heads.vision, tp, rank),))
    if kind == "packed_qkv":
        third = shape[0] // 3
        start, stop = _by_heads(name, third, heads.vision, tp, rank)
        return Shard(0, tuple((start + i * third, stop + i * third) for i in range(3)))
    return Shard(0, (_even(name, shape[0], tp, rank),))


def _even(name: str, size: int, tp: int, rank: int) -> Span:
    if size % tp:
        raise ValueError(f"{name}: {size} cannot be split over {tp} ranks{_advice(name)}")
    return size // tp * rank, size // tp * (rank + 1)


def _by_heads(name: str, size: int, count: int, tp: int, rank: int, may_repeat: bool = False) -> Span:
    """The rows of a rank's heads; with more ranks than heads several ranks hold the same one."""
    if size % count:
        raise ValueError(f"{name}: {size} rows are not a multiple of {count} heads")
    if may_repeat and tp > count and tp % count == 0:
        return _even(name, size, count, rank // (tp // count))
    if count % tp:
        raise ValueError(f"{name}: {count} heads cannot be split over {tp} ranks{_advice(name)}")
    return _even(name, size, tp, rank)


def _advice(name: str) -> str:
    if name.startswith("model.visual."):
        return "; keep the vision tower whole on each rank (data)"
    return "; take fewer ranks" if name.startswith(TRAINER_TOWERS) else ""


def padded(rows: int) -> int:
    return -(-rows // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
