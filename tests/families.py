"""Prompts and tiny models of every family: what the suite of test_families.py drops a new family into."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from helpers import picture

from rollplex.data.encode import PromptEncoder
from rollplex.data.records import Prompt, Sample
from rollplex.models.registry import FAMILIES, split
from rollplex.models.split_model import SplitModel
from rollplex.tasks.base import VLMTask

NAMES = list(FAMILIES)
SMALL = dict(
    hidden_size=64, heads=2, kv_heads=1, intermediate_size=96, vision_hidden=64, vision_heads=2, vision_intermediate=128
)
PARITY = dict(init_std=0.1, seed=1, layers=3, tie_word_embeddings=False, **SMALL)


def image(width: int, height: int, seed: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": picture(width, height, seed)}


def video(frames: int, fps: float) -> dict[str, Any]:
    return {"type": "video", "video": [np.asarray(picture(56, 56, i)) for i in range(frames)], "fps": fps}


ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [],
    "picture": [image(56, 84)],
    "large picture": [image(224, 224, 3)],
    "two pictures": [image(56, 84, 1), image(140, 56, 2)],
    "video": [video(6, 0.5)],
    "video and picture": [image(56, 56, 4), video(6, 2.0)],
}


class Rows(VLMTask):
    """`ROWS`, with a reward that is not the same for all responses."""

    def samples(self, split: str) -> list[Sample]:
        return [Sample(f"{split}-{name}", {"parts": parts}) for name, parts in ROWS.items()]

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*sample["parts"], {"type": "text", "text": "what?"}]}]

    def reward(self, sample: Sample, response: Any) -> float:
        return 1.0 - float(response.token_ids[0]) / 256


def encoded(processor: Any, names: Any = ROWS) -> list[Prompt]:
    encoder, task = PromptEncoder(processor), Rows()
    return [encoder.encode(task, Sample(name, {"parts": ROWS[name]})) for name in names]


def same_shape(prompt: Prompt, seed: int) -> Prompt:
    """Other pixels under the same tokens: two prompts of one bundle."""
    generator = torch.Generator().manual_seed(seed)
    media = {
        k: torch.randn(t.shape, generator=generator) if k.startswith("pixel_values") else t
        for k, t in prompt.media.items()
    }
    return Prompt(Sample(f"{prompt.sample.id} {seed}"), prompt.input_ids, prompt.mm_token_type_ids, media)


def fresh(model: Any, **options: Any) -> SplitModel:
    return split(copy.deepcopy(model), **options)
