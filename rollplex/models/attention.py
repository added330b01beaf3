"""Attention over a prompt's shared K/V, without G copies of it.

A suffix row attends to two key sets: its group's prompt (no mask) and its own earlier tokens (causal). Each part is
one flash attention that also returns its log-sum-exp; the two are merged by

    lse = logaddexp(lse_prefix, lse_own),   out = sum_part exp(lse_part - lse) * out_part

and the backward of each part is the flash backward fed the *merged* out and lse, because softmax weights under the
merged normaliser are exp(score - lse). (The identity behind FlashAttention's split-K, arXiv 2205.14135; here used to
share the prompt: all rows of a group and all query heads of a K/V head are folded into one query axis.)

Transformers finds the function under `ATTENTION_NAME`; what it does in a pass is decided by the state object that the
pass hands down as a forward keyword (`AttentionState`). Without a state it is plain scaled-dot-product attention.

Shape legend: B groups, G responses per group, N = B*G rows, h query heads, k key/value heads, r = h/k,
P prompt tokens, T own tokens, d head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION_NAME = "rollplex_shared_prefix"
STATE_KEYWORD = "rollplex_state"

_aten = torch.ops.aten


class AttentionState(Protocol):
    """What a pass does in each layer's attention."""

    def attend(self, layer: int, q_NhTd: Tensor, k_NkTd: Tensor, v_NkTd: Tensor, scale: float) -> Tensor:
        """Returns (N, T, h, d)."""


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' attention signature; dispatches to the pass's state."""
    state: AttentionState | None = kwargs.pop(STATE_KEYWORD, None)
    if state is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return out, None
    scale = kwargs["scaling"]
    return state.attend(module.layer_idx, query, key, value, scale), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION_NAME, attention_forward)


# ---- one part: flash attention with its log-sum-exp -----------------------------------------------------------------


def _kernel(q: Tensor) -> str:
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256:
        return "cuda"
    return "math"


def part_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Attention of q (N, h, T, d) to k, v (N, h, S, d): out, lse (N, h, T) float32 (float64 for float64), extras."""
    kernel = _kernel(q)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse, ()
    if kernel == "cuda":
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return out, lse, (cum_q, cum_k, max_q, max_k, seed, offset)
    scores = _scores(q, k, causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype) @ v, lse, ()


