"""Positions of prompts, remembered: engine, reference and actor ask for each, and transformers counts in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from rollplex.data.records import Prompt

POSITIONS_KEPT = 16_384
"""Prompts whose positions are remembered."""

Known = dict[int, tuple[weakref.ref[Prompt], Tensor]]
"""Address of a prompt -> the prompt, if it still lives, and its positions."""


def remembered(known: Known, prompt: Prompt, compute: Callable[[Prompt], Tensor]) -> Tensor:
    """(3, P) int64 as `compute` gives them."""
    found = known.get(id(prompt))
    if found is not None and found[0]() is prompt:
        return found[1]
    if len(known) >= POSITIONS_KEPT:
        known.clear()
    positions_3P = compute(prompt)
    known[id(prompt)] = (weakref.ref(prompt), positions_3P)
    return positions_3P
