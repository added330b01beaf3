"""M-RoPE positions by the rule of Qwen2-VL's paper, written out here: what follows a video begins past its last second."""

from __future__ import annotations

import copy
from itertools import groupby

import pytest
import torch
from families import NAMES, PARITY, encoded, fresh
from helpers import make_prompt, monolithic_logps, picture

from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.rope_order import in_order, keep_order
from rollplex.models.tiny import build_tiny_in_memory


def by_hand(config, prompt) -> torch.Tensor:
    """(3, P)."""
    vision = config.vision_config
    rate = getattr(vision, "tokens_per_second", None)
    grids = {kind: iter(prompt.media.get(f"{name}_grid_thw", ())) for kind, name in ((1, "image"), (2, "video"))}
    seconds = iter(prompt.media.get("second_per_grid_ts", ()))
    parts, begin = [], 0
    for kind, stretch in groupby(prompt.mm_token_type_ids.tolist()):
        if kind == 0:
            part = torch.arange(len(list(stretch))).expand(3, -1)
        else:
            t, h, w = next(grids[kind]).tolist()
            h, w = h // vision.spatial_merge_size, w // vision.spatial_merge_size
            step = rate * float(next(seconds)) if kind == 2 and rate else 1.0
            times = (torch.arange(t) * step).long()
            axes = torch.meshgrid(times, torch.arange(h), torch.arange(w), indexing="ij")
            part = torch.stack(axes).reshape(3, -1)
        parts.append(part + begin)
        begin = int(parts[-1].max()) + 1
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("fps", [0.3, 2.0, 8.0])
@pytest.mark.parametrize("frames", [2, 40])
def test_vid_04_text_after_a_video_begins_past_its_last_second(frames, fps, tiny_parity_model, tiny_processor):
    pictures = [picture(56, 56, 7)]
    prompt = make_prompt(tiny_processor, "?", images=pictures, video_frames=frames, fps=fps)
    actor = Qwen2_5VL(copy.deepcopy(tiny_parity_model))
    positions_31P, first = actor.positions([prompt])
    expected_3P = by_hand(actor.config, prompt)
    assert torch.equal(positions_31P[:, 0], expected_3P) and int(first) == int(expected_3P[0, -1]) + 1
    again = make_prompt(tiny_processor, "?", images=pictures, video_frames=frames, fps=fps)  # not remembered
    assert torch.equal(actor.alias().positions([again])[0], positions_31P), "an engine's, or a reference's"
    # And transformers' own pass, which numbers the response too.
    ids = torch.randint(0, 256, (1, 5), generator=torch.Generator().manual_seed(0))
    prefix = actor.prefix([prompt], grad=False)
    mine = actor.suffix(prefix, ids, torch.tensor([5]), temperature=1.0, grad=False).logps_NR[0]
    with torch.no_grad():
        theirs = monolithic_logps(copy.deepcopy(actor.hf), prompt, ids[0], 1.0, actor.banned_token_ids)
    assert (mine - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("family", [name for name in NAMES if name.startswith("qwen")])
def test_every_prompt_of_a_family_is_numbered_in_order(family):
    model, processor = build_tiny_in_memory(family=family, **PARITY)
    actor = fresh(model)
    for prompt in encoded(processor):
        positions_3P = actor.positions([prompt])[0][:, 0]
        assert torch.equal(in_order(positions_3P, prompt.mm_token_type_ids), positions_3P)
        if family != "qwen3_vl":  # whose frames are apart in the prompt
            assert torch.equal(positions_3P, by_hand(actor.config, prompt))


def test_padding_keeps_its_positions_and_a_second_call_changes_nothing(tiny_parity_model, tiny_processor):
    model = copy.deepcopy(tiny_parity_model).model
    prompt = make_prompt(tiny_processor, "?", video_frames=8, fps=0.3)
    ids, types = prompt.input_ids, prompt.mm_token_type_ids

    def padded(row: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(row, (3, 0))[None]

    keep_order(model)
    method = model.get_rope_index
    keep_order(model)
    assert model.get_rope_index == method
    grids = {k: prompt.media[k] for k in ("video_grid_thw", "second_per_grid_ts")}
    alone, delta = model.get_rope_index(ids[None], mm_token_type_ids=types[None], **grids)
    mask = padded(torch.ones_like(ids))
    behind, also = model.get_rope_index(padded(ids), mm_token_type_ids=padded(types), attention_mask=mask, **grids)
    assert torch.equal(behind[:, 0, 3:], alone[:, 0]) and torch.equal(delta, also)
