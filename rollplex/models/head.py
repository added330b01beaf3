"""The output head as one module call from hidden states to log-probabilities."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rollplex.models.logprobs import linear_logps


class PolicyHead(nn.Linear):
    """A head whose weight is only there during module calls (ZeRO-3 gathers it for them).

    Called with targets it gives `linear_logps` of its weight, called without it is the linear layer it was.
    """

    @classmethod
    def adopt(cls, head: nn.Module) -> None:
        """Make a model's head one of these, in place: its parameters, hooks and name stay."""
        assert type(head) in (nn.Linear, cls) and head.bias is None, f"an output head of type {type(head).__name__}"
        head.__class__ = cls

    def forward(
        self, hidden: Tensor, target_M: Tensor | None = None, *, temperature: float = 1.0, banned_V: Any = None
    ) -> Any:
        if target_M is None:
            return super().forward(hidden)
        return linear_logps(hidden, self.weight, target_M, temperature=temperature, banned_V=banned_V)
