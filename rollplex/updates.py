"""From accumulated gradients to those that the optimizer takes: summed over ranks, rescaled, clipped.

A strategy owns one of these. `GRPOModule` calls `begin` before the first backward of an update, `finish` after the last
one, then steps the optimizer, then asks for `norm`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from rollplex.buckets import buckets
from rollplex.ranks import Ranks

BUCKET_BYTES = 256 * 1024**2
"""Gradients reduced by one collective."""


class GradientUpdate(Protocol):
    def begin(self) -> None:
        """Backward calls of one update follow, as many as there are units."""

    def finish(self, parameters: Iterable[nn.Parameter], scale: float | None, limit: float | None) -> None:
        """They are over. scale: what the summed gradient is multiplied by, equal on every rank; None: no rank has
        anything to learn, and the coming optimizer step must move nothing. limit: largest norm; None is no clipping.

        Raises FloatingPointError, before a weight has moved, when the norm is not finite.
        """

    def norm(self) -> float:
        """After the optimizer step: the gradient's norm before clipping. Raises as `finish` where only the step knows
        it; no weight has moved then either."""

    def abandon(self) -> None:
        """Forget the gradients of an update that is given up."""


def not_finite(norm: float) -> FloatingPointError:
    return FloatingPointError(f"gradient norm {norm}; weights kept")


class WholeGradients:
    """Every rank holds all parameters and gradients: they are summed in flat buckets, once per update."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Ranks()
        self._norm = 0.0

    def begin(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def finish(self, parameters: Iterable[nn.Parameter], scale: float | None, limit: float | None) -> None:
        parameters = [p for p in parameters if p.requires_grad]
        self._norm = 0.0
        if scale is None:
            # Without gradients the optimizer moves nothing, and the step still counts.
            for p in parameters:
                p.grad = None
            return
        self._sum(parameters)
        held = [p for p in parameters if p.grad is not None]
        if not held:
            return
        torch._foreach_mul_([p.grad for p in held if p.grad is not None], scale)
        norm = torch.nn.utils.clip_grad_norm_(held, limit if limit is not None else float("inf"))
        self._norm = float(norm)
        if not torch.isfinite(norm):
            raise not_finite(self._norm)

    def norm(self) -> float:
        return self._norm

    def _sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """A parameter without a gradient on any rank (a vision tower that no picture went through) keeps none."""
        if self.ranks.alone:
            return
        everywhere = self.ranks.gather([p.grad is not None for p in parameters])
        for p, used in zip(parameters, map(any, zip(*everywhere, strict=True)), strict=True):
            if used and p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in buckets([p.grad for p in parameters if p.grad is not None], BUCKET_BYTES):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            with self.ranks.collective("the sum of gradients"):
                dist.all_reduce(flat)
            for gradient, summed in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(summed.view_as(gradient))
