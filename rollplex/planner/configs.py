"""What a config of `rollplex fit` says about the memory and the work of its run; nothing is built or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from rollplex.planner.adapters import adapter_sizes
from rollplex.planner.run_memory import OFFLOADABLE, RunSettings
from rollplex.residency import ACTIVATIONS, KV_POOL

CPU_KV_BYTES = 512 * 1024**2
"""vLLM's pool on a CPU where a config does not say."""
GPU_WORKSPACE = 2.0
"""GiB of the CUDA context, kernels' work space and fragmentation on one device."""
PLAIN = ("rollplex", "RollplexStrategy")
"""Strategies of one device, by name and by class."""
MODULE_DEFAULTS = {"num_generations": 8, "max_completion_length": 256}
"""Of GRPOModule."""


def read_config(path: str) -> dict[str, Any]:
    content: Any = yaml.safe_load(Path(path).read_text()) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping, as `rollplex fit --config` takes it")
    return content


def arguments_of(entry: Any) -> dict[str, Any]:
    """init_args of a class_path entry; none of a name alone."""
    return dict((entry.get("init_args") or {}) if isinstance(entry, Mapping) else {})


def class_of(entry: Any) -> str:
    """The last part of a class_path, or the name itself."""
    path = entry.get("class_path", "") if isinstance(entry, Mapping) else entry or ""
    return str(path).rpartition(".")[2]


def from_config(path: str) -> dict[str, Any]:
    return workload_of(read_config(path))


def workload_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Model, work and place. Lengths are the longest that the config allows."""
    model, data = arguments_of(content.get("model")), arguments_of(content.get("data"))
    trainer = content.get("trainer") or {}
    engine = arguments_of(arguments_of(trainer.get("strategy")).get("engine"))
    devices, nodes = (str(trainer.get(name, 1)) for name in ("devices", "num_nodes"))
    found = {
        "model": model.get("model"),
        "num_generations": model.get("num_generations"),
        "beta": model.get("beta", 0.0),  # as GRPOModule
        "prompts": data.get("batch_size"),
        "prompt_tokens": data.get("max_prompt_length"),
        "response_tokens": model.get("max_completion_length"),
        "gpus": int(devices) * int(nodes) if devices.isdigit() and nodes.isdigit() else None,
        "train_tp": arguments_of(trainer.get("strategy")).get("train_tp"),
        "rollout_tp": engine.get("tensor_parallel_size"),
        "shard_optimizer": _shards_optimizer(trainer.get("strategy")) or None,
        "micro_tokens": _micro_tokens(model, data),
    }
    if engine.get("kv_cache_memory_bytes"):
        found["kv_pool_gib"] = engine["kv_cache_memory_bytes"] / 1024**3
    return {name: value for name, value in found.items() if value is not None}


def _shards_optimizer(strategy: Any) -> bool:
    """ZeRO of any stage."""
    name = str(strategy.get("class_path") if isinstance(strategy, Mapping) else strategy)
    return "zero" in name.lower() or int(arguments_of(strategy).get("stage") or 0) > 0


def _micro_tokens(model: Mapping[str, Any], data: Mapping[str, Any]) -> int | None:
    """Tokens of the largest pass of training: prompts or responses; None where a length is not known."""
    prompt, response = data.get("max_prompt_length"), model.get("max_completion_length")
    responses = model.get("responses_per_pass") or model.get("num_generations")
    if prompt is None or response is None or responses is None:
        return None
    return int(model.get("prompts_per_pass", 1)) * max(int(prompt), int(responses) * int(response))


def on_one_device(content: Mapping[str, Any]) -> bool:
    """Whether its strategy is the plain one; others split states over devices."""
    return class_of((content.get("trainer") or {}).get("strategy")) in ("", *PLAIN)


def callbacks_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Class name -> init_args."""
    entries = (content.get("trainer") or {}).get("callbacks") or []
    entries = entries if isinstance(entries, list) else [entries]
    return {class_of(entry): arguments_of(entry) for entry in entries}


def settings_of(content: Mapping[str, Any], given: Mapping[str, Any]) -> RunSettings:
    """given: what a config does not know (prompt_tokens) or flags override."""
    model, data = arguments_of(content.get("model")), arguments_of(content.get("data"))
    trainer = content.get("trainer") or {}
    strategy = arguments_of(trainer.get("strategy"))
    callbacks = callbacks_of(content)
    known = {f.name for f in fields(RunSettings)}
    found: dict[str, Any] = MODULE_DEFAULTS | {k: v for k, v in model.items() if k in known and v is not None}
    found["freeze"] = tuple(model.get("freeze") or ())
    if model.get("lora") is not None:
        found |= adapter_sizes(str(model.get("model")), model["lora"], found["freeze"])
    found["itemsize"] = 2 if model.get("dtype") == "bfloat16" else 4
    found["reference"] = float(model.get("beta") or 0.0) > 0
    found["prompts"] = data.get("batch_size", RunSettings.prompts)
    found["prefix_budget_bytes"] = strategy.get("prefix_budget_bytes")
    found |= _engine(strategy.get("engine"), on_cpu=trainer.get("accelerator") == "cpu")
    found["overlap"] = "PrefixOverlap" in callbacks
    found["streaming"] = "GroupStreaming" in callbacks
    found["reuse"] = "PrefillReuse" in callbacks
    found["shared_weights"] = "SharedWeights" in callbacks
    found["workspace_gib"] = 0.0 if trainer.get("accelerator") == "cpu" else GPU_WORKSPACE
    if "PhaseOffload" in callbacks:
        found |= _offload(callbacks["PhaseOffload"], found)
    return RunSettings(**(found | {k: v for k, v in given.items() if k in known}))


def _engine(entry: Any, *, on_cpu: bool) -> dict[str, Any]:
    settings = arguments_of(entry)
    if class_of(entry) == "RemoteEngine":  # its weights and K/V lie on another device
        return {"engine": "remote"}
    if "VLLM" not in class_of(entry):
        found = {"engine": "torch", "releases_kv": settings.get("release_kv_cache", False)}
        return found | {k: settings[k] for k in ("max_num_seqs",) if k in settings}
    pool = settings.get("kv_cache_memory_bytes") or (CPU_KV_BYTES if on_cpu else None)
    return {
        "engine": "vllm", "kv_cache_bytes": pool, "engine_vision": settings.get("vision", "engine") == "engine",
        "kv_share": settings.get("gpu_memory_utilization", 0.5), "max_num_seqs": settings.get("max_num_seqs", 256),
        "releases_kv": settings.get("release_kv_cache", True),
    }  # fmt: skip


def _offload(settings: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    chosen = settings.get("offload", "auto")
    names = OFFLOADABLE if chosen == "auto" else tuple(chosen)
    if chosen == "auto" and found["engine"] == "vllm" and not found["releases_kv"]:
        names = tuple(name for name in names if name != KV_POOL)
    return {
        "offload": names, "update_chunk_bytes": settings.get("update_chunk_bytes"),
        "prefix_on_host": bool(found.get("prefix_on_host")) or ACTIVATIONS in names,
    }  # fmt: skip