def part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extras: tuple[Any, ...], causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of one part w.r.t. q, k, v, given the merged out and lse."""
    kernel = _kernel(q)
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    if kernel == "cuda":
        cum_q, cum_k, max_q, max_k, seed, offset = extras
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset, scale=scale
        )
    p = torch.exp(_scores(q, k, causal, scale) - lse.unsqueeze(-1))
    g, o = grad.float(), out.float()
    dv = p.transpose(-1, -2) @ g
    ds = p * (g @ v.float().transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * scale
    return (ds @ k.float()).to(q.dtype), (ds.transpose(-1, -2) @ q.float()).to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if causal:
        keep = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores


def merge_parts(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two parts' (out, lse) over the same queries; lse shapes are out's without the last axis."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse).unsqueeze(-1)
    weight_b = torch.exp(lse_b - lse).unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse


# ---- folding rows and query heads of a group into one query axis -----------------------------------------------------


def fold(x_NhTd: Tensor, groups: int, kv_heads: int) -> Tensor:
    """(N, h, T, d) -> (B, k, G*r*T, d)."""
    n, h, t, d = x_NhTd.shape
    x = x_NhTd.reshape(groups, n // groups, kv_heads, h // kv_heads, t, d)
    return x.transpose(1, 2).reshape(groups, kv_heads, (n // groups) * (h // kv_heads) * t, d)


def unfold(x_BkFd: Tensor, rows: int, heads: int, tokens: int) -> Tensor:
    """(B, k, G*r*T, ...) -> (N, h, T, ...), the inverse of `fold` (works for lse too)."""
    b, k = x_BkFd.shape[:2]
    tail = x_BkFd.shape[3:]
    x = x_BkFd.reshape(b, k, rows // b, heads // k, tokens, *tail)
    return x.transpose(1, 2).reshape(rows, heads, tokens, *tail)


def repeat_heads(x_NkTd: Tensor, repeats: int) -> Tensor:
    """(N, k, T, d) -> (N, k*r, T, d), each head repeated r times in place."""
    if repeats == 1:
        return x_NkTd
    n, k, t, d = x_NkTd.shape
    return x_NkTd.unsqueeze(2).expand(n, k, repeats, t, d).reshape(n, k * repeats, t, d)


class SharedPrefixAttention(torch.autograd.Function):
    """Exact attention of N suffix rows to [their group's prompt | their own causal tokens]."""

    @staticmethod
    def forward(
        ctx: Any, q_NhTd: Tensor, k_NkTd: Tensor, v_NkTd: Tensor, pk_BkPd: Tensor, pv_BkPd: Tensor, scale: float
    ) -> Tensor:
        n, h, t, _ = q_NhTd.shape
        b, kv = pk_BkPd.shape[:2]
        q_fold = fold(q_NhTd, b, kv)
        out_p, lse_p, extras_p = part_forward(q_fold, pk_BkPd, pv_BkPd, False, scale)
        k_own, v_own = repeat_heads(k_NkTd, h // kv), repeat_heads(v_NkTd, h // kv)
        out_o, lse_o, extras_o = part_forward(q_NhTd, k_own, v_own, True, scale)
        out, lse = merge_parts(unfold(out_p, n, h, t), unfold(lse_p, n, h, t), out_o, lse_o)
        ctx.save_for_backward(q_NhTd, k_NkTd, v_NkTd, pk_BkPd, pv_BkPd, out, lse)
        ctx.scale, ctx.extras = scale, (extras_p, extras_o)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, pk, pv, out, lse = ctx.saved_tensors
        n, h, t, d = q.shape
        b, kv = pk.shape[:2]
        r = h // kv
        extras_p, extras_o = ctx.extras
        grad = grad.contiguous()
        fold_lse = fold(lse.unsqueeze(-1), b, kv).squeeze(-1)
        dq_p, dpk, dpv = part_backward(
            fold(grad, b, kv), fold(q, b, kv), pk, pv, fold(out, b, kv), fold_lse, extras_p, False, ctx.scale
        )
        dq_o, dk, dv = part_backward(
            grad, q, repeat_heads(k, r), repeat_heads(v, r), out, lse, extras_o, True, ctx.scale
        )
        if r > 1:
            dk, dv = dk.reshape(n, kv, r, t, d).sum(2), dv.reshape(n, kv, r, t, d).sum(2)
        return unfold(dq_p, n, h, t) + dq_o, dk, dv, dpk, dpv, None


def expanded_prefix_attention(
    q_NhTd: Tensor, k_NkTd: Tensor, v_NkTd: Tensor, pk_BkPd: Tensor, pv_BkPd: Tensor, scale: float
) -> Tensor:
    """The plain twin: the prompt's K/V copied to each row, one masked attention."""
    n, h, t, _ = q_NhTd.shape
    b, kv, p, _ = pk_BkPd.shape
    keys = torch.cat([pk_BkPd.repeat_interleave(n // b, dim=0), k_NkTd], dim=2)
    values = torch.cat([pv_BkPd.repeat_interleave(n // b, dim=0), v_NkTd], dim=2)
    own = torch.ones(t, t, dtype=torch.bool, device=q_NhTd.device).tril()
    mask = torch.cat([own.new_ones(t, p), own], dim=1)
    return torch.nn.functional.scaled_dot_product_attention(
        q_NhTd, repeat_heads(keys, h // kv), repeat_heads(values, h // kv), attn_mask=mask, scale=scale
    )
