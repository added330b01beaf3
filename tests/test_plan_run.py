"""A plan of a config against the run of that config: planned bytes are those of the run's ledger."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import make_prompt, picture

from rollplex.cli import RollplexCLI, main
from rollplex.models.registry import split
from rollplex.models.tiny import build_tiny_in_memory
from rollplex.planner.activations import prefix_activations, suffix_activations
from rollplex.planner.command import parser, plan_of
from rollplex.planner.fitting import run_changes
from rollplex.planner.hardware import GPUS
from rollplex.planner.memory import fits
from rollplex.planner.models import MODELS, model_shape
from rollplex.planner.run_memory import OFFLOADABLE, RunSettings, in_config_words, resident, run_states
from rollplex.residency import (
    ACTIVATIONS,
    ACTOR_KV,
    ENGINE_WEIGHTS,
    GRADIENTS,
    KV_POOL,
    MASTERS,
    MOMENTS,
    OLD_KV,
    PARAMETERS,
    REFERENCE,
    REFERENCE_KV,
    SUFFIX,
    VISION,
    Ledger,
    Stage,
)

VISUAL = 16
"""Vision tokens of each prompt of EqualPictures."""


def config_of(folder: Path, root: Path, *, model=None, strategy=None, callbacks=()) -> dict[str, Any]:
    """Four equal prompts a batch, two batches."""
    settings = dict(num_generations=4, max_completion_length=9, learning_rate=1e-3, seed=7) | (model or {})
    return {
        "seed_everything": 0,
        "model": {"class_path": "rollplex.GRPOModule", "init_args": {"model": str(folder)} | settings},
        "data": {
            "class_path": "rollplex.VLMDataModule",
            "init_args": {"task": {"class_path": "runs.EqualPictures"}, "batch_size": 4},
        },
        "trainer": {
            "accelerator": "cpu", "max_steps": 2, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False, "limit_val_batches": 0,
            "default_root_dir": str(root),
            "strategy": {"class_path": "rollplex.RollplexStrategy", "init_args": strategy or {}},
            "callbacks": [{"class_path": f"rollplex.callbacks.{name}", "init_args": args} for name, args in callbacks],
        },
    }  # fmt: skip


def planned_and_run(config: dict[str, Any], root: Path) -> tuple[Ledger, Ledger, Any]:
    """(the plan's ledger, the run's, the module)."""
    path = root / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cli = RollplexCLI(args=["fit", "--config", str(path)])
    assert not [str(w.message) for w in caught if "memory ledger" in str(w.message)]
    tokens = len(next(iter(cli.datamodule.train_dataloader()))[0])
    flags = ["--config", str(path), "--prompt-tokens", str(tokens), "--visual-share", str(VISUAL / tokens)]
    plan = plan_of(parser().parse_args(flags))
    return plan.ledger, cli.trainer.strategy.colocation.watch.ledger, cli.model


def assert_close(planned: Ledger, ran: Ledger, names: set[str]) -> None:
    """Most bytes on the device at once, state by state, within 5 %; and no state that the plan does not know."""
    most = {name: max(row.values()) for name, row in planned.planned().items()}
    seen = {name: size for name, size in ran.run.largest.items() if size}
    assert set(seen) == names
    for name in names:
        assert most[name] == pytest.approx(seen[name], rel=0.05), name


def assert_totals_close(planned: Ledger, ran: Ledger, stages: set[Stage]) -> None:
    """What a stage holds by the plan, without what the run's ledger has no name for."""
    profile = {name: row for name, row in planned.planned().items() if name in ran.run.largest}
    for stage in stages:
        total = sum(row[stage] for row in profile.values())
        assert total == pytest.approx(ran.run.totals()[stage], rel=0.05), stage


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [dict(), dict(layers=3, heads=8, kv_heads=2, hidden_size=256, vision_depth=3)])
def test_saved_activations_are_counted_operation_by_operation(tmp_path, checkpointing, dtype, shape):
    """Within 1 %: what is left out are a few numbers per picture."""
    hf, processor = build_tiny_in_memory(init_std=0.1, seed=1, **shape)
    hf.save_pretrained(tmp_path)
    prompts = [make_prompt(processor, "what is this?", images=[picture(112, 168, seed=i)]) for i in range(2)]
    state = split(hf.to(dtype), prefix_checkpointing=checkpointing).prefix(prompts, grad=True)
    tokens = sum(map(len, prompts))
    visual = 2 * (112 // 14) * (168 // 14) / 4
    planned = prefix_activations(
        model_shape(str(tmp_path)), dtype.itemsize, tokens, visual, checkpointing=checkpointing
    )
    assert planned == pytest.approx(state.saved_bytes, rel=0.01)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [dict(), dict(layers=3, heads=8, kv_heads=2, hidden_size=256)])
