"""Prompts made of random pictures, and the plain reference every split pass is measured against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from rollplex.data.records import Prompt, Sample
from rollplex.models.rope_order import keep_order


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_prompt(processor: Any, text: str, *, images=(), video_frames: int = 0, fps: float = 2.0, name: str = "row"):
    """A prompt straight from transformers' processor, with no Rollplex code in between."""
    parts: list[dict[str, Any]] = [{"type": "image"} for _ in images]
    kwargs: dict[str, Any] = {}
    if video_frames:
        parts.append({"type": "video"})
        kwargs["videos"] = [[picture(56, 56, seed=i) for i in range(video_frames)]]
        metadata = {"total_num_frames": video_frames, "fps": fps, "frames_indices": list(range(video_frames))}
        kwargs["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [metadata]}
    if images:
        kwargs["images"] = list(images)
    parts.append({"type": "text", "text": text})
    chat = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    out = processor(text=[chat], return_tensors="pt", **kwargs)
    media = {
        k: torch.as_tensor(out[k])
        for k in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
        if k in out
    }
    return Prompt(
        sample=Sample(id=name),
        input_ids=out["input_ids"][0],
        mm_token_type_ids=out["mm_token_type_ids"][0].long(),
        media=media,
        text=chat,
    )


def ordered(model: Any) -> Any:
    """Transformers' model, numbering what follows a video by the family's rule; test_rope_order.py has that by hand."""
    if hasattr(model.model, "get_rope_index"):
        keep_order(model.model)
    return model


def monolithic_logps(model: Any, prompt: Prompt, response: torch.Tensor, temperature: float, banned=()) -> torch.Tensor:
    """Transformers' own forward over one full sequence, alone, unpadded: log-probs of the response tokens (R,)."""
    ordered(model)
    ids = torch.cat([prompt.input_ids, response])[None]
    types = torch.cat([prompt.mm_token_type_ids, torch.zeros_like(response)])[None]
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **prompt.media).logits[0].float()
    logits = logits[len(prompt) - 1 : -1] / temperature
    if banned:
        logits[:, list(banned)] = float("-inf")
    return torch.log_softmax(logits, dim=-1).gather(1, response[:, None]).squeeze(1)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def levels(video: Any) -> list[int]:
    """Which frames of the `clip` fixture a video has."""
    return [round(float(frame.mean()) / 10) for frame in video.frames]
