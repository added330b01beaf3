"""Training runs in which trainer and vLLM engine have tensor-parallel degrees of their own (gloo, this machine's
processes): responses are those of transformers on the gathered weights, before and after updates, and the engine has no
storage but what the layout plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.deepspeed, pytest.mark.distributed]
pytest.importorskip("vllm")
pytest.importorskip("deepspeed")

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def split_folders(tmp_path_factory):
    """(KV heads, family) -> a model that four ranks can share."""
    from rollplex.models.tiny import build_tiny

    root = tmp_path_factory.mktemp("models")

    def get(kv: int = 2, family: str = "qwen2_5_vl") -> Path:
        settings = dict(family=family, init_std=0.1, seed=1, hidden_size=256, heads=8, kv_heads=kv)
        return build_tiny(root / f"{family}-{kv}", **settings)

    return get


def launch(
    folder: Path, model: Path, ranks: int, train_tp: int, rollout_tp: int, stage: int, weights: str = "shared"
) -> tuple[list[dict[str, Any]], list[dict[str, torch.Tensor]]]:
    """Reports and final whole weights of the ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    arguments = [str(a) for a in (folder, model, train_tp, rollout_tp, stage, weights)]
    done = subprocess.run(
        [*launcher, str(HERE / "tp_runs.py"), *arguments], env=environment, cwd=HERE.parent, capture_output=True,
        text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return reports, [torch.load(folder / f"weights{rank}.pt") for rank in range(ranks)]


def check(reports: list[dict[str, Any]], weights: list[dict[str, torch.Tensor]]) -> None:
    """What holds whatever the degrees are."""
    for report in reports:
        assert [all(greedy) for greedy in report["greedy"]] == [True, True, True]  # before, after one and two updates
        assert report["tokens"][0] != report["tokens"][2]
        assert report["hidden"] > 0 and report["mismatches"] == []
        assert [s["reward"] for s in report["steps"]] == [s["reward"] for s in reports[0]["steps"]]
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])


@pytest.mark.parametrize(
    ("ranks", "train_tp", "rollout_tp", "stage"),
    [
        (2, 2, 1, 2),
        *(
            pytest.param(*degrees, marks=pytest.mark.slow)
            for degrees in ((2, 1, 2, 2), (2, 2, 2, 2), (4, 4, 2, 2), (4, 2, 4, 1), (4, 2, 1, 2))
        ),
    ],
)
def test_degrees_of_trainer_and_engine_are_independent(split_folders, tmp_path, ranks, train_tp, rollout_tp, stage):
    reports, weights = launch(tmp_path, split_folders(max(2, train_tp)), ranks, train_tp, rollout_tp, stage)
    check(reports, weights)
    assert (
        f"train TP {train_tp}, rollout TP {rollout_tp}" in (tmp_path / "output.txt").read_text()
    )  # as every run says it
    for report in reports:
        classes = report["classes"]
        # The storage that there is, counted by address, is what the plan calls fetched or rebuilt; no second copy.
        assert report["own_bytes"] == report["gathered_bytes"] + classes["rebuild"]
        assert report["own_bytes"] < report["engine_bytes"] / 2
        assert (report["gathered_bytes"] > 0) == (train_tp > rollout_tp)
        # Rebuilt tensors are filled without their padding.
        for copied in report["copied"]:
            assert report["gathered_bytes"] <= copied <= report["own_bytes"]
        assert report["seen"] == classes and report["misplaced"] == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava_onevision", "internvl"])
@pytest.mark.parametrize(("train_tp", "rollout_tp"), [(1, 2), (2, 1), (2, 2)])
def test_other_families(split_folders, tmp_path, family, train_tp, rollout_tp):
    reports, weights = launch(tmp_path, split_folders(2, family), 2, train_tp, rollout_tp, 2)
    check(reports, weights)
    for report in reports:
        assert report["own_bytes"] == report["gathered_bytes"] + report["classes"]["rebuild"]
        assert report["own_bytes"] < report["engine_bytes"] / 2
        assert (report["gathered_bytes"] > 0) == (train_tp > rollout_tp)


@pytest.mark.slow
@pytest.mark.parametrize(("train_tp", "rollout_tp"), [(2, 1), (1, 2)])
def test_shared_weights_are_the_copied_ones(split_folders, tmp_path, train_tp, rollout_tp):
    """The plain twin: every weight gathered and copied after each update."""
    found = {}
    for kind in ("shared", "copied"):
        (tmp_path / kind).mkdir()
        found[kind] = launch(tmp_path / kind, split_folders(), 2, train_tp, rollout_tp, 2, kind)
        check(*found[kind])
    for shared, copied in zip(found["shared"][0], found["copied"][0], strict=True):
        assert shared["tokens"] == copied["tokens"]
        assert copied["own_bytes"] >= shared["engine_bytes"] > 2 * shared["own_bytes"]
        assert min(copied["copied"]) >= shared["engine_bytes"]


@pytest.mark.slow
def test_an_engine_of_two_ranks_has_merged_adapters(split_folders, tmp_path):
    """Of two trainers that share it, each with all weights."""
    reports, weights = launch(tmp_path, split_folders(), 2, 1, 2, 2, "lora")
    check(reports, weights)
    assert all(step["kl"] > 0 for report in reports for step in report["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_engines_share_all_weights_but_those_with_adapters(split_folders, tmp_path, stage):
    """Stage 3: with the copy that is gathered for them."""
    reports, weights = launch(tmp_path, split_folders(), 2, 1, 1, stage, "lora_shared")
    check(reports, weights)
    assert all(0 < min(report["copied"]) for report in reports)
    if stage == 2:
        assert all(max(report["copied"]) == report["own_bytes"] < report["trainer_bytes"] for report in reports)


@pytest.mark.slow
def test_degrees_draw_the_same_further_groups(split_folders, tmp_path):
    """dynamic_sample: trainers that share an engine and engines that share a trainer go through the same rounds."""
    found = {}
    for degrees in ((1, 1), (1, 2), (2, 1), (2, 2)):
        folder = tmp_path / "-".join(map(str, degrees))
        folder.mkdir()
        found[degrees] = launch(folder, split_folders(), 2, *degrees, 2, "dynamic")
        check(*found[degrees])
    plain = found[1, 1][0][0]["steps"]
    assert all(step["groups_kept"] == 4 and step["groups_resampled"] > 0 for step in plain)
    for reports, _ in found.values():
        for own, other in zip(reports[0]["steps"], plain, strict=True):
            for name in ("groups_kept", "groups_dropped", "groups_resampled", "resample_rounds"):
                assert own[name] == other[name], name
        for name in ("reward", "loss", "grad_norm"):  # of the first step: later weights differ by rounding
            assert reports[0]["steps"][0][name] == pytest.approx(plain[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_each_data_parallel_rank_has_an_engine_of_its_own(split_folders, tmp_path, stage):
    reports, weights = launch(tmp_path, split_folders(), 2, 1, 1, stage)
    check(reports, weights)
    assert [report["own_bytes"] for report in reports] == [0, 0]
    assert reports[0]["tokens"] != reports[1]["tokens"]  # other prompts


@pytest.mark.slow
def test_vllm_gets_the_features_of_sharded_parameters(split_folders, tmp_path):
    """ZeRO-3 and `vision: shared`: the trainer's tower is run once for vLLM, which has none, and for the actor."""
    reports, weights = launch(tmp_path, split_folders(), 2, 1, 1, 3, "vision")
    check(reports, weights)
    # The reference has a tower of its own: it is not frozen.
    assert [step["vision_passes"] for step in reports[0]["steps"]] == pytest.approx([2.0, 2.0])
