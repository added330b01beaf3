"""The layout plan: for each engine tensor of each GPU, the slices of trainer tensors it is made of, and how they share.

Pure functions of names, shapes and head counts: no model, no engine, no GPU. All positions are counted in elements
along one dimension: 0 for rows, 1 for columns.

Trainer and engine may have different tensor-parallel degrees, one dividing the other. The larger of the two is the
number of GPUs; GPU g is trainer rank floor(g * train_tp / gpus) and engine rank floor(g * rollout_tp / gpus). With
this pairing (a contiguous group of GPUs per engine would not do) one side's shard lies inside the other's, and the
larger side's tensor is the storage of both: `home`. A trainer with full tensors is the case train_tp = 1: everything
is at home there.

| class | the smaller side's tensor is | examples |
|---|---|---|
| alias | one contiguous view of the larger side's | embeddings, head, norms, column modules |
| strided | one view with a stride | o_proj, down_proj, vision proj |
| blocks | made of several contiguous views (or: several views of one engine tensor) | fused QKV, gate and up |
| rebuild | not a view: the engine has storage of its own, refilled after each update | what is below |

Rebuilt are: fused groups named in `own` (an engine that reads them as one tensor only), vocabulary shards that reach
into a padding which the trainer does not allocate, and shards that do not nest.

The paper this follows counts three classes at train TP 8, rollout TP 4: "same order" is our alias + blocks,
"transpose-compatible" is our strided, "rebuilt" is QKV. Its trainer keeps Q, K and V of a rank fused in one tensor:
three ranges of the engine's, so not a view. transformers' three tensors are three views of the engine's one, so QKV is
`blocks` here; `own=("qkv_proj",)` counts as the paper does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from rollplex.weights.families import WHOLE_TOWERS, Heads, Match, Part, match, table_of
from rollplex.weights.shards import Shape, Shard, padded, shard_of

Shapes = Mapping[str, tuple[Shape, torch.dtype]]
"""Tensor name -> (shape, dtype); tensors tied to another one appear once."""

Class = Literal["alias", "strided", "blocks", "rebuild"]
CLASSES: tuple[Class, ...] = ("alias", "strided", "blocks", "rebuild")

VisionMode = Literal["weights", "data", "none"]
"""vLLM's mm_encoder_tp_mode: the tower split over ranks, or whole on each; none: the engine has no tower."""


def shapes_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[Shape, torch.dtype]]:
    """Of `model.named_parameters()`, on any device, also meta."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named}


@dataclass(frozen=True)
class Source:
    """A trainer tensor."""

    shape: Shape
    """Full, without padding."""

    dtype: torch.dtype
    rows: int
    """Rows of the full tensor with the padding the trainer allocates (shape[0] where there is none)."""

    shards: tuple[Shard, ...]
    """By trainer rank, in rows with padding."""

    def local_shape(self, rank: int, padded: bool = True) -> Shape:
        """Shape of the rank's tensor, with or without the padding rows that are on this rank."""
        shard = self.shards[rank]
        shape = [self.rows, *self.shape[1:]]
        shape[shard.dim] = shard.length
        if not padded and shard.dim == 0:
            shape[0] = sum(max(0, min(stop, self.shape[0]) - start) for start, stop in shard.spans)
        return tuple(shape)


@dataclass(frozen=True)
class Piece:
    """`length` positions of a trainer tensor that are as many positions of an engine tensor."""

    source: str
    start: int
    """In the full trainer tensor."""

    engine_start: int
    length: int
    owners: tuple[int, ...]
    """Trainer ranks that hold it; none: padding that only the engine has."""


@dataclass(frozen=True)
class Run:
    """Neighbouring pieces that are neighbours in the tensor of a trainer rank too: one view."""

    source: str
    local: int
    """In the rank's own tensor."""

    engine_start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """An engine tensor on one GPU."""

    name: str
    shape: Shape
    dtype: torch.dtype
    part: Part
    gpu: int
    layout: Class
    home: Literal["trainer", "engine"]
    """Whose tensor is the storage of both; engine for what is rebuilt."""

    dim: int
    """Along which the pieces are cut."""

    pieces: tuple[Piece, ...]
    gathered: int
    """Elements along `dim` that other trainer ranks hold: fetched after each update."""

    @property
    def nbytes(self) -> int:
        return _nbytes(self.shape, self.dtype)

    @property
    def gathered_bytes(self) -> int:
        return self.nbytes * self.gathered // max(1, self.shape[self.dim])


