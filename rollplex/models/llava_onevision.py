"""LLaVA-OneVision (arXiv 2408.03326): a picture alone in its prompt is seen whole and cut into tiles by its shape
("anyres"), several pictures are seen whole only, and a video is its frames, pooled. A learned vector ends each row of
tiles, each picture and each video.

Shape legend: I vision tokens, H hidden size, F frames, C channels, S side of a tile in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollplex.data.records import Prompt
from rollplex.models.scattered import ScatteredVision
from rollplex.models.split_model import Kind, Part
from rollplex.models.support import Support


def _features(model: Any, kind: Kind, *inputs: Any, **more: Any) -> Tensor:
    """(I, H) of all pictures or videos of one call, one after the other."""
    return torch.cat(list(getattr(model, f"get_{kind}_features")(*inputs, **more).pooler_output))


class FeatureCalls:
    """transformers' `LlavaOnevisionModel` whose features come by a module call: its newline is a parameter of its own,
    and ZeRO-3 gathers these for module calls only."""

    @classmethod
    def adopt(cls, model: Any) -> None:
        """Make a model one of these, in place: parameters, hooks and names stay."""
        kind = type(model)
        if not isinstance(model, cls):
            model.__class__ = type(kind.__name__, (cls, kind), {"__module__": kind.__module__})

    def forward(self, *inputs: Any, features_of: Kind | None = None, **more: Any) -> Any:
        if features_of is None:
            return super().forward(*inputs, **more)  # type: ignore[misc]
        return _features(self, features_of, *inputs, **more)


class LlavaOnevision(ScatteredVision):
    model_type = "llava_onevision"
    support = Support(features_by_item=True)
    media_names: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "image": ("pixel_values", "image_sizes", "batch_num_images"), "video": ("pixel_values_videos",),
    }  # fmt: skip

    unread = ("model.vision_tower.post_layernorm.",)
    engine_names: ClassVar[Mapping[str, str]] = {"model.vision_tower.": "model.vision_tower.vision_model."}

    def part_parameters(self, name: Part) -> list[nn.Parameter]:
        own = [self.hf.model.image_newline] if name == "projector" else []
        return super().part_parameters(name) + own

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        return (self.config.image_token_id, self.config.video_token_id)

    @staticmethod
    def engine_refusal(config: Any) -> str | None:
        aspect = config.vision_aspect_ratio
        return None if aspect == "anyres_max_9" else f"vision_aspect_ratio={aspect!r} (it takes anyres_max_9)"

    @property
    def _side(self) -> int:
        """Patches along each side of a tile."""
        return self.config.vision_config.image_size // self.config.vision_config.patch_size

    def item_tokens(self, prompt: Prompt, kind: Kind) -> list[int]:
        media = prompt.media
        if kind == "video":
            frames = [len(video) for video in media.get("pixel_values_videos", ())]
            return [n * math.ceil(self._side / 2) ** 2 + 1 for n in frames]
        if "pixel_values" not in media:
            return []
        # transformers' own packing, of features that are one number wide
        tokens = self._side**2
        tiles = [torch.empty(len(p), tokens, 1) for p in self._tiles(prompt)]
        aspect = self.config.vision_aspect_ratio
        _, sizes = self.hf.model.pack_image_features(
            tiles, media["image_sizes"], image_newline=torch.empty(1), vision_aspect_ratio=aspect
        )
        return sizes.tolist()

    def _tiles(self, prompt: Prompt) -> list[Tensor]:
        """(tiles, C, S, S) of each picture, without the padding to the one with most."""
        from transformers.models.llava_onevision.modeling_llava_onevision import image_size_to_num_patches

        media, vision = prompt.media, self.config.vision_config
        alone = [n == 1 for n in media["batch_num_images"].tolist() for _ in range(n)]
        counts = [
            image_size_to_num_patches(size, self.config.image_grid_pinpoints, vision.image_size) if one else 1
            for size, one in zip(media["image_sizes"].tolist(), alone, strict=True)
        ]
        return [tiles[:n] for tiles, n in zip(media["pixel_values"], counts, strict=True)]

    def vision_embeddings(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        found = {}
        seen = [p for p in prompts if "pixel_values" in p.media]
        if seen:
            sizes, numbers = (torch.cat([p.media[name] for p in seen]) for name in ("image_sizes", "batch_num_images"))
            tiles = torch.cat([t for p in seen for t in self._tiles(p)]).to(self.device)
            found["image_embeds"] = self._features("image", tiles, sizes, batch_num_images=numbers.tolist())
        videos = [v for p in prompts if "pixel_values_videos" in p.media for v in p.media["pixel_values_videos"]]
        if videos:
            # All frames as one video: one call of the tower, and what ends that one ends each.
            frames_1FCSS = torch.cat(videos)[None].to(self.device)
            found_IH = self._features("video", frames_1FCSS)
            of_each = found_IH[:-1].split([len(v) * math.ceil(self._side / 2) ** 2 for v in videos])
            found["video_embeds"] = torch.cat([part for rows in of_each for part in (rows, found_IH[-1:])])
        return found

    def _features(self, kind: Kind, *inputs: Any, **more: Any) -> Tensor:
        """(I, H) of transformers' `get_image_features` or `get_video_features`."""
        model = self.hf.model
        by_call = isinstance(model, FeatureCalls)
        if by_call:
            return model(*inputs, features_of=kind, **more)
        return _features(model, kind, *inputs, **more)

    def call_modules_alone(self) -> None:
        super().call_modules_alone()
        FeatureCalls.adopt(self.hf.model)

    def blank_media(self, kind: Kind) -> dict[str, Tensor]:
        side, channels = self.config.vision_config.image_size, self.config.vision_config.num_channels
        if kind == "video":
            return {"pixel_values_videos": torch.zeros(1, 1, channels, side, side)}
        # Two, which are seen whole only: one alone would be cut into as many tiles as the config's smallest grid has.
        sizes = torch.tensor([[side, side]] * 2)
        tiles = torch.zeros(2, 1, channels, side, side)
        return {"pixel_values": tiles, "image_sizes": sizes, "batch_num_images": torch.tensor([2])}

    def engine_media(self, prompt: Prompt, features: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        media = super().engine_media(prompt, features)
        media.pop("batch_num_images", None)
        return media
