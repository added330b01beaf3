"""`rollplex verify`: schedules agree on a sound build, every sort of fault is caught and named, empty proofs are told;
the engine agrees with the trainer, or what differs is named."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import string
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import LearningRateMonitor
from rich.console import Console
from runs import PictureTask

import rollplex.cli
from rollplex import parity
from rollplex import verify as command
from rollplex.ablation import RunTrace, Schedule, StepTrace, Work
from rollplex.callbacks import GroupStreaming, PrefixOverlap
from rollplex.comparison import RESPONSES, dumps, judge
from rollplex.data.records import Rollout
from rollplex.engines import TorchEngine, torch_engine
from rollplex.engines.sampling import sample, support
from rollplex.models.registry import split
from rollplex.models.tiny import build_tiny
from rollplex.verify import OTHERS, SERIAL, SWEEP, VerifyCLI

LETTERS = list(string.ascii_lowercase[:20])
"""As stop strings: a random model ends its responses early with them, each at another length. With seed=7 the longest
responses of the first batch's groups have 24, 16, 9 and 16 tokens: the first group is complete last."""


class NumberedTask(PictureTask):
    """A reward that no second run repeats."""

    calls = itertools.count()

    def reward(self, sample, response):
        return math.sin(float(next(self.calls)))


@pytest.fixture
def config(parity_folder, tmp_path):
    """Writes the YAML of a small run with these model settings; returns its path."""

    def write(
        task: str = "runs.PictureTask", callbacks: Any = None, strategy: Any = "rollplex", **settings: Any
    ) -> str:
        model = dict(
            model=str(parity_folder),
            num_generations=4,
            max_completion_length=24,
            learning_rate=1e-3,
            stop=LETTERS,
            seed=7,
        )
        content = {
            "seed_everything": 0,
            "model": {"class_path": "rollplex.GRPOModule", "init_args": model | settings},
            "data": {
                "class_path": "rollplex.VLMDataModule",
                "init_args": {"task": {"class_path": task}, "batch_size": 4, "seed": 3},
            },
            "trainer": {
                "accelerator": "cpu", "strategy": strategy, "max_steps": 100, "val_check_interval": 20,
                "callbacks": callbacks, "default_root_dir": str(tmp_path / "run"),
            },
        }  # fmt: skip
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


@pytest.fixture
def verify(tmp_path):
    """Runs the command; returns (exit code, what it printed, the JSON it wrote)."""

    def run(path: str, *arguments: str) -> tuple[int, str, Any]:
        printed, target = io.StringIO(), tmp_path / "out" / "verify.json"
        arguments = arguments if "--engine_parity" in arguments else (*arguments, "--engine_parity", "skip")
        code = command.verify(["--config", path, "--json", str(target), *arguments], Console(file=printed, width=200))
        return code, printed.getvalue(), json.loads(target.read_text()) if target.exists() else None

    return run


@pytest.fixture
def only_overlap(monkeypatch):
    """One schedule is enough to see a fault."""
    monkeypatch.setattr(command, "OTHERS", OTHERS[:1])


# ---- a sound build ----


