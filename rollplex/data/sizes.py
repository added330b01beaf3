"""The `size` a processor is called with, from the areas that the settings allow."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

Size = dict[str, int]


class Sizes:
    """Of pictures, and of videos by their frames. None leaves the processor's own."""

    def __init__(
        self, processor: Any, *, min_pixels: int | None, max_pixels: int | None, video_total_pixels: int | None
    ) -> None:
        """Settings as of `PromptEncoder`. Raises ValueError for those that the processor cannot keep."""
        self.min_pixels, self.max_pixels, self.total = min_pixels, max_pixels, video_total_pixels
        part: Any = getattr(processor, "video_processor", None)
        self._part = part
        self.image = _set(getattr(processor, "image_processor", None), "image", min_pixels, max_pixels)
        self.least_frames = int(part.temporal_patch_size) if _counts_all_frames(part) else 1
        """Of a video: where the processor's size is of a whole one, it takes no fewer than a patch holds."""
        self._frame = None if _counts_all_frames(part) else _set(part, "video", min_pixels, max_pixels)

    def video(self, frames: Sequence[int]) -> Size | None:
        """frames: of each video of a prompt; the processor takes one size for all. Raises ValueError where not even
        the smallest frames allowed fit."""
        if _counts_all_frames(self._part):
            return self._of_whole_videos(min(frames))
        if self.total is None:
            return self._frame
        low, high = _edges(self._frame or self._part.size, "video", self._part)
        if (share := self.total // max(frames)) < low:
            raise ValueError(
                f"video_total_pixels={self.total} is {share} for each of {max(frames)} frames, but a frame has at "
                f"least {low}: lower video_max_frames or min_pixels"
            )
        return {"shortest_edge": low, "longest_edge": min(high, share)}

    def _of_whole_videos(self, frames: int) -> Size | None:
        """Of a processor whose size is that of all frames together; its own is the budget where none is set."""
        if self.total is None and self.min_pixels is None and self.max_pixels is None:
            return None
        low, budget = _edges(self._part.size, "video", self._part)
        budget = budget if self.total is None else self.total
        high = budget if self.max_pixels is None else min(budget, self.max_pixels * frames)
        low = min(low, high) if self.min_pixels is None else self.min_pixels * frames
        if low > high:
            raise ValueError(
                f"{frames} frames of min_pixels={self.min_pixels} are more than the {high} pixels of a whole video: "
                "lower min_pixels or video_max_frames, or set a higher video_total_pixels"
            )
        return {"shortest_edge": low, "longest_edge": high}


def _counts_all_frames(part: Any) -> bool:
    """Whether the processor's size is of all frames together (Qwen3-VL), not of each (Qwen2-VL, Qwen2.5-VL)."""
    resize = getattr(sys.modules[type(part).__module__], "smart_resize", None)
    return resize is not None and "num_frames" in inspect.signature(resize).parameters


def _edges(size: Any, kind: str, part: Any) -> tuple[int, int]:
    size = dict(size)
    low, high = size.get("shortest_edge"), size.get("longest_edge")
    if not low or not high or not hasattr(part, "merge_size"):
        raise ValueError(
            f"min_pixels/max_pixels cannot be set for {type(part).__name__}, whose size is {size}; "
            f"set the size in the checkpoint's {kind} processor config"
        )
    return low, high


def _set(part: Any, kind: str, min_pixels: int | None, max_pixels: int | None) -> Size | None:
    """Of each picture or frame."""
    if part is None or (min_pixels is None and max_pixels is None):
        return None
    low, high = _edges(part.size, kind, part)
    low, high = min_pixels or low, max_pixels or high
    if low > high:
        raise ValueError(f"min_pixels={low} is above max_pixels={high} (for the {kind} processor): set both")
    return {"shortest_edge": low, "longest_edge": high}
