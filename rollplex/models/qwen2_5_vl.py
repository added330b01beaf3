"""Qwen2.5-VL (arXiv 2502.13923): window-attention vision tower, 2x2 patch merger, M-RoPE text model.

Shape legend: B prompts, P prompt tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rollplex.data.records import Prompt
from rollplex.models.attention import STATE_KEYWORD
from rollplex.models.prefix import RecordPrefix
from rollplex.models.rope_order import keep_order
from rollplex.models.split_model import Kind, Part, SplitModel


class Qwen2_5VL(SplitModel):
    model_type = "qwen2_5_vl"

    def __init__(self, hf: Any, **settings: Any) -> None:
        """As of `SplitModel`."""
        super().__init__(hf, **settings)
        keep_order(hf.model)

    def twin(self, tensor_of: Callable[[nn.Parameter], Tensor], *, adapters: bool = True) -> SplitModel:
        """As of `SplitModel`."""
        twin = super().twin(tensor_of, adapters=adapters)
        keep_order(twin.hf.model)
        return twin

    @property
    def language_model(self) -> nn.Module:
        return self.hf.model.language_model

    def part(self, name: Part) -> list[nn.Module]:
        visual = self.hf.model.visual
        return {
            "vision_tower": [visual.patch_embed, visual.blocks],
            "projector": [visual.merger],
            "language_model": [self.hf.model.language_model, self.hf.lm_head],
        }[name]

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        c = self.config
        return (c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id)

    def item_tokens(self, prompt: Prompt, kind: Kind) -> list[int]:
        merge = int(self.config.vision_config.spatial_merge_size)
        grids = prompt.media.get(f"{kind}_grid_thw")
        return [] if grids is None else [t * h * w // merge**2 for t, h, w in grids.tolist()]

    def compute_positions(self, prompt: Prompt) -> Tensor:
        grids = {k: prompt.media.get(k) for k in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
        types_1P = prompt.mm_token_type_ids[None]
        positions_31P, _ = self.hf.model.get_rope_index(prompt.input_ids[None], mm_token_type_ids=types_1P, **grids)
        return positions_31P[:, 0]

    def vision_embeddings(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        media = stack_media(prompts)
        for kind, pixels, compute in (
            ("image", "pixel_values", self.hf.model.get_image_features),
            ("video", "pixel_values_videos", self.hf.model.get_video_features),
        ):
            if pixels in media:
                grids = media[f"{kind}_grid_thw"].to(self.device)
                found[f"{kind}_embeds"] = torch.cat(compute(media[pixels].to(self.device), grids).pooler_output)
        return found

    def prefix_hidden(
        self, prompts: Sequence[Prompt], positions: Tensor, state: RecordPrefix, features: Mapping[str, Tensor] | None
    ) -> Tensor:
        ids_BP = torch.stack([p.input_ids for p in prompts])
        inputs: dict[str, Any]
        if features is None:
            media = stack_media(prompts)
            inputs = {k: v.to(self.device) for k, v in media.items() if k != "second_per_grid_ts"}
        else:
            # transformers takes the tower's output as a tuple, one tensor for each picture; all in one is the same
            one: Any = BaseModelOutputWithPooling
            outputs = {name.removesuffix("_embeds"): one(pooler_output=(t,)) for name, t in features.items()}
            inputs = {"mm_encoder_outputs": outputs}
        out = self.hf.model(
            input_ids=ids_BP.to(self.device), position_ids=positions, use_cache=False, **inputs,
            **{STATE_KEYWORD: state},
        )  # fmt: skip
        return out.last_hidden_state

    def blank_media(self, kind: Kind) -> dict[str, Tensor]:
        vision = self.config.vision_config
        side = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels, grid = self.media_names[kind]
        return {pixels: torch.zeros(side * side, width), grid: torch.tensor([[1, side, side]])}


def stack_media(prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Media tensors concatenated in prompt order."""
    names = {name for p in prompts for name in p.media}
    return {name: torch.cat([p.media[name] for p in prompts if name in p.media]) for name in sorted(names)}
