"""A layout plan on real tensors: views that share storage, and assembled copies to check them against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rollplex.weights.layout import Entry, LayoutPlan, Piece, Run


def views(plan: LayoutPlan, tensors: Mapping[str, Tensor], gpu: int = 0) -> dict[str, tuple[Tensor, ...]]:
    """Engine tensor -> views of the GPU's trainer tensors, in the order of `plan.runs`; nothing is copied.

    tensors: the trainer rank's own. Vocabulary rows beyond the trainer's tensor are read from its storage, which must
    have room for them (`padded_shapes`). What is at home with the trainer is made of these views; what is rebuilt is
    refilled from them; what is at home in the engine holds them already (`trainer_views` is the other way around).
    """
    rank = plan.train_rank(gpu)
    return {
        entry.name: tuple(_view(plan, entry, run, tensors, rank) for run in plan.runs(entry)) for entry in plan.on(gpu)
    }


def trainer_views(plan: LayoutPlan, buffers: Mapping[str, Tensor], gpu: int = 0) -> dict[str, Tensor]:
    """Trainer tensor -> view of an engine tensor, for what is at home in the engine; nothing is copied.

    buffers: the GPU's engine tensors, at least those entries. A trainer that is split finer than the engine keeps its
    shards here; the update then writes them in place, and only the other ranks' pieces are to be fetched.
    """
    return {
        run.source: buffers[entry.name].narrow(entry.dim, run.engine_start, run.length)
        for entry in plan.on(gpu)
        if entry.home == "engine" and entry.layout != "rebuild"
        for run in plan.runs(entry)
    }


def padded_shapes(plan: LayoutPlan, rank: int = 0) -> dict[str, tuple[int, ...]]:
    """Trainer tensors of a rank that need more rows of storage than they have, and the shape to allocate for them."""
    return {
        name: source.local_shape(rank)
        for name, source in plan.sources.items()
        if source.local_shape(rank) != source.local_shape(rank, padded=False)
    }


def assemble(plan: LayoutPlan, shards: Sequence[Mapping[str, Tensor]], gpu: int = 0) -> dict[str, Tensor]:
    """The GPU's engine tensors as copies, from the tensors of every trainer rank; padding is zero."""
    found = {}
    for entry in plan.on(gpu):
        first = shards[0][entry.pieces[0].source]
        full = torch.zeros(entry.shape, dtype=entry.dtype, device=first.device)
        for piece in entry.pieces:
            length = _real(plan, entry, piece)
            if not piece.owners or not length:
                continue
            rank = plan.train_rank(gpu) if plan.train_rank(gpu) in piece.owners else piece.owners[0]
            local = plan.sources[piece.source].shards[rank].local(piece.start, piece.start + piece.length)
            assert local is not None, "a piece lies in one span of each of its owners"
            held = _checked(plan, piece.source, shards[rank], rank).narrow(entry.dim, local, length)
            full.narrow(entry.dim, piece.engine_start, length).copy_(held)
        found[entry.name] = full
    return found


def split(plan: LayoutPlan, tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What a trainer rank holds of full tensors, as copies without padding."""
    found = {}
    for name, source in plan.sources.items():
        shard, full = source.shards[rank], tensors[name]
        size = full.shape[shard.dim]
        spans = [(min(start, size), min(stop, size)) for start, stop in shard.spans]
        found[name] = torch.cat([full.narrow(shard.dim, start, stop - start) for start, stop in spans], shard.dim)
    return found


def _real(plan: LayoutPlan, entry: Entry, piece: Piece) -> int:
    """Length of a piece without vocabulary padding."""
    if entry.dim:
        return piece.length
    return max(0, min(piece.length, plan.sources[piece.source].shape[0] - piece.start))


def _checked(plan: LayoutPlan, name: str, tensors: Mapping[str, Tensor], rank: int) -> Tensor:
    """A trainer rank's tensor, with the shape the plan was made for."""
    source = plan.sources[name]
    if name not in tensors:
        raise KeyError(f"the trainer has no tensor {name}, which the layout plan uses")
    tensor = tensors[name]
    allowed = (source.local_shape(rank), source.local_shape(rank, padded=False))
    if tuple(tensor.shape) not in allowed:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the layout plan was made for {allowed[-1]}")
    return tensor.detach()


def _view(plan: LayoutPlan, entry: Entry, run: Run, tensors: Mapping[str, Tensor], rank: int) -> Tensor:
    tensor = _checked(plan, run.source, tensors, rank)
    if run.local + run.length <= tensor.shape[entry.dim]:
        return tensor.narrow(entry.dim, run.local, run.length)
    if entry.layout == "rebuild":  # a copy anyway: only the rows that exist
        return tensor[run.local :]
    first = tensor.storage_offset() + run.local * tensor.stride(0)
    room = tensor.untyped_storage().nbytes() // tensor.itemsize
    if not tensor.is_contiguous() or first + run.length * tensor.stride(0) > room:
        raise ValueError(
            f"{run.source} has no room for the vocabulary padding: allocate it as the first rows of a tensor of shape "
            f"{plan.sources[run.source].local_shape(rank)}, or plan with padded_vocab=False"
        )
    return tensor.as_strided((run.length, *tensor.shape[1:]), tensor.stride(), first)
