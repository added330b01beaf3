"""The planner's figures against published ones, and against models counted for real."""

from __future__ import annotations

import pytest
import torch

from rollplex.planner.hardware import GPUS, gpu_of, gpus_of
from rollplex.planner.memory import (
    GIB,
    MemorySettings,
    fits,
    naive_bytes,
    stage_bytes,
    states,
)
from rollplex.planner.models import MODELS, model_shape
from rollplex.residency import Stage, State, StateClass

PUBLISHED = {
    "Qwen2.5-VL-3B": 3_754_622_976, "Qwen2.5-VL-7B": 8_292_166_656, "Qwen2.5-VL-32B": 33_452_718_336,
    "Qwen2.5-VL-72B": 73_410_777_344, "Qwen3-VL-8B": 8_767_123_696, "Qwen3-VL-32B": 33_357_390_064,
}  # fmt: skip
PAPER = MemorySettings(train_tp=8, rollout_tp=4, data_parallel=4)
LARGE = MODELS["Qwen2.5-VL-32B"]


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_parameters_are_the_published_numbers(name, total):
    assert MODELS[name].params == total


def test_kv_bytes_per_token():
    sizes = {name: MODELS[name].kv_bytes_per_token / 1024 for name in PUBLISHED}
    assert list(sizes.values()) == [36, 56, 256, 320, 144, 256]


def test_layout_classes_of_the_paper():
    n = LARGE.language_params
    assert n == pytest.approx(32.764e9, rel=1e-4)
    assert 100 * LARGE.row_params / n == pytest.approx(32.8, abs=0.05)
    assert 100 * LARGE.qkv_params / n == pytest.approx(7.2, abs=0.05)
    rebuilt = next(s for s in states(LARGE, PAPER) if "rebuilt" in s.name)
    assert rebuilt.bytes / GIB == pytest.approx(1.09, abs=0.01)
    assert 2 * n / 8 / GIB == pytest.approx(7.63, abs=0.01)


def test_memory_of_the_papers_example():
    found = states(LARGE, PAPER)
    sizes = {s.name: s.bytes / GIB for s in found}
    expected = {
        "actor weights, engine's layout": 16.5, "actor weights, trainer's layout": 8.9, "reference_weights": 8.9,
        "gradients": 17.8, "float32 masters and moments": 53.5, "rollout KV pool": 26.0, "reference_prefix_kv": 4.0,
        "actor_prefix_kv": 4.0, "prefix checkpoints": 10.0, "micro-batch activations": 1.6, "workspace": 14.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert sizes[name] == pytest.approx(value, abs=0.06), name
    assert naive_bytes(found) / GIB == pytest.approx(165.2, rel=0.01)
    peaks = {
        Stage.ROLLOUT: 56.5, Stage.PREFIX_REF: 72.1, Stage.PREFIX_ACT: 69.7, Stage.SCORE: 50.1, Stage.TRAIN: 57.7,
        Stage.UPDATE: 56.1,
    }  # fmt: skip
    for stage, value in peaks.items():
        assert stage_bytes(found)[stage] / GIB == pytest.approx(value, rel=0.02), stage
    whole = states(LARGE, MemorySettings(train_tp=8, rollout_tp=4, data_parallel=4, update_chunks=2))
    assert stage_bytes(whole)[Stage.UPDATE] / GIB == pytest.approx(102.9, rel=0.02)
    assert fits(found, GPUS["H800"]) and not fits(whole, GPUS["H800"])


def test_every_stage_holds_what_it_needs_and_nothing_else():
    state = State("x", 8.0, frozenset({Stage.TRAIN}), StateClass.PHASE_LOCAL, resident=2.0)
    assert state.at(Stage.TRAIN) == 2.0 and state.at(Stage.SCORE) == 0.0
    assert naive_bytes([state]) == 8.0


def test_without_a_reference_its_states_and_its_window_are_gone():
    found = states(LARGE, MemorySettings(train_tp=8, rollout_tp=4, reference=False))
    assert not any("reference" in s.name for s in found)
    assert Stage.PREFIX_REF not in stage_bytes(found)


@pytest.mark.parametrize(("degree", "name"), [(3, "Qwen2.5-VL-7B"), (8, "Qwen2.5-VL-7B"), (0, "Qwen2.5-VL-3B")])
def test_degrees_that_cannot_split_the_heads_name_those_that_can(degree, name):
    with pytest.raises(ValueError, match=rf"train_tp={degree} cannot split {name} .* set one of 1, 2"):
        states(MODELS[name], MemorySettings(train_tp=degree))


def test_a_folder_is_counted_like_the_real_model(parity_folder):
    from rollplex.models.registry import load_hf

    hf = load_hf(str(parity_folder), "float32")
    shape = model_shape(str(parity_folder))
    assert shape.params == sum(p.numel() for p in hf.parameters())
    vision = sum(p.numel() for p in hf.model.visual.parameters())
    assert shape.vision_params == vision
    qkv = sum(p.numel() for n, p in hf.named_parameters() if any(f".{x}_proj." in n for x in "qkv"))
    assert shape.qkv_params == qkv and shape.tied and shape.qkv_bias and not shape.qk_norm


def test_published_sizes_equal_the_transformers_class_counted_on_the_meta_device(tmp_path):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    s = MODELS["Qwen2.5-VL-7B"]
    text = dict(
        hidden_size=s.hidden, num_hidden_layers=s.layers, intermediate_size=s.ffn, num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads, vocab_size=s.vocab, tie_word_embeddings=False,
    )  # fmt: skip
    vision = dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=s.hidden)
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    assert sum(p.numel() for p in model.parameters()) == s.params
    config.save_pretrained(tmp_path)
    assert model_shape(str(tmp_path)).params == s.params


