"""The GRPO family of losses as unnormalised sums. Pure functions.

A step's loss is (sum over all kept responses) / normaliser. The sum is built response by response, in whatever
micro-batches fit, and each part is back-propagated as it is; the normaliser is known only when all responses are
in, and divides the gradients once at the end. So the gradient does not depend on how the batch was cut.

Shape legend: B responses (of any number of groups), T token positions of the padded responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo"]
KLEstimator = Literal["k1", "k2", "k3"]
ImportanceLevel = Literal["token", "sequence"]

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio| before exp(): beyond it exp() overflows to inf, and 0 * inf in backward is NaN. Gradients
are 0 outside the bound, where the ratio is past 4.8e8 (or below 2.1e-9)."""


@dataclass(frozen=True)
class LossSettings:
    """What defines the loss. Names and meanings are TRL's where TRL has them."""

    beta: float = 0.0
    """Weight of the KL term to the reference model. 0 needs no reference model."""

    kl_estimator: KLEstimator = "k3"
    """Estimator of KL(policy || reference), see `kl_terms`."""

    epsilon: float = 0.2
    """The ratio is clipped from below at 1 - epsilon (PPO, arXiv 1707.06347)."""

    epsilon_high: float | None = None
    """The ratio is clipped from above at 1 + epsilon_high (DAPO's clip-higher, arXiv 2503.14476). None: epsilon."""

    delta: float | None = None
    """Upper bound of the ratio when the advantage is negative, where PPO has none (two-sided clipping of
    INTELLECT-2, arXiv 2505.07291). Must exceed 1 + epsilon_high. None is off."""

    loss_type: LossType = "dapo"
    """How token losses are weighed, see `loss_normalizer`."""

    importance_sampling_level: ImportanceLevel = "token"
    """Ratio per token, or one per response: its geometric mean (GSPO, arXiv 2507.18071)."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    max_completion_length: int | None = None
    """Most tokens of a response; the divisor of "dr_grpo", which needs it."""

    def __post_init__(self) -> None:
        _check_choice("loss_type", self.loss_type, LossType)
        _check_choice("kl_estimator", self.kl_estimator, KLEstimator)
        _check_choice("importance_sampling_level", self.importance_sampling_level, ImportanceLevel)
        for name in ("beta", "entropy_coef"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value} must be a finite number, at least 0")
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon={self.epsilon} must be in [0, 1): the ratio is clipped at 1 - epsilon")
        if not (math.isfinite(self.upper) and self.upper >= 1):
            raise ValueError(f"epsilon_high={self.epsilon_high} must be a finite number, at least 0, or None")
        if self.delta is not None and not (math.isfinite(self.delta) and self.delta > self.upper):
            raise ValueError(
                f"delta={self.delta} must exceed 1 + epsilon_high = {self.upper:g}, or it would undercut the clip; "
                "raise delta or set it to None"
            )
        if self.max_completion_length is not None and self.max_completion_length < 1:
            raise ValueError(f"max_completion_length={self.max_completion_length} must be at least 1")
        if self.loss_type == "dr_grpo" and self.max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' divides by max_completion_length: set it")

    @property
    def lower(self) -> float:
        """Smallest ratio that is not clipped."""
        return 1.0 - self.epsilon

    @property
    def upper(self) -> float:
        """Largest ratio that is not clipped."""
        return 1.0 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)


@dataclass(frozen=True)
class LossSums:
    """Sums over the kept tokens of one micro-batch; `+` merges micro-batches.

    All are 0-d tensors on the device of the inputs (no synchronisation); all but `loss` are detached float64.
    """

    loss: torch.Tensor
    """float32, differentiable, unnormalised: divide by `loss_normalizer`."""

    kl: torch.Tensor
    """Sum over tokens of the KL estimate to the reference, nats; 0 without a reference."""

    entropy: torch.Tensor
    """Sum over tokens of the entropy, nats; 0 if none was given."""

    clip_low: torch.Tensor
    """Tokens without policy gradient because ratio < 1 - epsilon at a negative advantage."""

    clip_high: torch.Tensor
    """Tokens without policy gradient because ratio > 1 + epsilon_high at a positive advantage."""

    ratio_min: torch.Tensor
    """inf if there is no token."""

    ratio_max: torch.Tensor
    """-inf if there is no token."""

    tokens: torch.Tensor
    """Kept tokens."""

    sequences: torch.Tensor
    """Responses with at least one kept token."""

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            loss=self.loss + other.loss,
            kl=self.kl + other.kl,
            entropy=self.entropy + other.entropy,
            clip_low=self.clip_low + other.clip_low,
            clip_high=self.clip_high + other.clip_high,
            ratio_min=torch.minimum(self.ratio_min, other.ratio_min),
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
        )


def policy_loss_sums(
    logps_BT: torch.Tensor,
    old_logps_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    settings: LossSettings,
    *,
    ref_logps_BT: torch.Tensor | None = None,
    entropy_BT: torch.Tensor | None = None,
    is_weights_BT: torch.Tensor | None = None,
    length_norm_B: torch.Tensor | None = None,
) -> LossSums:
    """Unnormalised loss of some responses, and sums for metrics.

    Per token, with ratio r = exp(logp - old_logp) and advantage A:
        l = -w min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta KL - entropy_coef H
    (PPO eq. 7, arXiv 1707.06347; GRPO, arXiv 2402.03300; delta: INTELLECT-2, arXiv 2505.07291). For level "sequence"
    r is exp(mean over the response of logp - old_logp) for all its tokens (GSPO eq. 7, arXiv 2507.18071).
    loss_type "grpo" sums l / length, the others sum l. At r = 1 the gradient is REINFORCE's, -A dlogp.

    Args:
        logps_BT: (B, T) current log-probabilities, differentiable. All arithmetic is float32.
        old_logps_BT: (B, T) at the weights of the rollout; detached here.
        advantages_B: (B,).
        mask_BT: (B, T) bool or 0/1: kept tokens. All False for a response that is not kept (`kept_responses`).
            What lies outside may be anything, -inf or NaN included: it contributes exactly 0 to loss and gradient.
        ref_logps_BT: (B, T) under the reference. Needed if beta > 0, else only measured.
        entropy_BT: (B, T) entropy in nats, differentiable if entropy_coef > 0, which needs it.
        is_weights_BT: (B, T) w, from `importance_weights`; None is 1. It does not touch the KL and entropy terms.
        length_norm_B: (B,) lengths for "grpo"; None counts the mask.

    Raises:
        ValueError: beta or entropy_coef set without its input.
    """
    if settings.beta > 0 and ref_logps_BT is None:
        raise ValueError(f"beta={settings.beta} needs log-probabilities of a reference model, but there are none")
    if settings.entropy_coef > 0 and entropy_BT is None:
        raise ValueError(f"entropy_coef={settings.entropy_coef} needs the entropy of each token, but there is none")
    mask_BT = mask_BT.bool()
    length_B = mask_BT.sum(dim=1)
    logps_BT = _kept(logps_BT, mask_BT)
    ratio_BT = _ratio(logps_BT - _kept(old_logps_BT.detach(), mask_BT), mask_BT, length_B, settings)
    advantages_B1 = advantages_B.detach().float()[:, None]

    bounded_BT = ratio_BT if settings.delta is None else ratio_BT.clamp(max=settings.delta)
    clipped_BT = ratio_BT.clamp(settings.lower, settings.upper)
    loss_BT = -torch.minimum(bounded_BT * advantages_B1, clipped_BT * advantages_B1)
    if is_weights_BT is not None:
        loss_BT = loss_BT * _kept(is_weights_BT.detach(), mask_BT)
    zero = torch.zeros((), dtype=torch.float64, device=logps_BT.device)
    kl, entropy = zero, zero
    if ref_logps_BT is not None:
        kl_BT = kl_terms(logps_BT, _kept(ref_logps_BT.detach(), mask_BT), settings.kl_estimator)
        kl = _total(kl_BT, mask_BT)
        loss_BT = loss_BT + settings.beta * kl_BT if settings.beta > 0 else loss_BT
    if entropy_BT is not None:
        entropy_BT = _kept(entropy_BT, mask_BT)
        entropy = _total(entropy_BT, mask_BT)
        loss_BT = loss_BT - settings.entropy_coef * entropy_BT if settings.entropy_coef > 0 else loss_BT

    # Every response is summed by itself first, then over responses.
    loss_B = torch.where(mask_BT, loss_BT, 0.0).sum(dim=1)
    if settings.loss_type == "grpo":
        norm_B = length_B if length_norm_B is None else length_norm_B
        loss_B = loss_B / norm_B.clamp(min=1)
    ratio_BT = ratio_BT.detach()
    # The extra element gives an empty batch an extreme too.
    low = torch.where(mask_BT, ratio_BT, torch.inf).flatten()
    high = torch.where(mask_BT, ratio_BT, -torch.inf).flatten()
    return LossSums(
        loss=loss_B.sum(),
        kl=kl,
        entropy=entropy,
        clip_low=_total((ratio_BT < settings.lower) & (advantages_B1 < 0), mask_BT),
        clip_high=_total((ratio_BT > settings.upper) & (advantages_B1 > 0), mask_BT),
        ratio_min=torch.cat([low, low.new_tensor([torch.inf])]).min().to(torch.float64),
        ratio_max=torch.cat([high, high.new_tensor([-torch.inf])]).max().to(torch.float64),
        tokens=length_B.sum().to(torch.float64),
        sequences=(length_B > 0).sum().to(torch.float64),
    )


def kl_terms(logps_BT: torch.Tensor, ref_logps_BT: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from sampled tokens (Schulman, joschu.net/blog/kl-approx.html).

    With d = ref - logp: k1 = -d, unbiased, of either sign; k2 = d^2 / 2, biased; k3 = exp(d) - d - 1, unbiased and
    never negative (GRPO's, arXiv 2402.03300 eq. 4). As a *loss*, k1 has a gradient of mean 0 on the policy's own
    samples, so it pulls to the reference only through noise; k2 has the gradient of the true KL.
    """
    diff_BT = ref_logps_BT - logps_BT
    if estimator == "k1":
        return -diff_BT
    if estimator == "k2":
        return 0.5 * diff_BT.square()
    diff_BT = diff_BT.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(diff_BT) - diff_BT


