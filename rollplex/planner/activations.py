"""Bytes that autograd saves of prefix and suffix passes, counted operation by operation.

The counts are those of transformers' Qwen-VL layers as this program runs them. The K/V of the boundary are not among
them: they are a state of their own, also where the attention saves them. A suffix's own K/V are.

Shape legend: H hidden size, F feed-forward size, h heads, d head size; w bytes of an element.
"""

from __future__ import annotations

from rollplex.planner.models import ModelShape, VisionShape


def _norm(hidden: int, w: int) -> int:
    """An RMS norm works in float32, and saves its input there; then what it scales, and what it gives, in w."""
    return hidden * (4 + 2 * w) + 4


def text_bytes(s: ModelShape, w: int, *, checkpointing: bool, suffix: bool = False) -> float:
    """Of one token: layers, the last norm (whose result is no matrix product's input), the token's id."""
    last = _norm(s.hidden, w) - s.hidden * w + 9
    if checkpointing:  # the input of each layer
        return float(s.layers * s.hidden * w + last)
    heads = s.heads * s.head_dim
    attention = 2 * heads * w + 4 * s.heads  # queries and output, log-sum-exp
    if suffix:  # own keys and values, and the merged output in the order of the next matrix product
        attention += (2 * s.kv_heads * s.head_dim + heads) * w
    mlp = 4 * s.ffn * w  # gate, its activation, up, their product
    rotation = 2 * s.head_dim * w
    return float(s.layers * (2 * _norm(s.hidden, w) + attention + mlp) + rotation + last)


def patch_bytes(v: VisionShape, w: int, *, checkpointing: bool) -> float:
    """Of one vision patch: its pixels, the tower, the projector."""
    projector = _norm(v.hidden, w) + 2 * v.hidden * w
    around = v.patch_values * w + projector
    if checkpointing:
        return float(v.depth * v.hidden * w + around)
    attention = 7 * v.hidden * w + 4 * v.heads  # fused QKV (3), rotated queries and keys, output twice
    mlp = (4 if v.gated else 2) * v.ffn * w
    rotation = 2 * v.hidden // v.heads * 4
    return float(v.depth * (2 * _norm(v.hidden, w) + attention + mlp) + rotation + around)


def tower_activations(s: ModelShape, w: int, visual_tokens: float, *, checkpointing: bool) -> float:
    """Bytes saved for the backward of the vision tower; 0 for a tower whose shape is not known."""
    if s.vision is None:
        return 0.0
    return visual_tokens * s.vision.patches_per_token * patch_bytes(s.vision, w, checkpointing=checkpointing)


def prefix_activations(
    s: ModelShape, w: int, tokens: float, visual_tokens: float, *, checkpointing: bool
) -> float:  # fmt: skip
    """Bytes saved for the backward of prefix passes over `tokens` prompt tokens, `visual_tokens` of them visual."""
    text = tokens * text_bytes(s, w, checkpointing=checkpointing)
    return text + tower_activations(s, w, visual_tokens, checkpointing=checkpointing)


def suffix_activations(s: ModelShape, w: int, rows: float, tokens: float, *, checkpointing: bool) -> float:
    """Bytes saved for the backward of one suffix pass over `rows` responses of `tokens` tokens each. The first token is
    predicted by the prefix; of every token the head keeps hidden state, id, log-sum-exp, entropy and mask."""
    own = rows * max(tokens - 1, 0) * text_bytes(s, w, checkpointing=checkpointing, suffix=True)
    return own + rows * tokens * (s.hidden * w + 17)
