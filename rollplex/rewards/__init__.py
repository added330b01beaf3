"""Rewards as objects, and running the user's reward code, isolated and with a time limit."""

from rollplex.rewards.answers import ExactMatch, MathVerify, MultipleChoice, Numeric
from rollplex.rewards.base import Reward
from rollplex.rewards.boxes import BoxIoU
from rollplex.rewards.form import FormatRegex, SoftOverlongPunishment
from rollplex.rewards.function import FunctionReward
from rollplex.rewards.runner import RewardFailure, RewardResult, RewardRunner

__all__ = [
    "BoxIoU",
    "ExactMatch",
    "FormatRegex",
    "FunctionReward",
    "MathVerify",
    "MultipleChoice",
    "Numeric",
    "Reward",
    "RewardFailure",
    "RewardResult",
    "RewardRunner",
    "SoftOverlongPunishment",
]
