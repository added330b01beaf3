"""Log-probabilities of chosen tokens straight from hidden states; the logits never exist as a whole.

    z = (h W^T) / temperature, banned columns -inf;  logp = z[target] - logsumexp(z)   (float32)
    entropy = logsumexp(z) - sum_v softmax(z)_v z_v

The vocabulary is walked in chunks with an online log-sum-exp; the backward walks it again and recomputes each chunk:

    dlogp/dz_v = [v = target] - p_v          dentropy/dz_v = -p_v (log p_v + entropy)

Shape legend: M tokens, H hidden size, V vocabulary, C vocabulary chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 * 1024**2
"""Largest float32 logits block held at once."""


def chunk_width(tokens: int, vocabulary: int) -> int:
    """Vocabulary columns whose float32 logits for `tokens` tokens fit CHUNK_BYTES; at least 256."""
    return max(256, min(vocabulary, CHUNK_BYTES // (4 * max(tokens, 1))))


def _chunk(h_MH: Tensor, w_VH: Tensor, start: int, stop: int, temperature: float, banned_V: Tensor | None) -> Tensor:
    z_MC = torch.nn.functional.linear(h_MH, w_VH[start:stop])
    z_MC = z_MC if z_MC.dtype == torch.float64 else z_MC.float()
    if temperature != 1.0:
        z_MC = z_MC / temperature
    if banned_V is not None:
        z_MC = z_MC.masked_fill(banned_V[start:stop], float("-inf"))
    return z_MC


class _LinearLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_MH: Tensor, w_VH: Tensor, target_M: Tensor, temperature: float, banned_V: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        m, v = h_MH.shape[0], w_VH.shape[0]
        dtype = torch.float64 if h_MH.dtype == torch.float64 else torch.float32
        peak_M = h_MH.new_full((m,), float("-inf"), dtype=dtype)
        sum_M, dot_M, chosen_M = (h_MH.new_zeros(m, dtype=dtype) for _ in range(3))
        width = chunk_width(m, v)
        for start in range(0, v, width):
            stop = min(start + width, v)
            z_MC = _chunk(h_MH, w_VH, start, stop, temperature, banned_V)
            new_peak_M = torch.maximum(peak_M, z_MC.amax(dim=1))
            # A chunk may be banned as a whole while nothing was seen yet: exp(-inf - -inf) would be NaN.
            safe_M = torch.where(torch.isinf(new_peak_M), torch.zeros_like(new_peak_M), new_peak_M)
            shrink_M = torch.exp(peak_M - safe_M)
            e_MC = torch.exp(z_MC - safe_M.unsqueeze(1))
            sum_M = sum_M * shrink_M + e_MC.sum(dim=1)
            dot_M = dot_M * shrink_M + (e_MC * z_MC.masked_fill(e_MC == 0, 0.0)).sum(dim=1)
            peak_M = new_peak_M
            inside_M = (target_M >= start) & (target_M < stop)
            local_M = (target_M - start).clamp(0, stop - start - 1)
            chosen_M = torch.where(inside_M, z_MC.gather(1, local_M.unsqueeze(1)).squeeze(1), chosen_M)
        lse_M = peak_M + sum_M.log()
        entropy_M = lse_M - dot_M / sum_M
        ctx.save_for_backward(h_MH, w_VH, target_M, lse_M, entropy_M)
        ctx.temperature, ctx.banned_V, ctx.width = temperature, banned_V, width
        return chosen_M - lse_M, entropy_M

    @staticmethod
    def backward(ctx: Any, g_logp_M: Tensor, g_ent_M: Tensor) -> tuple[Tensor | None, ...]:
        h_MH, w_VH, target_M, lse_M, entropy_M = ctx.saved_tensors
        need_h, need_w = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        dh_MH = torch.zeros_like(h_MH) if need_h else None
        dw_VH = torch.empty_like(w_VH) if need_w else None
        with_entropy = bool(torch.any(g_ent_M != 0))
        v = w_VH.shape[0]
        for start in range(0, v, ctx.width):
            stop = min(start + ctx.width, v)
            z_MC = _chunk(h_MH, w_VH, start, stop, ctx.temperature, ctx.banned_V)
            logp_MC = z_MC - lse_M.unsqueeze(1)
            p_MC = torch.exp(logp_MC)
            dz_MC = -g_logp_M.unsqueeze(1) * p_MC
            if with_entropy:
                surprise_MC = logp_MC.masked_fill(p_MC == 0, 0.0) + entropy_M.unsqueeze(1)
                dz_MC -= g_ent_M.unsqueeze(1) * p_MC * surprise_MC
            inside_M = (target_M >= start) & (target_M < stop)
            local_M = (target_M - start).clamp(0, stop - start - 1)
            dz_MC.scatter_add_(1, local_M.unsqueeze(1), (g_logp_M * inside_M).unsqueeze(1))
            dz_MC = (dz_MC / ctx.temperature).to(h_MH.dtype)
            if dh_MH is not None:
                dh_MH += dz_MC @ w_VH[start:stop]
            if dw_VH is not None:
                dw_VH[start:stop] = dz_MC.transpose(0, 1) @ h_MH
        return dh_MH, dw_VH, None, None, None


def linear_logps(
    h_MH: Tensor, w_VH: Tensor, target_M: Tensor, *, temperature: float = 1.0, banned_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `target_M` (int64) and entropies (both (M,) float32, nats; float64 for float64 input).

    `banned_V` (V,) bool marks tokens outside the support. A banned target gives -inf: mask it before use.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} has no log-probabilities to train on; set it above 0")
    return _LinearLogps.apply(h_MH, w_VH, target_M, temperature, banned_V)
