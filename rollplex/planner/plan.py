"""`rollplex plan`: memory per phase, whether it fits, and predicted step times, before a GPU is touched."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from rollplex.planner.fitting import Change, fitting_changes
from rollplex.planner.hardware import Gpu, gpu_of
from rollplex.planner.memory import GIB, MemorySettings, State, naive_bytes, stage_bytes, states
from rollplex.planner.models import ModelShape, model_shape
from rollplex.planner.simulate import Model, Placement, Rates, StepTime, Workload, compare


@dataclass(frozen=True)
class Plan:
    """Everything that is printed."""

    shape: ModelShape
    gpu: Gpu
    place: Placement
    memory: MemorySettings
    workload: Workload
    states: list[State]
    changes: list[Change] | None
    """Empty: it fits. None: nothing that the planner knows makes it fit."""
    times: dict[str, StepTime] = field(default_factory=dict)

    @property
    def layout(self) -> dict[str, float]:
        """Bytes of the language model by what sharing takes from one layout to the other."""
        s = self.shape
        same = s.language_params - s.row_params - s.qkv_params
        if self.place.train_tp == self.place.rollout_tp:
            return {"same order": 2.0 * s.language_params, "strided": 0.0, "rebuilt": 0.0}
        return {"same order": 2.0 * same, "strided": 2.0 * s.row_params, "rebuilt": 2.0 * s.qkv_params}

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.shape.name,
            "gpu": self.gpu.name,
            "params": self.shape.params,
            "states_gib": {s.name: s.bytes / GIB for s in self.states},
            "naive_gib": naive_bytes(self.states) / GIB,
            "stages_gib": {stage.value: size / GIB for stage, size in stage_bytes(self.states).items()},
            "gpu_gib": self.gpu.memory / GIB,
            "fits": self.changes == [],
            "changes": None if self.changes is None else [str(c) for c in self.changes],
            "layout": {name: size / (2 * self.shape.language_params) for name, size in self.layout.items()},
            "rebuilt_gib": self.layout["rebuilt"] / self.place.rollout_tp / GIB,
            "second_copy_gib": 2 * self.shape.language_params / self.place.train_tp / GIB,
            "seconds": {name: time.total for name, time in self.times.items()},
        }


def make_plan(shape: ModelShape, gpu: Gpu, place: Placement, memory: MemorySettings, workload: Workload) -> Plan:
    found = states(shape, memory)
    times = compare(Model(shape, gpu, Rates()), workload, place)
    return Plan(shape, gpu, place, memory, workload, found, fitting_changes(shape, memory, gpu), times)


# ---- tables ----


def memory_table(plan: Plan) -> Table:
    """A row per state, a column per stage, GiB per GPU."""
    stages = stage_bytes(plan.states)
    table = Table(title=f"{plan.shape.name}: GiB on each of {plan.place.gpus} {plan.gpu.name}")
    for name in ("state", "class", "naive", *(stage.value for stage in stages)):
        table.add_column(name, justify="left" if name in ("state", "class") else "right")
    for s in plan.states:
        cells = [f"{s.at(stage) / GIB:.1f}" if s.at(stage) else "" for stage in stages]
        table.add_row(s.name, s.kind.value, f"{s.bytes / GIB:.1f}" if s.naive else "", *cells)
    table.add_section()
    totals = (f"{size / GIB:.1f}" for size in stages.values())
    table.add_row("total", "", f"{naive_bytes(plan.states) / GIB:.1f}", *totals)
    return table


def time_table(plan: Plan) -> Table:
    """Predicted seconds, against both baselines: serial with the prefix per response, and per group."""
    table = Table(title="Predicted step; prefix once per response (unshared) or per group (shared)")
    for name in ("schedule", "seconds", "rollout", "hidden", "serial, unshared / it", "serial, shared / it"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    bases = [plan.times[f"serial, {kind}"].total for kind in ("unshared", "shared")]
    for name, time in plan.times.items():
        ratios = (f"{base / time.total:.2f}" for base in bases)
        table.add_row(name, f"{time.total:.1f}", f"{time.rollout:.1f}", f"{time.hidden:.1f}", *ratios)
    return table


def show(plan: Plan, console: Console) -> None:
    facts = plan.to_dict()
    console.print(memory_table(plan))
    room, peak = facts["gpu_gib"], max(facts["stages_gib"].values())
    whole = "fits" if facts["naive_gib"] <= room else "does not fit"
    console.print(f"everything resident {whole}: {facts['naive_gib']:.1f} GiB of {room:.1f}")
    console.print(
        "By phase: what a phase does not need has left the device. This version plans that, but does not do it."
    )
    if plan.changes == []:
        console.print(f"by phase it fits: peak {peak:.1f} GiB of {room:.1f}")
    elif plan.changes is None:
        advice = "no knob of one node helps: use a smaller model or a larger GPU"
        console.print(f"by phase it does not fit: peak {peak:.1f} GiB of {room:.1f}, and {advice}")
    else:
        changes = ", ".join(map(str, plan.changes))
        console.print(f"by phase it does not fit: peak {peak:.1f} GiB of {room:.1f}; it does with {changes}")
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in facts["layout"].items())
    console.print(
        f"weights shared from train TP {plan.place.train_tp} to rollout TP {plan.place.rollout_tp}: {shares}; "
        f"{facts['rebuilt_gib']:.2f} GiB rebuilt, where a second copy takes {facts['second_copy_gib']:.2f}"
    )
    console.print(time_table(plan))


# ---- command line ----

MEMORY_FLAGS = (
    "boundary_tokens", "micro_tokens", "kv_pool_gib", "workspace_gib", "update_chunks", "checkpoint_share",
)  # fmt: skip
WORK_FLAGS = ("prompts", "num_generations", "prompt_tokens", "response_tokens", "sigma", "beta")


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
    out.add_argument("--json", action="store_true", help="print numbers instead of tables")
    return out


def from_config(path: str) -> dict[str, Any]:
    """What a training config says about model, work and place. Lengths are the longest that it allows."""
    content = yaml.safe_load(Path(path).read_text()) or {}
    model, data, trainer = _init(content.get("model")), _init(content.get("data")), content.get("trainer") or {}
    engine = _init(_init(trainer.get("strategy")).get("engine"))
    devices, nodes = (str(trainer.get(name, 1)) for name in ("devices", "num_nodes"))
    found = {
        "model": model.get("model"),
        "num_generations": model.get("num_generations"),
        "beta": model.get("beta", 0.0),  # as GRPOModule
        "prompts": data.get("batch_size"),
        "prompt_tokens": data.get("max_prompt_length"),
        "response_tokens": model.get("max_completion_length"),
        "gpus": int(devices) * int(nodes) if devices.isdigit() and nodes.isdigit() else None,
        "rollout_tp": engine.get("tensor_parallel_size"),
        "shard_optimizer": _shards_optimizer(trainer.get("strategy")) or None,
        "micro_tokens": _micro_tokens(model, data),
    }
    if engine.get("kv_cache_memory_bytes"):
        found["kv_pool_gib"] = engine["kv_cache_memory_bytes"] / GIB
    return {name: value for name, value in found.items() if value is not None}


def _init(chosen: Any) -> dict[str, Any]:
    """Arguments of a class chosen in YAML; none where a name alone, or nothing, is given."""
    return (chosen.get("init_args") or {}) if isinstance(chosen, dict) else {}


def _shards_optimizer(strategy: Any) -> bool:
    """ZeRO of any stage."""
    name = str(strategy.get("class_path") if isinstance(strategy, dict) else strategy)
    return "zero" in name.lower() or int(_init(strategy).get("stage") or 0) > 0


def _micro_tokens(model: dict[str, Any], data: dict[str, Any]) -> int | None:
    """Tokens of the largest pass of training: prompts or responses; None where a length is not known."""
    prompt, response = data.get("max_prompt_length"), model.get("max_completion_length")
    responses = model.get("responses_per_pass") or model.get("num_generations")
    if prompt is None or response is None or responses is None:
        return None
    return int(model.get("prompts_per_pass", 1)) * max(int(prompt), int(responses) * int(response))


def plan_of(options: argparse.Namespace) -> Plan:
    chosen = from_config(options.config) if options.config else {}
    chosen |= {name: value for name, value in vars(options).items() if value is not None}
    if "model" not in chosen:
        raise ValueError("nothing to plan: give --model NAME_OR_FOLDER, or --config with model.init_args.model")
    place = Placement(*(chosen.get(name, 1) for name in ("gpus", "train_tp", "rollout_tp")))
    work = Workload(**{name: _number(Workload, name, chosen[name]) for name in WORK_FLAGS if name in chosen})
    if options.config and {"prompts", "prompt_tokens"} <= chosen.keys():
        chosen.setdefault("boundary_tokens", -(-work.prompts // place.replicas) * work.prompt_tokens)
    memory = MemorySettings(
        train_tp=place.train_tp, rollout_tp=place.rollout_tp, data_parallel=place.replicas,
        shard_optimizer=chosen.get("shard_optimizer", False), reference=work.beta > 0,
        **{name: chosen[name] for name in MEMORY_FLAGS if name in chosen},
    )  # fmt: skip
    return make_plan(model_shape(chosen["model"]), gpu_of(options.gpu, options.gpus_file), place, memory, work)


def _number(owner: type, name: str, value: Any) -> Any:
    kind: Any = type(getattr(owner(), name))
    value = kind(value)
    if value < (0 if name in ("sigma", "beta") else 1):
        raise ValueError(f"{name}={value} is too small; set at least {0 if name in ('sigma', 'beta') else 1}")
    return value


def main(arguments: list[str]) -> None:
    """Command line; a setting that cannot work ends it with one line."""
    options = parser().parse_args(arguments)
    try:
        plan = plan_of(options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    if options.json:
        json.dump(plan.to_dict(), sys.stdout, indent=1)
        print()
    else:
        show(plan, Console(width=None if sys.stdout.isatty() else 170))
