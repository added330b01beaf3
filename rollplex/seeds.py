"""A run's seed, and the random stream of each response."""

from __future__ import annotations

import os


def run_seed() -> int:
    """What Lightning's `seed_everything` was last called with, in this process or the one that started it; else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def request_seed(seed: int, step: int, group: int, index: int) -> int:
    """A stream of its own for every response of a run: resume and schedule cannot change what is sampled."""
    mixed = seed
    for part in (step, group, index):
        mixed = ((mixed ^ part) * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & (2**64 - 1)
        mixed ^= mixed >> 29
    return mixed >> 1
