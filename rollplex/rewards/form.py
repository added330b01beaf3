"""Rewards for how a response is written, whatever it says."""

from __future__ import annotations

from rollplex.data.records import Rollout, Sample
from rollplex.rewards.base import Reward
from rollplex.rewards.extract import SECONDS, check_pattern


class FormatRegex(Reward):
    """1 if the whole response (without white space around it) matches a pattern, else 0."""

    def __init__(
        self,
        pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>",
        seconds: float = SECONDS,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        """
        Args:
            pattern: a regular expression; `.` matches line ends too.
            seconds: that one response may take. On unlucky text a pattern can search for ever; the response then has no
                reward.
        """
        super().__init__(weight, name)
        if not seconds > 0:
            raise ValueError(f"FormatRegex: seconds={seconds} must be positive")
        check_pattern(pattern, "FormatRegex: pattern")
        self.pattern, self.seconds = pattern, seconds

    def score(self, sample: Sample, response: Rollout) -> float:
        compiled = check_pattern(self.pattern, "FormatRegex: pattern")  # from regex's own cache
        return float(compiled.fullmatch(response.text.strip(), timeout=self.seconds) is not None)


class SoftOverlongPunishment(Reward):
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max_completion_length - soft_punish_cache
    tokens, from there down to -1 at max_completion_length, and -1 beyond.
    """

    def __init__(
        self, max_completion_length: int, soft_punish_cache: int, weight: float = 1.0, name: str | None = None
    ) -> None:
        """
        Args:
            max_completion_length: that of GRPOModule.
            soft_punish_cache: length of the slope, in tokens.
        """
        super().__init__(weight, name)
        if not 0 < soft_punish_cache <= max_completion_length:
            raise ValueError(
                f"SoftOverlongPunishment: soft_punish_cache={soft_punish_cache} must be in 1..max_completion_length="
                f"{max_completion_length}"
            )
        self.max_completion_length, self.soft_punish_cache = max_completion_length, soft_punish_cache

    def score(self, sample: Sample, response: Rollout) -> float:
        over = len(response) - (self.max_completion_length - self.soft_punish_cache)
        return -min(1.0, max(0, over) / self.soft_punish_cache)
