"""The records that cross files: what a task gives, what the engine takes and returns.

All are frozen: a record is made once and never changed, so both lanes may read it without a lock.

Shape legend: P prompt tokens, R response tokens, G responses of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from rollplex.models.prefix import PrefixState
    from rollplex.models.vision import VisionState

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sample:
    """One row of a task."""

    id: str
    """Unique within its split. Every error and skip about this row names it."""

    columns: Mapping[str, Any] = field(default_factory=dict)
    """Whatever the task needs later: image, question, answer. Never touched by Rollplex."""

    def __getitem__(self, column: str) -> Any:
        return self.columns[column]


@dataclass(frozen=True)
class Prompt:
    """A sample after the processor: the one encoding that trainer and engine both use (CPU tensors)."""

    sample: Sample
    input_ids: torch.Tensor
    """(P,) int64, vision placeholders already expanded."""

    mm_token_type_ids: torch.Tensor
    """(P,) int64: 0 text, 1 image, 2 video. Positions (M-RoPE) are computed from it."""

    media: Mapping[str, torch.Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """Processor outputs under transformers' names: pixel_values (patches, C*T*p*p) float32, image_grid_thw
    (images, 3) int64, pixel_values_videos, video_grid_thw, second_per_grid_ts (videos,) float32. Absent when unused."""

    text: str = ""
    """The chat template's text before placeholders were expanded; for logs."""

    images: tuple[Any, ...] = ()
    """The PIL images (and first frames of videos) as the processor saw them; for logs."""

    def __len__(self) -> int:
        return int(self.input_ids.numel())


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled. Defaults are neutral: nothing is taken from a checkpoint's generation_config."""

    max_tokens: int
    """Most tokens a response may have, the end token included."""

    temperature: float = 1.0
    """Divides the logits. 0 means greedy."""

    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    """The response ends *with* one of these (it is part of the response)."""

    stop: tuple[str, ...] = ()
    """The response ends with the token that completes one of these strings."""

    banned_token_ids: tuple[int, ...] = ()
    """Never sampled: their logits are -inf before the softmax, in the engine and in the trainer alike."""


@dataclass(frozen=True)
class PrefixPass:
    """One prefix pass over prompts of equal length: which pass of the step a prompt belongs to.

    An engine that prefills itself takes the prompts of a pass together, so that its K/V round as the trainer's do.
    """

    index: int
    """Of the pass in its step."""

    groups: tuple[int, ...]
    """Its prompts, in the pass's order."""

    state: PrefixState | None = None
    """What the trainer already computed of it under the weights that sample; None: the engine prefills."""

    vision: VisionState | None = None
    """What the trainer's vision tower made of its pictures and videos under the weights that sample; None where there
    are none, or where the engine needs no features or computes its own."""

    def features(self, groups: Sequence[int]) -> VisionState | None:
        """`vision` of these groups' prompts, in this order."""
        return None if self.vision is None else self.vision.select([self.groups.index(g) for g in groups])

    def tensors(self) -> list[torch.Tensor]:
        """All that an engine may read of it."""
        kv = [] if self.state is None else list(self.state.leaves)
        return kv if self.vision is None else [*kv, *self.vision.leaves.values()]


@dataclass(frozen=True)
class Request:
    """One response to be generated."""

    group: int
    """Index of the prompt in the rollout batch."""

    index: int
    """Index of the response in its group, 0..G-1."""

    prompt: Prompt
    params: SamplingParams
    seed: int
    """Of this request's own random stream: results do not depend on batch mates or order."""

    prefix: PrefixPass | None = None
    """The pass of its prompt; None lets the engine choose what it prefills together."""

    @property
    def key(self) -> tuple[int, int]:
        return (self.group, self.index)


@dataclass(frozen=True)
class Rollout:
    """One response."""

    group: int
    index: int
    token_ids: torch.Tensor
    """(R,) int64 as sampled, the end token included when finish_reason is "stop". Never re-tokenised."""

    logps: torch.Tensor
    """(R,) float32, natural log-probability of each token under the distribution that sampled it
    (after temperature, bans, penalties, top-k/top-p/min-p)."""

    text: str
    """Decoded without special tokens; for rewards and logs only."""

    finish_reason: FinishReason
    weights_version: int
    """Version of the weights that sampled it."""

    def __len__(self) -> int:
        return int(self.token_ids.numel())

    @property
    def key(self) -> tuple[int, int]:
        return (self.group, self.index)


@dataclass(frozen=True)
class Group:
    """One prompt with its G responses and their rewards."""

    index: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: torch.Tensor
    """(G,) float64 weighted total; NaN where the reward is missing."""

    components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Each named reward, (G,) float64, NaN where missing."""
