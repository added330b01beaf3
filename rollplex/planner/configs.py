"""What a config of `rollplex fit` says about the memory and the work of its run; nothing is built or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from rollplex.checks import check_freeze, check_offload
from rollplex.planner.adapters import adapter_sizes
from rollplex.planner.ranges import COUNT, DATA, ENGINE, MODEL, STRATEGY, ZERO, checked
from rollplex.planner.reading import read_yaml
from rollplex.planner.run_memory import MOVED_BY_DEEPSPEED, OFFLOADABLE, RunSettings
from rollplex.residency import ACTIVATIONS, KV_POOL

CPU_KV_BYTES = 512 * 1024**2
"""vLLM's pool on a CPU where a config does not say."""
GPU_WORKSPACE = 2.0
"""GiB of the CUDA context, kernels' work space and fragmentation on one device."""
MODULE_DEFAULTS = {"num_generations": 8, "max_completion_length": 256}
"""Of GRPOModule."""


# ---- reading ----


def read_config(path: str) -> dict[str, Any]:
    content = read_yaml(path) or {}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping, as `rollplex fit --config` takes it")
    if not isinstance(content.get("trainer") or {}, Mapping):
        raise ValueError(f"{path}: trainer={content['trainer']!r} must be a mapping of the Trainer's settings")
    return content


def arguments_of(entry: Any) -> dict[str, Any]:
    """init_args of a class_path entry; none of a name alone."""
    found = (entry.get("init_args") or {}) if isinstance(entry, Mapping) else {}
    if not isinstance(found, Mapping):
        raise ValueError(f"init_args={found!r} of {class_of(entry) or 'an entry'} must be a mapping")
    return dict(found)


def class_of(entry: Any) -> str:
    """The last part of a class_path, or the name itself."""
    path = entry.get("class_path", "") if isinstance(entry, Mapping) else entry or ""
    return str(path).rpartition(".")[2]


def trainer_of(content: Mapping[str, Any]) -> dict[str, Any]:
    return dict(content.get("trainer") or {})


def model_of(content: Mapping[str, Any]) -> dict[str, Any]:
    found = checked(arguments_of(content.get("model")), MODEL)
    check_freeze(found.get("freeze"))
    if (found.get("dtype") or "float32") not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={found['dtype']!r} must be float32 or bfloat16")
    return found


def data_of(content: Mapping[str, Any]) -> dict[str, Any]:
    return checked(arguments_of(content.get("data")), DATA)


def strategy_of(content: Mapping[str, Any]) -> dict[str, Any]:
    return checked(arguments_of(trainer_of(content).get("strategy")), STRATEGY)


def engine_of(content: Mapping[str, Any]) -> dict[str, Any]:
    return engine_entry(strategy_of(content).get("engine"))


def engine_entry(entry: Any) -> dict[str, Any]:
    found = checked(arguments_of(entry), ENGINE)
    if found.get("vision", "engine") not in ("engine", "shared"):
        raise ValueError(f"vision={found['vision']!r} is unknown; set engine or shared")
    return found


