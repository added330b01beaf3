"""What to change when a plan does not fit: the cheapest knobs first, and only those that are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from rollplex.planner.hardware import Gpu
from rollplex.planner.memory import MemorySettings, fits, states
from rollplex.planner.models import ModelShape
from rollplex.planner.run_memory import RunSettings, run_knobs, run_states


@dataclass(frozen=True)
class Change:
    """One setting, its old and its new value."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} {self.old} -> {self.new}"


def fitting_changes(model: ModelShape, s: MemorySettings, gpu: Gpu, *, most_tp: int = 8) -> list[Change] | None:
    """[] when the plan fits as it is; None when nothing here makes it fit. most_tp: GPUs of a node."""
    return search(s, _knobs(model, s, most_tp), lambda tried: fits(states(model, tried), gpu))


def run_changes(model: ModelShape, s: RunSettings, gpu: Gpu) -> list[Change] | None:
    """As `fitting_changes`, for a run on one device; the settings are those of RunSettings."""
    return search(s, run_knobs(s, model), lambda tried: fits(run_states(model, tried), gpu))


def search(settings: Any, knobs: Iterable[tuple[str, Any]], enough: Callable[[Any], bool]) -> list[Change] | None:
    """Turn one knob after the other until it is enough; returns the changes that are needed for it."""
    if enough(settings):
        return []
    tried = settings
    for name, value in knobs:
        tried = replace(tried, **{name: value})
        if enough(tried):
            return _needed(settings, tried, enough)
    return None


def _knobs(model: ModelShape, s: MemorySettings, most_tp: int) -> Iterator[tuple[str, Any]]:
    """(setting, value), each a step further than the one before. What costs no time comes first, then what costs some,
    then other degrees."""
    if s.data_parallel > 1:
        yield "shard_optimizer", True
    for chunks in (32, 64, 256):
        if chunks > s.update_chunks:
            yield "update_chunks", chunks
    for share in (0.25, 0.0625):
        if share < s.checkpoint_share:
            yield "checkpoint_share", share
    for part in (2, 4, 8, 16):
        yield "boundary_tokens", s.boundary_tokens // part
        yield "micro_tokens", max(1024, s.micro_tokens // part)
        yield "kv_pool_gib", s.kv_pool_gib / part
    degree = max(s.train_tp, s.rollout_tp)
    while degree < most_tp:
        degree *= 2
        for name in ("train_tp", "rollout_tp"):
            if degree > getattr(s, name) and _splits(model, degree):
                yield name, degree


def _splits(model: ModelShape, degree: int) -> bool:
    try:
        model.check_tp("tp", degree)
    except ValueError:
        return False
    return True


def _needed(before: Any, after: Any, enough: Callable[[Any], bool]) -> list[Change]:
    """The changes between two settings without those that it is enough without."""
    names = [f.name for f in fields(before) if getattr(before, f.name) != getattr(after, f.name)]
    for name in list(names):
        without = replace(after, **{name: getattr(before, name)})
        if enough(without):
            after = without
            names.remove(name)
    return [Change(name, getattr(before, name), getattr(after, name)) for name in names]
