"""What a step of GRPO is told besides models and prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollplex.data.records import SamplingParams
from rollplex.grpo.advantages import ScaleRewards
from rollplex.grpo.importance import ImportanceMode
from rollplex.grpo.losses import LossSettings


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know, beyond models and prompts."""

    num_generations: int
    sampling: SamplingParams
    loss: LossSettings
    scale_rewards: ScaleRewards = "group"
    mask_truncated_completions: bool = False
    num_iterations: int = 1
    num_mini_batches: int = 1
    prompts_per_pass: int = 1
    responses_per_pass: int | None = None
    """Responses of each prompt in one suffix pass; None takes all G."""
    share_prefix: bool = True
    """False recomputes the prefix for each response inside its suffix unit: what other systems do, as a baseline."""
    share_vision: bool = False
    """The engine takes vision features: the tower runs once, before the rollout, for engine and actor."""
    share_vision_with_reference: bool = False
    """And for the reference, whose tower is the same and stays so."""
    importance_sampling_mode: ImportanceMode | None = None
    importance_sampling_cap: float = 3.0

    @classmethod
    def of(cls, h: Mapping[str, Any], **others: Any) -> StepSettings:
        """From the settings of GRPOModule that have the fields' names, and `others`."""
        return cls(**{f.name: h[f.name] for f in fields(cls) if f.name in h}, **others)
