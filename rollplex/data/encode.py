"""From a row to a `Prompt`: the processor runs once, and trainer and engine use what it gave.

Shape legend: P prompt tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image

from rollplex.data.images import MAX_IMAGE_PIXELS, open_image
from rollplex.data.placeholders import IMAGE, VIDEO, check_tiles, has_grids, placeholder_types, runs
from rollplex.data.records import Prompt, Sample
from rollplex.data.sizes import Sizes
from rollplex.data.video import MAX_BYTES, MAX_SECONDS, Video, open_video
from rollplex.tasks.base import VLMTask

PICTURES_OF_A_ROW = 4
"""All pictures of a row together may hold this many times `max_image_pixels`."""

MEDIA_OF_A_ROW = 4096
"""Most pictures and videos of a row, where max_prompt_length sets no lower bound (each needs a token)."""

LONGEST_REASON = 500
"""Letters kept of a reason: a broken row may be quoted in it, and a row can be of any size."""

_BREAK = "\u200b"
_MEDIA = (
    "pixel_values", "image_grid_thw", "image_sizes", "batch_num_images",
    "pixel_values_videos", "video_grid_thw", "second_per_grid_ts",
)  # fmt: skip


class BadRow(ValueError):
    """A row that cannot become a prompt."""

    def __init__(self, row_id: str, reason: str, place: str = "") -> None:
        """place: where people find it, such as "line 12"; an id counts from 0."""
        reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."
        super().__init__(row_id, reason, place)
        self.row_id = row_id
        self.reason = reason
        self.place = place

    def __str__(self) -> str:
        return f"row {self.row_id!r}{f' ({self.place})' if self.place else ''}: {self.reason}"


def _checked_text(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"text (and a role) must be a string, not {type(text).__name__}")
    return text


class PromptEncoder:
    """Turns samples into prompts with one Hugging Face processor.

    Text stays text: whatever a row's text holds, only image and video *parts* become placeholders. A literal special
    token in a row's text (`<|image_pad|>`, `<|im_end|>`, for some families `<image>`) gets a zero-width space after
    its first character, so the tokenizer reads it as ordinary text and it cannot open a picture or end the turn.
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_prompt_length: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        video_fps: float = 2.0,
        video_min_frames: int = 1,
        video_max_frames: int = 64,
        video_max_seconds: float = MAX_SECONDS,
        video_total_pixels: int | None = None,
    ) -> None:
        """Settings.

        processor: with a chat template (what AutoProcessor gives).
        max_prompt_length: most tokens of a prompt, expanded vision tokens included; a longer one is a `BadRow`. Nothing
            is ever cut.
        min_pixels, max_pixels: smallest and largest area (pixels) of a picture or a video frame after the processor's
            resize; None keeps the processor's own. The engine gets the same pixels, so this is the only place.
        max_image_pixels: most pixels of a picture or a frame as it is stored, before any resize; all pictures of a row
            together may have four times as many. More is a `BadRow`, found before anything is decoded.
        video_fps: rate at which video files are decoded, and assumed of frames that come without `fps`.
        video_min_frames, video_max_frames: fewest and most frames taken of a video (see `decode_video`).
        video_max_seconds: a longer video file is a `BadRow`.
        video_total_pixels: most pixels of a video's frames together after the resize: with more frames, each gets
            smaller. A video whose frames would be smaller than the smallest allowed is a `BadRow`.
        """
        if getattr(processor, "chat_template", None) is None:
            raise ValueError(f"{type(processor).__name__} has no chat template: set processor.chat_template")
        for name, value in (
            ("max_prompt_length", max_prompt_length), ("max_image_pixels", max_image_pixels),
            ("video_max_frames", video_max_frames), ("video_total_pixels", video_total_pixels),
        ):  # fmt: skip
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name, rate in (("video_fps", video_fps), ("video_max_seconds", video_max_seconds)):
            if not rate > 0:
                raise ValueError(f"{name}={rate} must be positive")
        if not 1 <= video_min_frames <= video_max_frames:
            raise ValueError(f"video_min_frames={video_min_frames} must be in 1..video_max_frames={video_max_frames}")
        self.processor = processor
        self.max_prompt_length = max_prompt_length
        self.context_bound = False
        """Whether max_prompt_length is what the model's context leaves, and nothing that was set."""
        self.max_image_pixels = max_image_pixels
        self.video_fps = video_fps
        self.video_limits: dict[str, Any] = {
            "max_frames": video_max_frames, "min_frames": video_min_frames, "max_seconds": video_max_seconds,
            "max_pixels": max_image_pixels,
        }  # fmt: skip
        self.merge_size = int(getattr(getattr(processor, "image_processor", None), "merge_size", 1))
        self.sizes = Sizes(
            processor, min_pixels=min_pixels, max_pixels=max_pixels, video_total_pixels=video_total_pixels
        )
        self._special = _special_pattern(processor)
        self._longest_text = _longest_text(processor, max_prompt_length)
        self._most_media = max_prompt_length or MEDIA_OF_A_ROW

    def encode(self, task: VLMTask, sample: Sample) -> Prompt:
        """The prompt of one row, which is not touched. Raises `BadRow`, naming the row, for anything wrong with it."""
        try:
            messages, images, videos = self._read(task.messages(sample))
            return self._finish(sample, messages, images, videos)
        except (BadRow, MemoryError):
            raise
        except Exception as error:
            # Decoders raise nearly everything (OSError, SyntaxError, struct.error, KeyError of an absent column, ...).
            reason = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
            raise BadRow(sample.id, reason) from error

    def _read(self, messages: Any) -> tuple[list[dict[str, Any]], list[Image.Image], list[Video]]:
        """Messages with text made safe and media taken out, in order. The given messages stay as they are."""
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages() must return a list with at least one message")
        images: list[Image.Image] = []
        videos: list[Video] = []
        left, pixels, frame_bytes = self._most_media, PICTURES_OF_A_ROW * self.max_image_pixels, MAX_BYTES
        clean = []
        for message in messages:
            content = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            parts = []
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind == "text":
                    parts.append({"type": "text", "text": _checked_text(part["text"])})
                elif kind in ("image", "video") and left == 0:
                    raise ValueError(f"more than {self._most_media} pictures and videos, and each needs a token")
                elif kind == "image":
                    images.append(open_image(part["image"], max_pixels=min(pixels, self.max_image_pixels)))
                    pixels -= images[-1].width * images[-1].height
                    left -= 1
                    parts.append({"type": "image"})
                elif kind == "video":
                    videos.append(self._open_video(part, frame_bytes))
                    frame_bytes -= videos[-1].frames.nbytes
                    left -= 1
                    parts.append({"type": "video"})
                else:
                    raise ValueError(f"unknown part {kind!r} in a message: it must be text, image or video")
            self._make_plain([part for part in parts if part["type"] == "text"])
            clean.append({"role": self._as_plain(_checked_text(message["role"])), "content": parts})
        return clean, images, videos

    def _open_video(self, part: Mapping[str, Any], max_bytes: int) -> Video:
        return open_video(
            part["video"], fps=part.get("fps"), default_fps=self.video_fps, max_bytes=max_bytes, **self.video_limits
        )

    def _as_plain(self, text: str) -> str:
        return self._special.sub(lambda match: match[0][0] + _BREAK + match[0][1:], text)

    def _make_plain(self, parts: list[dict[str, str]]) -> None:
        """Text parts of one message, in place: a template may put one right behind another, whatever was between."""
        joined = "".join(part["text"] for part in parts)
        breaks = [match.start() + 1 for match in self._special.finditer(joined)]
        start = 0
        for part in parts:
            text, end = part["text"], start + len(part["text"])
            edges = [0, *(at - start for at in breaks if start < at <= end), len(text)]
            part["text"] = self._as_plain(_BREAK.join(text[a:b] for a, b in pairwise(edges)))
            start = end

    def _finish(
        self, sample: Sample, messages: list[dict[str, Any]], images: list[Image.Image], videos: list[Video]
    ) -> Prompt:
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if self._longest_text is not None and len(text) > self._longest_text:
            raise ValueError(
                f"its {len(text)} letters cannot fit into max_prompt_length={self.max_prompt_length} tokens; "
                + ("it is what the model's context leaves" if self.context_bound else "set a higher one, or null")
            )
        output = self.processor(text=[text], return_tensors="pt", **self._arguments(text, images, videos))
        ids = output["input_ids"][0].long()
        types = output.get("mm_token_type_ids")
        if types is None:
            types = placeholder_types(ids, self.processor)[None]
        prompt = Prompt(
            sample=sample,
            input_ids=ids,
            mm_token_type_ids=types[0].long(),
            # A plain dict: prompts cross process borders (workers, ranks), and a mapping proxy cannot be pickled.
            media={name: _tensor(output[name]) for name in _MEDIA if name in output},
            text=text,
            images=(*images, *(Image.fromarray(video.frames[0]) for video in videos)),
        )
        if has_grids(self.processor):
            check_placeholders(prompt, merge_size=self.merge_size, images=len(images), videos=len(videos))
        else:
            check_tiles(prompt, self.processor, images=len(images), frames=[len(v.frames) for v in videos])
        if self.max_prompt_length is not None and len(prompt) > self.max_prompt_length:
            vision = int((prompt.mm_token_type_ids > 0).sum())
            raise BadRow(
                sample.id,
                f"the prompt needs {len(prompt)} tokens ({vision} of them vision tokens); "
                f"max_prompt_length allows {self.max_prompt_length}"
                + (
                    ", what the model's context leaves"
                    if self.context_bound
                    else f"; set at least {len(prompt)}, or null"
                ),
            )
        return prompt

    def _arguments(self, text: str, images: list[Image.Image], videos: list[Video]) -> dict[str, Any]:
        """Keyword arguments of the processor call."""
        arguments: dict[str, Any] = {}
        bos = self.processor.tokenizer.bos_token
        if bos is not None and text.startswith(bos):
            arguments["text_kwargs"] = {"add_special_tokens": False}
        if images:
            # As pictures of one text, which some processors treat otherwise than pictures of several.
            arguments["images"] = images if has_grids(self.processor) else [images]
            if self.sizes.image is not None:
                arguments["images_kwargs"] = {"size": self.sizes.image}
        if videos:
            # Which frames of each: the last one again where there are too few.
            chosen = [[*range(n)] + [n - 1] * (self.sizes.least_frames - n) for n in (len(v.frames) for v in videos)]
            # Channels first and said so: the processor guesses the layout, wrongly for frames of height 1 or 3.
            arguments["videos"] = [
                torch.from_numpy(
                    np.ascontiguousarray(v.frames if len(which) == len(v.frames) else v.frames[which])
                ).permute(0, 3, 1, 2)
                for v, which in zip(videos, chosen, strict=True)
            ]
            arguments["videos_kwargs"] = {
                "do_sample_frames": False,
                "input_data_format": "channels_first",
                "video_metadata": [
                    {"total_num_frames": len(which), "fps": v.fps, "frames_indices": which}
                    for v, which in zip(videos, chosen, strict=True)
                ],
            }
            size = self.sizes.video([len(which) for which in chosen])
            if size is not None:
                arguments["videos_kwargs"]["size"] = size
        return arguments