@dataclass(frozen=True)
class LayoutPlan:
    """All engine tensors on all GPUs of one engine group."""

    family: str
    rollout_tp: int
    train_tp: int
    sources: Mapping[str, Source]
    entries: tuple[Entry, ...]

    @property
    def gpus(self) -> int:
        return max(self.rollout_tp, self.train_tp)

    def rollout_rank(self, gpu: int) -> int:
        return gpu * self.rollout_tp // self.gpus

    def train_rank(self, gpu: int) -> int:
        return gpu * self.train_tp // self.gpus

    def on(self, gpu: int, part: Part | None = None) -> list[Entry]:
        """The engine tensors of one GPU, of one part of the model or of both."""
        return [entry for entry in self.entries if entry.gpu == gpu and part in (None, entry.part)]

    def runs(self, entry: Entry) -> list[Run]:
        """What the GPU's trainer rank holds of an engine tensor."""
        rank = self.train_rank(entry.gpu)
        shards = {piece.source: self.sources[piece.source].shards[rank] for piece in entry.pieces}
        return _merge((piece for piece in entry.pieces if rank in piece.owners), shards)

    def class_bytes(self, gpu: int, part: Part | None = None) -> dict[Class, int]:
        """Bytes of the GPU's engine tensors by class."""
        found = self.on(gpu, part)
        return {name: sum(entry.nbytes for entry in found if entry.layout == name) for name in CLASSES}

    def paper_bytes(self, gpu: int, part: Part | None = "language") -> dict[str, int]:
        """Bytes by the paper's classes, as the module's docstring maps them; plan with `own=("qkv_proj",)`."""
        ours = self.class_bytes(gpu, part)
        return {
            "same order": ours["alias"] + ours["blocks"],
            "transpose-compatible": ours["strided"],
            "rebuilt": ours["rebuild"],
        }

    def gathered_bytes(self, gpu: int, part: Part | None = None) -> int:
        """Bytes that come from other GPUs after each update."""
        return sum(entry.gathered_bytes for entry in self.on(gpu, part))

    def trainer_bytes(self, gpu: int, part: Part | None = None) -> int:
        """Bytes of the GPU's trainer tensors that the engine's part is made of: what a second copy would cost."""
        rank = self.train_rank(gpu)
        used = {piece.source for entry in self.on(gpu, part) for piece in entry.pieces}
        return sum(_nbytes(self.sources[name].local_shape(rank), self.sources[name].dtype) for name in used)


def plan_layout(
    family: str,
    trainer_shapes: Shapes,
    heads: Heads,
    rollout_tp: int = 1,
    train_tp: int = 1,
    *,
    vision: VisionMode = "weights",
    train_vision: Literal["weights", "data"] = "data",
    own: Collection[str] = (),
    padded_vocab: bool = True,
    tied: bool = False,
    train_vocab: Literal["split", "whole"] = "split",
    engine_pads: bool = True,
) -> LayoutPlan:
    """Plan the engine tensors of `rollout_tp` ranks over the tensors of `train_tp` trainer ranks.

    trainer_shapes: of the full trainer tensors. vision, train_vision: see `VisionMode`. own: fused engine modules that
    the engine can only read as one tensor (qkv_proj, gate_up_proj, qkv). padded_vocab: the trainer allocates embeddings
    and head with the rows that vLLM adds to reach a multiple of 64. tied: the head is the embedding, although
    trainer_shapes may name both. train_vocab: whole: every trainer rank has all of embeddings and head. engine_pads:
    False for an engine of one rank, which can do without padding.
    """
    if rollout_tp < 1 or train_tp < 1 or max(rollout_tp, train_tp) % min(rollout_tp, train_tp):
        raise ValueError(f"rollout_tp={rollout_tp} and train_tp={train_tp}: one must divide the other")
    if vision == "data" and family not in WHOLE_TOWERS:
        raise ValueError(f"vision=data: vLLM splits the tower of model_type={family!r} always; set weights")
    shapes = {name: spec for name, spec in trainer_shapes.items() if not (tied and name == "lm_head.weight")}
    matches = [each for each in match(table_of(family), shapes) if vision != "none" or each.rule.part == "language"]
    sources = {}
    for each in matches:
        whole = each.rule.part == "vision" and train_vision == "data"
        whole |= each.rule.kind == "vocab" and train_vocab == "whole"
        kind = each.rule.trainer_kind or each.rule.kind
        for position, name in enumerate(each.sources):
            shape, dtype = shapes[name]
            rows = padded(shape[0]) if kind == "vocab" and padded_vocab else shape[0]
            full = (rows, *shape[1:])
            ranks = [(1, 0)] * train_tp if whole else [(train_tp, rank) for rank in range(train_tp)]
            cut = [shard_of(kind, position, name, full, heads, *rank) for rank in ranks]
            sources[name] = Source(shape, dtype, rows, tuple(cut))
    plan = LayoutPlan(family, rollout_tp, train_tp, sources, ())
    if not engine_pads and rollout_tp > 1:
        raise ValueError(f"rollout_tp={rollout_tp}: an engine of several ranks pads its vocabulary")
    entries = [
        _entry(each, plan, gpu, heads, vision, own, pads=engine_pads) for gpu in range(plan.gpus) for each in matches
    ]
    return LayoutPlan(family, rollout_tp, train_tp, sources, tuple(entries))


