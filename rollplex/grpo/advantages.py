"""From rewards to advantages. Pure functions; a missing reward is NaN and stays out of every statistic.

Shape legend: B groups (prompts), G responses of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

ScaleRewards = Literal["group", "batch", "none"]

EPS = 1e-4
"""Added to the standard deviation, as TRL does."""

EQUAL_TOLERANCE = 1e-6
"""Rewards this close, relative to max(1, largest |reward|), are one and the same number after rounding."""


@dataclass(frozen=True)
class Advantages:
    """What `group_advantages` returns; all tensors are on the device of the rewards."""

    advantages_BG: torch.Tensor
    """(B, G) float32. Exactly 0 where the reward is missing or the group has no spread."""

    valid_BG: torch.Tensor
    """(B, G) bool, False where the reward is missing."""

    mean_B: torch.Tensor
    """(B,) float64 over valid responses; 0 for a group without any (average them with `mean_reward`)."""

    std_B: torch.Tensor
    """(B,) float64, unbiased, over valid responses; 0 for a group without spread."""

    zero_variance_B: torch.Tensor
    """(B,) bool: all valid rewards equal, or fewer than two valid ones. Such a group gives no gradient."""

    @property
    def mean_reward(self) -> float:
        """Mean over all valid responses; NaN only if there are none."""
        count_B = self.valid_BG.sum(dim=1)
        total = int(count_B.sum())
        return float((self.mean_B * count_B).sum()) / total if total else float("nan")

    @property
    def num_missing(self) -> int:
        return int((~self.valid_BG).sum())


def group_advantages(rewards_BG: torch.Tensor, *, scale_rewards: ScaleRewards = "group") -> Advantages:
    """(reward - group mean) / (std + 1e-4), the group-relative advantage of GRPO (arXiv 2402.03300, eq. 3 ff.).

    `scale_rewards`: "group" divides by the group's unbiased std (GRPO); "batch" by the std over every valid reward
    in `rewards_BG` (arXiv 2508.08221); "none" does not divide (Dr. GRPO, arXiv 2503.20783). The mean is always the
    group's. With "batch" on several ranks, pass the rewards of all ranks and keep your own rows.

    Args:
        rewards_BG: (B, G) floating point, computed in float64; NaN is a missing reward. Groups smaller than G are
            padded with NaN.

    Rounding never becomes signal: a group whose rewards agree up to `EQUAL_TOLERANCE` gets exactly 0, where
    dividing its residue by 1e-4 would not. Hence |advantage| <= sqrt(G) for "group".

    Raises:
        ValueError: not two-dimensional, an unknown `scale_rewards`, or an infinite reward.
    """
    if scale_rewards not in get_args(ScaleRewards):
        raise ValueError(f"scale_rewards={scale_rewards!r} is unknown; set one of {', '.join(get_args(ScaleRewards))}")
    if rewards_BG.dim() != 2:
        raise ValueError(f"rewards must be (groups, responses), got shape {tuple(rewards_BG.shape)}")
    rewards_BG = rewards_BG.detach().to(torch.float64)
    if torch.isinf(rewards_BG).any():
        raise ValueError("a reward is infinite; return None for a response that cannot be scored")

    valid_BG = ~torch.isnan(rewards_BG)
    values_BG = torch.where(valid_BG, rewards_BG, 0.0)
    count_B = valid_BG.sum(dim=1)
    mean_B = values_BG.sum(dim=1) / count_B.clamp(min=1)
    centred_BG = torch.where(valid_BG, values_BG - mean_B[:, None], 0.0)

    equal_B = _spread(rewards_BG, valid_BG) <= EQUAL_TOLERANCE * values_BG.abs().amax(dim=1).clamp(min=1.0)
    zero_variance_B = equal_B | (count_B < 2)
    std_B = (centred_BG.square().sum(dim=1) / (count_B - 1).clamp(min=1)).sqrt()
    std_B = torch.where(zero_variance_B, 0.0, std_B)

    if scale_rewards == "group":
        centred_BG = centred_BG / (std_B[:, None] + EPS)
    elif scale_rewards == "batch":
        everything = rewards_BG[valid_BG]
        std = everything.std() if everything.numel() > 1 else rewards_BG.new_zeros(())
        centred_BG = centred_BG / (std + EPS)
    advantages_BG = torch.where(zero_variance_B[:, None], 0.0, centred_BG).to(torch.float32)
    return Advantages(advantages_BG, valid_BG, mean_B, std_B, zero_variance_B)


def _spread(rewards_BG: torch.Tensor, valid_BG: torch.Tensor) -> torch.Tensor:
    """(B,) largest minus smallest valid reward; -inf for a group without any."""
    high_B = torch.where(valid_BG, rewards_BG, -torch.inf).amax(dim=1)
    low_B = torch.where(valid_BG, rewards_BG, torch.inf).amin(dim=1)
    return high_B - low_B


def combine_rewards(components: Mapping[str, torch.Tensor], weights: Mapping[str, float] | None = None) -> torch.Tensor:
    """Weighted total of named rewards, float64, same shape as each component ((B, G) or (G,)).

    A response that lacks *any* component with a weight other than 0 has no total (NaN): a total over fewer
    components is on another scale than its neighbours', and would be read as a bad or good answer. Components of
    weight 0 are for logs only and may be missing. A component that does not apply to a whole group should be left
    out of that group's `components`.

    Args:
        weights: name to weight, for every component; None weighs each by 1.

    Raises:
        ValueError: no components, shapes differ, a weight that is not finite, a weight without a component, or a
            component without a weight.
    """
    if not components:
        raise ValueError("no reward component to combine")
    known = ", ".join(sorted(components))
    if weights is None:
        weights = dict.fromkeys(components, 1.0)
    if unknown := sorted(set(weights) - set(components)):
        raise ValueError(f"reward_weights names {', '.join(unknown)}, but the task's rewards are: {known}")
    if unweighted := sorted(set(components) - set(weights)):
        raise ValueError(
            f"reward_weights has no weight for {', '.join(unweighted)} (it names: {', '.join(sorted(weights))}); "
            "give every reward a weight, 0 to only log it"
        )
    if len({tuple(values.shape) for values in components.values()}) != 1:
        shapes = {name: tuple(values.shape) for name, values in components.items()}
        raise ValueError(f"reward components must have one shape, got {shapes}")
    total: torch.Tensor | None = None
    for name, values in components.items():
        weight = float(weights[name])
        if not torch.isfinite(torch.tensor(weight)):
            raise ValueError(f"reward_weights[{name!r}]={weight} must be a finite number")
        term = values.to(torch.float64) * weight if weight != 0.0 else torch.zeros_like(values, dtype=torch.float64)
        total = term if total is None else total + term
    assert total is not None
    return total


def rewards_by_group(
    keys: Sequence[tuple[int, int]], rewards: Sequence[float] | torch.Tensor, num_generations: int
) -> tuple[list[int], torch.Tensor]:
    """Place rewards that arrive in any order by their (group, index) key: grouping by id, never by position.

    Returns:
        The group ids in ascending order, and (B, G) float64 rewards in that order, NaN where no key came.

    Raises:
        ValueError: a key twice, an index outside 0..num_generations-1, or keys and rewards of different length.
    """
    if len(keys) != len(rewards):
        raise ValueError(f"{len(keys)} keys for {len(rewards)} rewards")
    groups = sorted({group for group, _ in keys})
    row = {group: position for position, group in enumerate(groups)}
    rewards_BG = torch.full((len(groups), num_generations), torch.nan, dtype=torch.float64)
    seen: set[tuple[int, int]] = set()
    for (group, index), reward in zip(keys, rewards, strict=True):
        if not 0 <= index < num_generations:
            raise ValueError(f"response {index} of group {group} is outside num_generations={num_generations}")
        if (group, index) in seen:
            raise ValueError(f"response {index} of group {group} is there twice")
        seen.add((group, index))
        rewards_BG[row[group], index] = float(reward)
    return groups, rewards_BG
