"""Every family of the registry through one suite: a new one is tested as soon as it is registered and has a tiny model.

The plain twin is transformers' own forward over each full sequence alone; bars are those of test_split.py.
"""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_helpers import drain, requests_for, started, trainer_logps
from families import NAMES, PARITY, ROWS, Rows, encoded, fresh, same_shape, video
from helpers import ordered, picture, relative_error
from rich.console import Console
from runs import run as train
from runs import same_bits, weights
from test_split import BAR, reference, responses_for
from test_split import split as split_pass
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollplex.callbacks import GroupStreaming, PrefixOverlap
from rollplex.data.encode import BadRow, PromptEncoder
from rollplex.data.placeholders import has_grids
from rollplex.data.records import Request, Sample, SamplingParams
from rollplex.engines import TorchEngine
from rollplex.export import export
from rollplex.models.registry import FAMILIES, REFUSED, family_of, family_table, split
from rollplex.models.tiny import build_tiny, build_tiny_in_memory
from rollplex.planner.models import model_shape
from rollplex.verify import verify

SLOW_RUNS = {name: pytest.mark.slow for name in ("qwen2_vl", "qwen2_5_vl", "llava_onevision")}
"""Their training runs: of Qwen2.5-VL all other tests of schedules are."""


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    """(name, model, processor, prompts): the model is not to be changed."""
    model, processor = build_tiny_in_memory(family=request.param, **PARITY)
    return SimpleNamespace(name=request.param, model=model, processor=processor, prompts=encoded(processor))


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp(family.name) / "model", family=family.name, **PARITY)


def bundles_of(family) -> list:
    """One prompt alone, two of one length, with and without pictures and a video."""
    return [[p] if name == "text" else [p, same_shape(p, 7)] for name, p in zip(ROWS, family.prompts, strict=True)]


# ---- the split passes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(family):
    """Log-probs and gradients of full sequences, with what they are of."""
    bundles = bundles_of(family)
    responses = [responses_for(len(b), 3, longest=6, seed=i) for i, b in enumerate(bundles)]
    generator = torch.Generator().manual_seed(5)
    at = [torch.randn(ids.shape, generator=generator) for ids, _ in responses]
    model = copy.deepcopy(family.model)
    logps, grads = reference(model, bundles, responses, at, 0.7, fresh(family.model).banned_token_ids)
    return SimpleNamespace(bundles=bundles, responses=responses, at=at, logps=logps, grads=grads)


