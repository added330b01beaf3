"""Reports about prompt, position and split faults (TOK, POS, SPL, LP-04), each against the sequence alone, unpadded."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, Scripted
from helpers import make_prompt, monolithic_logps, picture, relative_error
from PIL import Image
from runs import run
from test_rows_input import modes

from rollplex import Sample, VLMTask
from rollplex.data.encode import PromptEncoder
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.tiny import build_tiny

IDS = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
LENGTHS = torch.tensor([4, 3])


def group_logps(actor: Qwen2_5VL, prompt, ids=IDS, lengths=LENGTHS) -> list[torch.Tensor]:
    out = actor.suffix(actor.prefix([prompt], grad=False), ids, lengths, temperature=1.0, grad=False)
    return [row[:n] for row, n in zip(out.logps_NR, lengths.tolist(), strict=True)]


def alone(model, actor: Qwen2_5VL, prompt, ids=IDS, lengths=LENGTHS) -> list[torch.Tensor]:
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        return [
            monolithic_logps(plain, prompt, row[:n], 1.0, actor.banned_token_ids)
            for row, n in zip(ids, lengths.tolist(), strict=True)
        ]


def worst(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_tok_09_several_pictures_stay_with_their_sample(count, tiny_parity_model, tiny_processor):
    sizes = [(56, 84), (84, 56), (112, 56)][:count]
    pictures = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    actor = Qwen2_5VL(copy.deepcopy(tiny_parity_model))
    prompt = make_prompt(tiny_processor, "what?", images=pictures)
    got = group_logps(actor, prompt)
    assert worst(got, alone(tiny_parity_model, actor, prompt)) < 1e-5
    for n in range(2):  # one response at a time
        assert worst(group_logps(actor, prompt, IDS[n : n + 1], LENGTHS[n : n + 1]), got[n : n + 1]) < 1e-5
    if count > 1:
        swapped = make_prompt(tiny_processor, "what?", images=[pictures[1], pictures[0], *pictures[2:]])
        assert worst(group_logps(actor, swapped), got) > 1e-3


@pytest.mark.parametrize("g", [1, 2, 8])
def test_tok_10_the_picture_is_stored_once_for_the_group(g, tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(copy.deepcopy(tiny_parity_model))
    prompts = [make_prompt(tiny_processor, "x", images=[picture(*size)]) for size in ((56, 84), (84, 56))]
    generator = torch.Generator().manual_seed(g)
    ids = torch.randint(0, 256, (2 * g, 5), generator=generator)
    lengths = torch.randint(1, 6, (2 * g,), generator=generator)
    out = actor.suffix(actor.prefix(prompts, grad=False), ids, lengths, temperature=1.0, grad=False)
    for b, prompt in enumerate(prompts):  # two groups in one bundle
        rows = slice(b * g, (b + 1) * g)
        got = [row[:n] for row, n in zip(out.logps_NR[rows], lengths[rows].tolist(), strict=True)]
        assert worst(got, alone(tiny_parity_model, actor, prompt, ids[rows], lengths[rows])) < 1e-5


def test_tok_11_the_pixels_reach_training(tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(tiny_parity_model)
    a, b = (make_prompt(tiny_processor, "x", images=[picture(56, 56, seed)]) for seed in (1, 2))
    assert worst(group_logps(actor, a), group_logps(actor, b)) > 1e-3
    state = actor.prefix([a], grad=True)
    actor.suffix(state, IDS, LENGTHS, temperature=1.0, grad=True).logps_NR.sum().backward()
    state.backward()
    assert float(actor.hf.model.visual.patch_embed.proj.weight.grad.norm()) > 0


def test_pos_01_and_pos_04_nothing_depends_on_batch_mates(tiny_parity_model, tiny_processor):
    """Prompts are never padded, whatever side a processor pads on: a batch mate of 400 tokens goes through a pass of its
    own."""
    right = copy.deepcopy(tiny_processor)
    right.tokenizer.padding_side = "right"
    row = {"mates": [{"type": "image", "image": picture(56, 56)}, {"type": "image", "image": picture(84, 84)}]}
    task = OwnMedia(row | {"text": []})
    one, other = ([PromptEncoder(p).encode(task, s) for s in task.samples("train")] for p in (tiny_processor, right))
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.mm_token_type_ids, b.mm_token_type_ids)
    actor = Qwen2_5VL(copy.deepcopy(tiny_parity_model))
    prompts = [
        make_prompt(tiny_processor, "q"),
        make_prompt(tiny_processor, "q" * 400),
        make_prompt(tiny_processor, "q", images=[picture(56, 56), picture(84, 84)]),
    ]
    for prompt in prompts:
        assert worst(group_logps(actor, prompt), alone(tiny_parity_model, actor, prompt)) < 1e-5


def test_pos_03_rope_state_of_another_forward_is_not_used(tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(tiny_parity_model)
    text = make_prompt(tiny_processor, "plain")
    before = group_logps(actor, text)
    actor.hf.model.rope_deltas = torch.tensor([[99], [99], [99], [99]])
    actor.prefix([make_prompt(tiny_processor, "x", images=[picture(140, 56)])], grad=False)
    assert all(torch.equal(a, b) for a, b in zip(before, group_logps(actor, text), strict=True))


def test_pos_06_what_stands_in_the_padding_is_nothing(tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(tiny_parity_model)
    prompt = make_prompt(tiny_processor, "x", images=[picture(56, 56)])
    other = IDS.clone()
    other[1, 3] = 250
    a, b = group_logps(actor, prompt), group_logps(actor, prompt, other)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class OwnMedia(VLMTask):
    """A row for each entry: the parts of its message, without its text."""

    def __init__(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        self.rows = rows

    def samples(self, split: str) -> list[Sample]:
        return [Sample(name, {"parts": parts}) for name, parts in self.rows.items()] if split == "train" else []

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*sample["parts"], {"type": "text", "text": "what?"}]}]

    def reward(self, sample: Sample, response: Any) -> float:
        return float(response.index)


def check_step(folder, root, rows: dict[str, list[dict[str, Any]]]) -> None:
    """A step of all rows: engine and trainer agree on every one, and each is learnt from."""
    module = run(folder, root, steps=1, task=OwnMedia(rows), batch_size=len(rows), num_generations=2)
    metrics = module.seen[0]["metrics"]
    assert {group.prompt.sample.id for group in module.seen[0]["groups"]} == set(rows)
    assert metrics["rows_skipped"] == 0 and metrics["mismatch_max"] < 1e-5
    assert 0 < metrics["grad_norm"] < float("inf") and math.isfinite(metrics["loss"])


def test_img_01_img_03_img_04_a_step_of_pictures_of_every_size_and_mode(parity_folder, tmp_path):
    pictures = {str(size): picture(*size) for size in ((332, 27), (27, 332), (1, 1), (56, 56))} | modes()
    pictures |= {"clear": Image.new("RGBA", (56, 56), (255, 0, 0, 0)), "grey": Image.new("LA", (56, 56), (0, 0))}
    check_step(parity_folder, tmp_path, {k: [{"type": "image", "image": v}] for k, v in pictures.items()})


def test_vid_01_vid_04_a_step_of_videos_of_every_length_and_rate(parity_folder, tmp_path):
    videos = [([picture(56, 56, i) for i in range(n)], fps) for n, fps in ((2, 0.5), (3, 1), (5, 2), (4, 0.5), (4, 4))]
    rows = {f"{len(v)} at {fps}": [{"type": "video", "video": v, "fps": fps}] for v, fps in videos}
    check_step(parity_folder, tmp_path, rows)


def test_pos_10_sampled_ids_are_trained_as_they_are(parity_folder, tmp_path):
    """Half a UTF-8 character does not survive decoding and encoding; the ids must."""
    halves = ((0xE4,), (0xBD,), (0xE4, 0xBD), (0xBD, 0xE4))
    module = run(parity_folder, tmp_path, steps=1, engine=FakeEngine(lambda r: Scripted(list(halves[r.index]))))
    for group in module.seen[0]["groups"]:
        assert [tuple(r.token_ids.tolist()) for r in group.rollouts] == list(halves)
    assert module.seen[0]["metrics"]["grad_norm"] >= 0


def test_spl_01_gradient_flows_through_the_prompt(tiny_parity_model, tiny_processor):
    """A prompt pass without its graph gives the right loss and loses most of the gradient: the test sees the loss."""
    prompt = make_prompt(tiny_processor, "x", images=[picture(56, 84)])
    reference = copy.deepcopy(tiny_parity_model)
    for row, n in zip(IDS, LENGTHS.tolist(), strict=True):
        monolithic_logps(
            reference, prompt, row[:n], 1.0, Qwen2_5VL(copy.deepcopy(reference)).banned_token_ids
        ).sum().backward()
    want = {k: p.grad for k, p in reference.named_parameters()}

    def gradients(cut: bool) -> dict[str, torch.Tensor | None]:
        actor = Qwen2_5VL(copy.deepcopy(tiny_parity_model))
        state = actor.prefix([prompt], grad=True)
        actor.suffix(state, IDS, LENGTHS, temperature=1.0, grad=True).logps_NR.sum().backward()
        if not cut:
            state.backward()
        return {k: p.grad for k, p in actor.hf.named_parameters()}

    found, without = gradients(cut=False), gradients(cut=True)
    whole = torch.cat([g.flatten() for g in want.values()]).norm()
    taught = {name for name, g in want.items() if g.norm() > 1e-6 * whole}  # of a bias on keys there is only rounding
    assert len(taught) > 30 and any(name.startswith("model.visual.") for name in taught)
    for name in want:
        if name in taught:
            assert relative_error(found[name], want[name]) < 1e-5, name
        else:
            assert name.endswith("k_proj.bias") and (found[name] - want[name]).norm() < 1e-6 * whole, name
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    assert relative_error(without[name], want[name]) > 0.1
    assert without["model.visual.patch_embed.proj.weight"] is None


def test_spl_02_and_spl_06_suffix_positions_follow_each_prompt(tiny_parity_model, tiny_processor):
    """Prefixes of other lengths are held at once, as in a step; each one's responses continue where it ends."""
    actor = Qwen2_5VL(copy.deepcopy(tiny_parity_model))
    media: list[dict[str, Any]] = [{"images": [picture(112, 56, i) for i in range(n)]} for n in range(3)]
    media.append({"video_frames": 4, "fps": 0.5})
    prompts = [make_prompt(tiny_processor, "x" * (3 + 9 * i), **more) for i, more in enumerate(media)]
    assert len({len(prompt) for prompt in prompts}) == 4
    for prompt, more in zip(prompts, media, strict=True):
        positions, first = actor.positions([prompt])
        assert positions.shape[0] == 3 and int(first) == int(positions.max()) + 1
        assert (int(first) != len(prompt)) == any(more.values()), "with a picture the position is not the token index"
    states = [actor.prefix([prompt], grad=False) for prompt in prompts]
    for prompt, state in reversed(list(zip(prompts, states, strict=True))):
        out = actor.suffix(state, IDS, LENGTHS, temperature=1.0, grad=False)
        got = [row[:n] for row, n in zip(out.logps_NR, LENGTHS.tolist(), strict=True)]
        assert worst(got, alone(tiny_parity_model, actor, prompt)) < 1e-5


def test_lp_04_bfloat16_log_probs_are_float32_on_both_sides(parity_folder, tmp_path):
    settings = dict(steps=1, dtype="bfloat16", beta=0.1, max_completion_length=16)
    module = run(parity_folder, tmp_path, **settings)
    metrics = module.seen[0]["metrics"]
    assert metrics["kl"] == 0.0 and metrics["ratio_max"] == metrics["ratio_min"] == 1.0
    assert all(r.logps.dtype == torch.float32 for g in module.seen[0]["groups"] for r in g.rollouts)
    # Engine against trainer, with weights of an ordinary scale: std 0.1 magnifies bfloat16's rounding too.
    ordinary = build_tiny(tmp_path / "ordinary", seed=1)
    # (A processor that multiplies bfloat16 itself may round both sides alike.)
    assert run(ordinary, tmp_path, **settings).seen[0]["metrics"]["mismatch_abs"] < 1e-3
