"""Opening videos: frames at an even rate, with bounded memory.

Shape legend: T frames, H height, W width.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rollplex.data.images import open_image

MAX_BYTES = 1 << 30
"""Most memory the frames of one video may take."""


@dataclass(frozen=True)
class Video:
    """Frames as the processor gets them."""

    frames: np.ndarray
    """(T, H, W, 3) uint8."""

    fps: float
    """Frames per second of `frames` (not of the file they came from)."""


def open_video(source: Any, *, fps: float | None, default_fps: float, max_frames: int) -> Video:
    """A video part of a message -> frames.

    source: an array (T, H, W, 3) uint8 or a list of pictures: these frames are used as they are, `fps` is the rate they
        were taken at (default_fps when None), and more than max_frames is an error; or a path or bytes of a video
        file: decoded at `fps` frames per second (default_fps when None).
    Raises ValueError or OSError (PyAV's errors are both) for what cannot be read.
    """
    rate = default_fps if fps is None else float(fps)
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"a video's fps must be a positive number, got {fps!r}")
    if isinstance(source, str | Path | bytes | bytearray | memoryview):
        return decode_video(source, fps=rate, max_frames=max_frames)
    frames = source if isinstance(source, np.ndarray) else _stack(source)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or 0 in frames.shape:
        raise ValueError(f"video frames must be (T, H, W, 3) uint8, got {frames.shape} {frames.dtype}")
    if len(frames) > max_frames:
        raise ValueError(f"the video has {len(frames)} frames; video_max_frames allows {max_frames}")
    return Video(frames, rate)


def decode_video(source: str | Path | bytes | bytearray | memoryview, *, fps: float, max_frames: int) -> Video:
    """Decode a file: of each interval of 1/fps seconds the first frame shown in it.

    A file with a lower rate than `fps` keeps all its frames and its own rate. When more than max_frames come together,
    every second one is dropped and the rate is halved (so between max_frames / 2 and max_frames are kept, evenly
    spaced, however long the file is). A rotation stored in the file is applied.
    """
    import av

    if isinstance(source, str | Path):
        if "://" in str(source):
            raise ValueError(f"{str(source)[:80]!r} is a URL; nothing is fetched: give a local path")
        opened: Any = str(source)
    else:
        opened = io.BytesIO(source)
    kept: list[np.ndarray] = []
    with av.open(opened, mode="r") as container:
        if not container.streams.video:
            raise ValueError("the file has no video stream")
        stream = container.streams.video[0]
        own_rate = float(stream.average_rate or stream.guessed_rate or fps)
        fps = min(fps, own_rate)
        start, due = None, 0
        for count, frame in enumerate(container.decode(stream)):
            time = count / own_rate if frame.time is None else frame.time
            start = time if start is None else start
            slot = math.floor((time - start) * fps + 1e-6)
            if slot < due:
                continue
            due = slot + 1
            if (len(kept) + 1) * frame.width * frame.height * 3 > MAX_BYTES:
                raise ValueError(
                    f"its frames of {frame.width}x{frame.height} take more than {MAX_BYTES >> 20} MiB; "
                    "lower video_max_frames"
                )
            kept.append(np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90) % 4))
            if len(kept) > max_frames:
                kept, fps = kept[::2], fps / 2
                due = math.floor((time - start) * fps + 1e-6) + 1
    if not kept:
        raise ValueError("no frame of the video could be decoded")
    return Video(np.stack(kept), fps)


def _stack(source: Any) -> np.ndarray:
    if not isinstance(source, Sequence) or not source:
        raise ValueError(f"a video must be frames, a path or bytes, not {type(source).__name__} (or it is empty)")
    frames = [_frame(item) for item in source]
    sizes = sorted({frame.shape[:2] for frame in frames})
    if len(sizes) > 1:
        raise ValueError(f"the frames of a video must have one size, got (height, width) {sizes}")
    return np.stack(frames)


def _frame(item: Any) -> np.ndarray:
    if isinstance(item, np.ndarray):
        item = Image.fromarray(item)
    return np.asarray(open_image(item))
