"""A rule of M-RoPE that transformers does not keep for videos.

Shape legend: B rows, T tokens, P tokens of one row that are no padding.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor


def in_order(positions_3P: Tensor, types_P: Tensor) -> Tensor:
    """Let each stretch of text, picture or video begin one past the largest position, of any axis, of what is before it
    (arXiv 2409.12191, section 2.1). types_P: the kind of each token, one value for a stretch."""
    stretches, begin = [], 0
    lengths = torch.unique_consecutive(types_P, return_counts=True)[1]
    for stretch_3N in positions_3P.split(lengths.tolist(), dim=1):
        # Rows and columns are counted from where a stretch begins.
        stretches.append(stretch_3N - stretch_3N[1].min() + begin)
        begin = int(stretches[-1].max()) + 1
    return torch.cat(stretches, dim=1)


def keep_order(model: Any) -> None:
    """Let a model of transformers number its tokens so.

    Cause: since 5.3 get_rope_index (transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py, and of qwen2_vl) goes on
    after a video at its height or width, whichever is larger, and leaves its seconds out: text after a long video
    shares positions with it, which no checkpoint has seen and neither vLLM nor transformers 4 does
    (huggingface/transformers#45381). Where nothing is wrong this changes nothing; it may be called more than once.
    """
    if "get_rope_index" in vars(model):
        return

    def get_rope_index(
        self: Any, input_ids: Tensor, mm_token_type_ids: Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        positions_3BT, deltas_B1 = type(self).get_rope_index(
            self, input_ids, mm_token_type_ids, *args, attention_mask=attention_mask, **kwargs
        )
        positions_3BT, deltas_B1 = positions_3BT.clone(), deltas_B1.clone()
        for b, types_T in enumerate(mm_token_type_ids):
            there_T = torch.ones_like(types_T, dtype=torch.bool) if attention_mask is None else attention_mask[b].bool()
            ordered_3P = in_order(positions_3BT[:, b, there_T], types_T[there_T])
            positions_3BT[:, b, there_T] = ordered_3P
            deltas_B1[b] = ordered_3P.max() + 1 - ordered_3P.shape[1]
        return positions_3BT, deltas_B1

    model.get_rope_index = MethodType(get_rope_index, model)
