"""Transformers' activation checkpointing, for one pass at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointing:
    """Sets transformers' per-layer checkpointing flags for one pass and puts them back."""

    def __init__(self, roots: Sequence[nn.Module], enabled: bool) -> None:
        self.layers: list[Any] = [m for m in _modules(roots) if hasattr(m, "gradient_checkpointing")]
        self.enabled = enabled

    def __enter__(self) -> None:
        self.before = [(m.gradient_checkpointing, m.training) for m in self.layers]
        for m in self.layers:
            m.gradient_checkpointing = self.enabled
            m._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
            if self.enabled:
                m.training = True  # transformers checkpoints only modules in training mode

    def __exit__(self, *exc: object) -> None:
        for m, (flag, training) in zip(self.layers, self.before, strict=True):
            m.gradient_checkpointing, m.training = flag, training


def _modules(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    for root in roots:
        yield from root.modules()