def _entry(
    each: Match, plan: LayoutPlan, gpu: int, heads: Heads, vision: VisionMode, own: Collection[str], *, pads: bool
) -> Entry:
    whole = each.rule.part == "vision" and vision == "data"
    rank = (1, 0) if whole else (plan.rollout_tp, plan.rollout_rank(gpu))
    pieces: list[Piece] = []
    length = 0
    for position, name in enumerate(each.sources):
        source = plan.sources[name]
        rows = padded(source.shape[0]) if each.rule.kind == "vocab" and pads else source.shape[0]
        shape = (rows, *source.shape[1:])
        shard = shard_of(each.rule.kind, position, name, shape, heads, *rank)
        for start, stop in shard.spans:
            pieces += _cut(name, source, start, stop, length)
            length += stop - start
    first = plan.sources[each.sources[0]]
    engine_shape = list(first.shape)
    engine_shape[shard.dim] = length
    here = plan.train_rank(gpu)
    layout, home = _classify(pieces, plan.sources, shard.dim, here)
    if layout == "blocks" and each.rule.group in own:
        layout, home = "rebuild", "engine"
    gathered = sum(piece.length for piece in pieces if piece.owners and here not in piece.owners)
    return Entry(
        name=each.engine,
        shape=tuple(engine_shape),
        dtype=first.dtype,
        part=each.rule.part,
        gpu=gpu,
        layout=layout,
        home=home,
        dim=shard.dim,
        pieces=tuple(pieces),
        gathered=gathered,
    )


def _cut(name: str, source: Source, start: int, stop: int, engine_start: int) -> Iterator[Piece]:
    """Cut a span of a trainer tensor where its owners change."""
    edges = {edge for shard in source.shards for span in shard.spans for edge in span}
    points = sorted({start, stop} | {edge for edge in edges if start < edge < stop})
    for first, last in pairwise(points):
        owners = tuple(rank for rank, shard in enumerate(source.shards) if shard.local(first, last) is not None)
        yield Piece(name, first, engine_start + first - start, last - first, owners)


def _classify(
    pieces: list[Piece], sources: Mapping[str, Source], dim: int, rank: int
) -> tuple[Class, Literal["trainer", "engine"]]:
    """The class of an engine tensor for a GPU that is trainer rank `rank`, and where its storage is."""
    names = {piece.source for piece in pieces}
    shards = {name: sources[name].shards[rank] for name in names}
    if all(rank in piece.owners for piece in pieces):  # the engine's tensor lies in the trainer's
        runs = _merge(pieces, shards)
        if len(runs) > 1:
            return "blocks", "trainer"
        partial = dim == 1 and shards[runs[0].source].length != runs[0].length
        return ("strided" if partial else "alias"), "trainer"
    for name in names:  # does the trainer's lie in the engine's, each in one run?
        own = [piece for piece in pieces if piece.source == name]
        held = [piece for piece in own if rank in piece.owners]
        if sum(piece.length for piece in held) != shards[name].length or len(_merge(held, shards)) > 1:
            return "rebuild", "engine"
    if len(names) > 1:
        return "blocks", "engine"
    return ("strided" if dim == 1 else "alias"), "engine"


def _merge(pieces: Iterable[Piece], shards: Mapping[str, Shard]) -> list[Run]:
    """The pieces of one trainer rank as runs."""
    found: list[Run] = []
    for piece in pieces:
        local = shards[piece.source].local(piece.start, piece.start + piece.length)
        assert local is not None, "a piece lies in one span of each of its owners"
        last = found[-1] if found else None
        here = (piece.source, local, piece.engine_start)
        if last and here == (last.source, last.local + last.length, last.engine_start + last.length):
            found[-1] = replace(last, length=last.length + piece.length)
        else:
            found.append(Run(piece.source, local, piece.engine_start, piece.length))
    return found


def _nbytes(shape: Shape, dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
