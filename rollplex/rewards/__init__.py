"""Running the user's reward code, isolated and with a time limit."""

from rollplex.rewards.runner import RewardFailure, RewardResult, RewardRunner

__all__ = ["RewardFailure", "RewardResult", "RewardRunner"]
