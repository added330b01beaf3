"""What a prefix pass leaves behind, and the cut through which suffix gradients come back.

The prefix pass of a bundle (B prompts of equal token length) records each layer's K/V and the last prompt token's
hidden state. With gradients on, these *live* tensors keep the autograd graph through language model, projector and
vision tower, while suffix passes read detached *leaves* of the same storage. Every suffix backward adds to the leaves'
gradients; `PrefixState.backward` then runs the prefix graph once, with the sums. The two stages together are the
gradient of the uncut pass.

Shape legend: B prompts, P prompt tokens, k key/value heads, d head size, H hidden size, N suffix rows, T own tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollplex.models.attention import SharedPrefixAttention, expanded_prefix_attention

if TYPE_CHECKING:
    from rollplex.models.vision import VisionState


class StalePrefixError(RuntimeError):
    """A prefix computed from older weights was about to be used."""


class RecordPrefix:
    """Attention state of a prefix pass: causal attention, and each layer's K/V kept."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q_BhPd: Tensor, k_BkPd: Tensor, v_BkPd: Tensor, scale: float) -> Tensor:
        # Activation checkpointing replays the layer in backward; the first recording is the one in the graph.
        if layer not in self.kv:
            self.kv[layer] = (k_BkPd, v_BkPd)
        out = torch.nn.functional.scaled_dot_product_attention(
            q_BhPd, k_BkPd, v_BkPd, is_causal=q_BhPd.shape[2] > 1, scale=scale,
            enable_gqa=q_BhPd.shape[1] != k_BkPd.shape[1],
        )  # fmt: skip
        return out.transpose(1, 2)


class ReadPrefix:
    """Attention state of a suffix pass: own tokens plus the bundle's prompt K/V."""

    def __init__(self, kv: list[tuple[Tensor, Tensor]], *, shared: bool) -> None:
        self.kv = kv
        self.shared = shared

    def attend(self, layer: int, q_NhTd: Tensor, k_NkTd: Tensor, v_NkTd: Tensor, scale: float) -> Tensor:
        pk_BkPd, pv_BkPd = self.kv[layer]
        attention = SharedPrefixAttention.apply if self.shared else expanded_prefix_attention
        return attention(q_NhTd, k_NkTd, v_NkTd, pk_BkPd, pv_BkPd, scale).transpose(1, 2)


@dataclass
class PrefixState:
    """The boundary state of one bundle under one version of one model's weights."""

    live: list[Tensor]
    """[k_0, v_0, k_1, v_1, ..., last_hidden]: k, v (B, k, P, d), last_hidden (B, H); graph attached if it was kept."""

    next_position_B: Tensor
    """(B,) int64: M-RoPE position (all three axes) of the first response token."""

    version: int
    """Weights version it was computed with."""

    saved_bytes: int = 0
    """Bytes that autograd saved for the prefix's backward, on the model's device."""

    host_bytes: int = 0
    """Bytes of them that wait in host memory instead."""

    vision: VisionState | None = None
    """Features that the pass read instead of pixels, where the tower's graph waits behind them; else None."""

    leaves: list[Tensor] = field(default_factory=list)
    """Detached views of `live` that suffix passes read; their gradients accumulate in float32 or wider."""

    _sums: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for i, tensor in enumerate(self.live):
            leaf = tensor.detach()
            if tensor.requires_grad:
                leaf.requires_grad_(True)
                if leaf.dtype in (torch.bfloat16, torch.float16):
                    leaf.register_post_accumulate_grad_hook(self._widen(i))
            self.leaves.append(leaf)

    def _widen(self, i: int) -> Callable[[Tensor], None]:
        def hook(leaf: Tensor) -> None:
            # Autograd would add micro-batches in bf16, which loses small ones.
            assert leaf.grad is not None
            grad = leaf.grad.float()
            self._sums[i] = grad if i not in self._sums else self._sums[i].add_(grad)
            leaf.grad = None

        return hook

    @property
    def batch(self) -> int:
        return self.live[-1].shape[0]

    @property
    def tokens(self) -> int:
        return self.live[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the boundary tensors themselves (not of the graph behind them)."""
        return sum(t.numel() * t.element_size() for t in self.leaves)

    def kv(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.leaves[0:-1:2], self.leaves[1:-1:2], strict=True))

    @property
    def last_hidden_BH(self) -> Tensor:
        return self.leaves[-1]

    def check_version(self, version: int) -> None:
        if self.version != version:
            raise StalePrefixError(
                f"a prefix of weights version {self.version} was about to be used with weights version {version}"
            )

    def backward(self) -> None:
        """Second stage: push the accumulated boundary gradients through the prefix graph, once, and what arrives at the
        vision features through the tower's; then free both."""
        tensors, grads = [], []
        for i, (tensor, leaf) in enumerate(zip(self.live, self.leaves, strict=True)):
            grad = self._sums.pop(i, None) if i in self._sums else leaf.grad
            if tensor.requires_grad and grad is not None:
                tensors.append(tensor)
                grads.append(grad.to(tensor.dtype))
        if tensors:
            torch.autograd.backward(tensors, grads)
        if self.vision is not None:
            self.vision.backward()
        self.free()

    def free(self) -> None:
        self.live = []
        self.leaves = []
        self.vision = None
        self._sums.clear()
