"""`rollplex plan`: memory per phase, whether it fits, and predicted step times, before a GPU is touched.

A config whose ranks train on one GPU each (strategy rollplex, rollplex_ddp, rollplex_zero) is planned as its run will
do it, with PhaseOffload or without. Flags, or tensor-parallel degrees above one, plan a cluster with the residency of
the paper.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rollplex.planner import configs, show
from rollplex.planner.calibrate import Calibration, calibrate
from rollplex.planner.clashes import check_clashes, check_model_folder
from rollplex.planner.engine_memory import engine_memory
from rollplex.planner.hardware import gpu_of
from rollplex.planner.memory import GIB, MemorySettings
from rollplex.planner.models import model_shape
from rollplex.planner.names import check_names
from rollplex.planner.plan import Plan, make_plan
from rollplex.planner.ranges import FLAGS
from rollplex.planner.run_memory import RunSettings
from rollplex.planner.simulate import Placement, Rates, Workload
from rollplex.reports.plots import write_plots

MEMORY_FLAGS = (
    "boundary_tokens", "micro_tokens", "kv_pool_gib", "workspace_gib", "update_chunks", "checkpoint_share",
)  # fmt: skip
CLUSTER_ONLY = {
    "micro_tokens": "the config's responses_per_pass says it",
    "update_chunks": "PhaseOffload's update_chunk_bytes says it",
    "checkpoint_share": "prefix_on_host says it",
    "shard_optimizer": "the strategy says it",
}
"""Flags that a config answers itself when its run is planned."""
WORK_FLAGS = ("prompts", "num_generations", "prompt_tokens", "visual_share", "response_tokens", "sigma", "beta")
FROM_CONFIG = ("shared_vision", "frozen_vision")
"""Of the workload, what no flag says."""

HELP = {
    "gpus": "GPUs of the run", "train_tp": "tensor-parallel degree of training",
    "rollout_tp": "tensor-parallel degree of the engine",
    "boundary_tokens": "prompt tokens of a rollout batch whose prefix K/V a training replica holds",
    "micro_tokens": "tokens of one training pass", "kv_pool_gib": "the engine's K/V pool on each GPU, GiB",
    "workspace_gib": "CUDA contexts, kernels' work space and fragmentation on each GPU, GiB",
    "update_chunks": "parts in which the update streams the optimizer's states through the GPU",
    "checkpoint_share": "part of the prefix's activation checkpoints that stays on the GPU; the rest waits on the host",
    "prompts": "prompts in a rollout batch, of all GPUs together", "num_generations": "responses per prompt",
    "prompt_tokens": "tokens of a prompt, expanded vision tokens included",
    "visual_share": "part of a prompt's tokens that are visual", "response_tokens": "mean tokens of a response",
    "sigma": "spread of the response lengths (of a lognormal distribution's logarithm; 0 makes all alike)",
    "beta": "weight of the KL term; above 0 there is a reference model",
}  # fmt: skip
"""What each number of a plan is."""


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="rollplex plan", description=__doc__)
    out.add_argument("--config", default=None, help="a config of `rollplex fit`; flags given here override it")
    out.add_argument("--model", default=None, help="a name in the planner's table, or a transformers folder")
    out.add_argument("--gpu", default="H100", help="kind of GPU: a name in the planner's table or in --gpus-file")
    out.add_argument("--gpus-file", default=None, help="YAML with more GPUs")
    for name in ("gpus", "train_tp", "rollout_tp"):
        text = f"{HELP[name]} (default 1, or what the config says)"
        out.add_argument("--" + name.replace("_", "-"), type=int, default=None, help=text)
    out.add_argument("--shard-optimizer", action="store_true", default=None, help="ZeRO over the data-parallel ranks")
    defaults = (MemorySettings(), Workload())
    for names, owner in zip((MEMORY_FLAGS, WORK_FLAGS), defaults, strict=True):
        for name in names:
            value = getattr(owner, name)
            flag = "--" + name.replace("_", "-")
            out.add_argument(
                flag, type=type(value), default=None, help=f"{HELP[name]} (default {value}; {FLAGS[name]})"
            )
    out.add_argument(
        "--calibrate", default=None, metavar="RUN_DIR",
        help="a run with TimelineLogger(every_n_steps=1): unit seconds, alpha and r from its traces but the first "
        "step's, predicted beside recorded seconds",
    )  # fmt: skip
    out.add_argument(
        "--plots", default=None, metavar="DIR",
        help="write memory and timeline of the plan and of --calibrate's run as pictures; its memory with MemoryReport",
    )  # fmt: skip
    out.add_argument("--json", action="store_true", help="print numbers instead of tables")
    return out


def plan_of(options: argparse.Namespace, calibration: Calibration | None = None) -> Plan:
    content = configs.read_config(options.config) if options.config else {}
    check_names(content)
    flags = {name: value for name, value in vars(options).items() if value is not None}
    for name in FLAGS.keys() & flags.keys():
        flags[name] = FLAGS[name].take("--" + name.replace("_", "-"), flags[name])
    chosen = configs.workload_of(content) if content else {}
    chosen |= flags
    if "model" not in chosen:
        raise ValueError("nothing to plan: give --model NAME_OR_FOLDER, or --config with model.init_args.model")
    if content and "gpus" not in chosen:
        chosen["gpus"] = configs.gpus_of_config(content)
    place = Placement(*(chosen.get(name, 1) for name in ("gpus", "train_tp", "rollout_tp")))
    if content:
        check_clashes(content, place.gpus, place.train_tp, place.rollout_tp)
    work = Workload(**{name: chosen[name] for name in (*WORK_FLAGS, *FROM_CONFIG) if name in chosen})
    shape, gpu = model_shape(chosen["model"]), gpu_of(options.gpu, options.gpus_file)
    if content:
        check_model_folder(chosen["model"], content, place.gpus, place.train_tp, place.rollout_tp)
    if content and {"prompts", "prompt_tokens"} <= chosen.keys():
        chosen.setdefault("boundary_tokens", -(-work.prompts // place.replicas) * work.prompt_tokens)
    memory = MemorySettings(
        train_tp=place.train_tp, rollout_tp=place.rollout_tp, data_parallel=place.replicas,
        shard_optimizer=chosen.get("shard_optimizer", False), reference=work.beta > 0,
        remote_engine=configs.remote_engine_of(content) is not None,
        **{name: chosen[name] for name in MEMORY_FLAGS if name in chosen},
    )  # fmt: skip
    run = _run_settings(content, flags, work, place) if content and _runs(content, place) else None
    rates = replace(Rates(), **calibration.rates) if calibration else None
    plan = make_plan(shape, gpu, place, memory, work, run, rates)
    engine = None
    if memory.remote_engine:
        settings = run or _run_settings(content, {}, work, place)
        engine = engine_memory(content, shape, settings, place.gpus, gpu.memory)
    return replace(plan, assumptions=_assumptions(content, chosen, plan, calibration), engine=engine)


def _runs(content: Mapping[str, Any], place: Placement) -> bool:
    """Whether the config's own run is planned: each rank trains and decodes on one GPU."""
    kind = configs.sharding_of(content).kind
    return place.train_tp == place.rollout_tp == 1 and (
        kind in ("ddp", "zero") or (kind == "plain" and place.gpus == 1)
    )


