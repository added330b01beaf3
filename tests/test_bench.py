"""scripts/bench_step.py: the work is the same for all, the counts and the arithmetic of the report are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import bench_step
from bench.counts import ForwardCounts
from bench.gate import Missing
from bench.report import ratios, summary
from bench.workload import MODELS, WORKLOADS, Workload, grid, reward_of

# ---- the workload ----------------------------------------------------------------------------------------------------


def test_fixed_lengths():
    assert Workload(G=3, R=17).lengths_of(5) == [17, 17, 17]


def test_lognormal_lengths_have_the_mean_and_sigma_and_follow_the_row_alone():
    w = Workload(lengths="lognormal", sigma=0.9, mean=64.0, G=8)
    rows = [w.lengths_of(row) for row in range(500)]
    lengths = np.array(rows).ravel()
    assert abs(lengths.mean() / 64 - 1) < 0.06
    assert abs(np.log(lengths).std() - 0.9) < 0.06
    assert lengths.min() >= 1 and lengths.max() <= w.max_length == 384
    assert w.lengths_of(17) == rows[17]
    assert Workload(lengths="lognormal", seed=1).lengths_of(17) != rows[17]


def test_steps_have_prompts_of_their_own():
    w = Workload(B=4, lengths="lognormal")
    assert [list(w.rows_of(k)) for k in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert w.tokens_of(1) == sum(sum(w.lengths_of(row)) for row in (4, 5, 6, 7))


@pytest.mark.parametrize("tokens", [16, 64, 500, 1000])
def test_picture_gives_exactly_the_visual_tokens(tokens, tiny_processor):
    w = Workload(visual_tokens=tokens)
    out = tiny_processor.image_processor(w.picture(3), return_tensors="pt")
    assert int(out["image_grid_thw"].prod()) // 4 == tokens


@pytest.mark.parametrize("tokens", [997, 1500, 3, 1290])
def test_impossible_visual_tokens_are_refused(tokens):
    with pytest.raises(ValueError, match=f"visual_tokens={tokens} "):
        Workload(visual_tokens=tokens)


def test_grid_is_the_squarest():
    assert grid(64) == (8, 8) and grid(500) == (20, 25) and grid(1000) == (25, 40)


def test_prompts_have_one_length(tiny_processor):
    w = Workload()
    assert len({len(tiny_processor.tokenizer(w.prompt_text(row))["input_ids"]) for row in (0, 7, 123456)}) == 1


def test_reward_has_spread_and_is_deterministic():
    random = np.random.default_rng(0)
    rewards = [reward_of(random.integers(0, 256, 16).tolist()) for _ in range(8)]
    assert len(set(rewards)) == 8 and all(0 <= r <= 1 for r in rewards)
    assert reward_of([1, 2, 3]) == reward_of([1, 2, 3])


@pytest.mark.parametrize(("name", "millions"), [("tiny", 1.2), ("small", 27.0), ("medium", 60.0)])
def test_model_sizes(name, millions):
    import torch

    from rollplex.models.tiny import FAMILIES, TinySettings

    settings = TinySettings(**MODELS[name])
    family = FAMILIES[settings.family]
    with torch.device("meta"):
        model = family.model_class()(family.config(settings))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.1)


def test_named_workloads_are_workloads():
    for _, changes in WORKLOADS.values():
        Workload(**changes)


# ---- counting --------------------------------------------------------------------------------------------------------


def test_prompt_tokens_are_counted_by_what_a_pass_does():
    counts = ForwardCounts(patches_per_picture=8, prompt_tokens=10)
    counts.text(4, 12, None)  # full sequences
    counts.text(4, 1, None)  # a decode step
    counts.text(2, 10, "RecordPrefix")
    counts.text(4, 20, "ReadPrefix")  # responses longer than the prompt
    counts.vision(16)
    got = counts.result()
    assert got["prompt_tokens"] == 4 * 10 + 2 * 10
    assert got["language_tokens"] == 48 + 4 + 20 + 80
    assert got["pictures"] == 2 and got["vision_calls"] == 1


# ---- the report ------------------------------------------------------------------------------------------------------


def rounds(**steps):
    """Rounds from each contender's step times."""
    n = len(next(iter(steps.values())))
    return [
        {
            "load": 1.0,
            "others": 0.0,
            "steps": {name: {"step": times[i], "decode": times[i] / 2} for name, times in steps.items()},
        }
        for i in range(n)
    ]