def test_names_of_models_and_gpus():
    assert model_shape("Qwen/Qwen2.5-VL-7B-Instruct") is MODELS["Qwen2.5-VL-7B"]
    with pytest.raises(ValueError, match=r"neither a folder .* nor in the planner's table: Qwen2\.5-VL-3B"):
        model_shape("Qwen2.5-VL-8B")
    assert gpu_of("rtx 4090") is GPUS["RTX4090"]
    with pytest.raises(ValueError, match="gpu='H900' is not in the table: A100"):
        gpu_of("H900")


def test_gpus_from_a_file(tmp_path):
    path = tmp_path / "gpus.yaml"
    path.write_text("X1: {memory_gb: 96, tflops: 500, bandwidth_tb: 4, link_gb: 600, sms: 100}\n")
    assert gpu_of("x1", str(path)).memory == 96e9
    path.write_text("X1: {memory_gb: 96}\n")
    with pytest.raises(ValueError, match="'X1' needs exactly memory_gb, tflops"):
        gpus_of(str(path))
    path.write_text("X1: {memory_gb: -1, tflops: 500, bandwidth_tb: 4, link_gb: 600, sms: 100}\n")
    with pytest.raises(ValueError, match="memory_gb=-1 must be a number above 0"):
        gpus_of(str(path))


@pytest.mark.parametrize("degrees", [(8, 4), (4, 2), (8, 2)])
def test_layout_from_shapes_is_the_layout_from_tensor_names(tmp_path, degrees):
    """The planner counts by arithmetic, rollplex/weights goes through every tensor: per GPU the same bytes."""
    from test_layout import family_config, family_model

    from rollplex.planner.plan import make_plan
    from rollplex.planner.simulate import Placement, Workload
    from rollplex.weights.families import Heads
    from rollplex.weights.layout import plan_layout, shapes_of

    config = family_config("qwen2_5_vl", vocab=512, heads=8, kv=8)
    config.save_pretrained(tmp_path)
    shape, (train_tp, rollout_tp) = model_shape(str(tmp_path)), degrees
    memory = MemorySettings(train_tp=train_tp, rollout_tp=rollout_tp)
    planned = make_plan(
        shape, GPUS["H100"], Placement(train_tp, train_tp, rollout_tp), memory, Workload(prompts=8)
    ).layout
    shapes = {n: (s, torch.bfloat16) for n, (s, _) in shapes_of(family_model(config).named_parameters()).items()}
    named = plan_layout("qwen2_5_vl", shapes, Heads.of(config), rollout_tp, train_tp, vision="data", own=("qkv_proj",))
    norms = 2 * (2 * shape.layers + 1) * shape.hidden  # whole on every GPU
    for gpu in range(named.gpus):
        found = named.paper_bytes(gpu)
        assert found["transpose-compatible"] == planned["strided"] / rollout_tp
        assert found["rebuilt"] == planned["rebuilt"] / rollout_tp
        assert found["same order"] == (planned["same order"] - norms) / rollout_tp + norms
