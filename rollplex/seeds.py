"""The random stream of each response."""

from __future__ import annotations


def request_seed(seed: int, step: int, group: int, index: int) -> int:
    """A stream of its own for every response of a run: resume and schedule cannot change what is sampled."""
    mixed = seed
    for part in (step, group, index):
        mixed = ((mixed ^ part) * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & (2**64 - 1)
        mixed ^= mixed >> 29
    return mixed >> 1
