"""The layout plan: every engine tensor as slices of trainer tensors, checked against vLLM's own loading."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.engines.vllm_weights import engine_name
from rollplex.models.registry import FAMILIES as REGISTERED
from rollplex.weights.audit import LayoutError, audit, table
from rollplex.weights.families import Heads, table_of
from rollplex.weights.layout import CLASSES, plan_layout, shapes_of
from rollplex.weights.views import assemble, padded_shapes, split, trainer_views, views

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FAMILIES = (*QWEN, "llava_onevision", "internvl")
TOWERS = [*((family, mode) for family in QWEN for mode in ("weights", "data"))]
TOWERS += [(family, "weights") for family in FAMILIES if family not in QWEN]
"""(family, how an engine's ranks hold the tower)."""

DEGREES = (1, 2, 4, 8)
PAIRS = [(a, b) for a in DEGREES for b in DEGREES]  # one divides the other
GIB = 2**30


def family_config(family: str, vocab: int = 264, heads: int = 8, kv: int = 2, head_dim: int = 32, tie: bool = False):
    """A small transformers config; 264 tokens are no multiple of 64, so the vocabulary has padding."""
    import transformers

    width = heads * head_dim
    text = {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim, "tie_word_embeddings": tie,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    tower = {"hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 8}
    tower |= {"image_size": 28, "patch_size": 14}
    vision = {
        "qwen2_vl": {"depth": 2, "embed_dim": 256, "hidden_size": width, "num_heads": 8, "mlp_ratio": 2},
        "qwen2_5_vl": {
            "depth": 2, "hidden_size": 256, "intermediate_size": 160, "num_heads": 8, "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            "depth": 3, "hidden_size": 256, "intermediate_size": 160, "num_heads": 8, "out_hidden_size": width,
            "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
        },
        "llava_onevision": tower | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "internvl": tower | {"attention_bias": True, "use_qk_norm": True, "use_mean_pooling": False},
    }[family]  # fmt: skip
    classes = {
        "qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "llava_onevision": "LlavaOnevision",
        "internvl": "InternVL",
    }  # fmt: skip
    if family not in QWEN:  # their text models are any of several; this one has norms on heads
        text |= {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return getattr(transformers, classes[family] + "Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=tie
    )


def family_model(config, device: str = "meta"):
    import transformers

    name = type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"
    with torch.device(device):
        return getattr(transformers, name)(config)


@cache
def small_model(family: str, **options):
    """(config, full float32 tensors by name, every element different from its neighbours); made once, not to change."""
    config = family_config(family, **options)
    generator = torch.Generator().manual_seed(0)
    names = shapes_of(family_model(config).named_parameters())
    names = {name: spec for name, spec in names.items() if not name.startswith(REGISTERED[family].unread)}
    return config, {name: torch.randn(shape, generator=generator) for name, (shape, _) in names.items()}


def small_plan(family: str, rollout_tp: int = 1, train_tp: int = 1, options=None, **plan_options):
    """(plan, full trainer tensors)."""
    config, tensors = small_model(family, **(options or {}))
    shapes = shapes_of(tensors.items())
    return plan_layout(family, shapes, Heads.of(config), rollout_tp, train_tp, **plan_options), tensors


def engine_shapes(plan, gpu: int = 0):
    return {entry.name: (entry.shape, entry.dtype) for entry in plan.on(gpu)}


def with_room(plan, tensors, rank: int = 0):
    """The rank's tensors, embeddings and head as the first rows of a padded base (padding: zeros)."""
    bases = {name: torch.zeros(shape) for name, shape in padded_shapes(plan, rank).items()}
    found = dict(tensors)
    for name, base in bases.items():
        found[name] = base[: tensors[name].shape[0]].copy_(tensors[name])
    return found


def inside(view: torch.Tensor, base: torch.Tensor) -> bool:
    """All of a view's elements lie in the storage of another tensor."""
    storage = base.untyped_storage()
    last = view.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    return view.untyped_storage().data_ptr() == storage.data_ptr() and (last + 1) * view.itemsize <= storage.nbytes()


# --- coverage and values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_vision", ["weights", "data"])
@pytest.mark.parametrize(("family", "vision"), TOWERS)
@pytest.mark.parametrize(("train_tp", "rollout_tp"), PAIRS)
def test_union_of_the_ranks_is_the_trainer(family, vision, train_vision, train_tp, rollout_tp):
    plan, tensors = small_plan(family, rollout_tp, train_tp, vision=vision, train_vision=train_vision)
    audit(plan, shapes_of(tensors.items()), engine_shapes(plan))
    shards = [split(plan, tensors, rank) for rank in range(train_tp)]
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    for gpu in range(plan.gpus):
        engine = assemble(plan, shards, gpu)
        for entry in plan.on(gpu):
            assert engine[entry.name].shape == entry.shape
            for piece in entry.pieces:
                rows = min(piece.length, max(0, back[piece.source].shape[entry.dim] - piece.start))
                value = engine[entry.name].narrow(entry.dim, piece.engine_start, rows)
                back[piece.source].narrow(entry.dim, min(piece.start, back[piece.source].shape[entry.dim]), rows).copy_(
                    value
                )
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize(("family", "vision"), TOWERS)
def test_views_of_full_tensors_copy_nothing(family, rollout_tp, vision):
    plan, tensors = small_plan(family, rollout_tp, vision=vision)
    tensors = with_room(plan, {name: tensor.clone() for name, tensor in tensors.items()})
    for gpu in range(rollout_tp):
        assert plan.class_bytes(gpu)["rebuild"] == plan.gathered_bytes(gpu) == 0
        parts = views(plan, tensors, gpu)
        before = assemble(plan, [tensors], gpu)
        for entry in plan.on(gpu):
            runs = plan.runs(entry)
            assert all(inside(part, tensors[run.source]) for part, run in zip(parts[entry.name], runs, strict=True))
            assert (len(runs) == 1) == (entry.layout != "blocks")
            contiguous = all(part.is_contiguous() for part in parts[entry.name])
            assert contiguous == (entry.layout != "strided")
            assert torch.equal(torch.cat(parts[entry.name], entry.dim), before[entry.name])
    for tensor in tensors.values():
        tensor.add_(1)  # an update in place
    parts, after = views(plan, tensors, rollout_tp - 1), assemble(plan, [tensors], rollout_tp - 1)
    embed = "language_model.model.embed_tokens.weight"
    for entry in plan.on(rollout_tp - 1):
        if entry.name not in (embed, "language_model.lm_head.weight"):  # their padding is no trainer tensor
            assert torch.equal(torch.cat(parts[entry.name], entry.dim), after[entry.name])
            assert not torch.equal(after[entry.name], before[entry.name])


def test_classes_are_those_of_the_table():
    plan, _ = small_plan("qwen2_5_vl", 4)
    layouts = {entry.name: entry.layout for entry in plan.on(1)}
    layer, block = "language_model.model.layers.1.", "visual.blocks.1."
    assert layouts["language_model.model.embed_tokens.weight"] == layouts["language_model.lm_head.weight"] == "alias"
    assert layouts[layer + "input_layernorm.weight"] == layouts["visual.patch_embed.proj.weight"] == "alias"
    assert layouts[layer + "self_attn.qkv_proj.weight"] == layouts[layer + "self_attn.qkv_proj.bias"] == "blocks"
    assert layouts[layer + "mlp.gate_up_proj.weight"] == layouts[block + "mlp.gate_up_proj.bias"] == "blocks"
    assert layouts[layer + "self_attn.o_proj.weight"] == layouts[layer + "mlp.down_proj.weight"] == "strided"
    assert layouts[block + "attn.proj.weight"] == layouts["visual.merger.mlp.2.weight"] == "strided"
    assert layouts[block + "attn.proj.bias"] == layouts["visual.merger.mlp.0.weight"] == "alias"
    assert layouts[block + "attn.qkv.weight"] == "blocks"
    single, _ = small_plan("qwen2_5_vl", 1)
    layouts = {entry.name: entry.layout for entry in single.on(0)}
    assert layouts[block + "attn.qkv.weight"] == "alias"  # transformers keeps it fused in vLLM's order
    assert {name for name, layout in layouts.items() if layout == "blocks"} == {
        name for name in layouts if "qkv_proj" in name or "gate_up" in name
    }
    assert "strided" not in layouts.values()


def test_kv_heads_are_replicated_beyond_their_number():
    plan, tensors = small_plan("qwen3_vl", 8)
    key = tensors["model.language_model.layers.0.self_attn.k_proj.weight"]
    for gpu in range(8):
        parts = views(plan, with_room(plan, tensors), gpu)["language_model.model.layers.0.self_attn.qkv_proj.weight"]
        assert torch.equal(parts[1], key[gpu // 4 * 32 : (gpu // 4 + 1) * 32])
        assert [part.shape[0] for part in parts] == [32, 32, 32]


def test_vocabulary_padding_needs_room_or_storage_of_the_engine():
    plan, tensors = small_plan("qwen2_5_vl", 4)
    assert set(padded_shapes(plan).values()) == {(320, 256)}
    views(plan, tensors, gpu=2)  # rows 160 to 240 exist
    with pytest.raises(ValueError, match=r"embed_tokens.* has no room .* shape \(320, 256\)"):
        views(plan, tensors, gpu=3)
    own, _ = small_plan("qwen2_5_vl", 4, padded_vocab=False)
    assert [own.class_bytes(gpu)["rebuild"] for gpu in range(4)] == [0, 0, 0, 2 * 80 * 256 * 4]
    (part,) = views(own, tensors, gpu=3)["language_model.lm_head.weight"]
    assert torch.equal(part, tensors["lm_head.weight"][240:])
    full = assemble(own, [tensors], gpu=3)["language_model.lm_head.weight"]
    assert torch.equal(full[:24], part) and not full[24:].any()
    one, _ = small_plan("qwen2_5_vl", 1, padded_vocab=False)  # the engine's tensor is the padded base
    (entry,) = (entry for entry in one.on(0) if entry.name == "language_model.lm_head.weight")
    assert (entry.layout, entry.home, entry.shape) == ("alias", "engine", (320, 256))


def test_tied_embeddings_are_one_engine_tensor():
    plan, tensors = small_plan("qwen2_5_vl", 2, options={"tie": True})
    assert "lm_head.weight" not in tensors
    assert not any("lm_head" in entry.name for entry in plan.entries)
    named = shapes_of(tensors.items()) | {"lm_head.weight": ((264, 256), torch.float32)}
    heads = Heads(8, 2, 8)
    assert plan_layout("qwen2_5_vl", named, heads, 2, tied=True) == plan
    assert any("lm_head" in entry.name for entry in plan_layout("qwen2_5_vl", named, heads, 2).entries)


def test_an_engine_without_tower_needs_no_vision_tensor():
    plan, tensors = small_plan("qwen3_vl", 2, vision="none")
    assert not any(entry.name.startswith("visual.") for entry in plan.entries)
    audit(plan, shapes_of(tensors.items()), engine_shapes(plan))


# --- a trainer that is split too -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("train_tp", "rollout_tp"), [(2, 1), (2, 2), (4, 2), (2, 4), (8, 4), (8, 1), (4, 8)])
def test_one_side_is_a_view_of_the_other(family, train_tp, rollout_tp):
    plan, tensors = small_plan(family, rollout_tp, train_tp, vision=dict(TOWERS)[family])
    shards = [with_room(plan, split(plan, tensors, rank), rank) for rank in range(train_tp)]
    for gpu in range(plan.gpus):
        rank = plan.train_rank(gpu)
        assert plan.class_bytes(gpu)["rebuild"] == 0
        engine = assemble(plan, shards, gpu)
        parts = views(plan, shards[rank], gpu)
        held = trainer_views(plan, engine, gpu)
        for entry in plan.on(gpu):
            if entry.home == "trainer":
                assert entry.gathered == 0 and torch.equal(torch.cat(parts[entry.name], entry.dim), engine[entry.name])
                continue
            assert train_tp > rollout_tp
            for name in {piece.source for piece in entry.pieces}:
                assert inside(held[name], engine[entry.name])
                local = shards[rank][name]
                assert torch.equal(held[name].narrow(0, 0, local.shape[0]), local)
        sizes = [sum(part.numel() for part in parts[entry.name]) * 4 for entry in plan.on(gpu)]
        assert plan.gathered_bytes(gpu) + sum(sizes) == sum(plan.class_bytes(gpu).values())
        if train_tp <= rollout_tp:
            assert plan.gathered_bytes(gpu) == 0


def test_a_gpu_is_paired_so_that_shards_nest():
    plan, _ = small_plan("qwen2_5_vl", 4, 8, vision="data")
    assert [plan.rollout_rank(gpu) for gpu in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [plan.train_rank(gpu) for gpu in range(8)] == list(range(8))
    (down,) = (entry for entry in plan.on(5) if entry.name == "language_model.model.layers.0.mlp.down_proj.weight")
    assert (down.layout, down.home, down.gathered) == ("strided", "engine", 24)  # of 192 / 4 columns


def test_shards_that_do_not_nest_are_rebuilt():
    fused, _ = small_plan("qwen2_5_vl", 2, 4, train_vision="weights")  # a trainer rank's [q; k; v] is three ranges
    layouts = {entry.name: entry.layout for entry in fused.on(0)}
    assert layouts["visual.blocks.0.attn.qkv.weight"] == layouts["visual.blocks.0.attn.qkv.bias"] == "rebuild"
    assert layouts["language_model.model.layers.0.self_attn.qkv_proj.weight"] == "blocks"
    equal, _ = small_plan("qwen2_5_vl", 4, 4, train_vision="weights")
    assert {entry.layout for entry in equal.on(3) if ".attn.qkv." in entry.name} == {"alias"}
    plain, tensors = small_plan("qwen2_vl", 4, 4, train_vision="weights")  # vLLM's rows are not a rank's heads
    found = [entry for entry in plain.on(1) if entry.name == "visual.blocks.0.attn.qkv.weight"]
    assert [entry.layout for entry in found] == ["rebuild"] and 0 < found[0].gathered < 192
    shards = [split(plain, tensors, rank) for rank in range(4)]
    built = assemble(plain, shards, 1)["visual.blocks.0.attn.qkv.weight"]
    assert torch.equal(built, tensors["model.visual.blocks.0.attn.qkv.weight"][192:384])


def test_figures_of_the_paper():
    """Qwen2.5-VL-32B, language model, train TP 8 and rollout TP 4: 60.1 / 32.8 / 7.2 %, 1.09 GiB against 7.63."""
    from transformers import Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8,
        },
        vision_config={
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "num_heads": 16, "out_hidden_size": 5120,
        },
    )  # fmt: skip
    shapes = {
        name: (shape, torch.bfloat16) for name, (shape, _) in shapes_of(family_model(config).named_parameters()).items()
    }
    assert sum(torch.Size(shape).numel() for shape, _ in shapes.values()) == 33_452_718_336
    plan = plan_layout("qwen2_5_vl", shapes, Heads.of(config), 4, 8, vision="data", own=("qkv_proj",))
    audit(plan, shapes, engine_shapes(plan))
    for gpu in range(8):
        paper = plan.paper_bytes(gpu)
        total = sum(paper.values())
        assert [f"{100 * size / total:.1f}" for size in paper.values()] == ["60.1", "32.8", "7.2"]
        assert f"{paper['rebuilt'] / GIB:.2f}" == "1.09"
        assert f"{plan.trainer_bytes(gpu, 'language') / GIB:.2f}" == "7.63"
        assert f"{total / GIB:.2f}" == "15.26"
    blocks = plan_layout("qwen2_5_vl", shapes, Heads.of(config), 4, 8, vision="data")
    assert blocks.class_bytes(0)["rebuild"] == 0
    text = table(plan, "language").splitlines()
    assert "train TP 8, rollout TP 4" in text[0] and len(text) == 10
    assert text[7].split() == (
        "5 rank 5 rank 2 0.726 (4.8%) 5.00 (32.8%) 8.44 (55.3%) 1.09 (7.2%) 15.26 7.63 7.63".split()
    )


@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    kv=st.sampled_from([1, 2, 3, 4, 8]),
    repeat=st.integers(1, 4),
    degrees=st.sampled_from(PAIRS),
    vocab=st.integers(65, 400),
    roomy=st.booleans(),
    tie=st.booleans(),
)
def test_any_head_counts(family, kv, repeat, degrees, vocab, roomy, tie):
    train_tp, rollout_tp = degrees
    heads, vision = kv * repeat, dict(TOWERS)[family]
    options = {"heads": heads, "kv": kv, "head_dim": 16, "vocab": vocab, "tie": tie}
    fits = all(heads % tp == 0 and (kv % tp == 0 or tp % kv == 0) for tp in degrees) and (
        roomy or vocab % train_tp == 0
    )
    if not fits:
        with pytest.raises(ValueError, match="cannot be split over"):
            small_plan(family, rollout_tp, train_tp, options, vision=vision, padded_vocab=roomy)
        return
    plan, tensors = small_plan(family, rollout_tp, train_tp, options, vision=vision, padded_vocab=roomy)
    audit(plan, shapes_of(tensors.items()), engine_shapes(plan))
    shards = [split(plan, tensors, rank) for rank in range(train_tp)]
    prefix = "model.language_model.layers.1.self_attn."
    for gpu in range(plan.gpus):
        rank = plan.rollout_rank(gpu)
        qkv = assemble(plan, shards, gpu)["language_model.model.layers.1.self_attn.qkv_proj.weight"]
        query = [rank * heads // rollout_tp + i for i in range(heads // rollout_tp)]
        key = sorted({head * kv // heads for head in query})
        q, k, v = (tensors[f"{prefix}{name}_proj.weight"].unflatten(0, (-1, 16)) for name in "qkv")
        assert torch.equal(qkv, torch.cat([q[query], k[key], v[key]]).flatten(0, 1))


# --- audit ---------------------------------------------------------------------------------------------------------


def changed(plan, name: str, gpu: int = 1, **fields):
    """The plan with one entry's fields replaced."""
    entries = tuple(
        replace(entry, **fields) if (entry.name, entry.gpu) == (name, gpu) else entry for entry in plan.entries
    )
    return replace(plan, entries=entries)


QKV = "language_model.model.layers.0.self_attn.qkv_proj.weight"


@pytest.fixture(scope="module")
def two_ranks():
    """(plan of engine TP 2, trainer shapes, engine shapes)."""
    plan, tensors = small_plan("qwen2_5_vl", 2)
    return plan, shapes_of(tensors.items()), engine_shapes(plan)


def test_sync_06_audit_sees_an_engine_tensor_without_plan(two_ranks):
    plan, trainer, engine = two_ranks
    short = replace(plan, entries=tuple(entry for entry in plan.entries if entry.name != QKV))
    with pytest.raises(LayoutError, match=rf"the engine's {QKV} is not in the plan"):
        audit(short, trainer, engine)
    with pytest.raises(LayoutError, match=rf"{QKV}: the engine has no such tensor"):
        audit(plan, trainer, {name: spec for name, spec in engine.items() if name != QKV})
    with pytest.raises(LayoutError, match=rf"{QKV} is planned 2 times"):
        audit(replace(plan, entries=(*plan.entries, *(e for e in plan.entries if e.name == QKV))), trainer, engine)


def test_sync_06_audit_sees_slices_doubled_missing_or_shifted(two_ranks):
    plan, trainer, engine = two_ranks
    pieces = next(entry.pieces for entry in plan.on(1) if entry.name == QKV)
    with pytest.raises(LayoutError, match=r"two slices at \[0, 128\)"):
        audit(changed(plan, QKV, pieces=(pieces[0], *pieces)), trainer, engine)
    with pytest.raises(LayoutError, match=r"nothing at \[128, 160\)") as caught:
        audit(changed(plan, QKV, pieces=(pieces[0], pieces[2])), trainer, engine)
    assert "[32, 64) of model.language_model.layers.0.self_attn.k_proj.weight is not used" in str(caught.value)
    with pytest.raises(LayoutError, match=r"covered up to 160 of 192"):
        audit(changed(plan, QKV, pieces=pieces[:2]), trainer, engine)
    twice = (pieces[0], pieces[1], replace(pieces[1], engine_start=160))
    with pytest.raises(LayoutError, match=r"GPU 1: \[32, 64\) of .*k_proj.weight is used twice"):
        audit(changed(plan, QKV, pieces=twice), trainer, engine)
    shifted = (replace(pieces[0], start=200), *pieces[1:])
    with pytest.raises(LayoutError, match=r"q_proj.weight ends at 256, the slice at 328"):
        audit(changed(plan, QKV, pieces=shifted), trainer, engine)


def test_sync_06_audit_sees_an_unused_trainer_tensor(two_ranks):
    plan, trainer, engine = two_ranks
    more = trainer | {"model.language_model.layers.0.self_attn.sinks": ((8,), torch.float32)}
    with pytest.raises(LayoutError, match=r"the trainer's model.language_model.layers.0.self_attn.sinks is not used"):
        audit(plan, more, engine)
    fewer = {name: spec for name, spec in trainer.items() if name != "lm_head.weight"}
    with pytest.raises(LayoutError, match=r"the plan reads lm_head.weight, which the trainer lacks"):
        audit(plan, fewer, engine)


def test_sync_06_audit_sees_wrong_shapes_and_dtypes(two_ranks):
    plan, trainer, engine = two_ranks
    with pytest.raises(LayoutError, match=r"the engine has shape \(190, 256\), the plan \(192, 256\)"):
        audit(plan, trainer, engine | {QKV: ((190, 256), torch.float32)})
    with pytest.raises(LayoutError, match=r"the engine has torch.bfloat16, the trainer torch.float32"):
        audit(plan, trainer, engine | {QKV: ((192, 256), torch.bfloat16)})
    with pytest.raises(LayoutError, match=r"lm_head.weight: the trainer has \(264, 128\)"):
        audit(plan, trainer | {"lm_head.weight": ((264, 128), torch.float32)}, engine)


def test_a_long_list_of_faults_is_cut(two_ranks):
    plan, trainer, _ = two_ranks
    with pytest.raises(LayoutError, match=r"\.\.\. and \d+ more$") as caught:
        audit(plan, trainer, {})
    assert len(str(caught.value).splitlines()) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "llama"}, "no layout table for model_type='llama'"),
        ({"family": "internvl", "vision": "data"}, "vLLM splits the tower of model_type='internvl' always"),
        ({"rollout_tp": 3, "train_tp": 2}, "one must divide the other"),
        ({"rollout_tp": 3}, r"attn.qkv.weight: 8 heads cannot be split over 3 ranks; keep the vision tower whole"),
        ({"rollout_tp": 3, "vision": "data"}, r"embed_tokens.weight: 320 cannot be split over 3 ranks$"),
        ({"rollout_tp": 64}, "64 ranks"),
        ({"heads": Heads(7, 2, 8)}, "q_proj.weight: 256 rows are not a multiple of 7 heads"),
    ],
)
def test_plans_that_cannot_be(two_ranks, change, message):
    arguments = {"family": "qwen2_5_vl", "trainer_shapes": two_ranks[1], "heads": Heads(8, 2, 8), "rollout_tp": 2}
    with pytest.raises(ValueError, match=message):
        plan_layout(**arguments | change)


def test_a_fused_group_with_a_member_missing(two_ranks):
    _, trainer, _ = two_ranks
    fewer = {name: spec for name, spec in trainer.items() if "layers.0.mlp.up_proj" not in name}
    with pytest.raises(ValueError, match=r"the trainer lacks model.language_model.layers.0.mlp.up_proj.weight"):
        plan_layout("qwen2_5_vl", fewer, Heads(8, 2, 8))


def test_views_refuse_other_tensors(two_ranks):
    plan, _, _ = two_ranks
    tensors = with_room(plan, small_model("qwen2_5_vl")[1])
    with pytest.raises(
        ValueError, match=r"o_proj.weight has shape \(256, 200\), the layout plan was made for \(256, 256\)"
    ):
        views(plan, tensors | {"model.language_model.layers.0.self_attn.o_proj.weight": torch.zeros(256, 200)})
    del tensors["model.visual.merger.ln_q.weight"]
    with pytest.raises(KeyError, match=r"no tensor model.visual.merger.ln_q.weight"):
        views(plan, tensors)


def test_bytes_by_class_add_up(two_ranks):
    plan, trainer, _ = two_ranks
    for gpu in range(2):
        parts = [plan.class_bytes(gpu, part) for part in ("language", "vision")]
        assert plan.class_bytes(gpu) == {name: sum(part[name] for part in parts) for name in CLASSES}
    stored = sum(torch.Size(shape).numel() * 4 for shape, _ in trainer.values()) + 2 * 56 * 256 * 4  # padding rows
    assert plan.trainer_bytes(0) == plan.trainer_bytes(1) == stored


# --- against vLLM --------------------------------------------------------------------------------------------------


def vllm_shard(vllm_config, config, tensors, tp: int, rank: int, mode: str):
    """Parameters of vLLM's own model class as rank `rank` of `tp` loads them from the trainer's full tensors.

    Building and loading use no collective, so a group that only knows its size and rank is enough.
    """
    import copy

    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import ModelRegistry
    from vllm.utils.torch_utils import set_default_torch_dtype

    chosen, config = copy.deepcopy(vllm_config), copy.deepcopy(config)
    model_config = chosen.model_config
    config.architectures = [type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"]
    model_config.hf_config, model_config.hf_text_config = config, config.text_config
    model_config.multimodal_config.mm_encoder_tp_mode = mode
    chosen.compilation_config.static_forward_context = {}
    cls, _ = ModelRegistry.resolve_model_cls(config.architectures, model_config)
    before = parallel_state._TP
    parallel_state._TP = SimpleNamespace(world_size=tp, rank_in_group=rank, rank=rank)
    try:
        with set_current_vllm_config(chosen), set_default_torch_dtype(torch.float32), torch.device("cpu"):
            model = cls(vllm_config=chosen)
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
            family = REGISTERED[config.model_type]
            model.load_weights((engine_name(name, family), tensor) for name, tensor in tensors.items())
    finally:
        parallel_state._TP = before
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.vllm
@pytest.mark.parametrize("tp", DEGREES)
@pytest.mark.parametrize(("family", "vision"), TOWERS)
def test_shards_are_those_that_vllm_loads(vllm_engine, family, tp, vision):
    llm, _ = vllm_engine
    tie = tp == 2
    config, tensors = small_model(family, tie=tie)
    trainer = shapes_of(tensors.items())
    plan = plan_layout(family, trainer, Heads.of(config), tp, vision=vision)
    for rank in range(tp):
        real = vllm_shard(llm.llm_engine.vllm_config, config, tensors, tp, rank, vision)
        audit(plan, trainer, shapes_of(real.items()))
        ours = assemble(plan, [tensors], rank)
        assert set(ours) == set(real)
        assert [name for name in ours if not torch.equal(ours[name], real[name])] == []


@pytest.mark.vllm
def test_names_and_shapes_of_the_running_engine(vllm_engine):
    """The exported tiny model in the engine itself, against the plan of the folder's transformers model."""
    from transformers import AutoModelForImageTextToText

    llm, folder = vllm_engine
    policy = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    trainer = shapes_of(policy.named_parameters())
    plan = plan_layout("qwen2_5_vl", trainer, Heads.of(policy.config))
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    real = dict(worker.worker.model_runner.model.named_parameters())
    # On the CPU vLLM packs the weights of linear layers once they are loaded, and leaves an empty parameter behind.
    kept = {name: tensor for name, tensor in real.items() if tensor.numel()}
    planned = engine_shapes(plan)
    assert set(real) == set(planned)
    assert len(kept) > 20 and {name: planned[name] for name in kept} == shapes_of(kept.items())
    ours = assemble(plan, [dict(policy.named_parameters())])
    assert all(torch.equal(ours[name], tensor.data) for name, tensor in kept.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_rule_of_a_table_is_used(family):
    from rollplex.weights.families import match

    names = dict(family_model(family_config(family)).named_parameters())
    assert {each.rule for each in match(table_of(family), names)} == set(table_of(family))
