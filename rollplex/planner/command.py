"""`rollplex plan`: memory per phase, whether it fits, and predicted step times, before a GPU is touched.

A config of one device is planned as its run will do it, with PhaseOffload or without. Flags, or degrees above one, plan
a cluster with the residency of the paper.
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
from rollplex.planner.hardware import gpu_of
from rollplex.planner.memory import GIB, MemorySettings
from rollplex.planner.models import model_shape
from rollplex.planner.plan import Plan, make_plan
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
}
"""Memory flags that a config of one device answers itself."""
WORK_FLAGS = ("prompts", "num_generations", "prompt_tokens", "visual_share", "response_tokens", "sigma", "beta")
FROM_ZERO = ("sigma", "beta", "visual_share")
"""Work flags that may be below 1."""


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="rollplex plan", description=__doc__)
    out.add_argument("--config", default=None, help="a config of `rollplex fit`; flags given here override it")
    out.add_argument("--model", default=None, help="a name in the planner's table, or a transformers folder")
    out.add_argument("--gpu", default="H100")
    out.add_argument("--gpus-file", default=None, help="YAML with more GPUs")
    for name in ("--gpus", "--train-tp", "--rollout-tp"):
        out.add_argument(name, type=int, default=None, help="default 1, or what the config says")
    out.add_argument("--shard-optimizer", action="store_true", default=None, help="ZeRO over the data-parallel ranks")
    defaults = (MemorySettings(), Workload())
    for names, owner in zip((MEMORY_FLAGS, WORK_FLAGS), defaults, strict=True):
        for name in names:
            value = getattr(owner, name)
            flag = "--" + name.replace("_", "-")
            out.add_argument(flag, type=type(value), default=None, help=f"default {value}")
    out.add_argument(
        "--calibrate", default=None, metavar="RUN_DIR",
        help="a run with TimelineLogger: unit seconds, alpha and r from its traces, predicted beside recorded seconds",
    )  # fmt: skip
    out.add_argument("--plots", default=None, metavar="DIR", help="write memory and timeline as pictures")
    out.add_argument("--json", action="store_true", help="print numbers instead of tables")
    return out


def plan_of(options: argparse.Namespace, calibration: Calibration | None = None) -> Plan:
    content = configs.read_config(options.config) if options.config else {}
    chosen = configs.workload_of(content) if content else {}
    chosen |= {name: value for name, value in vars(options).items() if value is not None}
    if "model" not in chosen:
        raise ValueError("nothing to plan: give --model NAME_OR_FOLDER, or --config with model.init_args.model")
    place = Placement(*(chosen.get(name, 1) for name in ("gpus", "train_tp", "rollout_tp")))
    work = Workload(**{name: _number(Workload, name, chosen[name]) for name in WORK_FLAGS if name in chosen})
    if content and {"prompts", "prompt_tokens"} <= chosen.keys():
        chosen.setdefault("boundary_tokens", -(-work.prompts // place.replicas) * work.prompt_tokens)
    memory = MemorySettings(
        train_tp=place.train_tp, rollout_tp=place.rollout_tp, data_parallel=place.replicas,
        shard_optimizer=chosen.get("shard_optimizer", False), reference=work.beta > 0,
        **{name: chosen[name] for name in MEMORY_FLAGS if name in chosen},
    )  # fmt: skip
    run = None
    if content and place == Placement() and configs.on_one_device(content):
        run = _run_settings(content, options, work)
    rates = replace(Rates(), **calibration.rates) if calibration else None
    gpu = gpu_of(options.gpu, options.gpus_file)
    return make_plan(model_shape(chosen["model"]), gpu, place, memory, work, run, rates)


def _run_settings(content: Mapping[str, Any], options: argparse.Namespace, work: Workload) -> RunSettings:
    for name, instead in CLUSTER_ONLY.items():
        if getattr(options, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} plans a cluster, and the config is of one device: {instead}; leave {flag} out")
    given: dict[str, Any] = {"prompt_tokens": work.prompt_tokens, "prompts": work.prompts, "reference": work.beta > 0}
    given |= {"num_generations": work.num_generations, "visual_share": work.visual_share}
    if options.boundary_tokens is not None:
        given["prompt_tokens"] = -(-options.boundary_tokens // work.prompts)
    if options.kv_pool_gib is not None:
        given["kv_cache_bytes"] = int(options.kv_pool_gib * GIB)
    if options.workspace_gib is not None:
        given["workspace_gib"] = options.workspace_gib
    return configs.settings_of(content, given)


def _number(owner: type, name: str, value: Any) -> Any:
    kind: Any = type(getattr(owner(), name))
    value = kind(value)
    least = 0 if name in FROM_ZERO else 1
    if value < least:
        raise ValueError(f"{name}={value} is too small; set at least {least}")
    return value


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
