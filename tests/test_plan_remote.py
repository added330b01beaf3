"""Plans of configs whose engine has devices of its own, against runs of them: nothing of it is on the trainer's, and its
own hold what the plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_plan_run import assert_close, assert_totals_close, config_of, planned_and_run

from rollplex.cli import main
from rollplex.phases import PhaseCallback
from rollplex.planner.memory import MemorySettings, states
from rollplex.planner.models import model_shape
from rollplex.residency import (
    ACTIVATIONS,
    ACTOR_KV,
    ENGINE_WEIGHTS,
    GRADIENTS,
    KV_POOL,
    MOMENTS,
    PARAMETERS,
    SUFFIX,
    Stage,
)

HERE = Path(__file__).resolve().parent
TORCH, VLLM = "rollplex.engines.TorchEngine", "rollplex.engines.VLLMEngine"


def remote(kind: str = TORCH, **inner: Any) -> dict[str, Any]:
    engine = {"class_path": kind, "init_args": inner}
    return {"class_path": "rollplex.engines.RemoteEngine", "init_args": {"threads": 1, "engine": engine}}


class AskMemory(PhaseCallback):
    """What the engine holds on its own device after the last step."""

    found: dict[str, int]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        type(self).found = trainer.strategy.colocation.lane.call(lambda engine: engine.memory())


def planned(config: dict[str, Any], folder: Path, capsys, *flags: str) -> dict[str, Any]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    main(["plan", "--config", str(path), "--json", *flags])
    return json.loads(capsys.readouterr().out)


def test_a_run_with_a_remote_engine_holds_what_its_plan_says(parity_folder, tmp_path, capsys):
    config = config_of(parity_folder, tmp_path, strategy={"engine": remote()})
    config["trainer"]["callbacks"].append({"class_path": "test_plan_remote.AskMemory"})
    plan, ran, _ = planned_and_run(config, tmp_path)
    assert_close(plan, ran, {PARAMETERS, MOMENTS, GRADIENTS, ACTOR_KV, ACTIVATIONS, SUFFIX})
    assert_totals_close(plan, ran, {Stage.ROLLOUT, Stage.TRAIN, Stage.UPDATE})
    there = planned(config, tmp_path, capsys)["engine_gpus"]
    assert (there["engines"], there["gpus"]) == (1, 1)
    assert there["weights_gib"] * 2**30 == pytest.approx(AskMemory.found[ENGINE_WEIGHTS], rel=0.05)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("degree", [1, 2])
def test_the_engines_own_devices_hold_what_the_plan_says(tmp_path, capsys, degree):
    pytest.importorskip("vllm")
    from rollplex.models.tiny import build_tiny

    folder = build_tiny(tmp_path / "model", init_std=0.1, seed=1, hidden_size=256, heads=8, kv_heads=2, layers=4)
    engine = remote(
        VLLM,
        max_model_len=256,
        max_num_seqs=16,
        block_size=32,
        kv_cache_memory_bytes=2**24,
        tensor_parallel_size=degree,
    )
    config = config_of(folder, tmp_path, strategy={"engine": engine})
    config["trainer"]["max_steps"] = 1
    config["trainer"]["callbacks"].append({"class_path": "test_plan_remote.AskMemory"})
    plan, ran, _ = planned_and_run(config, tmp_path)
    assert_close(plan, ran, {PARAMETERS, MOMENTS, GRADIENTS, ACTOR_KV, ACTIVATIONS, SUFFIX})
    there = planned(config, tmp_path, capsys)["engine_gpus"]
    assert (there["engines"], there["gpus"]) == (1, degree)
    assert there["kv_pool_gib"] * 2**30 == AskMemory.found[KV_POOL] == 2**24
    assert there["weights_gib"] * 2**30 == pytest.approx(AskMemory.found[ENGINE_WEIGHTS], rel=0.1)


# ---- a trainer of several ranks ----


def split_config(folder: Path, root: Path, engine: dict[str, Any]) -> dict[str, Any]:
    config = config_of(folder, root, model={"dtype": "bfloat16"})
    strategy = {"class_path": "rollplex.RollplexDeepSpeedStrategy", "init_args": {"train_tp": 2, "engine": engine}}
    config["trainer"] |= {"devices": 2, "strategy": strategy}
    return config


def test_a_split_trainers_plan_has_nothing_of_an_engine_elsewhere(parity_folder, tmp_path, capsys):
    shape = model_shape("Qwen2.5-VL-7B")
    inner = {"kv_cache_memory_bytes": 2**34, "tensor_parallel_size": 2}
    config = split_config(Path("Qwen2.5-VL-7B"), tmp_path, remote(VLLM, **inner))
    found = planned(config, tmp_path, capsys)
    weights = 2 * (shape.language_params / 2 + shape.vision_params)
    assert found["states_gib"]["actor weights"] * 2**30 == pytest.approx(weights)
    assert found["states_gib"]["rollout KV pool"] == 0 and not any("layout" in name for name in found["states_gib"])
    assert found["engine_gpus"] == {
        "engines": 2, "gpus": 2, "weights_gib": pytest.approx(shape.params / 2**30), "kv_pool_gib": 16.0,
    }  # fmt: skip
    main(["plan", "--config", str(tmp_path / "config.yaml"), "--gpu", "H100"])
    said = " ".join(capsys.readouterr().out.split())
    assert "the engine has GPUs of its own (2 x 2, besides the trainer's). Each holds weights" in said
    assert "it fits" in said and "weights shared" not in said and "share one copy" not in said
    config["trainer"]["strategy"]["init_args"]["engine"] = remote(VLLM, kv_cache_memory_bytes=2**38)
    main(["plan", "--config", str(write(config, tmp_path)), "--gpu", "H100"])
    said = " ".join(capsys.readouterr().out.split())
    assert "it does not fit: set the engine's kv_cache_memory_bytes or max_num_seqs lower" in said


def write(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.distributed
def test_a_split_trainer_sends_whole_weights_and_holds_its_part_alone(tmp_path):
    """The run of such a config: what the engines sample is transformers', and no rank has a second copy."""
    pytest.importorskip("deepspeed")
    from rollplex.models.tiny import build_tiny

    model = build_tiny(tmp_path / "model", init_std=0.1, seed=1, hidden_size=256, heads=8, kv_heads=2, layers=4)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [*launcher, str(HERE / "remote_tp_run.py"), str(tmp_path), str(model)], env=environment, cwd=HERE.parent,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    shape = model_shape(str(model))
    (weights,) = (
        s.bytes for s in states(shape, MemorySettings(train_tp=2, remote_engine=True)) if s.name == "actor weights"
    )
    # Float32 in place of bfloat16; embeddings and head are whole on each rank, and the plan splits them.
    split_by_plan = shape.vocab * shape.hidden * (1 if shape.tied else 2) / 2
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert [all(equal) for equal in found["greedy"]] == [True] * 3 and found["tokens"][0] != found["tokens"][2]
        assert found["mismatches"] == [] and not found["largest"].get(ENGINE_WEIGHTS)
        assert found["largest"][PARAMETERS] == pytest.approx(2 * weights + 4 * split_by_plan, rel=0.05)
        assert found["there"][ENGINE_WEIGHTS] == pytest.approx(4 * shape.params, rel=0.05)
