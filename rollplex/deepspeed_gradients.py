"""Gradients of a DeepSpeed engine: many backward calls, one reduction, one step.

Backward calls run inside `coalesce_grad_reduction`, DeepSpeed's scope in which gradients stay on the parameters;
leaving it reduces them once. Other ways of calling backward several times a step are wrong with ZeRO-3, silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from rollplex.ranks import Ranks
from rollplex.tensor_parallel import TensorParallel
from rollplex.updates import not_finite


class ShardedGradients:
    """A `GradientUpdate` of a `deepspeed.DeepSpeedEngine`, whose settings must clip at the module's limit."""

    def __init__(self, engine: Any, ranks: Ranks, parallel: TensorParallel | None = None) -> None:
        self.engine, self.ranks, self.parallel = engine, ranks, parallel
        self.nothing = False
        """The coming optimizer step moves nothing, so the engine must not step."""
        self._open: AbstractContextManager[None] | None = None

    def begin(self) -> None:
        self.abandon()
        self._open = self.engine.coalesce_grad_reduction()
        self._open.__enter__()

    def abandon(self) -> None:
        """Leave the scope without its reduction, which the other ranks may not come to."""
        scope, self._open = self._open, None
        if scope is None:
            return
        flushes = ("_flush_coalesced_reduction_zero12", "_flush_coalesced_reduction_zero3")
        for flush in flushes:
            setattr(self.engine, flush, lambda optimizer: None)
        try:
            scope.__exit__(None, None, None)
        finally:
            for flush in flushes:
                delattr(self.engine, flush)
        if torch.device(self.engine.device).type == "cpu":
            # Stage 3 tells the stream of each gradient that it frees, and there are none.
            for parameter in self.engine.module.parameters():
                parameter.grad = None
        self.engine.optimizer.zero_grad(set_to_none=True)

    def finish(self, parameters: Iterable[nn.Parameter], scale: float | None, limit: float | None) -> None:
        assert self._open is not None, "finish without begin"
        assert self.engine.gradient_clipping() == (limit or 0.0), "DeepSpeed would clip at another norm"
        self.nothing = scale is None
        if scale is None:
            self.abandon()
            return
        trained = [p for p in parameters if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                # Ranks must reduce the same parameters, and ZeRO-3 would take a missing one's last gradient again.
                _give_zeros(parameter)
        if self.parallel is not None:
            self.parallel.agree_on_whole((n, p) for n, p in self.engine.module.named_parameters() if p.requires_grad)
        # DeepSpeed averages over data-parallel ranks; the scale is that of a sum.
        torch._foreach_mul_([p.grad for p in trained if p.grad is not None], scale * self.ranks.world)
        scope, self._open = self._open, None
        with self.ranks.collective("the sum of gradients"):
            scope.__exit__(None, None, None)

    def norm(self) -> float:
        if self.nothing:
            return 0.0
        norm = float(self.engine.get_global_grad_norm())
        if self.engine.optimizer.overflow:
            raise not_finite(norm)
        return norm


def _give_zeros(parameter: nn.Parameter) -> None:
    if getattr(parameter, "ds_shape", parameter.shape) == parameter.shape:
        parameter.grad = torch.zeros_like(parameter)
        return
    shape, held = parameter.ds_shape, parameter.data  # type: ignore[attr-defined]
    # A gradient must have its parameter's shape when it is set, and the shard has another.
    parameter.data = held.new_zeros(()).expand(shape)
    parameter.grad = held.new_zeros(shape)
    parameter.data = held
