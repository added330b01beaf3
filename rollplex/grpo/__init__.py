"""The mathematics of GRPO as pure functions: rewards to advantages, log-probabilities to a loss."""

from rollplex.grpo.advantages import Advantages, combine_rewards, group_advantages, rewards_by_group
from rollplex.grpo.importance import MismatchStats, WeightStats, importance_weights, mismatch_stats
from rollplex.grpo.losses import LossSettings, LossSums, kept_responses, loss_normalizer, policy_loss_sums

__all__ = [
    "Advantages",
    "LossSettings",
    "LossSums",
    "MismatchStats",
    "WeightStats",
    "combine_rewards",
    "group_advantages",
    "importance_weights",
    "kept_responses",
    "loss_normalizer",
    "mismatch_stats",
    "policy_loss_sums",
    "rewards_by_group",
]
