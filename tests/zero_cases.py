"""The cases of zero_runs.py, by name; test_zero.py reads what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_cases as lora
import resample_cases as r
import zero_runs as z
from families import NAMES as FAMILIES
from families import Rows

from rollplex.models.tiny import MARKER, build_tiny

Case = Callable[..., Any]

LOSSES = {
    "dapo": {}, "bnpo": {"loss_type": "bnpo", "num_mini_batches": 2}, "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "batch"}, "dapo_parts": {"num_mini_batches": 2, "num_iterations": 2},
    "reference": {"beta": 0.04}, "unshared": {"share_prefix": False}, "bnpo_whole": {"loss_type": "bnpo"},
    "dr_grpo_group": {"loss_type": "dr_grpo"}, "sequence": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "grpo_parts": {"loss_type": "grpo", "num_mini_batches": 2, "num_iterations": 2, "beta": 0.04},
}  # fmt: skip
"""Settings under which two ranks must equal one."""


def case(run: Callable[..., Any], *args: Any, **settings: Any) -> Case:
    """From zero_runs' arguments to the run's (model, root, ...)."""

    def call(*, model: str, untied: str, root: Path, folder: Path) -> Any:
        return run(model, root, *args, **settings)

    return call


def untied(run: Callable[..., Any], *args: Any) -> Case:
    def call(*, model: str, untied: str, root: Path, folder: Path) -> Any:
        return run(untied, root, *args)

    return call


def of_family(family: str, run: Callable[..., Any], *args: Any, **settings: Any) -> Case:
    """On a tiny model of another family, which the first rank builds."""

    def call(*, model: str, untied: str, root: Path, folder: Path) -> Any:
        path = folder / family
        if z.RANK == 0:
            build_tiny(path, family=family, init_std=0.1, seed=1)
        while not (path / MARKER).exists():
            time.sleep(0.1)
        return run(str(path), root, *args, **settings)

    return call


def of_another(name: str, stage: int) -> Case:
    """Continue from the checkpoint that the case `name` saved, under another stage."""

    def call(*, model: str, untied: str, root: Path, folder: Path) -> Any:
        return z.refused(model, root, stage, str(folder / "runs" / name / "half.ckpt"))

    return call


def with_other_adapters(name: str, stage: int) -> Case:
    """Continue from the checkpoint that the case `name` of lora_cases.py saved."""

    def call(*, model: str, untied: str, root: Path, folder: Path) -> Any:
        return lora.other(model, root, stage, name, folder)

    return call


CHECKPOINTED = {"prefix_checkpointing": True, "suffix_checkpointing": True, "responses_per_pass": 2}
ALL_CUT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""DeepSpeed keeps parameters whole that have few elements: in a tiny model, all of them."""
OF_FAMILY = CHECKPOINTED | {"task": Rows(), "batch_size": 6, "zero": ALL_CUT}
FROZEN = {"freeze": ["vision_tower", "projector"], "beta": 0.04}
VISION: dict[str, dict[str, Any]] = {
    "vision": {"zero": ALL_CUT}, "vision_reference": {"zero": ALL_CUT} | FROZEN,
    "vision_checkpointed": CHECKPOINTED | {"prompts_per_pass": 2, "num_mini_batches": 2, "num_iterations": 2, "steps": 2},
    "vision_tight": {"zero": {"prefix_budget_bytes": 900_000}, "serial": True},
}  # fmt: skip
"""One vision pass where parameters are sharded; with `vision_tight` some graph of the tower has no room."""
STAGES = (0, 1, 2, 3)
ZERO = (1, 2, 3)

TP = {"train_tp": 2}