def test_ratios_are_within_rounds():
    """A machine that slows down over the run must not show in the ratio: medians of times would give 2/4."""
    got = ratios(
        rounds(serial=[2.0, 4.0, 8.0], overlap=[1.0, 2.0, 4.0], trl=[6.0, 8.0, 24.0]), ["overlap", "serial", "trl"]
    )
    by_pair = {(r["of"], r["over"]): r for r in got}
    assert by_pair["serial", "overlap"] == {"of": "serial", "over": "overlap", "median": 2.0, "min": 2.0, "max": 2.0}
    assert by_pair["trl", "serial"]["median"] == 3.0
    assert (by_pair["trl", "overlap"]["min"], by_pair["trl", "overlap"]["max"]) == (4.0, 6.0)
    assert len(got) == 3


def test_summary():
    got = summary(rounds(serial=[2.0, 4.0, 3.0], overlap=[3.0, 3.0, 3.0]), ["serial", "overlap"])
    assert (got["serial"]["step"], got["serial"]["step_min"], got["serial"]["step_max"]) == (3.0, 2.0, 4.0)
    assert got["overlap"]["decode_slowdown"] == 0.0 and got["serial"]["decode_slowdown"] is None
    assert got["serial"]["overlap_efficiency"] is None


def test_lane_details():
    from bench.ours import lane_details

    from rollplex.timeline import PHASES, ROLLOUT_LANE, TRAIN_LANE, Timeline

    line = Timeline()
    line.add(ROLLOUT_LANE, "prefill", 0.0, 1.0)
    line.add(ROLLOUT_LANE, "decode", 1.0, 1.5)
    line.add(ROLLOUT_LANE, "decode", 1.5, 2.5)
    line.add(ROLLOUT_LANE, "decode", 4.0, 5.0)
    line.add(TRAIN_LANE, "act_prefix", 1.6, 3.6, hidden=True)
    line.add(TRAIN_LANE, "ref_prefix", 5.0, 6.0, hidden=False)
    line.add(TRAIN_LANE, "act_suffix", 6.0, 7.0, hidden=False)
    line.add(PHASES, "rollout", 0.0, 5.0)
    line.add(PHASES, "update", 7.5, 8.0)
    got = lane_details(line, 9.0)
    assert got["prefix"] == pytest.approx(3.0) and got["prefix_hidden"] == pytest.approx(2.0)
    assert got["decode"] == pytest.approx(2.5) and got["decode_steps"] == 3
    assert got["decode_beside"] == pytest.approx(1.0) and got["decode_alone"] == pytest.approx(0.75)
    # Nothing works in 3.6..4.0, 7.0..7.5 and in one second before the first span or after the last.
    assert got["overhead"] == pytest.approx(0.4 + 0.5 + 1.0)


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*arguments, folder=None):
    models = ["--models", str(folder)] if folder else []
    line = [sys.executable, "scripts/bench_step.py", *arguments, *models]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=580)


