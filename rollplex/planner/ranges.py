"""What numbers of flags and configs may be; anything else is one error that says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Range:
    """Finite numbers from `least` to `most`."""

    whole: bool = False
    least: float = 0.0
    most: float = math.inf
    above: bool = False
    """`least` itself is none."""

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        if math.isfinite(self.most):
            return f"{kind} from {self.least:g} to {self.most:g}"
        return f"{kind}, above {self.least:g}" if self.above else f"{kind}, at least {self.least:g}"

    def take(self, name: str, value: Any) -> Any:
        """The number; ValueError for what is none of the range. Strings are numbers too: YAML reads 1e-3 as one."""
        number = _number(value)
        good = number is not None and self.least <= number <= self.most and not (self.above and number == self.least)
        if not good or number is None or (self.whole and number != int(number)):
            raise ValueError(f"{name}={value!r} must be {self}")
        return int(number) if self.whole else number


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


COUNT = Range(whole=True, least=1)
SHARE = Range(most=1.0)
AMOUNT = Range()
"""0 or more."""
LARGE = Range(whole=True, least=1, most=10**9)
"""Counts of tokens and prompts."""

FLAGS: dict[str, Range] = {
    "gpus": Range(whole=True, least=1, most=10**6), "train_tp": COUNT, "rollout_tp": COUNT,
    "boundary_tokens": LARGE, "micro_tokens": LARGE, "kv_pool_gib": Range(most=1e6), "workspace_gib": Range(most=1e6),
    "update_chunks": LARGE, "checkpoint_share": SHARE,
    "prompts": Range(whole=True, least=1, most=10**6), "num_generations": Range(whole=True, least=1, most=10**5),
    "prompt_tokens": LARGE, "visual_share": SHARE, "response_tokens": Range(least=1, most=1e7),
    "sigma": Range(most=5.0), "beta": AMOUNT,
}  # fmt: skip
"""By flag of `rollplex plan`, and what a config says in its place."""

MODEL: dict[str, Range] = {
    "num_generations": FLAGS["num_generations"], "max_completion_length": LARGE, "num_mini_batches": COUNT,
    "num_iterations": COUNT, "prompts_per_pass": COUNT, "responses_per_pass": COUNT, "beta": AMOUNT,
}  # fmt: skip
DATA: dict[str, Range] = {"batch_size": FLAGS["prompts"], "max_prompt_length": LARGE}
STRATEGY: dict[str, Range] = {"prefix_budget_bytes": COUNT, "train_tp": COUNT}
ENGINE: dict[str, Range] = {
    "tensor_parallel_size": COUNT, "kv_cache_memory_bytes": COUNT, "max_num_seqs": COUNT,
    "gpu_memory_utilization": Range(most=1.0, above=True),
}  # fmt: skip
ZERO: dict[str, Range] = {
    "reduce_bucket_size": COUNT, "stage3_param_persistence_threshold": Range(whole=True)
}  # fmt: skip


def checked(settings: dict[str, Any], ranges: dict[str, Range]) -> dict[str, Any]:
    """Settings with every number of `ranges` among them taken, or left out where it is null, the default."""
    return {
        name: ranges[name].take(name, value) if name in ranges else value
        for name, value in settings.items()
        if value is not None or name not in ranges
    }
