"""What families share that put the tower's output in the place of placeholder embeddings and count positions one by
one, under a plain text model.

Shape legend: B prompts, P prompt tokens, T tokens of one call, N rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollplex.data.records import Prompt
from rollplex.models.attention import STATE_KEYWORD
from rollplex.models.prefix import RecordPrefix
from rollplex.models.split_model import Kind, Part, SplitModel
from rollplex.models.vision import TYPE_IDS

TEXT_MODELS = ("qwen2", "qwen3", "llama")
"""Text models under such a family whose every layer is full attention over rotary positions."""


class ScatteredVision(SplitModel):
    def __init__(self, hf: Any, **options: Any) -> None:
        text = hf.config.text_config.model_type
        if text not in TEXT_MODELS:
            raise ValueError(
                f"model_type={self.model_type!r} with a text model {text!r} was not shown to split exactly; supported "
                f"text models: {', '.join(TEXT_MODELS)}"
            )
        super().__init__(hf, **options)

    def part(self, name: Part) -> list[nn.Module]:
        model = self.hf.model
        return {
            "vision_tower": [model.vision_tower],
            "projector": [model.multi_modal_projector],
            "language_model": [model.language_model, self.hf.lm_head],
        }[name]

    @property
    def language_model(self) -> nn.Module:
        return self.hf.model.language_model

    def engine_media(self, prompt: Prompt, features: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        """Features are a list: (tokens, H) of each picture or video."""
        if features is None:
            return super().engine_media(prompt)
        kinds: dict[str, Kind] = {"image_embeds": "image", "video_embeds": "video"}
        return {name: list(found.split(self.item_tokens(prompt, kinds[name]))) for name, found in features.items()}

    def compute_positions(self, prompt: Prompt) -> Tensor:
        return torch.arange(len(prompt)).expand(3, -1)

    def run_text(self, embeds_NTH: Tensor, positions_3NT: Tensor, state: Any) -> Tensor:
        out = self.language_model(
            inputs_embeds=embeds_NTH, position_ids=positions_3NT[0], use_cache=False, **{STATE_KEYWORD: state}
        )
        return out.last_hidden_state

    def prefix_hidden(
        self, prompts: Sequence[Prompt], positions: Tensor, state: RecordPrefix, features: Mapping[str, Tensor] | None
    ) -> Tensor:
        found = self.vision_embeddings(prompts) if features is None else features
        types_BP = torch.stack([p.mm_token_type_ids for p in prompts]).to(self.device)
        embeds_BPH = self.embed(torch.stack([p.input_ids for p in prompts]).to(self.device))
        for name, found_IH in found.items():
            mine_BP1 = (types_BP == TYPE_IDS[name]).unsqueeze(-1)
            embeds_BPH = embeds_BPH.masked_scatter(mine_BP1, found_IH.to(embeds_BPH))
        return self.run_text(embeds_BPH, positions, state)
