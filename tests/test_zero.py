"""DeepSpeed's ZeRO and plain data parallel against the strategy of one device: weights, gradients, checkpoints, rows.

All runs of one world are made by one set of processes (zero_runs.py, zero_cases.py); each test reads one result. The
reference runs are plain ones, here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import lora_cases
import pytest
import resample_cases as r
import torch
import zero_runs as z
from helpers import relative_error
from lightning.pytorch import Callback
from runs import largest_difference, run, same_bits, weights
from test_lora import check_adapter_folder
from zero_cases import (
    CHECKPOINTED,
    FAMILIES,
    FOUR,
    LOSSES,
    OF_FAMILY,
    PAIR,
    QUICK,
    SOLO,
    STAGES,
    VISION,
    ZERO,
)

from rollplex import RollplexDeepSpeedStrategy
from rollplex import deepspeed_checkpoints as checkpoints
from rollplex.engines import VLLMEngine
from rollplex.models.lora import is_adapter

pytestmark = [pytest.mark.deepspeed, pytest.mark.distributed]
pytest.importorskip("deepspeed")

HERE = Path(__file__).resolve().parent
BAR = 1e-6
"""Weights after three steps, float32."""
NOISE = 1e-5
"""Of a parameter's gradient (root mean square): elements below, some twenty in a million of an update, are the rounding
of a sum that is zero, or off by a percent of themselves, as a sum's rounding is 1e-7 of its terms. Adam divides by their
size, so it makes a step of the noise: another order of sums (another processor's, too) moves such a weight by part of a
learning rate."""


TOGETHER = 20
"""Slow cases of one set of processes: each costs seconds, and the start of the processes as much as a few of them."""


class Results:
    """What the cases of one world come to: the quick ones in one set of processes, of the others `TOGETHER` in one
    when the first of them is asked for. All at once they would take longer than a test may."""

    def __init__(self, world: str, folder: Path, model: Path, untied: Path) -> None:
        self.world, self.folder, self.models = world, folder, (model, untied)
        self.launched: set[str] = set()
        self.output = ""

    def __getitem__(self, name: str) -> Any:
        if name not in self.launched:
            quick = name in QUICK[self.world]
            cases = [case for case in WORLDS[self.world] if (case in QUICK[self.world]) == quick]
            first = 0 if quick else cases.index(name) // TOGETHER * TOGETHER
            self._launch(cases if quick else cases[first : first + TOGETHER])
        path = self.folder / f"{name}.pt"
        assert path.exists(), f"no result of {name}\n{self.output[-8000:]}"
        result = torch.load(path, weights_only=False)
        assert "error" not in result, result["error"]
        return result

    def _launch(self, cases: list[str]) -> None:
        self.launched |= set(cases)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        ranks = {"solo": 1, "pair": 2, "four": 4}[self.world]
        arguments = [",".join(cases), *map(str, (self.folder, *self.models))]
        done = subprocess.run(
            [*launcher, f"--nproc-per-node={ranks}", str(HERE / "zero_runs.py"), *arguments], env=environment,
            cwd=HERE.parent, capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
        self.output = done.stdout + done.stderr


WORLDS = {"solo": SOLO, "pair": PAIR, "four": FOUR}


def of(world: str, values: Any, name: str) -> list[Any]:
    """Parameters; slow where their case is."""
    values = [value if isinstance(value, tuple) else (value,) for value in values]
    slow = [name.format(*value) not in QUICK[world] for value in values]
    return [pytest.param(*v, marks=[pytest.mark.slow] if s else []) for v, s in zip(values, slow, strict=True)]


def either(pairs: Any, name: str) -> list[Any]:
    """Parameters (world, value); slow where their case is."""
    slow = [name.format(value) not in QUICK[world] for world, value in pairs]
    return [pytest.param(*p, marks=[pytest.mark.slow] if s else []) for p, s in zip(pairs, slow, strict=True)]


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory):
    """As a model is before training: norm weights are 1."""
    from rollplex.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("models") / "untied", seed=1, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def solo(parity_folder, untied_folder, tmp_path_factory):
    return Results("solo", tmp_path_factory.mktemp("solo"), parity_folder, untied_folder)


@pytest.fixture(scope="module")
def pair(parity_folder, untied_folder, tmp_path_factory):
    return Results("pair", tmp_path_factory.mktemp("pair"), parity_folder, untied_folder)


@pytest.fixture(scope="module")
def four(parity_folder, untied_folder, tmp_path_factory):
    return Results("four", tmp_path_factory.mktemp("four"), parity_folder, untied_folder)


class KeepGradient(Callback):
    """Of the whole model: zeros where no pass reads a parameter (SigLIP's last norm)."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        named = pl_module.policy.named_parameters()
        self.gradient = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


class KeepGradients(Callback):
    """Of each update, of the parameters that have one."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        named = pl_module.policy.named_parameters()
        self.seen.append({n: p.grad.clone() for n, p in named if p.grad is not None})


class FindNoise(Callback):
    """Elements whose gradient was nothing but rounding in some update (0 itself is exact)."""

    def __init__(self) -> None:
        self.noise: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for n, p in pl_module.policy.named_parameters():
            if p.grad is not None:
                size = p.grad.abs()
                found = (size > 0) & (size < NOISE * size.square().mean().sqrt())
                self.noise[n] = found | self.noise.get(n, torch.tensor(False))


class Plain(NamedTuple):
    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    noise: dict[str, torch.Tensor]
    rows: list[list[str]]
    """Of the groups of each step."""

    def difference(self, other: dict[str, torch.Tensor]) -> float:
        """Largest difference of weights whose gradients were more than rounding; of the few others at most a learning
        rate for each update."""
        assert sum(int(x.sum()) for x in self.noise.values()) < 1e-3 * sum(w.numel() for w in self.weights.values())
        far = {n: (w - other[n]).abs() for n, w in self.weights.items()}
        assert max(float(d.max()) for d in far.values()) < z.STEPS["learning_rate"]
        return max(float(d.masked_fill(self.noise.get(n, torch.tensor(False)), 0.0).max()) for n, d in far.items())


@pytest.fixture(scope="module")
def plain(parity_folder, tmp_path_factory):
    """Plain runs on one device, by their settings."""
    known: dict[str, Plain] = {}

    def make(task: Any = None, **settings: Any) -> Plain:
        key = repr((task and task.samples("train"), sorted(settings.items())))
        if key not in known:
            root, noise = tmp_path_factory.mktemp("plain"), FindNoise()
            module = run(parity_folder, root, task=task, callbacks=[*z.callbacks(), noise], **(z.STEPS | settings))
            rows = [[g.prompt.sample.id for g in out["groups"]] for out in module.seen]
            known[key] = Plain(weights(module), [out["metrics"] for out in module.seen], noise.noise, rows)
        return known[key]

    return make


@pytest.fixture(scope="module")
def plain_gradient(parity_folder, tmp_path_factory):
    keep = KeepGradient()
    settings = z.STEPS | CHECKPOINTED | {"steps": 1, "max_grad_norm": None}
    run(parity_folder, tmp_path_factory.mktemp("gradient"), callbacks=[*z.callbacks(), keep], **settings)
    return keep.gradient


def moved(model: dict[str, torch.Tensor], parity_folder) -> float:
    """How far training went: a bar of 1e-6 says little about weights that stood still."""
    from rollplex.models.registry import load_hf

    return largest_difference(model, dict(load_hf(str(parity_folder), "float32").named_parameters()))


# ---- equal weights, gradients and metrics ----


@pytest.mark.parametrize("stage", of("solo", ZERO, "train{}"))
def test_one_rank_equals_the_plain_strategy(solo, plain, parity_folder, stage):
    expected = plain()
    result = solo[f"train{stage}"]
    assert moved(expected.weights, parity_folder) > 30 * BAR
    assert expected.difference(result["weights"]) < BAR
    for own, other in zip(result["steps"], expected.metrics, strict=True):
        assert own["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def check_metrics(steps: list[dict[str, float]], metrics: list[dict[str, float]], bar: float = BAR) -> None:
    """Of each step of several ranks, against one's. bar: of the largest rounding between engine and trainer."""
    timed = ("time/", "tokens_per", "rollout_tokens", "overlap", "units_", "decode_", "prefix_bytes", "memory/", "lr")
    for own, other in zip(steps, metrics, strict=True):
        assert own.keys() >= {name for name in other if not name.startswith(timed)}
        for name in other:
            if not name.startswith(timed):
                assert own[name] == pytest.approx(other[name], rel=1e-4, abs=bar), name


@pytest.mark.parametrize("stage", of("pair", STAGES, "train{}"))
def test_two_ranks_equal_one(pair, plain, stage):
    expected = plain()
    result = pair[f"train{stage}"]
    assert expected.difference(result["weights"]) < BAR
    check_metrics(result["steps"], expected.metrics)


@pytest.mark.parametrize("stage", of("pair", STAGES, "train{}"))
def test_gradients_are_reduced_once_an_update(pair, stage):
    """After all backward calls (of two suffix and two prefix passes on each rank), every element once."""
    result = pair[f"train{stage}"]
    size = sum(w.numel() for w in result["weights"].values())
    assert result["reductions"] == [(done, "update", size) for done in range(3)]


@pytest.mark.parametrize(("name", "stage"), of("pair", [(n, s) for n in LOSSES for s in (0, 3)], "{}{}"))
def test_two_ranks_equal_one_for_every_loss(pair, plain, name, stage):
    expected = plain(**LOSSES[name])
    result = pair[f"{name}{stage}"]
    assert expected.difference(result["weights"]) < BAR
    assert [m["loss"] for m in result["steps"]] == pytest.approx([m["loss"] for m in expected.metrics], abs=1e-6)


def test_no_loss_is_left_out():
    from typing import get_args

    from rollplex.grpo.losses import LossType

    assert {settings.get("loss_type", "dapo") for settings in LOSSES.values()} == set(get_args(LossType))


@pytest.mark.parametrize(("world", "stage"), either([(w, s) for w in ("solo", "pair") for s in ZERO], "gradient{}"))
def test_spl_07_prefix_and_suffix_passes_with_checkpointing_give_the_whole_gradient(
    request, plain_gradient, world, stage
):
    gradient = request.getfixturevalue(world)[f"gradient{stage}"]["gradient"]
    assert gradient.keys() == plain_gradient.keys()
    whole, own = (torch.cat([g[n].flatten() for n in sorted(g)]) for g in (plain_gradient, gradient))
    assert relative_error(own, whole) < 1e-5
    for name, expected in plain_gradient.items():
        if expected.norm() > 1e-4 * whole.norm():
            assert relative_error(gradient[name], expected) < 1e-4, name


# ---- one trainer on two ranks ----

TENSOR_BAR = 1e-5
"""Weights after three steps with train_tp 2: sums over heads and features are split in two, and AdamW makes a step of
1e-6 of an element whose gradient is only rounding."""


@pytest.mark.parametrize("stage", of("pair", (1, 2), "tensor{}"))
def test_a_trainer_split_over_two_ranks_equals_one(pair, plain, parity_folder, stage):
    expected = plain()
    result = pair[f"tensor{stage}"]
    assert moved(expected.weights, parity_folder) > 3 * TENSOR_BAR
    assert expected.difference(result["weights"]) < TENSOR_BAR
    for own, other in zip(result["steps"], expected.metrics, strict=True):
        assert own["reward"] == pytest.approx(other["reward"], abs=1e-6)
        assert own["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)  # shards count once each
        assert own["completion_length"] == other["completion_length"]


@pytest.mark.parametrize("name", of("pair", list(LOSSES), "tensor_{}2"))
def test_a_split_trainer_equals_one_for_every_loss(pair, plain, name):
    expected = plain(**LOSSES[name])
    result = pair[f"tensor_{name}2"]
    assert expected.difference(result["weights"]) < TENSOR_BAR
    assert [m["loss"] for m in result["steps"]] == pytest.approx([m["loss"] for m in expected.metrics], abs=1e-6)


@pytest.mark.parametrize("name", of("pair", ["gradient2"], "tensor_{}"))
def test_split_prefix_and_suffix_passes_give_the_whole_gradient(pair, plain_gradient, name):
    gradient = pair[f"tensor_{name}"]["gradient"]
    assert gradient.keys() == plain_gradient.keys()
    whole, own = (torch.cat([g[n].flatten() for n in sorted(g)]) for g in (plain_gradient, gradient))
    assert relative_error(own, whole) < 1e-5
    for name, expected in plain_gradient.items():
        if expected.norm() > 1e-4 * whole.norm():
            assert relative_error(gradient[name], expected) < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_gradient_of_other_families(pair, family, tmp_path):
    """Qwen3-VL has norms of single heads, whose gradients are parts of the whole on each rank."""
    from rollplex.models.tiny import build_tiny

    keep = KeepGradient()
    model = build_tiny(tmp_path / family, family=family, init_std=0.1, seed=1)
    settings = z.STEPS | CHECKPOINTED | {"steps": 1, "max_grad_norm": None}
    run(model, tmp_path, callbacks=[*z.callbacks(), keep], **settings)
    gradient = pair[f"tensor_{family}2"]["gradient"]
    whole, own = (torch.cat([g[n].flatten() for n in sorted(g)]) for g in (keep.gradient, gradient))
    assert relative_error(own, whole) < 1e-5
    assert any("q_norm" in name for name in gradient) == (family == "qwen3_vl")
    for name, expected in keep.gradient.items():
        if expected.norm() > 1e-4 * whole.norm():
            assert relative_error(gradient[name], expected) < 1e-4, name


@pytest.mark.parametrize("family", of("pair", FAMILIES, "{}3"))
def test_every_family_with_all_parameters_cut(pair, family, tmp_path):
    """ZeRO-3 on prompts of all media, of which each rank has others; gradient of the first step, weights after three."""
    from rollplex.models.tiny import build_tiny

    gradients, noise = KeepGradients(), FindNoise()
    model = build_tiny(tmp_path / family, family=family, init_std=0.1, seed=1)
    settings = z.STEPS | {k: v for k, v in OF_FAMILY.items() if k != "zero"} | {"max_grad_norm": None}
    module = run(model, tmp_path, callbacks=[*z.callbacks(), gradients, noise], **settings)
    own, first = pair[f"{family}3"], gradients.seen[0]
    whole = torch.cat([g.flatten() for g in first.values()]).norm()
    # Biases of SigLIP's keys cancel in the softmax: all there is of their gradients is rounding.
    taught = {n for n, g in first.items() if g.norm() > 1e-6 * whole}
    assert all("vision" in n and n.endswith("k_proj.bias") for n in first.keys() - taught)
    for name, gradient in own["gradient"].items():
        expected = first.get(name, torch.zeros_like(gradient))  # no pass reads SigLIP's last norm
        assert (gradient - expected).norm() < 1e-5 * whole
        if expected.norm() > 1e-4 * whole:
            assert relative_error(gradient, expected) < 1e-4, name
    expected = Plain({n: w for n, w in weights(module).items() if n in taught}, [], noise.noise, [])
    assert expected.difference(own["weights"]) < TENSOR_BAR
    assert moved(expected.weights, model) > 3 * TENSOR_BAR
    check_metrics(own["steps"], [out["metrics"] for out in module.seen])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor2", "tensor_dr_grpo2"])
def test_two_trainers_of_two_ranks_equal_one(four, plain, name):
    expected = plain(**LOSSES.get(name.removeprefix("tensor_").removesuffix("2"), {}))
    assert expected.difference(four[name]["weights"]) < TENSOR_BAR
    for own, other in zip(four[name]["steps"], expected.metrics, strict=True):
        assert own["reward"] == pytest.approx(other["reward"], abs=1e-6)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_three", "odd", "alone", "uneven"])
def test_two_trainers_of_two_ranks_with_other_rows(four, plain, name):
    """Also one that has no group at all."""
    task, settings = z.mix(name)
    assert plain(task, **settings).difference(four[f"tensor_{name}2"]["weights"]) < TENSOR_BAR


@pytest.mark.slow
def test_two_trainers_of_two_ranks_validate_every_row_once(four):
    result = four["tensor_rows1"]  # of the data-parallel ranks
    validated = [row for rank in result["validated"] for row in rank]
    assert len(result["validated"]) == 4 and result["metrics"][0] == result["metrics"][1]
    assert sorted(validated) == sorted(2 * 2 * [f"validation-{i}" for i in range(5)])  # each trainer's two ranks


@pytest.mark.slow
def test_two_trainers_of_two_ranks_resume(four):
    result = four["tensor_resume1"]
    assert same_bits(result["straight"]["weights"], result["resumed"]["weights"])


# ---- groups drawn in the place of others ----


def resampled(ranks: Any, plain: Any, name: str, stage: int, split: str = "") -> tuple[dict[str, Any], Plain]:
    """A run of several ranks and one of one, which must be equal in weights, metrics and rows. split: "tensor_"."""
    task, settings = r.scenario(name)
    expected, result = plain(task, **settings), ranks[f"{split}dynamic_{name}{stage}"]
    bar = TENSOR_BAR if split else BAR
    assert expected.difference(result["weights"]) < bar
    check_metrics(result["steps"], expected.metrics, bar)
    for rows, step in zip(expected.rows, zip(*result["rows"], strict=True), strict=True):
        assert dict(enumerate(rows)) == {place: row for rank in step for place, row in rank.items()}
    assert expected.metrics[0]["groups_resampled"] > 0
    return result, expected


DYNAMIC = [("rounds", s) for s in STAGES] + [("bundled", s) for s in (0, 2, 3)]


@pytest.mark.parametrize(("name", "stage"), of("pair", DYNAMIC, "dynamic_{}{}"))
def test_two_ranks_draw_and_learn_what_one_would(pair, plain, parity_folder, name, stage):
    result, expected = resampled(pair, plain, name, stage)
    assert len(expected.rows) == 3 and moved(expected.weights, parity_folder) > 30 * BAR
    assert all(m["groups_resampled"] > 0 for m in expected.metrics) and expected.metrics[0]["resample_rounds"] == 2
    assert all(m["groups_kept"] == 4 and m["updates_skipped"] == 0 for m in result["steps"])


@pytest.mark.parametrize(("name", "stage"), of("pair", [("one_sided", s) for s in (0, 2, 3)], "dynamic_{}{}"))
def test_a_rank_that_keeps_all_its_groups_goes_on_with_one_that_keeps_none(pair, plain, name, stage):
    result, _ = resampled(pair, plain, name, stage)
    first, second = ({place for place in ranks[0] if place < 4} for ranks in result["spread"])
    assert (first, second) == ({0, 2}, set())
    assert all(len(rank[0]) == 3 for rank in result["rows"])  # the two drawn are shared


@pytest.mark.parametrize(("name", "stage"), of("pair", [("run_out", s) for s in (0, 2, 3)], "dynamic_{}{}"))
def test_rounds_of_two_ranks_run_out(pair, plain, name, stage):
    result, _ = resampled(pair, plain, name, stage)
    assert all(m["resample_rounds"] == 1 and 0 < m["groups_kept"] < 4 for m in result["steps"])
    assert [] in [rank[0] for rank in result["spread"]]  # a rank without anything to learn


@pytest.mark.parametrize(("name", "stage"), of("pair", [("nothing", s) for s in (0, 2, 3)], "dynamic_{}{}"))
def test_two_ranks_that_keep_nothing_move_nothing(pair, plain, parity_folder, name, stage):
    result, _ = resampled(pair, plain, name, stage)
    assert moved(result["weights"], parity_folder) == 0.0 and result["global_step"] == 2
    assert all(m["groups_dropped"] == 12 and m["updates_skipped"] == 1 for m in result["steps"])


def test_an_update_without_a_response_that_counts_moves_nothing(solo, parity_folder):
    """Its gradients are there, and given up before they are reduced."""
    result = solo["truncated3"]
    assert result["steps"][0]["completions_truncated"] == 1.0 and result["global_step"] == 1
    assert moved(result["weights"], parity_folder) == 0.0


@pytest.mark.parametrize(
    ("name", "stage"), of("pair", [(n, s) for n in ("few_rows", "bad_rows") for s in (0, 2, 3)], "dynamic_{}{}")
)
def test_rows_run_out_or_are_bad_for_two_ranks_as_for_one(pair, plain, name, stage):
    result, _ = resampled(pair, plain, name, stage)
    wanted = {"few_rows": (3, 1), "bad_rows": (3, 4)}[name]
    assert (result["steps"][0]["groups_resampled"], result["steps"][0]["groups_kept"]) == wanted


@pytest.mark.parametrize("stage", of("pair", (0, 2, 3), "dynamic_resume{}"))
def test_two_ranks_resume_to_the_same_draws(pair, stage):
    result = pair[f"dynamic_resume{stage}"]
    straight, resumed = result["straight"], result["resumed"]
    assert same_bits(straight["weights"], resumed["weights"])
    for name in ("loss", "reward", "groups_resampled", "resample_rounds"):
        assert [m[name] for m in resumed["steps"]] == [m[name] for m in straight["steps"]][3:]
    assert any(m["groups_resampled"] > 0 for m in resumed["steps"])


@pytest.mark.parametrize("name", of("pair", r.NAMES, "tensor_dynamic_{}2"))
def test_a_split_trainer_draws_and_learns_what_one_would(pair, plain, name):
    result, _ = resampled(pair, plain, name, 2, "tensor_")
    first, second = result["rows"]
    assert first == second  # the two ranks are one trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", r.NAMES)
def test_two_trainers_of_two_ranks_draw_and_learn_what_one_would(four, plain, name):
    """In "one_sided" and "run_out" one of them keeps nothing, in "bad_rows" it has no further rows."""
    resampled(four, plain, name, 2, "tensor_")


# ---- ranks with other rows ----


@pytest.mark.parametrize(
    ("name", "stage"), of("pair", [(n, s) for n in (*z.MIXES, "uneven", "odd", "alone") for s in (0, 2, 3)], "{}{}")
)
def test_dist_01_dist_05_ranks_with_other_pictures_and_other_numbers_of_passes(pair, plain, name, stage):
    task, settings = z.mix(name)
    assert plain(task, **settings).difference(pair[f"{name}{stage}"]["weights"]) < BAR


@pytest.mark.parametrize("stage", of("pair", (0, 3), "broken{}"))
def test_img_07_lp_15_lp_17_what_is_broken_on_one_rank_stops_no_other(pair, plain, stage):
    """A file, a reward that never comes and one that raises: counted, and the rest is learnt as by one rank."""
    expected, result = plain(z.BrokenTask(), **z.BROKEN), pair[f"broken{stage}"]
    assert expected.difference(result["weights"]) < BAR
    check_metrics(result["steps"], expected.metrics)
    assert sum(m["rewards_missing/timeout"] for m in result["steps"]) > 0 < result["steps"][-1]["rows_skipped"]
    assert sum(m["rewards_missing/raised"] for m in result["steps"]) > 0
    groups = [group for rank in result["rewarded"] for group in rank]
    assert all(result["rewarded"]) and {row for row, _, _ in groups} == {f"train-{i}" for i in range(8) if i != 3}
    for row, prompt, rewards in groups:
        assert row in prompt
        assert {int(reward) for reward in rewards if reward == reward} == {int(row.removeprefix("train-"))}


@pytest.mark.parametrize("stage", of("pair", (0, 3), "rows{}"))
def test_dist_09_rows_that_ranks_do_not_divide(pair, parity_folder, tmp_path, stage):
    result = pair[f"rows{stage}"]
    for trained in zip(*result["trained"], strict=True):  # a step: the rows of each rank
        rows = [row for rank in trained for row in rank]
        assert len(rows) == len(set(rows)) == 4
    validated = [row for rank in result["validated"] for row in rank]
    assert sorted(validated) == sorted(2 * [f"validation-{i}" for i in range(5)])
    assert result["metrics"][0] == result["metrics"][1]
    metrics = z.ValidationMetrics()
    run(
        parity_folder, tmp_path, task=z.SevenAndFive(), callbacks=[*z.callbacks(), metrics], trainer=z.VALIDATE,
        **(z.STEPS | {"steps": 2}),
    )  # fmt: skip
    assert result["metrics"][0] == pytest.approx(metrics.seen, abs=1e-5)


@pytest.mark.parametrize(("world", "stage"), either([("solo", 3), ("pair", 0), ("pair", 2), ("pair", 3)], "vision{}"))
def test_one_vision_pass_on_every_rank(request, plain, world, stage):
    result = request.getfixturevalue(world)[f"vision{stage}"]
    assert plain().difference(result["weights"]) < BAR
    assert result["passes"] == pytest.approx([1.0] * 3)


@pytest.mark.parametrize(
    ("world", "name"),
    either([("solo", "vision_reference3"), *(("pair", f"{name}3") for name in VISION if name != "vision")], "{}"),
)
def test_one_vision_pass_of_sharded_parameters(request, plain, world, name):
    """Also for a reference with the same frozen tower, and where some rank has no room for a graph of the tower: then
    the actors of all ranks run theirs again."""
    settings = {k: v for k, v in VISION[name[:-1]].items() if k not in ("zero", "serial")}
    result = request.getfixturevalue(world)[name]
    assert plain(**settings).difference(result["weights"]) < BAR
    for passes in result["passes"]:
        if name == "vision_reference3":
            assert passes == pytest.approx(1.0)
        else:
            assert 1 < passes < (2 if name == "vision_tight3" else 5)


@pytest.mark.slow
def test_one_vision_pass_in_every_round(pair, plain):
    """vision: shared, dynamic_sample and ZeRO-3 at once."""
    task, settings = r.scenario("rounds")
    result, expected = pair["dynamic_vision3"], plain(task, **settings)
    assert expected.difference(result["weights"]) < BAR
    assert all(m["groups_resampled"] > 0 for m in expected.metrics)
    # The reference has a tower of its own: it is not frozen.
    assert result["passes"] == pytest.approx([2.0] * 3)


# ---- adapters ----


@pytest.fixture(scope="module")
def untrained(parity_folder):
    """Name -> weight, as a run with adapters starts."""
    from rollplex.models.lora import add_adapters, lora_config
    from rollplex.models.registry import load_hf

    model = load_hf(str(parity_folder), "float32")
    add_adapters(model, lora_config(lora_cases.WIDE), seed=7)
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "stage"), either([(w, s) for w in ("solo", "pair") for s in ZERO], "lora{}"))
def test_adapters_learn_what_they_learn_on_one_device(request, plain, untrained, world, stage):
    """And nothing else moves, is taken over by the engine after an update, or has optimizer states."""
    expected, result = plain(**lora_cases.SETTINGS), request.getfixturevalue(world)[f"lora{stage}"]
    own, ranks = result["straight"]["weights"], {"solo": 1, "pair": 2}[world]
    assert expected.difference(own) < BAR
    check_metrics(result["straight"]["steps"], expected.metrics)
    assert all(m["kl"] > 0 for m in result["straight"]["steps"])
    moved = {name for name, weight in own.items() if not torch.equal(weight, untrained[name])}
    assert moved == {name for name in own if is_adapter(name)}
    assert max(float((own[name] - untrained[name]).abs().max()) for name in moved) > 30 * BAR
    assert result["reference"] == []  # no weights of its own
    assert result["states"]["optimizer_moments"] == pytest.approx(2 * result["adapter_bytes"] / ranks, rel=0.01)
    if stage == 3:
        first, *later = result["gathered"]
        assert len(later) == 3 and {first, *later} == {result["adapter_bytes"]}


@pytest.mark.parametrize(("world", "stage"), either([(w, s) for w in ("solo", "pair") for s in ZERO], "lora{}"))
def test_checkpoints_of_adapters_resume_and_export(request, parity_folder, world, stage):
    result = request.getfixturevalue(world)[f"lora{stage}"]
    straight, resumed = result["straight"], result["resumed"]
    assert same_bits(straight["weights"], resumed["weights"])
    assert [m["loss"] for m in resumed["steps"]] == [m["loss"] for m in straight["steps"]][2:]
    assert result["saved"] == sorted(f"policy.{name}" for name in straight["weights"] if is_adapter(name))
    check_adapter_folders(result, parity_folder)


def check_adapter_folders(result: dict[str, Any], base: Path) -> None:
    """The exported model is the merged one; that of the checkpoint, a step before, is another one."""
    from transformers import AutoModelForImageTextToText

    models = [AutoModelForImageTextToText.from_pretrained(result[name]) for name in ("export", "half")]
    end, half = ({n: p.detach() for n, p in model.named_parameters()} for model in models)
    assert same_bits(end, result["merged"]) and not same_bits(end, half)
    for name, model in zip(("export", "half"), models, strict=True):
        check_adapter_folder(Path(result[name]), base, model)


def test_a_checkpoint_of_other_adapters_is_refused(solo):
    assert "lora={'r': 2" in solo["lora_other"]["message"] and "(was {'r': 4" in solo["lora_other"]["message"]


@pytest.mark.slow
def test_adapters_of_a_split_trainer_are_refused(pair):
    assert "lora with train_tp=2 is not supported" in pair["tensor_lora2"]["message"]


@pytest.mark.slow
def test_adapters_are_validated_from_their_checkpoint(solo):
    for during, after in solo["lora_validated3"]["seen"]:
        assert during and after == pytest.approx(during, abs=1e-5)


@pytest.mark.slow
def test_adapters_and_a_rank_without_a_group(pair, plain):
    task, settings = z.mix("alone")
    assert plain(task, **settings, **lora_cases.SETTINGS).difference(pair["lora_mix3"]["weights"]) < BAR


@pytest.mark.slow
def test_one_vision_pass_with_adapters(pair, plain):
    """The reference's too: no adapter is in the tower."""
    expected, result = plain(lora=lora_cases.RANDOM, beta=0.04), pair["lora_vision3"]
    assert expected.difference(result["weights"]) < BAR
    assert result["passes"] == pytest.approx([1.0] * 3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", (2, 3))
def test_adapters_of_a_bfloat16_model(solo, plain, stage):
    """The last bit may differ: gradients are scaled in bfloat16 on one device, in float32 by DeepSpeed. In stage 3 the
    engine reads other addresses, rounds otherwise and samples other tokens."""
    expected, own = plain(dtype="bfloat16", **lora_cases.SETTINGS).weights, solo[f"lora_bf16_{stage}"]["weights"]
    assert {w.dtype for w in own.values()} == {torch.bfloat16} and expected.keys() == own.keys()
    for name, weight in own.items():
        if not is_adapter(name):
            assert torch.equal(weight, expected[name]), name
            continue
        far = (weight.float() - expected[name].float()).abs()
        steps = z.STEPS["learning_rate"] * (1 if stage == 2 else 6)
        assert (far <= expected[name].float().abs() * 2**-7 + steps).all(), name


# ---- the engine's weights ----


@pytest.mark.parametrize(("world", "threshold"), either((("solo", 0), ("solo", 100_000), ("pair", 0)), "engine_{}"))
def test_dist_06_after_a_push_the_engine_has_every_tensor_of_the_trainer(request, world, threshold):
    result = request.getfixturevalue(world)[f"engine_{threshold}"]
    assert result["compared"] > 200 and result["unequal"] == []
    assert 0 < result["peak"] < result["whole"] / 4  # in buckets
    if threshold == 0:  # nothing may stay gathered: units leave little behind, and a bucket is all there is of a push
        assert 0 < result["gathered"] <= result["peak"]
        assert 0 < result["resident"] < result["whole"] / 3


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("world", "stage"),
    either([("solo", 1), ("solo", 2), ("solo", 3), ("pair", 0), ("pair", 2), ("pair", 3)], "resume{}"),
)
def test_ckpt_02_a_resumed_run_is_the_uninterrupted_one(request, world, stage):
    result = request.getfixturevalue(world)[f"resume{stage}"]
    straight, resumed = result["straight"], result["resumed"]
    assert same_bits(straight["weights"], resumed["weights"])
    assert resumed["rates"] == straight["rates"][3:]
    assert straight["rates"][:5] == sorted(set(straight["rates"][:5])) and straight["rates"][5] < straight["rates"][4]
    assert [m["loss"] for m in resumed["steps"]] == [m["loss"] for m in straight["steps"]][3:]
    assert [m["reward"] for m in resumed["steps"]] == [m["reward"] for m in straight["steps"]][3:]
    assert resumed["global_step"] == straight["global_step"] == 6
    assert resumed.get("engine_steps", 6) == 6 and result["leftover"] == []


@pytest.mark.slow
def test_a_resumed_run_of_a_split_trainer_is_the_uninterrupted_one(pair):
    result = pair["tensor_resume2"]
    assert same_bits(result["straight"]["weights"], result["resumed"]["weights"])
    assert [m["loss"] for m in result["resumed"]["steps"]] == [m["loss"] for m in result["straight"]["steps"]][3:]
    assert result["leftover"] == []


@pytest.mark.slow
def test_a_split_trainer_validates_from_its_checkpoint(pair):
    """There nothing is split: the module is put together on every rank."""
    for during, after in pair["tensor_validated2"]["seen"]:
        assert during and after == pytest.approx(during, abs=1e-5)


def test_ckpt_08_one_global_step_per_optimizer_update(solo, plain):
    result = solo["parts"]
    assert result["global_step"] == result["engine_steps"] == result["scheduler_steps"] == 8
    assert [m["updates"] for m in result["steps"]] == [4.0, 8.0]
    assert plain(num_mini_batches=2, num_iterations=2, steps=2).difference(result["weights"]) < BAR


def test_a_checkpoint_of_another_stage_or_number_of_ranks_is_refused(solo, tmp_path):
    assert "was written by rollplex_zero2, and this run's stage is 1" in solo["stage"]["message"]
    checkpoints.Mark(stage=2, ranks=2).write(tmp_path)
    with pytest.raises(ValueError, match="has the shards of 2 ranks, and this run has 1"):
        checkpoints.check_mark(tmp_path, stage=2, ranks=1)
    with pytest.raises(ValueError, match="was written with train_tp=1, and this run's is 2"):
        checkpoints.check_mark(tmp_path, stage=2, ranks=2, train_tp=2)
    (tmp_path / "plain.ckpt").write_text("")
    with pytest.raises(ValueError, match="is a file, a checkpoint of strategy rollplex"):
        checkpoints.check_mark(tmp_path / "plain.ckpt", stage=2, ranks=1)
    (tmp_path / "half").mkdir()
    with pytest.raises(ValueError, match="is no checkpoint of a rollplex_zero strategy"):
        checkpoints.check_mark(tmp_path / "half", stage=2, ranks=1)


@pytest.mark.parametrize("before", ["nothing", "folder", "file", "link", "broken link"])
def test_a_checkpoint_takes_the_place_of_what_had_its_name_and_leaves_nothing_behind(tmp_path, before):
    """ModelCheckpoint(save_last="link") makes last.ckpt a link to another checkpoint, which stays."""
    partial, target, other = (tmp_path / name for name in (".last.ckpt.partial", "last.ckpt", "step=2.ckpt"))
    for folder in (partial, other):
        folder.mkdir()
        (folder / "content").write_text(folder.name)
    if before == "folder":
        target.mkdir()
        (target / "content").write_text("old")
    elif before == "file":
        target.write_text("old")
    elif "link" in before:
        target.symlink_to(other.name if before == "link" else "gone")
    checkpoints.replace_folder(partial, target)
    assert not target.is_symlink() and (target / "content").read_text() == partial.name
    assert (other / "content").read_text() == other.name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=2.ckpt"]


@pytest.mark.parametrize(
    ("world", "name"),
    either([("solo", "export2"), ("pair", "export3"), ("pair", "export3_untied"), ("pair", "tensor_export2")], "{}"),
)
def test_ckpt_06_exports_load_with_plain_transformers(request, world, name, tiny_processor):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    result = request.getfixturevalue(world)[name]
    for folder in result["folders"]:
        model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert same_bits({n: p.detach() for n, p in model.named_parameters()}, result["weights"])
        assert (Path(folder) / "generation_config.json").exists()
        AutoProcessor.from_pretrained(folder)


def test_a_trainer_of_more_ranks_than_were_started_is_refused(parity_folder, tmp_path):
    strategy = RollplexDeepSpeedStrategy(2, train_tp=2)
    with pytest.raises(ValueError, match="need a multiple of 2 processes, but 1 were started"):
        run(parity_folder, tmp_path, trainer={"strategy": strategy, "devices": 1})


# ---- states ----


@pytest.mark.parametrize("stage", of("solo", (1, 2), "offload{}"))
def test_dist_07_offload_and_reload_change_nothing(solo, stage):
    result = solo[f"offload{stage}"]
    assert result["same"] and same_bits(result["with"], result["without"])
    assert result["groups"] == 2  # parameters with weight decay and those without, which alternate in the model
    first, _, _, *later = result["bytes"]
    assert first["masters"] > 0 and first["optimizer_moments"] == 0  # nothing is learnt yet
    assert later[0]["optimizer_moments"] == 2 * first["masters"]
    for present, gone, again in zip(*[iter(result["bytes"])] * 3, strict=True):
        assert gone["masters"] == gone["optimizer_moments"] == 0 and gone["parameters"] == present["parameters"]
        assert {k: again[k] for k in ("masters", "optimizer_moments", "parameters")} == {
            k: present[k] for k in ("masters", "optimizer_moments", "parameters")
        }


@pytest.mark.parametrize(
    ("world", "case"),
    either([("solo", "phases0"), ("solo", "phases1"), ("solo", "phases2"), ("solo", "lora_phases2"), ("pair", "tensor_phases2")], "{}"),
)  # fmt: skip
def test_offload_by_phase_changes_no_bit(request, world, case):
    result, stage = request.getfixturevalue(world)[case], int(case[-1])
    assert same_bits(result["with"], result["without"]) and not result["wrong"]
    masters = ["masters"] if stage else []
    reference = [] if case.startswith("lora") else ["reference_weights"]  # with adapters there is none
    assert {"optimizer_moments", "kv_pool", *masters, *reference} <= set(result["states"])
    for name in ("optimizer_moments", *masters):
        row = result["recorded"][name]
        assert row["update"] > 0 and not any(size for key, size in row.items() if key != "update")
    for name in reference:
        assert result["recorded"][name]["train"] == 0 < result["recorded"][name]["score"]


@pytest.mark.parametrize(
    "name", of("pair", [*(f"ledger{s}" for s in STAGES), "ledger2_bf16", "ledger2_lora", "ledger3_lora"], "{}")
)
def test_a_plan_of_two_ranks_is_what_their_ledgers_saw(pair, parity_folder, tmp_path, name):
    """State by state within 5 %, and no state that the plan does not know."""
    import yaml
    from test_plan_run import VISUAL, config_of

    from rollplex.planner.command import parser, plan_of

    result = pair[name]
    model = {"bf16": dict(dtype="bfloat16", beta=0.04), "lora": lora_cases.SETTINGS}.get(name.partition("_")[2], {})
    config = config_of(parity_folder, tmp_path, model=model)
    stage = int(name.removeprefix("ledger")[0])
    kind, settings = ("DeepSpeed", {"stage": stage}) if stage else ("DDP", {})
    strategy = {"class_path": f"rollplex.Rollplex{kind}Strategy", "init_args": settings}
    config["trainer"] |= {"devices": 2, "strategy": strategy}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    lengths = ["--prompt-tokens", str(result["tokens"]), "--visual-share", str(VISUAL / result["tokens"])]
    plan = plan_of(parser().parse_args(["--config", str(path), *lengths]))
    most = {state: max(row.values()) for state, row in plan.ledger.planned().items()}
    assert plan.run.ranks == 2 and plan.run.zero == stage and result["wrong"] == [[], []]
    for seen in result["largest"]:
        assert seen.keys() == most.keys() - {"reduction buffer", "gathered parameters"}
        for state, size in seen.items():
            if name.endswith("lora") and state in ("prefix_activations", "suffix_activations"):
                assert most[state] >= size  # planned as if all weights were trained
            else:
                assert most[state] == pytest.approx(size, rel=0.05), state


@pytest.mark.parametrize("stage", of("solo", (0, 2), "limited{}"))
def test_the_windows_admission_asks_the_ledger(solo, stage):
    """With one rank's batch, as tests/test_phase_offload.py with strategy rollplex."""
    result = solo[f"limited{stage}"]
    assert result["refused"] >= 1 and result["held"] <= result["limit"]
    assert same_bits(result["free"], result["tight"])


@pytest.mark.parametrize(
    ("world", "case"), either([*(("solo", f"masters{s}") for s in ZERO), ("pair", "tensor_masters2")], "{}")
)
def test_sync_08_masters_of_a_bfloat16_model_move(request, world, case):
    result = request.getfixturevalue(world)[case]
    assert set(result["dtypes"]) == {"torch.float32"}
    before, after = result["before"], result["after"]
    norms = [name for name in before if "norm" in name and name.endswith("weight")]
    assert norms
    for name in before:
        assert after[name].dtype == torch.bfloat16
        step = (before[name].float() - after[name].float()).abs()
        # bfloat16 rounds by at most 1/512 of a number.
        assert ((step - 1e-2).abs() <= 1e-4 + before[name].float().abs() / 256).all(), name
    for name in norms:
        assert (before[name] == 1).all() and (after[name] < 1).all(), name


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 0}, "stage=0 must be 1, 2 or 3; without sharding, set strategy rollplex_ddp"),
        ({"stage": 2, "zero_optimization": {"stage": 3}}, "the stage is set by `stage`"),
        ({"stage": 3, "zero_optimization": {"offload_param": {"device": "cpu"}}}, "parameters cannot be offloaded"),
        ({"gather_bucket_bytes": 0}, "gather_bucket_bytes=0"),
        ({"memory_limit_bytes": True}, "memory_limit_bytes=True must be a whole number, 1 or more"),
        ({"admission": "sometimes"}, "admission='sometimes' is unknown"),
        ({"train_tp": 0}, "train_tp=0 must be a whole number, 1 or more"),
        (
            {"stage": 3, "train_tp": 2},
            "train_tp=2 needs parameters that ZeRO-3 does not cut once more; set stage 1 or 2",
        ),
        ({"train_tp": 4, "engine": VLLMEngine(tensor_parallel_size=3)}, "one must divide the other"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RollplexDeepSpeedStrategy(**settings)


@pytest.mark.parametrize(
    ("stage", "names", "message"),
    [
        (2, ["parameters"], "parameters cannot leave the device"),
        (2, ["moments"], "moments is unknown; states are optimizer_moments, masters"),
        (2, ["gradients"], "gradients are freed after each update"),
        (3, ["masters"], "ZeRO-3 moves masters of DeepSpeed's FusedAdam only, and the optimizer is AdamW"),
    ],
)
def test_states_that_cannot_be_offloaded_are_refused(stage, names, message):
    from types import SimpleNamespace

    from rollplex.deepspeed_offload import StateOffload

    engine = SimpleNamespace(
        optimizer=SimpleNamespace(optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]))
    )
    with pytest.raises(ValueError, match=message):
        StateOffload(engine, stage).offload(names)


