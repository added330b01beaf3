"""InternVL (arXiv 2504.10479) as transformers has it: a picture is cut into tiles of one size, each of which becomes
`image_seq_length` tokens. The frames of a video are pictures of one tile, with their number as text before them.

Shape legend: I vision tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rollplex.data.placeholders import runs
from rollplex.data.records import Prompt
from rollplex.models.scattered import ScatteredVision
from rollplex.models.split_model import Kind
from rollplex.models.support import Support


class InternVL(ScatteredVision):
    model_type = "internvl"
    support = Support(video="as pictures", features_by_item=True)
    media_names: ClassVar[Mapping[str, tuple[str, ...]]] = {"image": ("pixel_values",)}

    @property
    def banned_token_ids(self) -> tuple[int, ...]:
        return (self.config.image_token_id,)

    @staticmethod
    def engine_refusal(config: Any) -> str | None:
        layer, strategy = config.vision_feature_layer, config.vision_feature_select_strategy
        if (layer, strategy) == (-1, "default"):
            return None
        return f"vision_feature_layer={layer}, vision_feature_select_strategy={strategy!r} (it takes -1 and default)"

    def item_tokens(self, prompt: Prompt, kind: Kind) -> list[int]:
        # The end token of a picture stands between two of them, so each is one run of placeholders.
        return runs(prompt.mm_token_type_ids == 1) if kind == "image" else []

    def vision_embeddings(self, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
        tiles = [p.media["pixel_values"] for p in prompts if "pixel_values" in p.media]
        if not tiles:
            return {}
        found = self.hf.model.get_image_features(torch.cat(tiles).to(self.device)).pooler_output
        return {"image_embeds": found.flatten(0, 1)}

    def blank_media(self, kind: Kind) -> dict[str, Tensor]:
        vision = self.config.vision_config
        return {"pixel_values": torch.zeros(1, vision.num_channels, *vision.image_size)}

    def engine_media(self, prompt: Prompt, features: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
        if features is not None:
            return super().engine_media(prompt, features)
        sizes = self.item_tokens(prompt, "image")
        per_tile = self.config.image_seq_length
        return {
            "pixel_values": prompt.media["pixel_values"].cpu(),
            "image_num_patches": torch.tensor([size // per_tile for size in sizes]),
            "image_token_id": torch.tensor(self.config.image_token_id),
        }
