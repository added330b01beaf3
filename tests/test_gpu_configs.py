"""The configs for real GPUs, as far as a machine without one can tell: parsed, planned, and their numbers fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import picture
from lightning.pytorch.cli import instantiate_class

import rollplex
from rollplex import GRPOModule, Rollout, VLMDataModule
from rollplex.cli import main
from rollplex.engines import VLLMEngine
from rollplex.planner.configs import from_config
from rollplex.planner.models import MODELS
from rollplex.tasks.files import FileTask

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SEVEN = [path for path in CONFIGS if "7b" in path.name]
SHAPE = MODELS["Qwen2.5-VL-7B"]


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch):
    """Where commands are run."""
    monkeypatch.chdir(ROOT)


def changed(written: Any, parsed: Any, where: str = "") -> list[str]:
    """Settings of a YAML that the parser does not give back."""
    if isinstance(written, dict):
        missing = [f"{where}.{k}" for k in written if not isinstance(parsed, dict) or k not in parsed]
        return missing or [f for k, v in written.items() for f in changed(v, parsed[k], f"{where}.{k}")]
    if isinstance(written, list) and isinstance(parsed, list) and len(written) == len(parsed):
        return [f for i, (a, b) in enumerate(zip(written, parsed, strict=True)) for f in changed(a, b, f"{where}[{i}]")]
    return [] if written == parsed else [where]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_parses(path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(path), "--print_config"])
    assert end.value.code == 0
    assert changed(yaml.safe_load(path.read_text()), yaml.safe_load(capsys.readouterr().out)) == []


def plan(capsys, path: Path, *arguments: str) -> dict[str, Any]:
    main(["plan", "--config", str(path), "--json", *arguments])
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_the_7b_config_of_8_gpus_fits_80_gb_by_phase_and_not_with_everything_resident(gpu, capsys):
    found = plan(capsys, SEVEN[1], "--gpu", gpu)
    assert found["model"] == "Qwen2.5-VL-7B" and found["gpu_gib"] == pytest.approx(74.5, abs=0.1)
    assert found["fits"] and max(found["stages_gib"].values()) < found["gpu_gib"]
    assert found["naive_gib"] > found["gpu_gib"]  # as their first lines say
    states = found["states_gib"]
    assert states["kv_pool"] == 8.0
    boundary = 16 * (2048 * SHAPE.kv_bytes_per_token + 2 * SHAPE.hidden) / 2**30
    assert states["actor_prefix_kv"] == pytest.approx(boundary)
    assert states["optimizer_moments"] + states["masters"] == pytest.approx(92.7 / 8, abs=0.1)  # ZeRO-2
    assert states["gradients"] == pytest.approx(15.4, abs=0.1)  # whole, until the one reduction
    assert "reference_weights" in states


def test_the_32b_config_of_32_gpus_is_the_papers_layout_and_fits_by_phase(capsys):
    """Its model folder is not there: the planner knows the name."""
    path = ROOT / "configs" / "qwen2_5_vl_32b_32gpu.yaml"
    found = plan(capsys, path, "--model", "Qwen2.5-VL-32B", "--gpu", "H800")
    assert found["fits"] and max(found["stages_gib"].values()) < 0.8 * found["gpu_gib"] < found["naive_gib"]
    place = from_config(str(path))
    assert (place["gpus"], place["train_tp"], place["rollout_tp"]) == (32, 8, 4)
    states = found["states_gib"]
    assert states["float32 masters and moments"] == pytest.approx(53.5 / 4, abs=0.1)  # ZeRO-2 over 4 replicas
    assert states["actor weights rebuilt for the trainer"] == pytest.approx(1.09, abs=0.02)
    engine = yaml.safe_load(path.read_text())["trainer"]["strategy"]["init_args"]["engine"]["init_args"]
    shape, prompts = MODELS["Qwen2.5-VL-32B"], 16  # of a replica
    tokens = prompts * 8 * 512 + prompts * 2048
    assert (
        tokens * shape.kv_bytes_per_token / 4 <= engine["kv_cache_memory_bytes"]
        and engine["max_num_seqs"] == prompts * 8
    )


@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_the_7b_config_of_one_gpu_fits_80_gb_because_of_phase_offload(gpu, capsys, tmp_path):
    """Its model folder is not there: the planner knows the name."""
    model = ("--model", "Qwen2.5-VL-7B", "--gpu", gpu)
    found = plan(capsys, SEVEN[0], *model)
    assert found["fits"] and max(found["stages_gib"].values()) < 0.7 * found["gpu_gib"] < found["naive_gib"]
    states = found["states_gib"]
    assert states["kv_pool"] == 8.0 and states["optimizer_moments"] + states["masters"] == pytest.approx(92.7, abs=0.1)
    content = yaml.safe_load(SEVEN[0].read_text())
    callbacks = content["trainer"]["callbacks"]
    content["trainer"]["callbacks"] = [c for c in callbacks if "PhaseOffload" not in c["class_path"]]
    (tmp_path / "resident.yaml").write_text(yaml.safe_dump(content))
    resident = plan(capsys, tmp_path / "resident.yaml", *model)
    assert not resident["fits"] and "PhaseOffload" in " ".join(resident["changes"])


def test_parts_of_an_update_that_the_run_would_refuse_are_refused_without_its_weights(tmp_path):
    config = tmp_path / "small_parts.yaml"
    config.write_text(SEVEN[0].read_text().replace("update_chunk_bytes: 7000000000", "update_chunk_bytes: 1000000000"))
    with pytest.raises(SystemExit, match=f"set at least {12 * SHAPE.vocab * SHAPE.hidden}"):
        main(["plan", "--config", str(config), "--gpu", "L40S"])


def test_places_come_from_the_config_and_flags_override_them(capsys, tmp_path):
    one, eight = SEVEN
    assert (from_config(str(one))["gpus"], from_config(str(eight))["gpus"]) == (1, 8)
    text = eight.read_text().replace(
        "class_path: rollplex.RollplexDeepSpeedStrategy", "class_path: rollplex.RollplexDDPStrategy"
    )
    assert "RollplexDDPStrategy" in text
    whole = tmp_path / "whole.yaml"
    whole.write_text(text.replace("      stage: 2\n", ""))
    for path, ranks in ((eight, 8), (whole, 1)):
        found = plan(capsys, path)["states_gib"]
        assert found["optimizer_moments"] + found["masters"] == pytest.approx(92.7 / ranks, abs=0.1)
    with pytest.raises(SystemExit, match=r"--shard-optimizer plans a cluster, .* the strategy says it"):
        plan(capsys, whole, "--shard-optimizer")
    per_token = SHAPE.kv_bytes_per_token / 2**30
    longer = plan(capsys, eight, "--boundary-tokens", "65536")["states_gib"]["actor_prefix_kv"]
    assert longer == pytest.approx(65536 * per_token, rel=0.01)
    two = plan(capsys, eight, "--gpus", "2")["states_gib"]["actor_prefix_kv"]
    assert two == pytest.approx(64 * 2048 * per_token, rel=0.01)
    split = plan(capsys, eight, "--train-tp", "2")["states_gib"]  # a cluster as the paper has it
    assert split["float32 masters and moments"] == pytest.approx(92.7 / 8, rel=0.1)


@pytest.mark.parametrize("path", SEVEN, ids=lambda path: path.stem)
def test_numbers_of_a_7b_config_belong_together(path):
    content = yaml.safe_load(path.read_text())
    model, data = content["model"]["init_args"], content["data"]["init_args"]
    strategy, options = (content["trainer"]["strategy"][key] for key in ("class_path", "init_args"))
    engine = options.pop("engine")["init_args"]
    VLLMEngine(**engine)
    getattr(rollplex, strategy.removeprefix("rollplex."))(**options)
    GRPOModule(**model)  # settings that clash are refused here
    prompts = data["batch_size"] // content["trainer"]["devices"]
    rows, length, prompt = prompts * model["num_generations"], model["max_completion_length"], data["max_prompt_length"]
    assert engine["max_model_len"] == prompt + length and engine["max_num_seqs"] >= rows
    # All responses at once, a group's prompt once.
    assert (rows * length + prompts * prompt) * SHAPE.kv_bytes_per_token <= engine["kv_cache_memory_bytes"]
    assert prompts * prompt * SHAPE.kv_bytes_per_token <= options["prefix_budget_bytes"]
    assert data["max_pixels"] // 28**2 < prompt


# ---- their task ----


@pytest.mark.parametrize("path", SEVEN, ids=lambda path: path.stem)
def test_their_task_reads_rows_and_rewards_the_tagged_answer(path, tmp_path, tiny_processor):
    (tmp_path / "images").mkdir()
    picture(56, 84).save(tmp_path / "images" / "1.png")
    row = {"problem": "<image>How long is AB?", "images": ["images/1.png"], "answer": "12 cm"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    options = yaml.safe_load(path.read_text())["data"]["init_args"]["task"]["init_args"]
    rewards = [instantiate_class((), reward) for reward in options.pop("rewards")]
    files = {"path": str(tmp_path / "train.jsonl"), "validation_path": None}
    task = FileTask(**options | files, rewards=rewards)
    data = VLMDataModule(task, batch_size=1, on_bad_row="error").attach(tiny_processor)
    data.setup("fit")
    ((prompt,),) = list(data.train_dataloader())
    assert len(prompt.images) == 1 and "How long is AB?\nThink step by step" in prompt.text
    for text, expected in (
        ("AB is <answer>12 CM</answer>", [1.0, 1.0]),
        ("AB is <answer>13 cm</answer>", [0.0, 1.0]),
        ("12 cm", [0.0, 0.0]),
    ):
        response = Rollout(0, 0, torch.tensor([1]), torch.tensor([-1.0]), text, "stop", 0)
        assert [reward.score(prompt.sample, response) for reward in rewards] == expected