CONFIGS = HERE.parent / "configs"


def test_digits_config_is_that_of_one_device_with_zero(capsys):
    """Nothing but strategy, devices and folders differ, and it parses."""
    import yaml

    from rollplex.cli import main

    theirs, ours = (
        yaml.safe_load((CONFIGS / name).read_text().replace("runs/digits-zero2", "runs/digits"))
        for name in ("digits_cpu.yaml", "digits_zero2_cpu.yaml")
    )
    assert ours["trainer"].pop("devices") == 1
    strategy = ours["trainer"].pop("strategy")
    assert strategy["class_path"] == "rollplex.RollplexDeepSpeedStrategy" and strategy["init_args"].pop("stage") == 2
    assert strategy["init_args"] == theirs["trainer"].pop("strategy")["init_args"]
    assert ours == theirs
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(CONFIGS / "digits_zero2_cpu.yaml"), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert end.value.code == 0 and printed["trainer"]["strategy"]["init_args"]["gather_bucket_bytes"] == 512 * 1024**2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (1, 2))
def test_digits_config_runs_resumes_and_is_evaluated(tmp_path, ranks):
    """By the command alone: Lightning starts the second process."""
    from rollplex.models.tiny import build_tiny
    from rollplex.tasks.digits import Digits

    build_tiny(tmp_path / "models" / "tiny-digits")
    config = ["--config", str(CONFIGS / "digits_zero2_cpu.yaml"), "--trainer.devices", str(ranks)]
    checkpoint = ["--ckpt_path", "last"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    short = ["--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1"]
    for command in (
        ["fit", *config, *short, "--trainer.max_steps", "2"],
        ["fit", *config, *short, *checkpoint, "--trainer.max_steps", "3"],
        ["validate", *config, *checkpoint],
        ["predict", *config, *checkpoint, "--trainer.limit_predict_batches", "1"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "rollplex", *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    (written,) = tmp_path.rglob("predictions.jsonl")
    ids = [json.loads(line)["id"] for line in written.read_text().splitlines()]
    assert len(ids) == len(set(ids)) == len(Digits().samples("test"))