def _run_settings(
    content: Mapping[str, Any], flags: Mapping[str, Any], work: Workload, place: Placement
) -> RunSettings:  # fmt: skip
    for name, instead in CLUSTER_ONLY.items():
        if name in flags:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} plans a cluster, and this plan is of the config's run: {instead}; leave it out")
    given: dict[str, Any] = {"prompt_tokens": work.prompt_tokens, "reference": work.beta > 0, "ranks": place.gpus}
    given |= {"prompts": -(-work.prompts // place.gpus)}
    given |= {"num_generations": work.num_generations, "visual_share": work.visual_share}
    if "boundary_tokens" in flags:
        given["prompt_tokens"] = -(-flags["boundary_tokens"] // given["prompts"])
    if "kv_pool_gib" in flags:
        given["kv_cache_bytes"] = int(flags["kv_pool_gib"] * GIB)
    if "workspace_gib" in flags:
        given["workspace_gib"] = flags["workspace_gib"]
    return configs.settings_of(content, given)


def _assumptions(
    content: Mapping[str, Any], chosen: Mapping[str, Any], plan: Plan, calibration: Calibration | None
) -> tuple[str, ...]:  # fmt: skip
    """What the figures rest on and nobody said."""
    w, found = plan.workload, []

    def unless(name: str, text: str) -> None:
        if name not in chosen:
            found.append(text)

    instead = "data's max_prompt_length or --prompt-tokens" if content else "--prompt-tokens"
    unless("prompt_tokens", f"{w.prompt_tokens} tokens a prompt ({instead} is not set)")
    unless("visual_share", f"{100 * w.visual_share:.0f} % of a prompt's tokens are visual (--visual-share)")
    unless("prompts", f"{w.prompts} prompts in a rollout batch")
    unless("num_generations", f"{w.num_generations} responses per prompt")
    unless("response_tokens", f"{w.response_tokens:g} tokens a response on average")
    unless("sigma", f"response lengths spread with sigma {w.sigma:g}, in the predicted seconds")
    if plan.run is None:
        unless("kv_pool_gib", f"a K/V pool of {plan.memory.kv_pool_gib:g} GiB on each GPU")
        unless("boundary_tokens", f"{plan.memory.boundary_tokens} prompt tokens held by each training replica")
        unless("workspace_gib", f"{plan.memory.workspace_gib:g} GiB of workspace on each GPU")
    elif plan.run.workspace_gib:
        unless("workspace_gib", f"{plan.run.workspace_gib:g} GiB of workspace on each GPU")
    model = configs.model_of(content)
    if not model.get("share_prefix", True):
        found.append("one prefix per prompt in the memory, although share_prefix is false")
    if "language_model" in (model.get("freeze") or ()):
        found.append("activations as if the language model were trained, although freeze names it")
    if model.get("lora") is not None:
        what = "memory" if plan.run is None else "activations"
        found.append(f"{what} and seconds as if all weights were trained, although lora trains adapters")
    if calibration is None:
        found.append("seconds from the GPU's data sheet and the rates of the paper's 32 H800 (--calibrate fits them)")
    return tuple(found)


def main(arguments: list[str]) -> None:
    """Command line; a setting that cannot work ends it with one line."""
    options = parser().parse_args(arguments)
    try:
        run(options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def run(options: argparse.Namespace) -> None:
    found = calibrate(Path(options.calibrate)) if options.calibrate else None
    plan = plan_of(options, found) if found is None or options.model or options.config else None
    if options.plots is not None:
        written = write_plots(Path(options.plots), plan, Path(options.calibrate) if options.calibrate else None)
    if options.json:
        content = plan.to_dict() if plan is not None else {}
        json.dump(content | ({"calibration": found.to_dict()} if found is not None else {}), sys.stdout, indent=1)
        print()
        return
    console = Console(width=None if sys.stdout.isatty() else 170)
    if found is not None:
        show.show_calibration(found, console)
    if plan is not None:
        show.show_plan(plan, console)
    if options.plots is not None:
        console.print("plots: " + ", ".join(map(str, written)))
        if found is not None and not any(path.name == "run_memory.png" for path in written):
            console.print(f"{options.calibrate} has no memory.json: record with MemoryReport to see its memory drawn")