def test_activations_of_a_suffix_pass_are_counted_operation_by_operation(tmp_path, checkpointing, dtype, shape):
    hf, processor = build_tiny_in_memory(init_std=0.1, seed=1, **shape)
    hf.save_pretrained(tmp_path)
    model = split(hf.to(dtype), suffix_checkpointing=checkpointing)
    prefix = model.prefix([make_prompt(processor, "what?", images=[picture(56, 56, seed=0)])], grad=True)
    rows, tokens = 3, 20
    ids = torch.full((rows, tokens), 65)
    out = model.suffix(prefix, ids, torch.full((rows,), tokens), temperature=1.0, grad=True)
    planned = suffix_activations(
        model_shape(str(tmp_path)), dtype.itemsize, rows, tokens, checkpointing=checkpointing
    )  # fmt: skip
    assert planned == pytest.approx(out.saved_bytes, rel=0.01)
    assert model.suffix(prefix, ids, torch.full((rows,), tokens), temperature=1.0, grad=False).saved_bytes == 0


def test_serial_run_with_everything_resident(parity_folder, tmp_path):
    config = config_of(parity_folder, tmp_path, model=dict(beta=0.04, prompts_per_pass=2))
    planned, ran, _ = planned_and_run(config, tmp_path)
    names = {PARAMETERS, MOMENTS, GRADIENTS, REFERENCE, KV_POOL, ACTOR_KV, REFERENCE_KV, ACTIVATIONS, SUFFIX}
    assert_close(planned, ran, names)
    assert_totals_close(planned, ran, {Stage.ROLLOUT, Stage.SCORE, Stage.TRAIN, Stage.UPDATE})


def test_bfloat16_run_with_everything_offloaded(parity_folder, tmp_path):
    chunk = 12 * max(model_shape(str(parity_folder)).sizes)
    callbacks = [("PrefillReuse", {}), ("PrefixOverlap", {}), ("PhaseOffload", {"update_chunk_bytes": chunk})]
    model = dict(beta=0.04, dtype="bfloat16", prefix_checkpointing=True)
    config = config_of(parity_folder, tmp_path, model=model, strategy={"admission": "always"}, callbacks=callbacks)
    planned, ran, module = planned_and_run(config, tmp_path)
    # The reference's prefixes are hidden or not, as the window allows: their K/V is compared by the serial run.
    ran.run.largest.pop(REFERENCE_KV)
    assert_close(planned, ran, {PARAMETERS, MASTERS, MOMENTS, GRADIENTS, REFERENCE, KV_POOL, ACTOR_KV, SUFFIX})
    assert_totals_close(planned, ran, {Stage.UPDATE})
    host = module.trainer.callback_metrics["prefix_host_bytes"]
    activations = next(s for s in planned.states if s.name == ACTIVATIONS)
    assert activations.bytes == pytest.approx(float(host), rel=0.05)


@pytest.mark.parametrize("frozen", [False, True])
def test_run_with_one_vision_pass(parity_folder, tmp_path, frozen):
    """Features of all prompts, and the towers' graphs of the first mini-batch, are there before the rollout."""
    model = dict(num_mini_batches=2, prompts_per_pass=2) | ({"freeze": ["vision_tower", "projector"]} if frozen else {})
    engine = {"class_path": "rollplex.engines.TorchEngine", "init_args": {"vision": "shared"}}
    config = config_of(parity_folder, tmp_path, model=model, strategy={"engine": engine})
    planned, ran, _ = planned_and_run(config, tmp_path)
    names = {PARAMETERS, MOMENTS, GRADIENTS, KV_POOL, ACTOR_KV, OLD_KV, VISION, ACTIVATIONS, SUFFIX}
    assert_close(planned, ran, names)
    for stage in (Stage.ROLLOUT, Stage.TRAIN):
        held = ran.recorded()[ACTIVATIONS][Stage.ROLLOUT] if stage is Stage.ROLLOUT else ran.run.largest[ACTIVATIONS]
        assert planned.planned()[ACTIVATIONS][stage] == pytest.approx(held, rel=0.05)
    assert (ran.recorded()[ACTIVATIONS][Stage.ROLLOUT] == 0) == frozen
    features = ran.recorded()[VISION]
    assert planned.planned()[VISION][Stage.ROLLOUT] == pytest.approx(features[Stage.ROLLOUT], rel=0.05)


