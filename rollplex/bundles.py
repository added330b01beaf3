"""How the prompts of a rollout batch are cut into mini-batches and bundles. Pure.

A bundle is what one prefix pass takes: prompts of equal token length, at most `prompts_per_pass` of them. Big prompts
go one by one; small ones (and tiny models) share a pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bundle:
    index: int
    """Position in the step; unit indices are these."""

    groups: tuple[int, ...]
    """Indices of its prompts in the rollout batch."""

    mini_batch: int
    """The mini-batch (optimizer step within the rollout batch) that it belongs to."""


def split_mini_batches(groups: int, num_mini_batches: int) -> list[range]:
    """Consecutive groups in near-equal parts; fewer parts when there are fewer groups."""
    parts = max(1, min(num_mini_batches, groups))
    edges = [round(i * groups / parts) for i in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def make_bundles(
    lengths: Sequence[int],
    *,
    prompts_per_pass: int,
    num_mini_batches: int = 1,
    numbers: Sequence[int] | None = None,
    groups: int | None = None,
) -> list[Bundle]:
    """`lengths` are the prompts' token counts. Groups of one length stay in order; bundles follow their first group.

    Of a rank's part of a batch of `groups` groups, `numbers` are its groups' places in the whole batch: mini-batches
    are parts of that, and a rank may have no bundle in one.
    """
    numbers = range(len(lengths)) if numbers is None else numbers
    bundles: list[Bundle] = []
    for mini_batch, part in enumerate(split_mini_batches(groups or len(lengths), num_mini_batches)):
        by_length: dict[int, list[int]] = {}
        for group, number in enumerate(numbers):
            if number in part:
                by_length.setdefault(lengths[group], []).append(group)
        chunks = [
            alike[start : start + prompts_per_pass]
            for alike in by_length.values()
            for start in range(0, len(alike), prompts_per_pass)
        ]
        for chunk in sorted(chunks):
            bundles.append(Bundle(index=len(bundles), groups=tuple(chunk), mini_batch=mini_batch))
    return bundles