SOLO: dict[str, Case] = {
    **{f"train{s}": case(z.train, s) for s in ZERO},
    **{f"gradient{s}": case(z.gradient, s, **CHECKPOINTED) for s in ZERO},
    **{f"resume{s}": case(z.resume, s) for s in ZERO},
    "parts": case(z.train, 2, num_mini_batches=2, num_iterations=2, steps=2),
    "stage": of_another("resume2", 1),
    **{f"engine_{t}": case(z.engine_weights, t) for t in (0, 100_000)},
    **{f"offload{s}": case(z.offload, s) for s in (1, 2)},
    **{f"phases{s}": case(z.phase_offload, s) for s in (0, 1, 2)},
    **{f"masters{s}": untied(z.masters, s) for s in ZERO},
    "export2": case(z.export, 2),
    **{f"limited{s}": case(z.limited, s) for s in (0, 2)},
    "truncated3": case(z.train, 3, mask_truncated_completions=True, steps=1),
    "vision3": case(z.shared_vision, 3),
    "vision_reference3": case(z.shared_vision, 3, **VISION["vision_reference"]),
    **{f"lora{s}": case(lora.train, s, zero=ALL_CUT if s == 3 else {}) for s in ZERO},
    "lora_other": with_other_adapters("lora3", 3),
    "lora_phases2": case(z.phase_offload, 2, lora=lora.WIDE),
    "lora_validated3": case(z.validated, 3, lora=lora.WIDE, zero=ALL_CUT),
    **{f"lora_bf16_{s}": case(z.train, s, dtype="bfloat16", **lora.SETTINGS) for s in (2, 3)},
}
PAIR: dict[str, Case] = {
    **{f"train{s}": case(z.counted, s) for s in STAGES},
    **{f"gradient{s}": case(z.gradient, s, **CHECKPOINTED) for s in ZERO},
    **{f"{name}{s}": case(z.train, s, **settings) for name, settings in LOSSES.items() for s in (0, 3)},
    **{f"{name}{s}": case(z.mixed, s, name) for name in (*z.MIXES, "uneven", "odd", "alone") for s in (0, 2, 3)},
    **{f"rows{s}": case(z.uneven_rows, s) for s in (0, 3)},
    **{f"broken{s}": case(z.broken, s) for s in (0, 3)},
    **{f"resume{s}": case(z.resume, s) for s in (0, 2, 3)},
    "engine_0": case(z.engine_weights, 0),
    **{f"tensor{s}": case(z.train, s, zero=TP) for s in (1, 2)},
    **{f"tensor_{name}2": case(z.train, 2, zero=TP, **settings) for name, settings in LOSSES.items()},
    "tensor_gradient2": case(z.gradient, 2, zero=TP, **CHECKPOINTED),
    "tensor_resume2": case(z.resume, 2, zero=TP),
    "tensor_phases2": case(z.phase_offload, 2, zero=TP),
    "tensor_masters2": untied(z.masters, 2, TP),
    **{f"tensor_{f}2": of_family(f, z.gradient, 2, zero=TP, **CHECKPOINTED) for f in FAMILIES},
    **{f"{f}3": of_family(f, z.gradient_and_weights, 3, **OF_FAMILY) for f in FAMILIES},
    "tensor_validated2": case(z.validated, 2, zero=TP),
    "tensor_export2": case(z.export, 2, zero=TP),
    **{f"ledger{s}": case(z.ledger, s) for s in STAGES},
    **{f"vision{s}": case(z.shared_vision, s) for s in (0, 2)},
    **{f"{name}3": case(z.shared_vision, 3, **VISION[name]) for name in VISION},
    "dynamic_vision3": case(z.shared_vision, 3, task=r.scenario("rounds")[0], **r.scenario("rounds")[1]),
    "ledger2_bf16": case(z.ledger, 2, dtype="bfloat16", beta=0.04),
    **{f"lora{s}": case(lora.train, s, zero=ALL_CUT if s == 3 else {}) for s in ZERO},
    **{f"ledger{s}_lora": case(z.ledger, s, **lora.SETTINGS) for s in (2, 3)},
    "tensor_lora2": case(z.refused, 2, zero=TP, **lora.SETTINGS),
    "lora_mix3": case(z.mixed, 3, "alone", zero=ALL_CUT, **lora.SETTINGS),
    "lora_vision3": case(z.shared_vision, 3, zero=ALL_CUT, lora=lora.RANDOM, beta=0.04),
    "export3": case(z.export, 3),
    "export3_untied": untied(z.export, 3),
    "dynamic_rounds1": case(r.resample, 1, "rounds"),
    **{f"dynamic_{name}{s}": case(r.resample, s, name) for name in r.NAMES for s in (0, 2, 3)},
    **{f"dynamic_resume{s}": case(z.resume, s, task=r.scenario("rounds")[0], dynamic_sample=True) for s in (0, 2, 3)},
    **{f"tensor_dynamic_{name}2": case(r.resample, 2, name, zero=TP) for name in r.NAMES},
}
QUICK: dict[str, set[str]] = {
    "four": set(),
    "solo": {"train1", "train2", "train3", "gradient3", "resume2", "stage", "parts", "offload2", "phases2", "masters3", "limited2",
             "lora3", "lora_other", "truncated3"},
    "pair": {
        "train0", "train2", "train3", "gradient3", "dapo_parts3", "text_image3", "uneven3", "alone3", "rows3", "broken3", "resume0", "resume3",
        "engine_0", "export3", "lora2", "ledger2_lora", "tensor2", "tensor_gradient2", "ledger2", "ledger3", "dynamic_rounds2",
        "dynamic_one_sided3", "llava_onevision3", "vision3",
    },
}  # fmt: skip
"""World -> what the default tests read; the rest is read by slow ones."""

FOUR: dict[str, Case] = {
    "tensor2": case(z.train, 2, zero=TP),
    **{f"tensor_{name}2": case(z.mixed, 2, name, zero=TP) for name in ("one_three", "odd", "alone", "uneven")},
    **{f"tensor_dynamic_{name}2": case(r.resample, 2, name, zero=TP) for name in r.NAMES},
    "tensor_rows1": case(z.uneven_rows, 1, zero=TP),
    "tensor_resume1": case(z.resume, 1, zero=TP),
    "tensor_dr_grpo2": case(z.train, 2, zero=TP, **LOSSES["dr_grpo"]),
}
"""Two trainers of two ranks each."""

CASES = {1: SOLO, 2: PAIR, 4: FOUR}.get(z.WORLD, {})
