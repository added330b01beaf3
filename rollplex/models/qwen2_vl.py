"""Qwen2-VL (arXiv 2409.12191): vision tower with full attention, 2x2 patch merger, M-RoPE text model.

To the split passes it is Qwen2.5-VL: parts have the same names, and positions follow the same rule except that a
video's frames count one each, whatever its rate. transformers' `get_rope_index` of each family knows, but for what
`rope_order.py` says.
"""

from __future__ import annotations

from rollplex.models.qwen2_5_vl import Qwen2_5VL


class Qwen2VL(Qwen2_5VL):
    model_type = "qwen2_vl"
