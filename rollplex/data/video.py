"""Opening videos: frames at an even rate, with bounded memory and time.

Shape legend: T frames, H height, W width.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rollplex.data.images import MAX_IMAGE_PIXELS, check_pixels, open_file, open_image

MAX_BYTES = 1 << 30
"""Most memory that the frames of one video, or of all videos of a row, may take."""

MAX_SECONDS = 3600.0
"""Longest video that is decoded unless the settings say otherwise."""

MAX_RATE = 240
"""Frames per second of the longest video allowed: what a file may make a decoder do is bounded by their product."""

TICK = 1e-3
"""Seconds to which containers round the times of frames, at the coarsest (Matroska, WebM, FLV)."""

CONTAINERS = "mov,mp4,matroska,webm,avi,gif,mpegts,mpeg,ogg,flv,asf,ivf"
"""What is opened. FFmpeg knows playlists too, whose text makes it read other files and addresses."""


@dataclass(frozen=True)
class Video:
    """Frames as the processor gets them."""

    frames: np.ndarray
    """(T, H, W, 3) uint8."""

    fps: float
    """Frames per second of `frames` (not of the file they came from)."""


def open_video(
    source: Any, *, fps: float | None, default_fps: float, max_frames: int, min_frames: int = 1,
    max_seconds: float = MAX_SECONDS, max_pixels: int = MAX_IMAGE_PIXELS, max_bytes: int = MAX_BYTES,
) -> Video:  # fmt: skip
    """A video part of a message -> frames.

    source: an array (T, H, W, 3) uint8 or a list of pictures: these frames are used as they are, `fps` is the rate they
        were taken at (default_fps when None), and more than max_frames is an error; or a path or bytes of a video
        file: decoded at `fps` frames per second (default_fps when None), see `decode_video`.
    max_pixels: of one frame as it is stored. max_bytes: of all frames kept.
    Raises ValueError or OSError (PyAV's errors are both) for what cannot be read.
    """
    rate = default_fps if fps is None else float(fps)
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"a video's fps must be a positive number, got {fps!r}")
    if isinstance(source, str | Path | bytes | bytearray | memoryview):
        return decode_video(
            source, fps=rate, max_frames=max_frames, min_frames=min_frames, max_seconds=max_seconds,
            max_pixels=max_pixels, max_bytes=max_bytes,
        )  # fmt: skip
    if isinstance(source, Sequence | np.ndarray) and len(source) > max_frames:
        raise ValueError(f"the video has {len(source)} frames; video_max_frames allows {max_frames}")
    frames = source if isinstance(source, np.ndarray) else _stack(source, max_pixels, max_bytes)
    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or 0 in frames.shape:
        raise ValueError(f"video frames must be (T, H, W, 3) uint8, got {frames.shape} {frames.dtype}")
    check_pixels(frames.shape[2], frames.shape[1], max_pixels)
    _check_bytes(frames.shape[2], frames.shape[1], len(frames), max_bytes)
    return Video(frames, rate)


def decode_video(
    source: str | Path | bytes | bytearray | memoryview, *, fps: float, max_frames: int, min_frames: int = 1,
    max_seconds: float = MAX_SECONDS, max_pixels: int = MAX_IMAGE_PIXELS, max_bytes: int = MAX_BYTES,
) -> Video:  # fmt: skip
    """Decode a file: of each interval of 1/fps seconds the first frame that begins in it, else the one still shown.

    A file with a lower rate than `fps` keeps all its frames and its own rate. When more than max_frames come together,
    every second one is dropped and the rate is halved (so between max_frames / 2 and max_frames are kept, evenly
    spaced, however long the file is). When fewer than min_frames do, min_frames of the file are taken, evenly spaced
    (all of them, if it has no more). A rotation stored in the file is applied. A file longer than max_seconds is an
    error: nothing is cut off.
    """
    if not 1 <= min_frames <= max_frames:
        raise ValueError(f"video_min_frames={min_frames} must be between 1 and video_max_frames={max_frames}")
    limits = (max_seconds, max_pixels)
    kept: list[np.ndarray] = []
    start_rate, count, before = fps, 0, None
    for number, seconds, own_rate, frame in _shown(source, fps, *limits):
        fps, count = min(fps, own_rate), number + 1
        # kept[i] is of interval i. Where none began in some before this frame's, the one before is shown in them.
        held: np.ndarray | None = None
        while (interval := math.floor((seconds + TICK) * fps + 1e-6)) >= len(kept):
            _check_bytes(frame.width, frame.height, len(kept) + 1, max_bytes)
            if interval == len(kept):
                kept.append(_pixels(frame, kept, max_bytes))
            else:
                held = _pixels(before, kept, max_bytes) if held is None else held
                kept.append(held)
            if len(kept) > max_frames:
                kept, fps = kept[::2], fps / 2
        before = frame
    if len(kept) < min(min_frames, count):
        kept, wanted = [], {i * count // min_frames for i in range(min_frames)}
        for number, seconds, own_rate, frame in _shown(source, start_rate, *limits):
            fps = min(min_frames, count) / (seconds + 1 / own_rate)
            if number in wanted:
                kept.append(_pixels(frame, kept, max_bytes))
    if not kept:
        raise ValueError("no frame of the video could be decoded")
    return Video(np.stack(kept), fps)


def _shown(
    source: Any, default_rate: float, max_seconds: float, max_pixels: int
) -> Iterator[tuple[int, float, float, Any]]:
    """(number, seconds since the first, the file's frames per second, frame) of each frame, in order."""
    import av

    with ExitStack() as stack:
        file = stack.enter_context(open_file(source)) if isinstance(source, str | Path) else io.BytesIO(source)
        # A file object and these lists, so that FFmpeg opens this file, as a video, and nothing else.
        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": ""}
        container = stack.enter_context(av.open(file, mode="r", container_options=options))
        if not container.streams.video:
            raise ValueError("the file has no video stream")
        stream = container.streams.video[0]
        check_pixels(stream.codec_context.width or 0, stream.codec_context.height or 0, max_pixels)
        if container.duration is not None and container.duration / av.time_base > max_seconds:
            raise ValueError(_too_long(container.duration / av.time_base, max_seconds))
        # The average is another where some frames are shown for long, and of a few frames always a bit higher.
        own_rate = float(stream.guessed_rate or stream.average_rate or default_rate)
        start = None
        for number, frame in enumerate(container.decode(stream)):
            time = number / own_rate if frame.time is None else frame.time
            start = time if start is None else start
            if time - start > max_seconds or number > max_seconds * MAX_RATE:
                raise ValueError(_too_long(time - start, max_seconds))
            check_pixels(frame.width, frame.height, max_pixels)
            yield number, max(0.0, time - start), own_rate, frame


def _too_long(seconds: float, most: float) -> str:
    return f"the video has {seconds:.0f} s or more; video_max_seconds allows {most:g}, of {MAX_RATE} frames"


def _pixels(frame: Any, kept: Sequence[np.ndarray], max_bytes: int) -> np.ndarray:
    """Of a decoded frame that is to follow those kept, upright."""
    _check_bytes(frame.width, frame.height, len(kept) + 1, max_bytes)
    pixels = np.rot90(frame.to_ndarray(format="rgb24"), k=round(frame.rotation / 90) % 4)
    if kept and kept[0].shape != pixels.shape:
        raise ValueError(f"the frames change their size, from {kept[0].shape[:2]} to {pixels.shape[:2]}")
    return pixels


def _check_bytes(width: int, height: int, count: int, max_bytes: int) -> None:
    if count * width * height * 3 > max_bytes:
        raise ValueError(f"its frames of {width}x{height} take more than {max_bytes >> 20} MiB; lower video_max_frames")


def _stack(source: Any, max_pixels: int, max_bytes: int) -> np.ndarray:
    if not isinstance(source, Sequence) or not source:
        raise ValueError(f"a video must be frames, a path or bytes, not {type(source).__name__} (or it is empty)")
    frames: list[np.ndarray] = []
    for item in source:
        picture = open_image(Image.fromarray(item) if isinstance(item, np.ndarray) else item, max_pixels=max_pixels)
        _check_bytes(picture.width, picture.height, len(frames) + 1, max_bytes)
        frames.append(np.asarray(picture))
    sizes = sorted({frame.shape[:2] for frame in frames})
    if len(sizes) > 1:
        raise ValueError(f"the frames of a video must have one size, got (height, width) {sizes}")
    return np.stack(frames)
