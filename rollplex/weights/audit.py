"""Checks of a layout plan, and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from rollplex.weights.families import TRAINER_TOWERS
from rollplex.weights.layout import CLASSES, Entry, LayoutPlan, Part, Shapes
from rollplex.weights.shards import Span

MAX_FAULTS = 8
"""Most faults an error lists."""


class LayoutError(ValueError):
    """A layout plan that does not fit the trainer's or the engine's tensors."""


def audit(plan: LayoutPlan, trainer_shapes: Shapes, engine_shapes: Shapes) -> None:
    """Raise unless every engine element is covered exactly once and every trainer tensor is used.

    trainer_shapes: full tensors. engine_shapes: of one rank (all ranks' are equal). A trainer tensor may be used by any
    rank; within a rank no element is used twice. Of an engine without vision tower (`vision="none"`) the trainer's is
    not asked for.
    """
    faults = list(_source_faults(plan, trainer_shapes))
    for gpu in range(plan.gpus):
        entries = plan.on(gpu)
        counts = Counter(entry.name for entry in entries)
        faults += [f"GPU {gpu}: {name} is planned {count} times" for name, count in counts.items() if count > 1]
        faults += [f"GPU {gpu}: the engine's {name} is not in the plan" for name in engine_shapes if name not in counts]
        for entry in entries:
            faults += [f"GPU {gpu}: {entry.name}: {fault}" for fault in _entry_faults(entry, plan, engine_shapes)]
    faults += _use_faults(plan)
    if faults:
        more = f"\n... and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
        raise LayoutError("the layout plan is wrong:\n" + "\n".join(faults[:MAX_FAULTS]) + more)


def _source_faults(plan: LayoutPlan, trainer_shapes: Shapes) -> Iterable[str]:
    with_vision = any(entry.part == "vision" for entry in plan.entries)
    for name, (shape, dtype) in trainer_shapes.items():
        source = plan.sources.get(name)
        if source is None:
            if with_vision or not name.startswith(TRAINER_TOWERS):
                yield f"the trainer's {name} is not used"
        elif (source.shape, source.dtype) != (shape, dtype):
            yield f"{name}: the trainer has {shape} {dtype}, the plan {source.shape} {source.dtype}"
    yield from (
        f"the plan reads {name}, which the trainer lacks" for name in plan.sources if name not in trainer_shapes
    )


def _entry_faults(entry: Entry, plan: LayoutPlan, engine_shapes: Shapes) -> Iterable[str]:
    if entry.name not in engine_shapes:
        yield "the engine has no such tensor"
    elif engine_shapes[entry.name][0] != entry.shape:
        yield f"the engine has shape {engine_shapes[entry.name][0]}, the plan {entry.shape}"
    elif engine_shapes[entry.name][1] != entry.dtype:
        yield f"the engine has {engine_shapes[entry.name][1]}, the trainer {entry.dtype}: no storage can be shared"
    end = 0
    for piece in sorted(entry.pieces, key=lambda piece: piece.engine_start):
        if piece.engine_start != end:
            what = "nothing" if piece.engine_start > end else "two slices"
            first, last = sorted((end, piece.engine_start))
            yield f"{what} at [{first}, {last}) of dimension {entry.dim}"
        end = max(end, piece.engine_start + piece.length)
        if piece.source not in plan.sources:
            yield f"{piece.source} is not a trainer tensor of the plan"
            continue
        source = plan.sources[piece.source]
        size = [source.rows, *source.shape[1:]]
        if piece.owners and piece.start + piece.length > size[entry.dim]:
            yield f"{piece.source} ends at {size[entry.dim]}, the slice at {piece.start + piece.length}"
        if source.dtype != entry.dtype:
            yield f"{piece.source} has {source.dtype}, its neighbours {entry.dtype}"
        across = [list(shape[: entry.dim]) + list(shape[entry.dim + 1 :]) for shape in (source.shape, entry.shape)]
        if across[0] != across[1]:
            yield f"slices of {piece.source} are {across[0]} wide, the tensor {across[1]}"
    if end != entry.shape[entry.dim]:
        yield f"covered up to {end} of {entry.shape[entry.dim]} in dimension {entry.dim}"


def _use_faults(plan: LayoutPlan) -> Iterable[str]:
    """Elements of trainer tensors that no rank uses, or one rank twice."""
    everywhere: dict[str, list[Span]] = {name: [] for name in plan.sources}
    dims: dict[str, int] = {}
    for gpu in range(plan.gpus):
        here: dict[str, list[Span]] = {name: [] for name in plan.sources}
        for entry in plan.on(gpu):
            for piece in entry.pieces:
                here.setdefault(piece.source, []).append((piece.start, piece.start + piece.length))
                dims[piece.source] = entry.dim
        for name, spans in here.items():
            spans.sort()
            for (_, stop), (start, _) in pairwise(spans):
                if start < stop:
                    yield f"GPU {gpu}: [{start}, {stop}) of {name} is used twice"
            everywhere.setdefault(name, []).extend(spans)
    for name, source in plan.sources.items():
        end = 0
        for start, stop in sorted(everywhere[name]):
            if start > end:
                yield f"[{end}, {start}) of {name} is not used"
            end = max(end, stop)
        size = source.shape[dims.get(name, 0)]
        if end < size:
            yield f"[{end}, {size}) of {name} is not used"


def table(plan: LayoutPlan, part: Part | None = None) -> str:
    """Bytes per class and GPU, as text: GiB and share of the engine's tensors."""
    rows = [["GPU", "trainer", "engine", *CLASSES, "total GiB", "gathered", "trainer GiB"]]
    for gpu in range(plan.gpus):
        by_class = plan.class_bytes(gpu, part)
        total = sum(by_class.values())
        shares = [f"{_gib(by_class[name])} ({by_class[name] / max(1, total):.1%})" for name in CLASSES]
        ranks = [f"rank {plan.train_rank(gpu)}", f"rank {plan.rollout_rank(gpu)}"]
        sums = [_gib(size) for size in (total, plan.gathered_bytes(gpu, part), plan.trainer_bytes(gpu, part))]
        rows.append([str(gpu), *ranks, *shares, *sums])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    title = f"{plan.family}, {part or 'all'} tensors: train TP {plan.train_tp}, rollout TP {plan.rollout_tp}"
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([title, *lines])


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}" if size < 2**30 else f"{size / 2**30:.2f}"
