"""scripts/gpu_check.py on a CPU: the same code as on a GPU, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from gpu_check import SCHEDULES, SHAPES, Result, config_of, faults

GOOD = Result("serial", responses=[[1, 2], [3]], norms=[1.0, 2.0], weights={"w": torch.ones(2)})


def test_every_schedule_runs_and_equals_serial(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--shapes", "tiny", "--json", str(out)]
    done = subprocess.run([*command, "--steps", "3"], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed in" in done.stdout
    result = json.loads(out.read_text())["tiny"]
    assert tuple(result["rows"]) == SCHEDULES
    assert not any(result["faults"].values())
    rows = result["rows"]
    assert rows["overlap"]["overlap_efficiency"] > 0 == rows["serial"]["overlap_efficiency"]
    assert rows["reuse_streaming"]["overlap_efficiency"] is None  # no separate prefix pass is left
    assert all(row["replays"] > row["captures"] > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(responses=[[1, 2], [4]]), "1 of 2 responses"),
        (dict(norms=[1.0, 2.1]), "gradient norm of step 2: 2.1 against 2"),
        (dict(norms=[float("nan"), 2.0]), "gradient norm of step 1: nan"),
        (dict(finite=False), "weights are not finite"),
        (dict(weights={"w": torch.tensor([1.0, 1.0000001])}), "1 of 1 parameters differ in their bits, w first"),
    ],
)
def test_each_fault_is_found(change, message):
    assert faults(GOOD, GOOD, 0.02) == []
    assert any(message in line for line in faults(GOOD, replace(GOOD, **change), 0.02))


@pytest.mark.parametrize(("name", "billions"), [("3b", (3.5, 4.0)), ("7b", (8.0, 8.5))])
def test_shapes_have_the_published_sizes(name, billions):
    from transformers import Qwen2_5_VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config_of(SHAPES[name]))
    count = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions[0] < count < billions[1]
    assert (model.lm_head.weight is model.model.language_model.embed_tokens.weight) == SHAPES[name].tied
    assert sum(
        model.config.text_config.rope_parameters["mrope_section"]
    ) * 2 == model.config.text_config.hidden_size // (model.config.text_config.num_attention_heads)