def test_list_workloads(capsys):
    assert bench_step.main(["--list-workloads"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in WORKLOADS) and "--visual-tokens 64" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--G", "1"], "G=1 must be at least 2"),
        (["--visual-tokens", "997"], "visual_tokens=997"),
        (["--repeats", "0"], "--repeats 0 must be at least 1"),
        (["--check", "--set", "beta"], "NAME=VALUE"),
        (["--check", "--set", "beta=x"], "not JSON"),
    ],
)
def test_bad_arguments_are_explained(arguments, words, capsys, tmp_path):
    assert bench_step.main([*arguments, "--models", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_wait_quiet_returns_when_nobody_else_works_or_when_its_time_is_up(monkeypatch):
    clock, busy = [0.0], [0.0]
    load = {"cpus": 1.0, "until": 60.0}

    def sleep(seconds):
        clock[0] += seconds
        busy[0] += seconds * (load["cpus"] if clock[0] <= load["until"] else 0.01)

    monkeypatch.setattr(bench_step, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    monkeypatch.setattr(bench_step, "busy_seconds", lambda: busy[0])
    bench_step.wait_quiet(600.0)
    assert 60 < clock[0] <= 64
    load["until"] = float("inf")
    bench_step.wait_quiet(30.0)
    assert 90 < clock[0] <= 96
    before = clock[0]
    bench_step.wait_quiet(0.0)
    assert clock[0] == before


def test_a_stopped_run_keeps_its_rounds(monkeypatch, tmp_path):
    """The second round fails: the first one is in the file."""

    class Fake:
        def __init__(self, name, *rest):
            self.name, self.steps = name, 0

        def wait_ready(self): ...

        def close(self): ...

        def step(self):
            self.steps += 1
            if self.steps == 3:
                raise bench_step.ContenderError("broke")
            return {"step": 1.0, "cpu": 1.0, "response_tokens": 16}

    monkeypatch.setattr(bench_step, "Contender", Fake)
    monkeypatch.setattr(bench_step, "model_folder", lambda *a: tmp_path)
    monkeypatch.setattr(bench_step, "parameters_of", lambda folder: 1)
    out = tmp_path / "r.json"
    assert bench_step.main(["--contenders", "serial", "--repeats", "2", "--json", str(out)]) == 2
    kept = json.loads(out.read_text())
    assert len(kept["rounds"]) == 1 and kept["contenders"] == ["serial"]


def test_options_change_a_named_workload():
    got = bench_step.workload_of(bench_step.parser().parse_args(["--workload", "lognormal", "--G", "2"]))
    assert (got.lengths, got.G, got.B) == ("lognormal", 2, 4)


def test_a_setting_this_checkout_lacks_is_named():
    from bench.ours import accepted

    class Target:
        def __init__(self, known: int = 0) -> None: ...

    assert accepted(Target, {"known": 1}) == {"known": 1}
    with pytest.raises(Missing, match="Target has no setting unknown"):
        accepted(Target, {"unknown": 1})


def test_check_finds_wrong_token_counts():
    w = Workload(**bench_step.CHECK)
    result = {
        "workload": w.to_dict(), "options": {"steps": 3}, "left_out": {},
        "rounds": [{"steps": {"a": {"response_tokens": w.tokens_of(0)}, "b": {"response_tokens": 1}}}],
    }  # fmt: skip
    assert bench_step.check(result) == ["b, round 1: 1 tokens instead of 16"]


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What `--check --json` wrote, for all of Rollplex's own contenders."""
    folder = tmp_path_factory.mktemp("bench")
    done = command("--check", "--json", str(folder / "result.json"), "--threads", "1", folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed" in done.stdout
    return json.loads((folder / "result.json").read_text())


def test_check_runs_every_own_contender(checked):
    assert checked["contenders"] == ["serial_unshared", "serial", "overlap", "overlap_streaming", "reuse_streaming"]
    assert checked["left_out"] == {} and len(checked["rounds"]) == 1
    assert len(checked["ratios"]) == 10  # every pair


def test_sharing_runs_each_picture_once_per_group(checked):
    b, g = checked["workload"]["B"], checked["workload"]["G"]
    steps = SimpleNamespace(**checked["rounds"][0]["steps"])
    assert steps.serial_unshared["pictures"] == b + b * g  # the engine shares its prefill in any case
    assert steps.reuse_streaming["pictures"] == b
    for step in (steps.serial, steps.overlap, steps.overlap_streaming):
        assert step["pictures"] == 2 * b
        assert step["prompt_tokens"] * (b + b * g) == steps.serial_unshared["prompt_tokens"] * 2 * b
        assert step["response_tokens"] == b * g * checked["workload"]["R"]


def test_a_step_accounts_for_its_time(checked):
    for step in checked["rounds"][0]["steps"].values():
        phases = sum(step[name] for name in ("rollout", "score", "train", "update", "publish"))
        assert 0 < phases <= step["inner"] <= step["step"]
        assert 0 <= step["overhead"] < step["inner"]
        assert step["peak_rss_mib"] > 100


def test_a_waiting_contender_does_not_spin(checked):
    """CPU seconds while it waited for its turn: others' steps took much longer than this."""
    for step in checked["rounds"][0]["steps"].values():
        assert step["idle_cpu"] < 0.05


@pytest.mark.slow
def test_trl_runs_each_picture_once_per_response_in_every_pass(tmp_path):
    pytest.importorskip("trl", reason="the bench extra is not installed")
    done = command("--check", "--contenders", "trl", "trl_tuned", "--json", str(tmp_path / "r.json"), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    responses = result["workload"]["B"] * result["workload"]["G"]
    steps = result["rounds"][0]["steps"]
    assert steps["trl_tuned"]["pictures"] == 2 * responses  # generate, train
    assert steps["trl"]["pictures"] == 3 * responses  # and the recomputation of checkpointing


@pytest.mark.slow
def test_trl_rows_end_at_their_lengths(tmp_path):
    pytest.importorskip("trl", reason="the bench extra is not installed")
    lengths = ["--lengths", "lognormal", "--mean", "6", "--G", "4"]
    done = command("--check", "--contenders", "serial", "trl_tuned", *lengths, folder=tmp_path)
    assert done.returncode == 0 and "check passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.vllm
def test_check_runs_with_vllm(tmp_path):
    options = ["--engine", "vllm", "--threads", "1", "--contenders", "serial", "overlap_streaming"]
    done = command("--check", "--json", str(tmp_path / "result.json"), *options, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["contenders"] == ["serial", "overlap_streaming"]
    assert result["left_out"] == {}
    for step in result["rounds"][0]["steps"].values():
        assert step["response_tokens"] == result["workload"]["B"] * result["workload"]["G"] * result["workload"]["R"]
        assert step["decode_steps"] > 0
        assert step["pictures"] == result["workload"]["B"]  # vLLM's own tower is not counted


def test_vllm_cannot_take_a_prefix():
    from bench.ours import CONTENDERS, engine_of

    with pytest.raises(Missing, match="vLLM keeps a K/V cache of its own"):
        engine_of("vllm", CONTENDERS["reuse_streaming"][0])
    assert engine_of("torch", CONTENDERS["reuse_streaming"][0])[1] == CONTENDERS["reuse_streaming"][0]


@pytest.mark.slow
def test_check_compares_the_two_placements(tmp_path):
    done = command("--check", "--placement", "both", "--json", str(tmp_path / "r.json"), folder=tmp_path)
    assert done.returncode == 0 and "check passed" in done.stdout, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["contenders"] == ["serial", "overlap", "overlap_streaming", "disaggregated"]
    assert [(p["of"], p["over"]) for p in result["ratios"]][:3] == [
        ("disaggregated", name) for name in ("serial", "overlap", "overlap_streaming")
    ]
    assert "disaggregated / overlap_streaming" in done.stdout and "1.57 to 2.24 over disaggregation" in done.stdout
    engine = result["rounds"][0]["steps"]["disaggregated"]
    assert engine["decode_steps"] > 0 and engine["cpu"] > 0


def test_placements_name_contenders():
    both = bench_step.parser().parse_args(["--placement", "both"])
    assert bench_step.contenders_of(both) == ("serial", "overlap", "overlap_streaming", "disaggregated")
    plain = bench_step.parser().parse_args(["--check"])
    assert bench_step.contenders_of(plain) == bench_step.OURS