def test_all_schedules_agree_and_the_table_shows_that_they_overlapped(config, verify, patient):
    listed = [{"class_path": "rollplex.callbacks.RolloutLogger"}, {"class_path": "rollplex.callbacks.PrefixOverlap"}]
    code, text, report = verify(config(callbacks=listed, beta=0.04), "--steps", "2")
    assert code == 0 and report["passed"] and "PASSED" in text, text
    assert "Callbacks left out: RolloutLogger." in text
    case = report["case"]
    assert case["serial"]["prefix"]["hidden_units"] == case["serial"]["suffix"]["hidden_units"] == 0
    assert case["serial"]["prefix"]["units"] == 2 * 8 and case["serial"]["mismatch"]["tokens"] > 50
    assert case["serial"]["mismatch"]["max"] < 1e-5
    assert case["serial"]["responses_with_advantage"] == 2 * 4 * 4
    for name in ("overlap", "streaming"):
        schedule = case["schedules"][name]
        assert schedule["caveat"] == "" and schedule["verdict"] == "identical"
        assert all(d["identical"] for d in schedule["differences"].values())
        assert schedule["prefix"]["hidden_units"] > 0
    for name in ("streaming", "streaming, any order"):
        assert case["schedules"][name]["suffix"]["hidden_units"] > 0
    free = case["schedules"]["streaming, any order"]
    assert "reordered" not in free["caveat"] and free["differences"]["weights"]["relative"] <= 1e-6
    for run in (case["serial"], *case["schedules"].values()):
        assert abs(run["kl"][0]) < 1e-6 and max(run["ratio_error"]) < 1e-6
        assert run["kl"][1] > 1e-8  # by then the policy has left the reference
    for quantity in case["schedules"]["overlap"]["differences"]:
        assert quantity in text


def test_sweep_covers_losses_kl_mini_batches_and_iterations():
    assert len(SWEEP) == len({tuple(case.values()) for case in SWEEP}) == 4 * 2 * 4
    assert {case["loss_type"] for case in SWEEP} == {"grpo", "dr_grpo", "dapo", "bnpo"}
    assert {case["beta"] > 0 for case in SWEEP} == {True, False}


def test_cases_all_runs_each_case_with_its_settings(config, verify, monkeypatch, only_overlap):
    monkeypatch.setattr(command, "SWEEP", [SWEEP[0], SWEEP[-1]])
    code, text, report = verify(config(), "--steps", "1", "--cases", "all", "--batch_size", "2")
    assert code == 0, text
    first, last = report["sweep"]
    assert (first["settings"], last["settings"]) == (SWEEP[0], SWEEP[-1])
    assert first["serial"]["kl"] == [None] and last["serial"]["kl"][0] is not None
    # 2 prompts: one update with an actor prefix each; or reference, old log-probs of the second half, and 2 x 2 updates
    assert first["serial"]["prefix"]["units"] == 2 and last["serial"]["prefix"]["units"] == 2 + 1 + 4
    assert "case 2 of 2" in text and "bnpo" in text


@pytest.mark.slow
def test_whole_sweep_passes(config, verify, patient):
    code, text, report = verify(config(), "--steps", "2", "--cases", "all")
    assert code == 0, text
    for case in report["sweep"]:
        assert not any("overlapped" in s["caveat"] or "learnt" in s["caveat"] for s in case["schedules"].values())


def test_start_from_a_checkpoint(config, verify, tmp_path, only_overlap):
    """Its weights and data position; a config that `fit` saved is accepted as it is."""
    path = config()
    fit = ["fit", "--config", path, "--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--trainer.logger=false"]
    saved = tmp_path / "one.ckpt"
    cli = rollplex.cli.RollplexCLI(args=[*fit, "--trainer.enable_progress_bar=false"])
    cli.trainer.save_checkpoint(saved)
    full = tmp_path / "saved.yaml"
    full.write_text(cli._parser("fit").dump(cli.config.fit, skip_none=False))
    assert "ckpt_path" in full.read_text()
    fresh = verify(str(full), "--steps", "1")[2]["case"]["serial"]["mismatch"]["tokens"]
    code, text, report = verify(str(full), "--steps", "1", "--ckpt_path", str(saved))
    assert code == 0, text
    assert report["case"]["serial"]["mismatch"]["tokens"] != fresh


# ---- faults ----


@pytest.fixture
def broken(monkeypatch):
    """Puts a fault into every step of the schedules other than serial: it is given the step and the module."""

    def put(fault: Any) -> None:
        original = PrefixOverlap.setup

        def setup(self, trainer, pl_module, stage):
            original(self, trainer, pl_module, stage)
            new_step = pl_module.new_step
            pl_module.configure_model()
            pl_module.initial = [p.detach().clone() for p in pl_module.policy.parameters()]

            def faulty(prompts):
                step = new_step(prompts)
                fault(step, pl_module)
                return step

            pl_module.new_step = faulty

        monkeypatch.setattr(PrefixOverlap, "setup", setup)

    return put