def remote_engine_of(content: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """(class, settings) of the engine inside a RemoteEngine; None without one."""
    entry = strategy_of(content).get("engine")
    if class_of(entry) != "RemoteEngine":
        return None
    inner = arguments_of(entry).get("engine")
    return class_of(inner), checked(arguments_of(inner), ENGINE)


def callbacks_of(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Class name -> init_args."""
    entries = trainer_of(content).get("callbacks") or []
    entries = entries if isinstance(entries, list) else [entries]
    return {class_of(entry): arguments_of(entry) for entry in entries}


# ---- devices ----


@dataclass(frozen=True)
class Sharding:
    """What a strategy does with the states of several ranks."""

    kind: Literal["plain", "ddp", "zero", "other"]
    stage: int = 0
    """ZeRO's."""


def sharding_of(content: Mapping[str, Any]) -> Sharding:
    name = class_of(trainer_of(content).get("strategy"))
    if name in ("", "rollplex", "RollplexStrategy"):
        return Sharding("plain")
    if name in ("rollplex_ddp", "RollplexDDPStrategy"):
        return Sharding("ddp")
    if name == "RollplexDeepSpeedStrategy":
        return Sharding("zero", strategy_of(content).get("stage", 2))
    if name in {f"rollplex_zero{stage}" for stage in (1, 2, 3)}:
        return Sharding("zero", int(name[-1]))
    return Sharding("other")


def gpus_of_config(content: Mapping[str, Any]) -> int:
    """Of all nodes. ValueError where the config leaves their number to the machine."""
    trainer, kind = trainer_of(content), sharding_of(content).kind
    nodes = COUNT.take("num_nodes", trainer.get("num_nodes", 1))
    devices = trainer.get("devices", "auto")
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if isinstance(devices, list | tuple):
        count = COUNT.take("devices", len(devices))
    elif str(devices) in ("auto", "-1"):
        if kind != "plain" and trainer.get("accelerator") != "cpu":
            raise ValueError(
                f"trainer.devices={devices} takes every GPU of the machine that it runs on, which a plan cannot see: "
                "say how many with --gpus, or set devices to a number"
            )
        count = 1
    else:
        count = COUNT.take("devices", devices)
    if kind == "plain" and count * nodes > 1:
        raise ValueError(
            f"strategy=rollplex uses one device, but devices={devices} and num_nodes={nodes} were set; set both to 1, "
            "or strategy to rollplex_ddp, rollplex_zero1, rollplex_zero2 or rollplex_zero3"
        )
    return count * nodes


# ---- what a plan takes ----


def from_config(path: str) -> dict[str, Any]:
    content = read_config(path)
    return workload_of(content) | {"gpus": gpus_of_config(content)}


def workload_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Model, work and place, as far as the config says; devices are `gpus_of_config`'s. Lengths are the longest that
    the config allows."""
    model, data, engine = model_of(content), data_of(content), engine_of(content)
    found = {
        "model": model.get("model"),
        "num_generations": model.get("num_generations"),
        "beta": model.get("beta", 0.0),  # as GRPOModule
        "prompts": data.get("batch_size"),
        "prompt_tokens": data.get("max_prompt_length"),
        "response_tokens": model.get("max_completion_length"),
        "train_tp": strategy_of(content).get("train_tp"),
        "rollout_tp": engine.get("tensor_parallel_size"),
        "shard_optimizer": sharding_of(content).kind == "zero" or None,
        "micro_tokens": _micro_tokens(model, data),
        "shared_vision": _shares_vision(model, engine) or None,
        "frozen_vision": {"vision_tower", "projector"} <= set(model.get("freeze") or ()) or None,
    }
    if engine.get("kv_cache_memory_bytes"):
        found["kv_pool_gib"] = engine["kv_cache_memory_bytes"] / 1024**3
    if remote_engine_of(content) is not None:
        found["kv_pool_gib"] = 0.0  # it lies on another device
    return {name: value for name, value in found.items() if value is not None}


def _shares_vision(model: Mapping[str, Any], engine: Mapping[str, Any]) -> bool:
    return engine.get("vision") == "shared" and bool(model.get("share_prefix", True))


def _micro_tokens(model: Mapping[str, Any], data: Mapping[str, Any]) -> int | None:
    """Tokens of the largest pass of training: prompts or responses; None where a length is not known."""
    prompt, response = data.get("max_prompt_length"), model.get("max_completion_length")
    responses = model.get("responses_per_pass") or model.get("num_generations")
    if prompt is None or response is None or responses is None:
        return None
    return model.get("prompts_per_pass", 1) * max(prompt, responses * response)


def settings_of(content: Mapping[str, Any], given: Mapping[str, Any]) -> RunSettings:
    """given: what a config does not know (prompt_tokens, ranks) or flags override."""
    model, data, strategy = model_of(content), data_of(content), strategy_of(content)
    callbacks, on_cpu = callbacks_of(content), trainer_of(content).get("accelerator") == "cpu"
    known = {f.name for f in fields(RunSettings)}
    found: dict[str, Any] = MODULE_DEFAULTS | {k: v for k, v in model.items() if k in known and v is not None}
    found["freeze"] = tuple(model.get("freeze") or ())
    if model.get("lora") is not None:
        found |= adapter_sizes(str(model.get("model")), model["lora"], found["freeze"])
    found["itemsize"] = 2 if model.get("dtype") == "bfloat16" else 4
    found["reference"] = model.get("beta", 0.0) > 0
    found["prompts"] = data.get("batch_size", RunSettings.prompts)
    found["prefix_budget_bytes"] = strategy.get("prefix_budget_bytes")
    found["zero"] = sharding_of(content).stage
    zero = strategy.get("zero_optimization") or {}
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero_optimization={zero!r} must be a mapping of DeepSpeed's settings")
    zero = checked(dict(zero), ZERO)
    names = {"reduce_bucket_size": "reduce_bucket", "stage3_param_persistence_threshold": "persistence"}
    found |= {ours: zero[theirs] for theirs, ours in names.items() if theirs in zero}
    found |= _engine(trainer_of(content), engine_of(content), on_cpu=on_cpu)
    found["shared_vision"] = _shares_vision(model, engine_of(content))
    found["overlap"] = "PrefixOverlap" in callbacks
    found["streaming"] = "GroupStreaming" in callbacks
    found["reuse"] = "PrefillReuse" in callbacks
    found["shared_weights"] = "SharedWeights" in callbacks
    found["workspace_gib"] = 0.0 if on_cpu else GPU_WORKSPACE
    if "PhaseOffload" in callbacks:
        found |= _offload(callbacks["PhaseOffload"], found)
    return RunSettings(**(found | {k: v for k, v in given.items() if k in known}))


def _engine(trainer: Mapping[str, Any], settings: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    name = class_of(arguments_of(trainer.get("strategy")).get("engine"))
    if name == "RemoteEngine":  # its weights and K/V lie on another device
        return {"engine": "remote"}
    return engine_settings(name, settings, on_cpu=on_cpu)


def engine_settings(name: str, settings: Mapping[str, Any], *, on_cpu: bool) -> dict[str, Any]:
    """As RunSettings has them, of an engine by its class and settings."""
    if "VLLM" not in name:
        found = {"engine": "torch", "releases_kv": bool(settings.get("release_kv_cache", False))}
        return found | {k: settings[k] for k in ("max_num_seqs",) if settings.get(k)}
    pool = settings.get("kv_cache_memory_bytes") or (CPU_KV_BYTES if on_cpu else None)
    return {
        "engine": "vllm", "kv_cache_bytes": pool, "engine_vision": settings.get("vision", "engine") == "engine",
        "kv_share": settings.get("gpu_memory_utilization") or 0.5, "max_num_seqs": settings.get("max_num_seqs") or 256,
        "releases_kv": bool(settings.get("release_kv_cache", True)),
    }  # fmt: skip


def _offload(settings: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """As PhaseOffload decides."""
    chosen = settings.get("offload", "auto")
    check_offload(chosen, settings.get("update_chunk_bytes"), settings.get("pin", True))
    names = OFFLOADABLE if chosen == "auto" else tuple(chosen)
    unknown = [name for name in names if name not in OFFLOADABLE]
    if unknown:
        raise ValueError(f"PhaseOffload: {unknown} cannot leave the device; {', '.join(OFFLOADABLE)} can")
    if found["zero"] and settings.get("update_chunk_bytes"):
        raise ValueError(
            f"update_chunk_bytes={settings['update_chunk_bytes']} needs strategy rollplex or rollplex_ddp: DeepSpeed "
            "steps all its states at once; set it to null"
        )
    if found["zero"] == 3:
        fixed = [name for name in names if name in MOVED_BY_DEEPSPEED]
        if fixed and chosen != "auto":
            raise ValueError(
                f"PhaseOffload: {', '.join(fixed)} cannot leave the device: ZeRO-3 moves states of DeepSpeed's "
                "FusedAdam only; take them out, or set stage 1 or 2"
            )
        names = tuple(name for name in names if name not in MOVED_BY_DEEPSPEED)
    if chosen != "auto" and KV_POOL in names and found["engine"] == "remote":
        raise ValueError(
            "PhaseOffload: 'kv_pool' cannot leave the device: RemoteEngine has no pool that it can give back"
        )
    if chosen == "auto" and found["engine"] == "vllm" and not found["releases_kv"]:
        names = tuple(name for name in names if name != KV_POOL)
    return {
        "offload": names, "update_chunk_bytes": settings.get("update_chunk_bytes"),
        "prefix_on_host": bool(found.get("prefix_on_host")) or ACTIVATIONS in names,
    }  # fmt: skip
