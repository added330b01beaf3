"""Vision placeholders of processors that cut pictures into tiles (LLaVA-OneVision, InternVL) and so give no grids.

Shape legend: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollplex.data.records import Prompt

IMAGE, VIDEO = 1, 2
"""Values of mm_token_type_ids."""


def has_grids(processor: Any) -> bool:
    """Whether a processor says how many patches each picture has (image_grid_thw), as those of the Qwen-VL families."""
    return hasattr(getattr(processor, "image_processor", None), "merge_size")


def placeholder_types(ids_P: torch.Tensor, processor: Any) -> torch.Tensor:
    """(P,) int64 as mm_token_type_ids: the placeholders alone (some processors count what stands around them)."""
    types_P = torch.zeros_like(ids_P)
    for code, kind in ((IMAGE, "image"), (VIDEO, "video")):
        token = getattr(processor, f"{kind}_token_id", None)
        if token is not None:
            types_P[ids_P == token] = code
    return types_P


def runs(mask_P: torch.Tensor) -> list[int]:
    """(P,) bool -> lengths of its stretches of True."""
    values, counts = torch.unique_consecutive(mask_P, return_counts=True)
    return [int(count) for value, count in zip(values.tolist(), counts.tolist(), strict=True) if value]


def check_tiles(prompt: Prompt, processor: Any, *, images: int, frames: Sequence[int]) -> None:
    """Raise ValueError unless the prompt has as many placeholders as its pictures and videos have features.

    images: how many there must be; frames: of each video.
    """
    media, types = prompt.media, prompt.mm_token_type_ids
    _check_sides(media, processor)
    counts = {kind: int((types == code).sum()) for kind, code in (("image", IMAGE), ("video", VIDEO))}
    if "image_sizes" in media or "pixel_values_videos" in media:
        wanted = _anyres(media, processor, images, len(frames))
        got = (counts["image"], counts["video"])
    else:  # frames are pictures of one tile
        tiles = len(media["pixel_values"]) if "pixel_values" in media else 0
        parts = len(runs(types == IMAGE))
        if parts != images + sum(frames):
            raise ValueError(f"{images} image part(s) and {sum(frames)} frame(s) gave {parts} pictures in the prompt")
        wanted, got = (tiles * int(getattr(processor, "image_seq_length", 0)), 0), (counts["image"], counts["video"])
    if got != wanted:
        raise ValueError(
            f"the prompt has {got[0]} image and {got[1]} video tokens; its media have {wanted[0]} and {wanted[1]}"
        )


def _check_sides(media: Any, processor: Any) -> None:
    """Frames of a video come from another processor than pictures, with a size of its own."""
    size = processor.image_processor.size
    wanted = (size["height"], size["width"])
    for name in ("pixel_values", "pixel_values_videos"):
        if name in media and tuple(media[name].shape[-2:]) != wanted:
            raise ValueError(
                f"{name} are {media[name].shape[-2]} x {media[name].shape[-1]} pixels, and the model's tiles "
                f"{wanted[0]} x {wanted[1]}: set the size in the checkpoint's video_preprocessor_config.json"
            )


def _anyres(media: Any, processor: Any, images: int, videos: int) -> tuple[int, int]:
    """Tokens of LLaVA-OneVision's pictures and videos, by its processor."""
    found = [len(media[name]) if name in media else 0 for name in ("image_sizes", "pixel_values_videos")]
    if found != [images, videos]:
        raise ValueError(f"{images} image and {videos} video part(s) gave pixels of {found[0]} and {found[1]}")
    one = {kind: len(getattr(processor, f"{kind}_token")) for kind in ("image", "video")}
    inputs = {
        name: tensor.tolist() if name.startswith(("image_sizes", "batch")) else tensor for name, tensor in media.items()
    }
    return (
        sum(len(processor.replace_image_token(inputs, image_idx=i)) // one["image"] for i in range(images)),
        sum(len(processor.replace_video_token(inputs, video_idx=i)) // one["video"] for i in range(videos)),
    )