def kept_responses(
    lengths_B: torch.Tensor,
    valid_B: torch.Tensor,
    truncated_B: torch.Tensor,
    *,
    mask_truncated_completions: bool,
) -> torch.Tensor:
    """(B,) bool: which responses the loss counts. The others leave the sum *and* the normaliser.

    Kept are responses with a reward and at least one token, and, with `mask_truncated_completions` (DAPO's
    overlong filtering, arXiv 2503.14476), only those that ended by themselves.
    """
    kept_B = valid_B.bool() & (lengths_B > 0)
    return kept_B & ~truncated_B.bool() if mask_truncated_completions else kept_B


def loss_normalizer(
    loss_type: LossType,
    kept_lengths: Sequence[int] | torch.Tensor,
    *,
    max_completion_length: int | None = None,
    batch_tokens: int | None = None,
    num_mini_batches: int = 1,
) -> float:
    """What the loss sum (or the accumulated gradient) is divided by. Lengths are those of *kept* responses only.

    - "grpo": kept responses: mean over responses of their token means (arXiv 2402.03300).
    - "bnpo": kept tokens of this mini-batch (TRL's GRPOTrainer documentation, `loss_type`).
    - "dapo": kept tokens of the whole rollout batch over the number of mini-batches (arXiv 2503.14476, as TRL
      normalises it), so a token weighs the same in every mini-batch.
    - "dr_grpo": kept responses times max_completion_length, independent of the lengths (arXiv 2503.20783).

    On several ranks pass the lengths (and tokens) of all ranks, and sum the gradients over ranks.

    Args:
        kept_lengths: token counts of the kept responses of this mini-batch; zeros are ignored.
        batch_tokens: kept tokens of the whole rollout batch; needed for "dapo" with several mini-batches.

    Returns:
        A positive number: 1.0 when nothing is kept, where the sum is 0.

    Raises:
        ValueError: unknown loss_type, or a needed argument is missing.
    """
    _check_choice("loss_type", loss_type, LossType)
    if num_mini_batches < 1:
        raise ValueError(f"num_mini_batches={num_mini_batches} must be at least 1")
    lengths = [int(length) for length in kept_lengths if int(length) > 0]
    if loss_type == "grpo":
        normalizer = float(len(lengths))
    elif loss_type == "bnpo":
        normalizer = float(sum(lengths))
    elif loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' divides by max_completion_length: set it")
        normalizer = float(len(lengths) * max_completion_length)
    else:
        if batch_tokens is None and num_mini_batches > 1:
            raise ValueError(f"loss_type='dapo' with {num_mini_batches} mini-batches needs batch_tokens")
        normalizer = (sum(lengths) if batch_tokens is None else batch_tokens) / num_mini_batches
    return normalizer if normalizer > 0 else 1.0


def _ratio(
    log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, length_B: torch.Tensor, settings: LossSettings
) -> torch.Tensor:
    """(B, T) ratio of new to old probability; 1 outside the mask for level "token"."""
    if settings.importance_sampling_level == "sequence":
        log_ratio_B = log_ratio_BT.sum(dim=1) / length_B.clamp(min=1)
        log_ratio_BT = log_ratio_B[:, None].expand_as(mask_BT)
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _kept(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """float32, 0 outside the mask. A selection, not a product: 0 * NaN is NaN, in backward too."""
    return torch.where(mask_BT, values_BT.float(), 0.0)


def _total(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_BT, values_BT.detach().to(torch.float64), 0.0).sum()


def _check_choice(name: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is unknown; set one of {', '.join(get_args(choices))}")