def wrong_scale(step, module):
    normalizer = step.normalizer
    step.normalizer = lambda update: 1.001 * normalizer(update)


def dropped_backward(step, module):
    """The first bundle's gradient stops at the boundary: its prompt and picture teach nothing."""
    backward = step._backward
    step._backward = lambda b, update: (
        step.prefixes.pop(("act", b.index)).free() if b.index == 0 else backward(b, update)
    )


def stale_prefix(step, module):
    """The actor's prefix is computed with the weights the run began with."""
    prefix = step._prefix

    def stale(b, name, model):
        parameters = list(module.policy.parameters())
        present = [p.data for p in parameters]
        for p, old in zip(parameters, module.initial, strict=True):
            p.data = old
        try:
            prefix(b, name, model)
        finally:
            for p, new in zip(parameters, present, strict=True):
                p.data = new

    step._prefix = stale


def other_seeds(step, module):
    requests = step.requests
    step.requests = lambda seed, step: requests(seed=seed + 1, step=step)


def mixed_up_rewards(step, module):
    score = step._score

    def mixed(g):
        score(g)
        step.groups[g] = replace(step.groups[g], rewards=step.groups[g].rewards.flip(0))

    step._score = mixed


FAULTS = [
    (wrong_scale, {"gradient norm, first update", "gradients, first update", "weights"}, {"max_grad_norm": None}),
    (wrong_scale, {"gradient norm, first update"}, {"max_grad_norm": 1e-3}),  # clipping hides it from the optimizer
    (dropped_backward, {"gradient norm, first update", "gradients, first update", "weights"}, {}),
    (stale_prefix, {"gradient norm, later updates", "gradients, last update", "weights"}, {}),
    (other_seeds, {RESPONSES, "rewards", "gradients, first update", "weights"}, {}),
    (mixed_up_rewards, {"rewards", "advantages", "gradients, first update", "weights"}, {}),
]