def check_placeholders(
    prompt: Prompt, *, merge_size: int, images: int | None = None, videos: int | None = None
) -> None:
    """Raise ValueError unless placeholders, grids and pixels of a prompt belong together.

    For each kind: one run of placeholders for each grid, of grid.prod() / merge_size^2 tokens (or, for families that
    write time stamps between frames, one run for each frame), and pixel rows for every grid cell. So a prompt with
    image tokens and no pixels is an error, and so are pixels without tokens. images and videos: how many there must
    be; None when not known.
    """
    kinds = (
        ("image", IMAGE, "pixel_values", "image_grid_thw", images),
        ("video", VIDEO, "pixel_values_videos", "video_grid_thw", videos),
    )
    for kind, code, pixels_name, grid_name, expected in kinds:
        found = runs(prompt.mm_token_type_ids == code)
        grid = prompt.media.get(grid_name)
        pixels = prompt.media.get(pixels_name)
        rows = [] if grid is None else [[int(v) for v in row] for row in grid.tolist()]
        if (found or rows) and pixels is None:
            raise ValueError(f"the prompt has {sum(found)} {kind} tokens but no {pixels_name}")
        if expected is not None and len(rows) != expected:
            raise ValueError(f"{expected} {kind} part(s) gave {len(rows)} grid(s)")
        whole = [t * h * w // merge_size**2 for t, h, w in rows]
        by_frame = [h * w // merge_size**2 for t, h, w in rows for _ in range(t)]
        if found not in (whole, by_frame):
            raise ValueError(f"{kind} placeholder runs {found} do not match {whole}, the sizes of the {kind} grids")
        cells = sum(t * h * w for t, h, w in rows)
        if pixels is not None and len(pixels) != cells:
            raise ValueError(f"{pixels_name} has {len(pixels)} rows; the grids need {cells}")


def _tensor(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(value)
    return (tensor.float() if tensor.is_floating_point() else tensor.long()).contiguous()


def _longest_text(processor: Any, max_prompt_length: int | None) -> int | None:
    """Letters that max_prompt_length tokens can hold at most: a longer text need not be tokenized to be refused.

    No token holds more letters than the longest of the vocabulary. Normalisation may join some (NFC: up to three), so
    four times as many are let through.
    """
    if max_prompt_length is None:
        return None
    return 4 * max(map(len, processor.tokenizer.get_vocab())) * max_prompt_length


def _special_pattern(processor: Any) -> re.Pattern[str]:
    """Matches every special token that text could spell out."""
    tokenizer = processor.tokenizer
    tokens = {*tokenizer.all_special_tokens, *(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)}
    tokens |= {getattr(processor, f"{kind}_token", None) or "" for kind in ("image", "video", "audio")}
    longest_first = sorted((token for token in tokens if len(token) > 1), key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
