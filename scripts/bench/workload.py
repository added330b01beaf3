"""The work that every contender gets: model folder, pictures, prompts, response lengths, reward.

Nothing here imports torch, so the parent process stays light and idle while a contender runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

CELL = 28
"""Pixels along one side of a visual token: 14 per patch, 2 x 2 patches merged."""

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": dict(
        hidden_size=512, layers=6, heads=8, kv_heads=2, intermediate_size=1408, vision_hidden=384, vision_depth=4,
        vision_heads=6, vision_intermediate=1024,
    ),
    "medium": dict(
        hidden_size=768, layers=6, heads=12, kv_heads=4, intermediate_size=2048, vision_hidden=512, vision_depth=5,
        vision_heads=8, vision_intermediate=1536,
    ),
}  # fmt: skip
"""Fields of rollplex.models.tiny.TinySettings: about 1.2, 27 and 61 million parameters."""


@dataclass(frozen=True)
class Workload:
    """One benchmark workload. All contenders get the same one."""

    model: str = "small"
    """A key of `MODELS`."""
    visual_tokens: int = 500
    """Of the one picture in each prompt."""
    G: int = 8
    """Responses per prompt."""
    B: int = 4
    """Prompts per rollout batch."""
    R: int = 64
    """Response tokens with fixed lengths."""
    lengths: Literal["fixed", "lognormal"] = "fixed"
    sigma: float = 0.9
    """Of log(length)."""
    mean: float = 64.0
    """Mean length of the lognormal distribution before it is cut at `max_length`."""
    beta: float = 0.0
    learning_rate: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r} is not one of {', '.join(MODELS)}")
        for name in ("visual_tokens", "B", "R"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.G < 2:
            raise ValueError(f"G={self.G} must be at least 2: advantages compare the responses of a prompt")
        if self.lengths == "lognormal" and not (self.sigma > 0 and self.mean >= 1):
            raise ValueError(f"sigma={self.sigma} must be above 0 and mean={self.mean} at least 1")
        grid(self.visual_tokens)

    @property
    def max_length(self) -> int:
        """Longest response there can be."""
        return self.R if self.lengths == "fixed" else math.ceil(6 * self.mean)

    @property
    def picture_size(self) -> tuple[int, int]:
        """(width, height) in pixels that gives exactly `visual_tokens`."""
        rows, columns = grid(self.visual_tokens)
        return columns * CELL, rows * CELL

    def lengths_of(self, row: int) -> list[int]:
        """Response lengths of a prompt, G of them: a function of (seed, row) alone."""
        if self.lengths == "fixed":
            return [self.R] * self.G
        random = np.random.default_rng([self.seed, row, 1])
        mu = math.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(random.lognormal(mu, self.sigma, self.G)).astype(int)
        return [int(n) for n in np.clip(drawn, 1, self.max_length)]

    def rows_of(self, step: int) -> range:
        """Rows of a step's prompts: every contender's step k has the same prompts and lengths."""
        return range(step * self.B, (step + 1) * self.B)

    def tokens_of(self, step: int) -> int:
        """Response tokens of a step."""
        return sum(sum(self.lengths_of(row)) for row in self.rows_of(step))

    def prompt_text(self, row: int) -> str:
        """Of equal length for all rows."""
        return f"picture {row:06d}: what is it?"

    def picture(self, row: int) -> Any:
        """A PIL picture of noise, another one for each row."""
        from PIL import Image

        width, height = self.picture_size
        pixels = np.random.default_rng([self.seed, row, 2]).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(pixels)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def grid(visual_tokens: int) -> tuple[int, int]:
    """(rows, columns) of cells: the factors of `visual_tokens` that are nearest to a square."""
    rows = next(a for a in range(math.isqrt(visual_tokens), 0, -1) if visual_tokens % a == 0)
    columns = visual_tokens // rows
    if columns > 8 * rows:
        raise ValueError(
            f"visual_tokens={visual_tokens} would need a picture of {rows} x {columns} cells: choose a number with "
            f"two similar factors, e.g. {math.isqrt(visual_tokens) ** 2 or 1}"
        )
    if not 4 <= visual_tokens <= 1280:
        raise ValueError(f"visual_tokens={visual_tokens} must be from 4 to 1280: the processor resizes other pictures")
    return rows, columns


def reward_of(token_ids: Sequence[int]) -> float:
    """Cheap and deterministic, and different for almost any two responses."""
    return sum((7919 * int(i)) % 101 for i in token_ids) / (100.0 * max(1, len(token_ids)))


def model_folder(name: str, root: Path) -> Path:
    """The model's folder under `root`, written when it is not there yet. Random weights, seeded."""
    from rollplex.models.tiny import build_tiny

    return build_tiny(root / f"bench-{name}", seed=0, **MODELS[name])


WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "main": ("the headline: one picture of 500 tokens, 8 responses of 64", {}),
    "few-visual-tokens": ("little prefix to share or hide", dict(visual_tokens=64)),
    "many-visual-tokens": ("large prefix", dict(visual_tokens=1000, B=2)),
    "small-groups": ("two responses per prompt share a prefix", dict(G=2)),
    "lognormal": ("long tail: groups end at different times", dict(lengths="lognormal")),
    "reference": ("with a KL term: reference scoring beside the actor", dict(beta=0.04)),
    "tiny": ("a model bound by Python: overlap should decline", dict(model="tiny", visual_tokens=64)),
    "medium": ("a larger model", dict(model="medium", B=2)),
}
"""name -> (what it shows, fields of `Workload` that differ from the default)."""
