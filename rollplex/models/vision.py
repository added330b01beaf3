"""What a vision tower makes of a bundle's pictures and videos, and the cut between it and the prompt.

The tower's output depends on its own weights alone, neither on the prompt's text nor on who reads it: engine, actor and
reference may share one pass as long as their towers are equal. With gradients on, the *live* tensors keep the tower's
graph while the prefix pass reads detached *leaves*, as suffix passes do at the cut behind the prompt (`prefix.py`).
Backward of the prefix leaves gradients there, and `VisionState.backward` runs the tower's graph once.

Shape legend: B prompts, I vision tokens of one kind over all prompts, W width of what the tower gives for one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollplex.data.records import Prompt
from rollplex.models.prefix import StalePrefixError

TYPE_IDS = {"image_embeds": 1, "video_embeds": 2}
"""Name of the features -> what marks their tokens in mm_token_type_ids."""


def feature_tokens(prompts: Sequence[Prompt], name: str) -> tuple[int, ...]:
    """(B,) vision tokens of one kind in each prompt."""
    return tuple(int((p.mm_token_type_ids == TYPE_IDS[name]).sum()) for p in prompts)


@dataclass
class VisionState:
    """The tower's output for one bundle under one version of its weights."""

    live: dict[str, Tensor]
    """image_embeds and video_embeds, those there are: (I, W), prompt after prompt; graph attached if it was kept. A
    tower that feeds several layers of the language model has them side by side in W. I is 0 where the tower ran for
    the sake of other ranks (`models.blank`)."""

    tokens: dict[str, tuple[int, ...]]
    """Of each of `live`, how many of the I belong to each prompt."""

    version: int
    """Weights version it was computed with."""

    frozen: bool
    """Tower and projector are not trained: the features hold for every version."""

    saved_bytes: int = 0
    """Bytes that autograd saved for the tower's backward, on the model's device."""

    host_bytes: int = 0
    """Bytes of them that wait in host memory instead."""

    leaves: dict[str, Tensor] = field(default_factory=dict)
    """Detached views of `live` that prefix passes read."""

    def __post_init__(self) -> None:
        for name, tensor in self.live.items():
            rows, counted = tensor.shape[0], sum(self.tokens[name])
            assert rows == counted, f"{rows} rows of {name} for {counted} tokens"
            self.leaves[name] = tensor.detach().requires_grad_(tensor.requires_grad)

    @property
    def has_graph(self) -> bool:
        return any(t.requires_grad for t in self.live.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the features themselves (not of the graph behind them)."""
        return sum(t.numel() * t.element_size() for t in self.leaves.values())

    def holds_for(self, version: int) -> bool:
        """Whether the tower would give the same under weights of this version."""
        return self.frozen or self.version == version

    def check_version(self, version: int) -> None:
        if not self.holds_for(version):
            raise StalePrefixError(
                f"vision features of weights version {self.version} were about to be used with version {version}"
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """That these are features of these prompts, and not freed: each placeholder token gets a row."""
        wanted = {name: feature_tokens(prompts, name) for name in TYPE_IDS}
        found = {name: self.tokens[name] for name in self.leaves}
        some, needed = ({n: tokens for n, tokens in all_of.items() if any(tokens)} for all_of in (found, wanted))
        assert some == needed, f"vision features {found} (tokens of each prompt) for prompts that need {wanted}"

    def select(self, prompts: Sequence[int]) -> VisionState:
        """Without a graph, of these prompts (indices in the bundle) in this order."""
        live: dict[str, Tensor] = {}
        tokens: dict[str, tuple[int, ...]] = {}
        for name, leaf in self.leaves.items():
            counts = tuple(self.tokens[name][i] for i in prompts)
            if not sum(counts):
                continue
            if list(prompts) == list(range(len(self.tokens[name]))):
                live[name], tokens[name] = leaf.detach(), counts
            else:
                parts = leaf.detach().split(list(self.tokens[name]))
                live[name], tokens[name] = torch.cat([parts[i] for i in prompts]), counts
        return VisionState(live, tokens, self.version, self.frozen)

    def drop_graph(self) -> None:
        """Keep the features alone."""
        self.live = {name: leaf.detach() for name, leaf in self.leaves.items()}
        self.leaves = dict(self.live)
        self.saved_bytes = self.host_bytes = 0

    def backward(self) -> None:
        """Push the leaves' gradients through the tower's graph, once; then free everything."""
        reached = [name for name, leaf in self.leaves.items() if leaf.grad is not None]
        if reached:
            torch.autograd.backward([self.live[n] for n in reached], [self.leaves[n].grad for n in reached])
        self.free()

    def free(self) -> None:
        self.live, self.leaves = {}, {}
        self.saved_bytes = self.host_bytes = 0