OPTIONS = {
    "plain": {},
    "checkpointing": {"prefix_checkpointing": True, "suffix_checkpointing": True},
    "vision cut": {"cut": True},
    "micro-batches": {"micro": 2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_split_equals_full_sequences(family, whole, options):
    """Log-probs of every token and the gradient of every parameter."""
    passes = {k: v for k, v in options.items() if k in ("cut", "micro")}
    actor = fresh(family.model, **{k: v for k, v in options.items() if k not in passes})
    logps, grads = split_pass(actor, whole.bundles, whole.responses, whole.at, 0.7, **passes)
    for a, b in zip(logps, whole.logps, strict=True):
        assert len(a) == len(b) and (len(b) == 0 or (a - b).abs().max() <= BAR)
    checked = 0
    for name, want in whole.grads.items():
        if want is None:  # not read by any forward: SigLIP's last norm
            assert grads[name] is None, name
        elif want.abs().max() < 1e-5:  # a true zero (an attention bias on keys cancels in the softmax)
            assert (grads[name] - want).abs().max() < 1e-5, name
        else:
            assert relative_error(grads[name], want) <= BAR, (name, relative_error(grads[name], want))
            checked += 1
    assert checked > 20 and checked >= len(grads) - 6


def test_checkpointing_and_vision_cut_change_no_bit(family):
    bundles = bundles_of(family)
    responses = [responses_for(len(b), 2, longest=4, seed=i) for i, b in enumerate(bundles)]
    ones = [torch.ones(ids.shape) for ids, _ in responses]
    _, plain = split_pass(fresh(family.model), bundles, responses, ones, 1.0)
    for options in OPTIONS["checkpointing"], {"prefix_on_host": True}:
        _, grads = split_pass(fresh(family.model, **options), bundles, responses, ones, 1.0, cut=True)
        assert {k for k, g in grads.items() if g is not None} == {k for k, g in plain.items() if g is not None}
        assert all(torch.equal(g, plain[k]) for k, g in grads.items() if g is not None)


@pytest.mark.parametrize("frozen", [["vision_tower"], ["vision_tower", "projector"], ["language_model"]], ids="+".join)
def test_frozen_parts_get_no_gradient_and_the_others_all(family, frozen):
    actor = fresh(family.model)
    actor.freeze(frozen)
    parts = {
        part: {id(p) for p in actor.part_parameters(part)} for part in ("vision_tower", "projector", "language_model")
    }
    everything = [id(p) for p in actor.hf.parameters()]
    assert sorted(id for part in parts.values() for id in part) == sorted(everything)  # each in one part
    off = set().union(*(parts[part] for part in frozen))
    assert {id(p) for p in actor.hf.parameters() if not p.requires_grad} == off
    _, grads = split_pass(
        actor,
        [[family.prompts[3]]],
        [responses_for(1, 2, 3)],
        [torch.ones(2, 3)],
        1.0,
        cut="language_model" not in frozen,
    )
    named = dict(actor.hf.named_parameters())
    assert all(grads[name] is None for name, p in named.items() if id(p) in off)
    assert any(grads[name] is not None for name, p in named.items() if id(p) not in off)


def prefix_and_gradient(actor, prompts, media):
    """A prefix, and of it and its backward: modules in the order of their calls, gradients in that of their coming."""
    seen = SimpleNamespace(called=[], gradients={})
    for name, module in actor.hf.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: seen.called.append(name))
    for name, p in actor.hf.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.gradients.update({name: p.grad}))
    state = actor.prefix(prompts, grad=True, media=media)
    kept = SimpleNamespace(live=[t.detach() for t in state.live])
    sum(leaf.sin().sum() for leaf in state.leaves).backward()
    state.backward()
    return kept, seen


def test_passes_that_make_the_same_calls_on_every_rank(family):
    """Where parameters are sharded (ZeRO-3), a tower that a prompt does not need sees a blank picture: whatever the
    prompts hold, modules are called and parameters get their gradients in one order, and no number is another."""
    media = frozenset(names[0] for names in fresh(family.model).media_names.values())
    twins = [[p, same_shape(p, 1)] for p in family.prompts[-2:]]
    orders = []
    for bundle in [*([p] for p in family.prompts), *twins]:
        (a, plain), (b, grads) = (prefix_and_gradient(fresh(family.model), bundle, m) for m in (None, media))
        assert all((x - y).abs().max() <= BAR for x, y in zip(a.live, b.live, strict=True))
        for name, grad in grads.gradients.items():
            want = plain.gradients.get(name, torch.zeros_like(grad))  # of a blank picture: exactly 0
            assert (grad - want).abs().max() <= BAR * want.norm(), name
        orders.append((grads.called, list(grads.gradients)))
    assert all(order == orders[0] for order in orders)
    assert any("vision" in name or "visual" in name for name in orders[0][1])


# ---- prompts ---------------------------------------------------------------------------------------------------------


def prompt_of(family, *parts, **settings):
    return PromptEncoder(family.processor, **settings).encode(Rows(), Sample("row", {"parts": parts}))


def test_vid_01_one_frame_is_a_video(family):
    """Qwen3-VL's processor alone refuses one: it takes no fewer than a patch holds."""
    prompt, actor = prompt_of(family, video(1, 1.0)), fresh(family.model)
    found = actor.vision_embeddings([prompt])
    assert {name: len(rows) for name, rows in found.items()} == {
        f"{kind}_embeds": int((prompt.mm_token_type_ids == code).sum())
        for kind, code in (("image", 1), ("video", 2))
        if (prompt.mm_token_type_ids == code).any()
    }


