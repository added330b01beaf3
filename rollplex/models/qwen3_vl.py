"""Qwen3-VL: the tower's early layers reach the language model's early layers directly (DeepStack, arXiv 2406.04334),
interleaved M-RoPE, and the time of each video frame as text between the frames.

What the tower gives for one token is W = H * (1 + levels) wide: what stands in the place of its embedding, then one
part for each of the first `levels` language layers, added behind that layer.

Shape legend: B prompts, P prompt tokens, I vision tokens, H hidden size, V vision tokens of the whole bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rollplex.data.records import Prompt
from rollplex.models.attention import STATE_KEYWORD
from rollplex.models.prefix import RecordPrefix
from rollplex.models.qwen2_5_vl import Qwen2_5VL, stack_media
from rollplex.models.split_model import Part
from rollplex.models.support import Support
from rollplex.models.vision import TYPE_IDS


class Qwen3VL(Qwen2_5VL):
    model_type = "qwen3_vl"
    support = Support(towerless=False)

    def part(self, name: Part) -> list[nn.Module]:
        visual = self.hf.model.visual
        return {
            "vision_tower": [visual.patch_embed, visual.pos_embed, visual.blocks],
            "projector": [visual.merger, visual.deepstack_merger_list],
            "language_model": [self.hf.model.language_model, self.hf.lm_head],
        }[name]

    def vision_embeddings(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        media = stack_media(prompts)
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if pixels in media:
                grids = media[f"{kind}_grid_thw"].to(self.device)
                out = self.hf.model.get_image_features(media[pixels].to(self.device), grids)
                levels = [out.pooler_output, *out.deepstack_features]
                found[f"{kind}_embeds"] = torch.cat([torch.cat(level) for level in levels], dim=-1)
        return found

    def prefix_hidden(
        self, prompts: Sequence[Prompt], positions: Tensor, state: RecordPrefix, features: Mapping[str, Tensor] | None
    ) -> Tensor:
        found = self.vision_embeddings(prompts) if features is None else features
        ids_BP = torch.stack([p.input_ids for p in prompts]).to(self.device)
        types_BP = torch.stack([p.mm_token_type_ids for p in prompts]).to(self.device)
        embeds_BPH = self.embed(ids_BP)
        extra = {}
        if found:
            h = embeds_BPH.shape[-1]
            seen_BP = types_BP > 0
            kinds_V = types_BP[seen_BP]
            (width,) = {t.shape[-1] for t in found.values()}
            all_VW = embeds_BPH.new_zeros(len(kinds_V), width)
            for name, found_IW in found.items():
                mine_V1 = (kinds_V == TYPE_IDS[name]).unsqueeze(-1)
                all_VW = all_VW.masked_scatter(mine_V1, found_IW.to(all_VW))
            embeds_BPH = embeds_BPH.masked_scatter(seen_BP.unsqueeze(-1), all_VW[:, :h])
            extra = {"visual_pos_masks": seen_BP, "deepstack_visual_embeds": list(all_VW[:, h:].split(h, dim=-1))}
        out = self.language_model(
            inputs_embeds=embeds_BPH, position_ids=positions, use_cache=False, **extra, **{STATE_KEYWORD: state}
        )
        return out.last_hidden_state
