"""`rollplex plan`: the paper's command, configs, bad input, and advice that works."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rollplex.cli import main
from rollplex.planner.fitting import fitting_changes
from rollplex.planner.hardware import GPUS
from rollplex.planner.memory import MemorySettings, fits, states
from rollplex.planner.models import MODELS

PAPER = "plan --model Qwen2.5-VL-32B --gpu H800 --gpus 32 --train-tp 8 --rollout-tp 4".split()
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def numbers(capsys, *arguments: str) -> dict:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_papers_command(capsys):
    plan = numbers(capsys, *PAPER)
    assert plan["naive_gib"] == pytest.approx(165, rel=0.01)
    peaks = [56.5, 72.1, 69.7, 50.1, 57.7, 56.1]
    assert list(plan["stages_gib"].values()) == [pytest.approx(x, rel=0.02) for x in peaks]
    assert plan["fits"] and plan["changes"] == []
    assert [round(100 * x, 1) for x in plan["layout"].values()] == [60.1, 32.8, 7.2]
    assert (round(plan["rebuilt_gib"], 2), round(plan["second_copy_gib"], 2)) == (1.09, 7.63)
    seconds = plan["seconds"]
    assert seconds["serial, unshared"] / seconds["overlap, unshared"] == pytest.approx(1.24, abs=0.02)
    assert seconds["disaggregated, unshared"] / seconds["overlap, unshared"] == pytest.approx(2.15, abs=0.1)
    assert {"overlap + streaming, shared", "overlap + streaming, unshared"} <= set(seconds)


def test_tables_say_the_same(capsys):
    main(PAPER)
    out = capsys.readouterr().out
    assert "everything resident at once (naive) does not fit: 165.2 GiB of 74.5 GiB" in out
    assert "by phase it fits: peak 72.1 GiB of 74.5 GiB" in out
    assert "same order 60.1 %, strided 32.8 %, rebuilt 7.2 %; 1.09 GiB rebuilt, where a second copy takes 7.63" in out


def test_one_layout_rebuilds_nothing(capsys):
    plan = numbers(capsys, "plan", "--model", "Qwen2.5-VL-7B", "--gpus", "2", "--train-tp", "2", "--rollout-tp", "2")
    assert plan["layout"] == {"same order": 1.0, "strided": 0.0, "rebuilt": 0.0} and plan["rebuilt_gib"] == 0
    assert plan["states_gib"]["actor weights rebuilt for the trainer"] == 0


def random_settings(seed: int) -> tuple:
    draw = random.Random(seed)
    model = MODELS[draw.choice(list(MODELS))]
    degrees = [t for t in (1, 2, 4, 8) if model.heads % t == 0 and model.ffn % t == 0]
    s = MemorySettings(
        train_tp=draw.choice(degrees), rollout_tp=draw.choice(degrees), data_parallel=draw.choice([1, 2, 4]),
        boundary_tokens=draw.choice([2**15, 2**17, 2**19]), kv_pool_gib=draw.choice([8.0, 26.0, 60.0]),
        update_chunks=draw.choice([2, 16]), checkpoint_share=draw.choice([0.25, 1.0]), reference=draw.random() < 0.5,
    )  # fmt: skip
    return model, s, GPUS[draw.choice(["A100", "H800", "H200"])]


CANNOT = [x for x in range(200) if not fits(states(*random_settings(x)[:2]), random_settings(x)[2])][:40]


def test_advice_makes_a_plan_fit_and_asks_for_nothing_it_does_not_need():
    helped = 0
    for seed in CANNOT:
        model, s, gpu = random_settings(seed)
        changes = fitting_changes(model, s, gpu)
        if changes is None:
            continue
        helped += 1
        assert changes
        after = replace(s, **{c.name: c.new for c in changes})
        assert fits(states(model, after), gpu)
        for c in changes:
            assert getattr(s, c.name) == c.old
            assert not fits(states(model, replace(after, **{c.name: c.old})), gpu)
    assert helped >= 20


def test_a_model_too_large_for_any_knob_is_called_so(capsys):
    main("plan --model Qwen2.5-VL-72B --gpu RTX4090".split())
    assert "no knob of one node helps: use a smaller model or a larger GPU" in " ".join(capsys.readouterr().out.split())


def test_a_plan_that_does_not_fit_says_what_to_change(capsys):
    main("plan --model Qwen2.5-VL-7B --gpu A100 --kv-pool-gib 40".split())
    assert "by phase it does not fit" in (out := " ".join(capsys.readouterr().out.split()))
    assert "it does with" in out and "->" in out


def test_a_config_gives_model_and_work_and_flags_override_it(capsys, parity_folder, tmp_path):
    text = (CONFIGS / "digits_cpu.yaml").read_text().replace("models/tiny-digits", str(parity_folder))
    (tmp_path / "config.yaml").write_text(text)
    plan = numbers(capsys, "plan", "--config", str(tmp_path / "config.yaml"), "--boundary-tokens", "1000")
    assert plan["model"] == parity_folder.name
    assert "reference_weights" not in plan["states_gib"]  # beta is 0 there
    with_beta = numbers(capsys, "plan", "--config", str(tmp_path / "config.yaml"), "--beta", "0.1")
    assert "reference_weights" in with_beta["states_gib"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu H100", "nothing to plan: give --model"),
        ("--model nowhere", "neither a folder with a config.json nor in the planner's table"),
        ("--model Qwen2.5-VL-7B --gpu H900", "gpu='H900' is not in the table"),
        ("--model Qwen2.5-VL-7B --gpus 8 --train-tp 8", "train_tp=8 cannot split Qwen2.5-VL-7B"),
        ("--model Qwen2.5-VL-7B --gpus 3 --train-tp 2", "gpus=3 is no multiple of train_tp=2"),
        ("--model Qwen2.5-VL-7B --prompts 0", "--prompts=0 must be a whole number from 1 to"),
        ("--model Qwen2.5-VL-7B --kv-pool-gib -5", "--kv-pool-gib=-5.0 must be a finite number from 0"),
        ("--model Qwen2.5-VL-7B --kv-pool-gib inf", "--kv-pool-gib=inf must be a finite number"),
        ("--model Qwen2.5-VL-7B --workspace-gib nan", "--workspace-gib=nan must be a finite number"),
        ("--model Qwen2.5-VL-7B --visual-share 7", "--visual-share=7.0 must be a finite number from 0 to 1"),
        ("--model Qwen2.5-VL-7B --checkpoint-share -1", "--checkpoint-share=-1.0 must be a finite number from 0 to 1"),
        ("--model Qwen2.5-VL-7B --sigma nan", "--sigma=nan must be a finite number from 0 to 5"),
        ("--model Qwen2.5-VL-7B --beta inf", "--beta=inf must be a finite number, at least 0"),
        ("--model Qwen2.5-VL-7B --update-chunks 0", "--update-chunks=0 must be a whole number"),
        ("--model Qwen2.5-VL-7B --boundary-tokens -1", "--boundary-tokens=-1 must be a whole number"),
        ("--model Qwen2.5-VL-7B --gpus 0", "--gpus=0 must be a whole number from 1"),
        ("--model Qwen2.5-VL-7B --gpus 8 --prompts 4", "prompts=4 leaves some of 8 GPU groups without work"),
        ("--config nowhere.yaml", "there is no file nowhere.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    with pytest.raises(SystemExit, match="error: ") as error:
        main(["plan", *arguments.split()])
    assert message in str(error.value)