@pytest.mark.parametrize(("fault", "named", "settings"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_fault_is_caught_and_named(config, verify, broken, patient, only_overlap, fault, named, settings):
    broken(fault)
    code, text, report = verify(config(**settings), "--steps", "2" if fault is stale_prefix else "1")
    overlap = report["case"]["schedules"]["overlap"]
    assert code == 1 and not report["passed"] and "FAILED" in text
    assert named <= set(overlap["faults"]), overlap["faults"]
    assert all(f"  {quantity}: " in text for quantity in named)
    assert report["case"]["reproducible"] and "reproduce itself" not in text
    if fault is stale_prefix:  # nothing is stale before the first update
        assert "gradients, first update" not in overlap["faults"]
        assert overlap["mismatch"]["max"] > 10 * report["case"]["serial"]["mismatch"]["max"]


def test_a_fault_in_free_order_is_caught_too(config, verify, broken, patient, monkeypatch):
    monkeypatch.setattr(command, "OTHERS", OTHERS[2:])
    broken(dropped_backward)
    code, _, report = verify(config(), "--steps", "1")
    assert code == 1 and "gradients, first update" in report["case"]["schedules"]["streaming, any order"]["faults"]


def test_a_run_that_does_not_reproduce_itself_is_told_apart(config, verify, only_overlap):
    code, text, report = verify(config(task="test_verify.NumberedTask"), "--steps", "1")
    assert code == 1 and not report["case"]["reproducible"]
    assert "serial schedule does not reproduce itself" in text


def test_an_error_names_the_schedule(config, broken, verify, only_overlap):
    def fault(step, module):
        raise RuntimeError("the window broke")

    broken(fault)
    with pytest.raises(RuntimeError, match="the window broke") as caught:
        verify(config(), "--steps", "1")
    assert "under the schedule: overlap" in caught.value.__notes__


# ---- empty proofs ----


def test_nothing_streamed_is_said(config, verify, patient):
    """All responses have full length: no group is complete before the rollout ends."""
    code, text, report = verify(config(stop=None, max_completion_length=3, scale_rewards="batch"), "--steps", "1")
    schedules = report["case"]["schedules"]
    assert code == 0 and schedules["overlap"]["caveat"] == ""
    for name in ("streaming", "streaming, any order"):
        assert schedules[name]["caveat"].startswith("nothing but rewards streamed")
    assert "nothing but rewards streamed" in text
    assert report["case"]["serial"]["responses_with_advantage"] == 16


def test_nothing_overlapped_and_nothing_learnt_are_said(config, verify, only_overlap):
    strategy = {"class_path": "rollplex.RollplexStrategy", "init_args": {"admission": "always"}}
    settings = dict(share_prefix=False, strategy=strategy, reward_weights={"reward": 0.0})
    code, text, report = verify(config(**settings), "--steps", "1")
    caveat = report["case"]["schedules"]["overlap"]["caveat"]
    assert code == 0 and "nothing overlapped" in caveat and "nothing learnt" in caveat
    assert report["case"]["serial"]["responses_with_advantage"] == 0
    assert "nothing overlapped" in text


# ---- the engine against the trainer ----


WAYS = ["T=0.6", "T=1", "T=1.3", "T=1, top_p=0.9"]
MADE = ["text only", "one picture", "two pictures", "a wide picture", "a slow video", "picture and video"]


@pytest.fixture
def few(monkeypatch):
    """A fault shows in few tokens too."""
    monkeypatch.setattr(parity, "TOKENS", 100)
    monkeypatch.setattr(parity, "DATA_PROMPTS", 1)


def strategy_of(engine: str, **settings: Any) -> dict[str, Any]:
    chosen = {"class_path": engine, "init_args": settings}
    return {"class_path": "rollplex.RollplexStrategy", "init_args": {"engine": chosen}}


def test_engine_parity_of_the_embedded_engine(config, verify):
    code, text, report = verify(config(), "--steps", "2", "--engine_parity", "only")
    assert code == 0 and report["passed"] and "case" not in report, text
    before, after = report["engine"]
    assert (before["when"], after["when"]) == ("before any update", "after 2 updates")
    for check in (before, after):
        assert check["passed"] and check["prompts"][-6:] == MADE and len(check["prompts"]) == 10
        assert check["greedy_equal"] == [True] * 10
        assert [s["name"] for s in check["sampled"]] == WAYS
        assert all(s["tokens"] >= 1000 and 0 < s["mean"] < s["max"] < s["bar"] for s in check["sampled"])
        assert [s["bar"] for s in check["sampled"]] == pytest.approx([1e-5 / 0.6, 1e-5, 1e-5, 1e-5])
    assert "T=1, top_p=0.9" in text and "10 of 10 prompts as generate" in text and "Left out" not in text


def test_engine_parity_checks_what_the_config_samples_with_too(config, verify, few):
    with pytest.warns(UserWarning, match="truncated or penalised"):
        settings = dict(temperature=0.7, top_k=20, min_p=0.02, repetition_penalty=1.3)
        code, text, report = verify(config(**settings), "--steps", "1", "--engine_parity", "only")
    assert code == 0, text
    names = [s["name"] for s in report["engine"][1]["sampled"]]
    assert names == ["T=0.6", "T=0.7", "T=1", "T=1.3", "T=0.7, top_p=0.9", "as the config samples"]


def test_engine_parity_runs_after_the_schedules_and_its_tolerance_is_a_bar(config, verify, only_overlap, few):
    code, text, report = verify(config(), "--steps", "1", "--engine_parity", "also", "--engine_tolerance", "1e-9")
    assert code == 1 and not report["passed"] and report["case"]["passed"], text
    sampled = [s for check in report["engine"] for s in check["sampled"]]
    assert [s["bar"] for s in sampled] == pytest.approx([1e-9 / 0.6, 1e-9, 1e-9, 1e-9] * 2)
    assert max(s["max"] for s in sampled) < 1e-5
    assert verify(config(), "--steps", "1")[2].keys().isdisjoint({"engine"})


class Stale(TorchEngine):
    """Samples with the weights that it started with, and says otherwise."""

    def start(self, context):
        super().start(replace(context, model=split(copy.deepcopy(context.model.hf))))


class Narrow(TorchEngine):
    """Has room for short sequences only."""

    def start(self, context):
        super().start(context)
        self._limit = 51


def reports(monkeypatch, of: Any) -> None:
    """Let the embedded engine report the log-probabilities of another distribution than the one it samples from."""

    def wrong(logits_NV, rule, seeds, positions, seen=None):
        ids, _ = sample(logits_NV, rule, seeds, positions, seen)
        z_NV = support(logits_NV, replace(rule, params=of(rule.params)), seen)
        return ids, torch.log_softmax(z_NV, dim=1).gather(1, ids[:, None]).squeeze(1)

    monkeypatch.setattr(torch_engine, "sample", wrong)


@pytest.mark.parametrize(
    ("of", "differ"),
    [
        (lambda p: replace(p, temperature=float(p.temperature > 0)), {"T=0.6", "T=1.3"}),  # before the temperature
        (lambda p: replace(p, top_p=1.0), {"T=1, top_p=0.9"}),  # before the truncation
    ],
)
def test_lp_01_engine_parity_finds_log_probs_of_another_distribution(config, verify, monkeypatch, of, differ, few):
    reports(monkeypatch, of)
    code, text, report = verify(config(), "--steps", "1", "--engine_parity", "only")
    assert code == 1 and "DIFFERS" in text and "FAILED" in text
    for check in report["engine"]:
        assert {s["name"] for s in check["sampled"] if s["max"] > s["bar"]} == differ
        assert all(check["greedy_equal"])


def test_engine_parity_finds_stale_weights(config, verify, few):
    path = config(strategy=strategy_of("test_verify.Stale"), learning_rate=1e-2)
    code, text, report = verify(path, "--steps", "2", "--engine_parity", "only")
    before, after = report["engine"]
    assert code == 1 and before["passed"] and not after["passed"]
    assert min(float(s["max"]) for s in after["sampled"]) > 0.01 and not all(after["greedy_equal"])
    assert "after 2 updates, greedy tokens differ from generate's: " in text


def test_engine_parity_says_what_the_engine_has_no_room_for(config, verify, few):
    path = config(strategy=strategy_of("test_verify.Narrow"), max_completion_length=8)
    code, text, report = verify(path, "--steps", "1", "--engine_parity", "only")
    assert code == 0, text
    assert "Left out: two pictures: row 'two pictures': 44 prompt tokens + max_tokens 8" in text
    assert report["engine"][0]["prompts"][-5:] == [name for name in MADE if name != "two pictures"]
    assert all(s["tokens"] >= 100 for s in report["engine"][0]["sampled"])


def test_engine_parity_in_bfloat16_judges_the_mean(config, verify, tmp_path, few):
    """With weights of an ordinary scale: std 0.1 magnifies bfloat16's rounding too."""
    ordinary = build_tiny(tmp_path / "ordinary", seed=1)
    path = config(model=str(ordinary), dtype="bfloat16", learning_rate=1e-4)
    code, text, report = verify(path, "--steps", "1", "--engine_parity", "only")
    assert code == 0 and "The bar is on the mean" in text, text
    sampled = [s for check in report["engine"] for s in check["sampled"]]
    assert all(1e-5 < s["mean"] < s["bar"] for s in sampled)


@pytest.mark.vllm
def test_engine_parity_of_vllm(config, verify):
    """At least 1,000 tokens for each way of sampling, before and after 3 updates, on one copy of the weights."""
    pytest.importorskip("vllm")
    settings = dict(max_model_len=512, max_num_seqs=64, block_size=32, kv_cache_memory_bytes=64 * 1024**2)
    callbacks = [{"class_path": "rollplex.callbacks.SharedWeights"}]
    path = config(strategy=strategy_of("rollplex.engines.VLLMEngine", **settings), callbacks=callbacks)
    code, text, report = verify(path, "--engine_parity", "only")
    assert code == 0, text
    assert [check["when"] for check in report["engine"]] == ["before any update", "after 3 updates"]
    for check in report["engine"]:
        assert all(check["greedy_equal"]) and check["prompts"][-6:] == MADE
        assert all(s["tokens"] >= 1000 and s["max"] <= s["bar"] for s in check["sampled"])
    assert "VLLMEngine against the trainer" in text and "Callbacks left out" not in text


# ---- what a schedule is made of ----


def test_a_schedule_is_the_list_of_callbacks_with_the_users_settings(config):
    callbacks = [
        {"class_path": "rollplex.callbacks.GroupStreaming", "init_args": {"deterministic": True}},
        {"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"},
    ]
    strategy = {"class_path": "rollplex.RollplexStrategy", "init_args": {"rollout_timeout": 7.0, "rollout_threads": 2}}
    cli = VerifyCLI(["--config", config(callbacks=callbacks, strategy=strategy)])
    for number, schedule in enumerate((SERIAL, *OTHERS)):
        cli.build(schedule, {"beta": number / 10}, threads=1)
        kinds = [type(c) for c in cli.trainer.callbacks]
        assert LearningRateMonitor not in kinds
        assert (PrefixOverlap in kinds, GroupStreaming in kinds) == {
            "serial": (False, False), "overlap": (True, False),
        }.get(schedule.name, (True, True))  # fmt: skip
        streaming = [c for c in cli.trainer.callbacks if isinstance(c, GroupStreaming)]
        assert all(c.deterministic == schedule.deterministic for c in streaming)
        assert cli.model.hparams["beta"] == number / 10 and cli.trainer.logger is None and cli.trainer.max_steps == -1
        colocation = cli.trainer.strategy.colocation
        assert colocation.executor.timeout == 7.0 and not colocation.executor.admission.measure
        colocation.threads.settle()
        assert (colocation.threads.total, colocation.threads.rollout, colocation.threads.train) == (1, 1, 1)


@pytest.mark.parametrize(
    ("settings", "arguments", "said"),
    [
        ({"model": "nowhere"}, [], "nowhere"),
        ({"num_generations": 1}, [], "num_generations=1"),
        ({}, ["--steps", "0"], "steps"),
        ({}, ["--tolerance", "-1"], "tolerance"),
        ({}, ["--cases", "some"], "cases"),
        ({}, ["--no_such_setting", "1"], "no_such_setting"),
    ],
)
def test_usage_errors_exit_with_2(config, capfd, settings, arguments, said):
    with pytest.raises(SystemExit) as caught:
        rollplex.cli.main(["verify", "--config", config(**settings), *arguments])
    assert caught.value.code == 2
    assert said in capfd.readouterr().err


# ---- the comparison itself ----


def trace(**changes: Any) -> RunTrace:
    """A run of one step and one response."""
    rollout = Rollout(0, 0, torch.tensor([1, 2]), torch.tensor([-1.0, -2.0]), "", "stop", 0)
    step = dict(
        rollouts={(0, 0): rollout}, rewards=torch.tensor([1.0, math.nan]), advantages=torch.tensor([0.5, 0.0]), norms=(2.0,),
        prefix=Work(1, 1, 1.0, 1.0), order=(("act_suffix", 0), ("act_suffix", 1)),
    )  # fmt: skip
    run = dict(
        first_gradient={"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-6])},
        weights={"a": torch.tensor([6.0, 8.0])},
    )
    run["last_gradient"] = run["first_gradient"]
    step |= {k: v for k, v in changes.items() if k in step}
    run |= {k: v for k, v in changes.items() if k in run}
    return RunTrace(steps=[StepTrace(**step)], **run)


def test_missing_rewards_are_equal_to_each_other():
    result = judge(trace(), OTHERS[0], trace(), None)
    assert result.verdict == "identical" and not result.empty


@pytest.mark.parametrize(
    ("changes", "quantity", "max_abs", "relative"),
    [
        ({"rewards": torch.tensor([1.0, 0.0])}, "rewards", math.inf, math.inf),
        ({"rewards": torch.tensor([1.0])}, "rewards", math.inf, math.inf),
        ({"weights": {"a": torch.tensor([6.0, 9.0])}}, "weights", 1.0, 0.1),
        ({"weights": {"a": torch.tensor([6.0, math.nan])}}, "weights", math.inf, math.inf),
        ({"norms": (2.5,)}, "gradient norm, first update", 0.5, 0.25),
        ({"norms": ()}, "gradient norm, first update", math.inf, math.inf),
        ({"first_gradient": {"a": torch.tensor([3.0, 4.5])}}, "gradients, first update", 0.5, 0.1),
        ({"first_gradient": {"b": torch.tensor([1e-6])}}, "gradients, first update", 4.0, 1.0),
        ({"rollouts": {}}, RESPONSES, 1, 1.0),
    ],
)
def test_differences_are_measured(changes, quantity, max_abs, relative):
    result = judge(trace(), OTHERS[0], trace(**changes), None)
    d = next(d for d in result.differences if d.quantity == quantity)
    assert d in result.faults and quantity in result.verdict
    assert d.max_abs == pytest.approx(max_abs) and d.relative == pytest.approx(relative)
    assert quantity in json.loads(dumps({quantity: d.relative}))  # inf too


def test_a_gradient_that_should_be_zero_is_measured_against_the_whole():
    """5e-3 is a thousandth of the norm 5: rounding of 1e-9 in such a parameter counts as 2e-7."""
    noisy = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-6 + 1e-9])}
    result = judge(trace(), OTHERS[2], trace(first_gradient=noisy), 1e-6)
    d = next(d for d in result.differences if d.quantity == "gradients, first update")
    assert not d.identical and d.relative == pytest.approx(2e-7, rel=0.05) and not result.faults
    assert "nothing but rewards streamed" in result.empty


