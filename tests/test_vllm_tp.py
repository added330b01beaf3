"""vLLM split over processes of this machine (gloo): ranks agree, tokens equal transformers', weights are the trainer's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex import RollplexStrategy
from rollplex.engines import VLLMEngine

pytestmark = [pytest.mark.vllm, pytest.mark.distributed]
pytest.importorskip("vllm")

HERE = Path(__file__).resolve().parent
BAR = 4e-5
"""Of log-probabilities (nats, down to -11), float32: at width 256 and std 0.1 layers magnify the rounding of sums that are
cut in two, to 1e-5 or 2e-5 for the worst of some hundred tokens; the processor decides. A wrong slice is off by 1."""


def launch(folder: Path, ranks: int, weights: str, vision: str, family: str) -> list[dict]:
    """Reports of the ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [*launcher, str(HERE / "tp_engine.py"), str(folder), weights, vision, family], env=environment, cwd=HERE.parent,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "weights", "vision", "family"),
    [
        (2, "shared", "engine", "qwen2_5_vl"), (2, "copied", "engine", "qwen2_5_vl"),
        (2, "shared", "shared", "qwen2_5_vl"), (4, "shared", "engine", "qwen2_5_vl"),
        *(
            pytest.param(ranks, "shared", vision, family, marks=pytest.mark.slow)
            for family in ("llava_onevision", "internvl")
            for ranks, vision in ((2, "engine"), (2, "shared"), (4, "engine"))
        ),
    ],
)  # fmt: skip
def test_ranks_agree_and_equal_the_trainer(tmp_path, ranks, weights, vision, family):
    reports = launch(tmp_path, ranks, weights, vision, family)
    (own,) = {report["shared_memory"] for report in reports}
    assert len(own) == 16, "the ranks' shared memory has the name that every run's has"
    for report in reports:
        for state in ("before", "after"):
            assert all(report[state]["greedy_equal"]), (report["rank"], state)
            assert report[state]["logps_error"] < BAR, report[state]["logps_error"]
            assert report[state]["sampled"] == reports[0][state]["sampled"]
        assert report["before"]["sampled"] != report["after"]["sampled"]
        assert report["aborted"] == reports[0]["aborted"] and max(report["aborted"]) > 1
        assert report["again"] and report["pointers_kept"]
        if weights == "shared":
            classes = report["classes"]
            assert classes["strided"] > 0 and classes["blocks"] > 0
            # Only the last rank's vocabulary reaches into a padding that the trainer has no rows for.
            assert report["own_bytes"] == classes["rebuild"]
            assert report["copied_bytes"] <= classes["rebuild"] and (classes["rebuild"] > 0) == (
                report["copied_bytes"] > 0
            )
            assert sum(classes.values()) > 10 * classes["rebuild"]
        else:
            assert report["own_bytes"] > 0 < report["copied_bytes"]


def test_a_degree_without_its_processes_is_refused(parity_folder):
    from rollplex.engines import vllm_patches

    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs as many processes, but 1 was started"):
        vllm_patches.check_processes(2)
    with pytest.raises(ValueError, match="tensor_parallel_size=0 must be at least 1"):
        VLLMEngine(tensor_parallel_size=0)


def test_a_strategy_of_one_device_refuses_a_split_engine(parity_folder, tmp_path):
    from runs import run

    strategy = RollplexStrategy(VLLMEngine(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="tensor_parallel_size=2 of the engine needs a strategy over several devices"):
        run(parity_folder, tmp_path, trainer={"strategy": strategy})
