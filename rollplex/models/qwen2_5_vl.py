"""Qwen2.5-VL (arXiv 2502.13923): window-attention vision tower, 2x2 patch merger, M-RoPE text model.

Shape legend: B prompts, P prompt tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rollplex.data.records import Prompt
from rollplex.models.attention import STATE_KEYWORD
from rollplex.models.prefix import RecordPrefix
from rollplex.models.split_model import Kind, Part, SplitModel
from rollplex.models.support import Support


class Qwen2_5VL(SplitModel):
    model_type = "qwen2_5_vl"
    support = Support(zero3=True)

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

    def prefix_hidden_with(
        self, prompts: Sequence[Prompt], positions: Tensor, state: RecordPrefix, media: frozenset[str]
    ) -> Tensor:
        ids_BP = torch.stack([p.input_ids for p in prompts]).to(self.device)
        own = stack_media(prompts)
        assert media >= set(own) & {"pixel_values", "pixel_values_videos"}, "the prompts have media not agreed on"
        hf = self.hf.model
        embeds_BPH = self.embed(ids_BP)
        for kind, pixels, compute in (
            ("image", "pixel_values", hf.get_image_features),
            ("video", "pixel_values_videos", hf.get_video_features),
        ):
            if pixels not in media:
                continue
            patches, grid = (own[pixels], own[f"{kind}_grid_thw"]) if pixels in own else self._blank()
            found_VH = torch.cat(compute(patches.to(self.device), grid.to(self.device)).pooler_output).to(embeds_BPH)
            if pixels in own:
                masks = hf.get_placeholder_mask(ids_BP, inputs_embeds=embeds_BPH, **{f"{kind}_features": found_VH})
                embeds_BPH = embeds_BPH.masked_scatter(masks[kind == "video"], found_VH)
            else:
                embeds_BPH = embeds_BPH + 0.0 * found_VH.sum()
        return self.run_text(embeds_BPH, positions, state)

    def _blank(self) -> tuple[Tensor, Tensor]:
        """Patches and grid of the smallest black picture."""
        vision = self.config.vision_config
        side = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return torch.zeros(side * side, width), torch.tensor([[1, side, side]])


def stack_media(prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Media tensors concatenated in prompt order."""
    names = {name for p in prompts for name in p.media}
    return {name: torch.cat([p.media[name] for p in prompts if name in p.media]) for name in sorted(names)}
