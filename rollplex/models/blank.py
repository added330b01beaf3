"""What a vision tower is run on where a rank has nothing to see, but others do.

Where parameters are sharded (ZeRO-3), each module call is a collective: a rank that left its tower out would leave the
others waiting. It runs on a blank picture then, of which no row goes anywhere. The rows that are left (none) still hang
on the tower's graph, so its backward is run as well, and adds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollplex.data.records import Prompt, Sample

if TYPE_CHECKING:
    from rollplex.models.split_model import Kind, SplitModel

KINDS: tuple[Kind, ...] = ("image", "video")
NOTHING = torch.zeros(0, dtype=torch.long)


def vision_embeddings(model: SplitModel, prompts: Sequence[Prompt], media: frozenset[str] | None) -> dict[str, Tensor]:
    """As `SplitModel.vision_embeddings`, by module calls that depend on `media` alone: names of pixel tensors, those of
    the prompts among them. What only others have is there with no row: (0, W). None: nobody else has any."""
    if media is None:
        return model.vision_embeddings(prompts)
    kinds = {kind: names[0] for kind, names in model.media_names.items()}
    own = {name for p in prompts for name in p.media} & set(kinds.values())
    assert media >= own, f"the prompts have {sorted(own)}, and the ranks agreed on {sorted(media)}"
    lacking = [kind for kind in KINDS if kinds.get(kind) in media - own]
    blank = {name: tensor for kind in lacking for name, tensor in model.blank_media(kind).items()}
    seen = [*prompts, Prompt(Sample("blank"), NOTHING, NOTHING, blank)] if blank else prompts
    found = model.vision_embeddings(seen)
    # A copy of nothing: a view would keep the blank picture's rows alive.
    return found | {f"{kind}_embeds": found[f"{kind}_embeds"][:0].clone() for kind in lacking}