@pytest.mark.vllm
def test_vllm_run_with_weights_of_its_own(parity_folder, tmp_path):
    pytest.importorskip("vllm")
    engine = {
        "class_path": "rollplex.engines.VLLMEngine",
        "init_args": {"max_model_len": 256, "max_num_seqs": 16, "block_size": 32, "kv_cache_memory_bytes": 2**24},
    }
    config = config_of(parity_folder, tmp_path, strategy={"engine": engine})
    config["trainer"]["max_steps"] = 1
    planned, ran, _ = planned_and_run(config, tmp_path)
    names = {PARAMETERS, MOMENTS, GRADIENTS, ENGINE_WEIGHTS, KV_POOL, ACTOR_KV, ACTIVATIONS, SUFFIX}
    assert_close(planned, ran, names)


# ---- what the command says ----


def said(capsys, *arguments: str) -> str:
    main(["plan", *arguments])
    return " ".join(capsys.readouterr().out.split())


def test_the_plan_of_a_config_says_what_its_run_does(parity_folder, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config_of(parity_folder, tmp_path)))
    out = said(capsys, "--config", str(path))
    assert "Without the callback PhaseOffload nothing leaves the device" in out and "as configured it fits" in out
    path.write_text(yaml.safe_dump(config_of(parity_folder, tmp_path, callbacks=[("PhaseOffload", {})])))
    assert "PhaseOffload: optimizer_moments, masters, reference_weights, kv_pool" in said(capsys, "--config", str(path))
    with pytest.raises(SystemExit, match="--update-chunks plans a cluster, and this plan is of the config's run"):
        said(capsys, "--config", str(path), "--update-chunks", "4")
    assert "weights shared from train TP 1" in said(capsys, "--config", str(path), "--gpus", "2")


def test_a_config_that_does_not_fit_names_the_callback(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    config = config_of(Path("Qwen2.5-VL-3B"), tmp_path, model=dict(dtype="bfloat16"))
    config["trainer"]["accelerator"] = "gpu"
    path.write_text(yaml.safe_dump(config))
    out = said(capsys, "--config", str(path), "--gpu", "L40S")
    assert "as configured it does not fit" in out and "it does with callbacks: PhaseOffload, offload none -> " in out


def random_run(seed: int):
    draw = random.Random(seed)
    model = MODELS[draw.choice(["Qwen2.5-VL-3B", "Qwen2.5-VL-7B", "Qwen3-VL-8B"])]
    settings = RunSettings(
        itemsize=draw.choice([2, 4]), prompts=draw.choice([8, 32, 128]), prompt_tokens=draw.choice([500, 2000, 6000]),
        reference=draw.random() < 0.5, overlap=draw.random() < 0.7, reuse=draw.random() < 0.3,
        prompts_per_pass=draw.choice([1, 4]), engine=draw.choice(["torch", "vllm"]), kv_cache_bytes=draw.choice([4, 16]) * 2**30,
        workspace_gib=2.0, max_completion_length=draw.choice([256, 1024]),
    )  # fmt: skip
    return model, settings, GPUS[draw.choice(["L40S", "A100", "H200"])]


CANNOT = [x for x in range(120) if not fits(run_states(*random_run(x)[:2]), random_run(x)[2])]


def test_advice_for_a_config_makes_it_fit_and_asks_for_nothing_it_does_not_need():
    helped = 0
    for seed in CANNOT:
        model, s, gpu = random_run(seed)
        changes = run_changes(model, s, gpu)
        if changes is None:
            continue
        helped += 1
        after = replace(s, **{c.name: c.new for c in changes})
        assert changes and fits(run_states(model, after), gpu)
        for c in changes:
            assert in_config_words(c.name, c.old, c.new) and getattr(s, c.name) == c.old
            assert not fits(run_states(model, replace(after, **{c.name: c.old})), gpu)
    assert helped >= 20


def test_offload_never_makes_a_stage_larger():
    for seed in range(40):
        model, s, _ = random_run(seed)
        stays = Ledger(run_states(model, resident(s))).planned_totals()
        leaves = Ledger(run_states(model, replace(s, offload=OFFLOADABLE))).planned_totals()
        assert all(leaves[stage] <= stays[stage] for stage in stays) and sum(leaves.values()) < sum(stays.values())
