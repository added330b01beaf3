"""The split step equals transformers' own forward over G full sequences, each alone and unpadded."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import make_prompt, monolithic_logps, picture, relative_error

from rollplex.data.records import Prompt
from rollplex.models.prefix import StalePrefixError
from rollplex.models.qwen2_5_vl import Qwen2_5VL

BAR = 1e-5


def prompts_for(kind: str, processor) -> list[list[Prompt]]:
    """Bundles (prompts of one length each) of a kind of input."""

    def make(text: str, **kw) -> Prompt:
        return make_prompt(processor, text, **kw)

    return {
        "text": [[make("plain question")], [make("a longer plain question?")]],
        "image": [[make("what is it?", images=[picture(56, 84)])]],
        "mixed": [
            [make("no picture")],
            [make("x", images=[picture(140, 28)])],
            [make("longer", images=[picture(56, 56)])],
        ],
        "two_images": [[make("compare", images=[picture(56, 84, 1), picture(112, 56, 2)])]],
        "bundle": [[make("same", images=[picture(56, 56, i)]) for i in range(3)]],
        "bundle_shapes": [[make("same", images=[picture(56, 112, 1)]), make("same", images=[picture(112, 56, 2)])]],
        "video": [[make("moves?", video_frames=4, fps=0.5)], [make("moves?", video_frames=4, fps=4.0)]],
        "video_and_image": [[make("both", images=[picture(56, 56)], video_frames=3)]],
    }[kind]


def responses_for(groups: int, g: int, longest: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids (N, R) and lengths (N,) that include 0 (for G > 1), 1 and the limit."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (groups * g,), generator=generator)
    lengths[0] = longest
    if g > 1:
        lengths[1], lengths[2 % (groups * g)] = 0, 1
        lengths[0] = longest
    return torch.randint(0, 256, (groups * g, longest), generator=generator), lengths


def reference(model, bundles, responses, weights, temperature, banned):
    """Loss, log-probs and gradients of the monolithic pass."""
    model.zero_grad()
    all_logps = []
    for prompts, (ids_NR, lengths_N), w_NR in zip(bundles, responses, weights, strict=True):
        g = len(ids_NR) // len(prompts)
        for n, ids_R in enumerate(ids_NR):
            response = ids_R[: lengths_N[n]]
            if len(response) == 0:
                all_logps.append(torch.zeros(0))
                continue
            logps = monolithic_logps(model, prompts[n // g], response, temperature, banned)
            (logps * w_NR[n, : len(response)]).sum().backward()
            all_logps.append(logps.detach())
    return all_logps, {k: p.grad for k, p in model.named_parameters()}


def split(actor: Qwen2_5VL, bundles, responses, weights, temperature, micro=None, cut=False):
    """cut: with vision features as a third cut."""
    actor.hf.zero_grad()
    all_logps = []
    for prompts, (ids_NR, lengths_N), w_NR in zip(bundles, responses, weights, strict=True):
        vision = actor.vision(prompts, grad=True) if cut else None
        state = actor.prefix(prompts, grad=True, vision=vision)
        b, g = len(prompts), len(ids_NR) // len(prompts)
        out_logps = torch.zeros_like(w_NR)
        for start in range(0, g, micro or g):
            rows = [i * g + j for i in range(b) for j in range(start, min(start + (micro or g), g))]
            longest = max(int(lengths_N[rows].max()), 1)
            out = actor.suffix(state, ids_NR[rows, :longest], lengths_N[rows], temperature=temperature, grad=True)
            (out.logps_NR * w_NR[rows, :longest]).sum().backward()
            out_logps[rows, :longest] = out.logps_NR.detach()
        state.backward()
        all_logps += [out_logps[n, : lengths_N[n]] for n in range(len(ids_NR))]
    return all_logps, {k: p.grad for k, p in actor.hf.named_parameters()}


KINDS = ["text", "image", "mixed", "two_images", "bundle", "bundle_shapes", "video", "video_and_image"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("g", [1, 2, 8])
def test_split_equals_monolithic(kind, g, tiny_parity_model, tiny_processor):
    compare(kind, g, tiny_parity_model, tiny_processor)


@pytest.mark.parametrize("kind", ["mixed", "bundle", "video_and_image"])
@pytest.mark.parametrize(
    "options",
    [
        {"prefix_checkpointing": True},
        {"suffix_checkpointing": True},
        {"prefix_checkpointing": True, "suffix_checkpointing": True},
        {"share_kv": False},
    ],
    ids=lambda o: "+".join(o),
)
def test_split_options_equal_monolithic(kind, options, tiny_parity_model, tiny_processor):
    compare(kind, 8, tiny_parity_model, tiny_processor, micro=3, **options)


@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_split_temperature(temperature, tiny_parity_model, tiny_processor):
    compare("image", 2, tiny_parity_model, tiny_processor, temperature=temperature)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"prefix_checkpointing": True}, {"prefix_on_host": True}], ids=str)
def test_vision_cut_equals_monolithic_and_changes_no_bit(kind, options, tiny_parity_model, tiny_processor):
    compare(kind, 2, tiny_parity_model, tiny_processor, cut=True, **options)
    actor = Qwen2_5VL(copy.deepcopy(tiny_parity_model), **options)
    bundles = prompts_for(kind, tiny_processor)
    responses = [responses_for(len(b), 3, longest=5, seed=i) for i, b in enumerate(bundles)]
    ones = [torch.ones(ids.shape) for ids, _ in responses]
    (_, whole), (_, parts) = (split(actor, bundles, responses, ones, 1.0, micro=2, cut=cut) for cut in (False, True))
    for name, grad in whole.items():
        assert (grad is None and parts[name] is None) or torch.equal(grad, parts[name]), name


@pytest.mark.parametrize("frozen", [["vision_tower"], ["vision_tower", "projector"]], ids=str)
def test_vision_cut_of_frozen_parts(frozen, tiny_parity_model, tiny_processor):
    """What is not trained gets no gradient, the rest the same."""
    actor = Qwen2_5VL(tiny_parity_model)
    actor.freeze(frozen)
    bundles = prompts_for("video_and_image", tiny_processor)
    responses = [responses_for(1, 2, longest=5)]
    ones = [torch.ones(ids.shape) for ids, _ in responses]
    (_, whole), (_, parts) = (split(actor, bundles, responses, ones, 1.0, cut=cut) for cut in (False, True))
    for name, grad in whole.items():
        assert (grad is None and parts[name] is None) or torch.equal(grad, parts[name]), name
    trained = [name for name, grad in parts.items() if grad is not None]
    assert ("model.visual.merger.mlp.0.weight" in trained) == (frozen == ["vision_tower"])
    assert not any(".visual.blocks" in name for name in trained) and len(trained) > 20


def compare(kind, g, model, processor, temperature=1.0, micro=None, cut=False, **options):
    actor = Qwen2_5VL(copy.deepcopy(model), **options)
    bundles = prompts_for(kind, processor)
    responses = [responses_for(len(b), g, longest=9, seed=i) for i, b in enumerate(bundles)]
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(ids.shape, generator=generator) for ids, _ in responses]
    expected, expected_grads = reference(model, bundles, responses, weights, temperature, actor.banned_token_ids)
    logps, grads = split(actor, bundles, responses, weights, temperature, micro, cut)
    for a, b in zip(logps, expected, strict=True):
        assert (a - b).abs().max() <= BAR if len(b) else len(a) == 0
    checked = 0
    for name, want in expected_grads.items():
        if want is None:  # the vision tower without any picture
            assert grads[name] is None, name
            continue
        if want.abs().max() < 1e-6:  # a true zero (an attention bias on keys cancels in the softmax)
            assert grads[name].abs().max() < 1e-5, name
            continue
        assert relative_error(grads[name], want) <= BAR, (name, relative_error(grads[name], want))
        checked += 1
    assert checked > 20


def test_prefix_keeps_nothing_after_backward(tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(tiny_parity_model)
    state = actor.prefix(prompts_for("image", tiny_processor)[0], grad=True)
    assert state.nbytes == sum(t.numel() * 4 for t in state.live)
    ids, lengths = responses_for(1, 2, 4)
    actor.suffix(state, ids, lengths, temperature=1.0, grad=True).logps_NR.sum().backward()
    state.backward()
    assert state.live == [] and state.leaves == []


def test_stale_prefix_is_refused(tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(tiny_parity_model)
    state = actor.prefix(prompts_for("text", tiny_processor)[0], grad=False)
    actor.version += 1
    ids, lengths = responses_for(1, 2, 4)
    with pytest.raises(StalePrefixError, match="version 0"):
        actor.suffix(state, ids, lengths, temperature=1.0, grad=False)


def test_tok_05b_banned_tokens_in_a_response_leave_a_finite_loss(tiny_parity_model, tiny_processor):
    """Image placeholders that come in a response anyway bind no features and take no part in the loss."""
    actor = Qwen2_5VL(tiny_parity_model)
    state = actor.prefix(prompts_for("image", tiny_processor)[0], grad=True)
    ids = torch.tensor([[10, actor.config.image_token_id, 30], [10, 20, 30]])
    out = actor.suffix(state, ids, torch.tensor([3, 3]), temperature=1.0, grad=True)
    assert out.mask_NR.tolist() == [[True, False, True], [True, True, True]]
    out.logps_NR.sum().backward()
    state.backward()
    assert all(torch.isfinite(p.grad).all() for p in actor.hf.parameters() if p.grad is not None)
    assert torch.isfinite(out.logps_NR).all()


def test_lp_06_dropout_is_refused(tiny_parity_model):
    tiny_parity_model.config.text_config.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        Qwen2_5VL(tiny_parity_model)


def test_alias_shares_every_weight_and_no_state(tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(tiny_parity_model, prefix_checkpointing=True)
    twin = actor.alias()
    assert twin.shares_storage_with(actor)
    assert not any(p.requires_grad for p in twin.hf.parameters())
    assert actor.hf.training and not twin.hf.training
    prompts = prompts_for("image", tiny_processor)[0]
    with torch.no_grad():
        for p in actor.hf.parameters():
            p.mul_(1.1)
    a, b = actor.prefix(prompts, grad=False), twin.prefix(prompts, grad=False)
    assert torch.equal(a.last_hidden_BH, b.last_hidden_BH)
    next(iter(actor.hf.parameters())).data = next(iter(actor.hf.parameters())).data.clone()
    assert not twin.shares_storage_with(actor)
    twin.bind(actor)
    assert twin.shares_storage_with(actor)