@pytest.mark.parametrize("settings", [{"max_pixels": 4096}, {"min_pixels": 784, "max_pixels": 4096}])
def test_img_09_sizes_are_those_of_each_frame_of_a_video(family, settings):
    """Qwen3-VL's processor has sizes of whole videos."""
    if not has_grids(family.processor):
        with pytest.raises(ValueError, match="cannot be set for"):
            prompt_of(family, **settings)
        return
    frames = [np.asarray(picture(448, 448, i)) for i in range(6)]
    prompt = prompt_of(family, {"type": "video", "video": frames, "fps": 1.0}, **settings)
    assert prompt.media["video_grid_thw"].tolist() == [[3, 4, 4]]
    if family.name == "qwen3_vl":
        whole = prompt_of(
            family, {"type": "video", "video": frames, "fps": 1.0}, **settings, video_total_pixels=6 * 1024
        )
        assert whole.media["video_grid_thw"].tolist() == [[3, 2, 2]]
        with pytest.raises(ValueError, match="6 frames of min_pixels=4096 are more than the 6144 pixels of a whole"):
            prompt_of(
                family, {"type": "video", "video": frames, "fps": 1.0}, min_pixels=4096, video_total_pixels=6 * 1024
            )


def test_vid_05_each_picture_and_video_has_its_tokens(family):
    """With time stamps too, which Qwen3-VL writes between frames: runs, grids and features agree."""
    actor = fresh(family.model)
    for name, prompt in zip(ROWS, family.prompts, strict=True):
        found = {k: len(t) for k, t in actor.vision_embeddings([prompt]).items()}
        for code, kind in ((1, "image"), (2, "video")):
            tokens, items = int((prompt.mm_token_type_ids == code).sum()), actor.item_tokens(prompt, kind)
            assert sum(items) == tokens == found.get(f"{kind}_embeds", 0)
            parts = sum(part["type"] == kind for part in ROWS[name])
            frames = 6 * ("video" in name) if kind == "image" and actor.support.video == "as pictures" else 0
            assert len(items) == (0 if kind == "video" and actor.support.video == "as pictures" else parts) + frames
    stamps = family.processor.tokenizer.decode(family.prompts[4].input_ids).count(" seconds>")
    assert stamps == (3 if family.name == "qwen3_vl" else 0)


def test_lost_pixels_and_lost_tokens_are_found(family, monkeypatch):
    actor = fresh(family.model)
    prompt = family.prompts[1]
    blind = copy.copy(prompt)
    object.__setattr__(blind, "media", {k: t for k, t in prompt.media.items() if k != "pixel_values"})
    with pytest.raises(ValueError, match="image tokens but no pixel_values"):
        started(actor, family.processor).submit([Request(0, 0, blind, SamplingParams(max_tokens=2), 0)])
    original = type(family.processor).replace_image_token
    monkeypatch.setattr(
        type(family.processor), "replace_image_token",
        lambda self, *a, **k: original(self, *a, **k).replace(self.image_token, "", 1),
    )  # fmt: skip
    if family.name != "llava_onevision":  # its count is the processor's own
        with pytest.raises(BadRow, match=r"placeholder|image and|but no"):
            encoded(family.processor, ["picture"])


# ---- the embedded engine ---------------------------------------------------------------------------------------------


def greedy(family, actor, n: int) -> list[list[int]]:
    """Transformers' greedy tokens of each prompt."""
    hf = ordered(copy.deepcopy(family.model)).eval()
    hf.set_attn_implementation("sdpa")
    hf.generation_config = type(hf.generation_config)(pad_token_id=256, eos_token_id=None)
    found = []
    for prompt in family.prompts:
        ids = prompt.input_ids[None]
        types = {} if not family.name.startswith("qwen") else {"mm_token_type_ids": prompt.mm_token_type_ids[None]}
        out = hf.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n,
            suppress_tokens=list(actor.banned_token_ids), **types, **prompt.media,
        )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


def test_engine_equals_generate_and_the_trainer(family):
    actor = fresh(family.model)
    engine = started(actor, family.processor)
    engine.submit(requests_for(family.prompts, SamplingParams(max_tokens=8, temperature=0)))
    got = {r.group: r.token_ids.tolist() for r in drain(engine)}
    assert [got[b] for b in range(len(got))] == greedy(family, actor, 8)
    engine.submit(requests_for(family.prompts, SamplingParams(max_tokens=8, temperature=0.7), g=3))
    for r in drain(engine):
        want = trainer_logps(actor, family.prompts[r.group], r, 0.7)
        assert (r.logps - want).abs().max() <= BAR / 0.7
        assert not set(r.token_ids.tolist()) & set(actor.banned_token_ids)


