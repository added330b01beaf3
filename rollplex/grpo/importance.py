"""Engine against trainer: how far apart their log-probabilities are, and weights that correct for it.

Responses are drawn from the engine's distribution mu, gradients taken for the trainer's pi. Even with equal weights
the two differ by kernels and precision. Importance sampling multiplies a token's policy loss by pi / mu, bounded so
that a few tokens do not dominate: truncation (Ionides 2008; for RL of language models Yao et al. 2025, "Your
efficient RL framework secretly brings you off-policy RL training") or masking (Liu et al. 2025, "When speed kills
stability"). Mode names are TRL's.

Shape legend: B responses, T token positions of the padded responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

ImportanceMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

MAX_LOG_RATIO = 20.0
"""exp() stays finite in float32, sums of many included; log-ratios beyond it mean something else is broken."""


@dataclass(frozen=True)
class WeightStats:
    """Of the importance weights over kept tokens. 0-d detached float64 tensors; `+` merges micro-batches."""

    weight: torch.Tensor
    """Sum of the weights over tokens, after truncation or masking."""

    weight_min: torch.Tensor
    """inf if there is no token."""

    weight_max: torch.Tensor
    """-inf if there is no token."""

    capped: torch.Tensor
    """Tokens whose weight was truncated or masked (in sequence modes: all tokens of such a sequence)."""

    tokens: torch.Tensor

    def __add__(self, other: WeightStats) -> WeightStats:
        return WeightStats(
            self.weight + other.weight,
            torch.minimum(self.weight_min, other.weight_min),
            torch.maximum(self.weight_max, other.weight_max),
            self.capped + other.capped,
            self.tokens + other.tokens,
        )


@dataclass(frozen=True)
class MismatchStats:
    """Difference of trainer and engine over kept tokens. 0-d detached float64 tensors; `+` merges micro-batches."""

    abs_diff: torch.Tensor
    """Sum over tokens of |trainer - engine|, nats. Divide by `tokens` for the mean."""

    abs_diff_max: torch.Tensor
    """0 if there is no token."""

    kl: torch.Tensor
    """Sum over tokens of the k3 estimate of KL(engine || trainer), nats."""

    tokens: torch.Tensor

    def __add__(self, other: MismatchStats) -> MismatchStats:
        return MismatchStats(
            self.abs_diff + other.abs_diff,
            torch.maximum(self.abs_diff_max, other.abs_diff_max),
            self.kl + other.kl,
            self.tokens + other.tokens,
        )


def importance_weights(
    trainer_logps_BT: torch.Tensor,
    engine_logps_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    mode: ImportanceMode | None,
    cap: float,
) -> tuple[torch.Tensor, WeightStats]:
    """Weights pi / mu for the policy loss, detached, (B, T) float32, 0 outside the mask.

    With d = trainer - engine: token modes use exp(d_t), sequence modes exp(sum_t d_t) for every token of the
    response (so a response must be in one call). "truncate" takes min(weight, cap); "mask" sets a weight above
    `cap` to 0. None gives 1.

    Args:
        trainer_logps_BT: (B, T) log-probabilities under the trainer at the weights that sampled (theta_t).
        engine_logps_BT: (B, T) as the engine reported them.
        mask_BT: (B, T) bool or 0/1, True on kept response tokens. What lies outside may be anything, NaN included.

    Raises:
        ValueError: unknown mode, or cap below 1 (it would change weights of a perfect match).
    """
    if mode is not None and mode not in get_args(ImportanceMode):
        raise ValueError(
            f"importance mode {mode!r} is unknown; set None or one of {', '.join(get_args(ImportanceMode))}"
        )
    mask_BT = mask_BT.bool()
    if mode is None:
        weights_BT = mask_BT.to(torch.float32)
        return weights_BT, _weight_stats(weights_BT, torch.zeros_like(mask_BT), mask_BT)
    if not (math.isfinite(cap) and cap >= 1.0):
        raise ValueError(f"importance cap={cap} must be a finite number, at least 1: pi / mu is 1 for a perfect match")

    diff_BT = _masked_diff(trainer_logps_BT, engine_logps_BT, mask_BT)
    if mode.startswith("sequence"):
        diff_BT = diff_BT.sum(dim=1, keepdim=True).expand_as(diff_BT)
    ratio_BT = diff_BT.clamp(max=MAX_LOG_RATIO).exp()
    over_BT = (ratio_BT > cap) & mask_BT
    ratio_BT = torch.where(over_BT, cap if mode.endswith("truncate") else 0.0, ratio_BT)
    weights_BT = torch.where(mask_BT, ratio_BT, 0.0)
    return weights_BT, _weight_stats(weights_BT, over_BT, mask_BT)


def mismatch_stats(
    trainer_logps_BT: torch.Tensor, engine_logps_BT: torch.Tensor, mask_BT: torch.Tensor
) -> MismatchStats:
    """How far trainer and engine are apart on the sampled tokens, as sums that add up over micro-batches.

    KL(engine || trainer) by Schulman's k3 (joschu.net/blog/kl-approx.html): tokens come from the engine, so with
    d = trainer - engine it is exp(d) - d - 1 per token, never negative. Shapes as `importance_weights`.
    """
    mask_BT = mask_BT.bool()
    diff_BT = _masked_diff(trainer_logps_BT, engine_logps_BT, mask_BT).to(torch.float64)
    abs_BT = diff_BT.abs()
    capped_BT = diff_BT.clamp(max=MAX_LOG_RATIO)
    kl = (torch.expm1(capped_BT) - capped_BT).sum()
    peak = abs_BT.max() if abs_BT.numel() else abs_BT.new_zeros(())
    return MismatchStats(abs_BT.sum(), peak, kl, mask_BT.sum().to(torch.float64))


def _masked_diff(trainer_BT: torch.Tensor, engine_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """trainer - engine in float32, 0 outside the mask; selected before the arithmetic, so padding may be NaN."""
    trainer_BT = torch.where(mask_BT, trainer_BT.detach().float(), 0.0)
    return trainer_BT - torch.where(mask_BT, engine_BT.detach().float(), 0.0)


def _weight_stats(weights_BT: torch.Tensor, over_BT: torch.Tensor, mask_BT: torch.Tensor) -> WeightStats:
    wide_BT = weights_BT.to(torch.float64)
    # One column more, so that an empty batch has an extreme too.
    low_BT = torch.nn.functional.pad(torch.where(mask_BT, wide_BT, torch.inf).flatten(), (0, 1), value=torch.inf)
    high_BT = torch.nn.functional.pad(torch.where(mask_BT, wide_BT, -torch.inf).flatten(), (0, 1), value=-torch.inf)
    return WeightStats(
        wide_BT.sum(), low_BT.min(), high_BT.max(), over_BT.sum().to(torch.float64), mask_BT.sum().to(torch.float64)
    )