def test_a_tolerance_is_a_bar():
    moved = trace(weights={"a": torch.tensor([6.0, 8.0 + 1e-4])})
    assert not judge(trace(), OTHERS[2], moved, 1e-3).faults
    assert judge(trace(), OTHERS[2], moved, 1e-6).faults
    assert judge(trace(), OTHERS[2], moved, 0.0).faults


def test_caveats():
    streamed = dict(prefix=Work(1, 1), order=(("act_suffix", 1), ("act_suffix", 0)))
    free, fixed = Schedule("free", ("GroupStreaming",), deterministic=False), Schedule("fixed", ("GroupStreaming",))
    later = trace(**streamed)
    later.steps[0].__dict__["suffix"] = Work(2, 1)
    same_order = trace(prefix=Work(1, 1))
    same_order.steps[0].__dict__["suffix"] = Work(2, 1)
    assert judge(trace(), free, later, 1.0).empty == ""
    assert judge(trace(), free, same_order, 1.0).empty.startswith("nothing reordered")
    assert judge(trace(), fixed, same_order, None).empty == ""
    assert judge(trace(), free, trace(prefix=Work(1, 0)), 1.0).empty.startswith("nothing overlapped")
    assert judge(trace(first_gradient={}), OTHERS[0], trace(first_gradient={}), None).empty.startswith("nothing learnt")