@pytest.mark.parametrize("family", [pytest.param(n, marks=SLOW_RUNS.get(n, ())) for n in NAMES], indirect=True)
def test_schedules_give_the_same_bits(family, folder, tmp_path):
    """Serial against overlap and streaming with one vision pass for engine and actor; each alone is `verify`'s."""

    def trained(callbacks=(), vision="engine"):
        module = train(
            folder, tmp_path, steps=2, task=Rows(), batch_size=6, engine=TorchEngine(vision=vision), callbacks=callbacks,
            num_generations=2, max_completion_length=4, prompts_per_pass=2,
        )  # fmt: skip
        return weights(module), [out["metrics"]["loss"] for out in module.seen]

    serial, losses = trained()
    assert not same_bits(serial, dict(family.model.named_parameters()))
    other, same_losses = trained([PrefixOverlap(), GroupStreaming()], "shared")
    assert same_bits(serial, other) and losses == same_losses


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_an_export_loads_with_plain_transformers_and_is_planned(family, tmp_path):
    actor = fresh(family.model)
    out = export(actor.hf, family.processor, tmp_path / "out")
    loaded, processor = AutoModelForImageTextToText.from_pretrained(out), AutoProcessor.from_pretrained(out)
    assert same_bits(dict(loaded.named_parameters()), dict(family.model.named_parameters()))
    again = encoded(processor)
    for a, b in zip(again, family.prompts, strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and a.media.keys() == b.media.keys()
        assert all(torch.equal(a.media[k], b.media[k]) for k in a.media)
    shape = model_shape(str(out))
    assert shape.params == sum(p.numel() for p in family.model.parameters())
    parts = {part: sum(p.numel() for p in actor.part_parameters(part)) for part in ("projector", "language_model")}
    assert (shape.projector_params, shape.language_params) == (parts["projector"], parts["language_model"])
    assert shape.vision is not None


def test_the_table_in_the_docs_is_the_registrys():
    text = (Path(__file__).parent.parent / "docs" / "families.md").read_text()
    assert family_table() in text
    assert all(
        any(line.startswith("| ") and name in line.split(" | ")[0] for line in text.splitlines()) for name in REFUSED
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_other_families_are_refused_with_the_reason_and_the_list():
    with pytest.raises(ValueError, match=r"cross-attention layers.*supported: qwen2_vl, .*internvl"):
        family_of("mllama")
    with pytest.raises(ValueError, match="no exact prefix/suffix split in Rollplex; supported"):
        family_of("unheard_of")
    assert not set(REFUSED) & set(FAMILIES)


def test_text_models_that_do_not_split_are_refused():
    model, _ = build_tiny_in_memory(family="internvl", **PARITY)
    windows = copy.deepcopy(model)
    windows.config.text_config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match=r"layer_types sliding_attention.*use_sliding_window=false"):
        split(windows)
    model.config.text_config.model_type = "gpt_oss"
    with pytest.raises(ValueError, match=r"text model 'gpt_oss'.*qwen2, qwen3, llama"):
        split(model)


@pytest.mark.slow
def test_verify_passes_on_a_tiny_model(family, folder, tmp_path):
    """`rollplex verify` with the config of the docs: every schedule, then engine against trainer on mixed media."""
    config = Path(__file__).parent.parent / "configs" / "family_cpu.yaml"
    printed, target = io.StringIO(), tmp_path / "verify.json"
    arguments = ["--config", str(config), "--model.init_args.model", str(folder), "--steps", "2", "--json", str(target)]
    code = verify([*arguments, f"--trainer.default_root_dir={tmp_path}"], Console(file=printed, width=200))
    report = json.loads(target.read_text())
    assert code == 0 and report["passed"], printed.getvalue()
    assert all(s["verdict"] == "identical" for name, s in report["case"]["schedules"].items() if name == "overlap")
    assert "Left out" not in printed.getvalue()  # the processor took every kind of media
