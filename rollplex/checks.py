"""Settings that clash, found before anything is loaded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, get_args

from lightning.pytorch.utilities import rank_zero_warn

from rollplex.grpo.advantages import ScaleRewards
from rollplex.grpo.importance import ImportanceMode
from rollplex.kinds import check_flag, check_whole
from rollplex.models.lora_settings import check_lora
from rollplex.models.split_model import Part
from rollplex.residency import LIFETIMES
from rollplex.seeds import run_seed


def settle_settings(h: MutableMapping[str, Any]) -> None:
    """Give a setting of GRPOModule that was left to the run its value (checkpoints and ranks compare that), and check
    all. Raises as `check_settings`."""
    if h["seed"] is None:
        h["seed"] = run_seed()
    check_settings(h)


def check_settings(h: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting of GRPOModule that cannot work; says what was set and what to set."""
    for name, least in (
        ("num_generations", 1), ("max_completion_length", 1), ("num_iterations", 1), ("num_mini_batches", 1),
        ("prompts_per_pass", 1), ("eval_num_generations", 1), ("warmup_steps", 0), ("reward_workers", 0), ("top_k", 0),
        ("max_resample_times", 1),
    ):  # fmt: skip
        check_whole(name, h[name], least)
    for name in ("learning_rate", "weight_decay", "entropy_coef", "beta"):
        if not (math.isfinite(h[name]) and h[name] >= 0):
            raise ValueError(f"{name}={h[name]} must be a finite number, 0 or more")
    if not (math.isfinite(h["temperature"]) and h["temperature"] > 0):
        raise ValueError(
            f"temperature={h['temperature']} gives every response of a group the same tokens, so GRPO has nothing to "
            "compare; set it above 0 (eval_temperature may be 0)"
        )
    if not 0 < h["top_p"] <= 1 or not 0 <= h["min_p"] <= 1 or not h["repetition_penalty"] > 0:
        raise ValueError(
            f"top_p={h['top_p']} must be in (0, 1], min_p={h['min_p']} in [0, 1], "
            f"repetition_penalty={h['repetition_penalty']} above 0"
        )
    if not (math.isfinite(h["eval_temperature"]) and h["eval_temperature"] >= 0):
        raise ValueError(f"eval_temperature={h['eval_temperature']} must be 0 (greedy) or more")
    if h["eval_temperature"] == 0 and h["eval_num_generations"] > 1:
        raise ValueError(
            f"eval_num_generations={h['eval_num_generations']} with eval_temperature=0 repeats one greedy answer; set "
            "eval_temperature above 0 or eval_num_generations=1"
        )
    if h["num_generations"] == 1:
        raise ValueError("num_generations=1 leaves nothing to compare a response with; set at least 2")
    check_whole("responses_per_pass", h["responses_per_pass"], null="all")
    if h["max_grad_norm"] is not None and not h["max_grad_norm"] > 0:
        raise ValueError(f"max_grad_norm={h['max_grad_norm']} must be above 0, or null for no clipping")
    if h["lr_scheduler_type"] in ("linear", "cosine") and not h["lr_decay_steps"]:
        raise ValueError(
            f"lr_scheduler_type={h['lr_scheduler_type']} needs lr_decay_steps, the optimizer steps until the rate is 0"
        )
    if h["lr_decay_steps"] is not None and h["lr_decay_steps"] <= h["warmup_steps"]:
        raise ValueError(f"lr_decay_steps={h['lr_decay_steps']} must be above warmup_steps={h['warmup_steps']}")
    if h["warmup_steps"] and h["lr_scheduler_type"] == "constant":
        raise ValueError(
            f"warmup_steps={h['warmup_steps']} has no effect with lr_scheduler_type=constant; set constant_with_warmup"
        )
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= h[name] < 1:
            raise ValueError(f"{name}={h[name]} must be in [0, 1)")
    if h["scale_rewards"] not in get_args(ScaleRewards):
        raise ValueError(f"scale_rewards={h['scale_rewards']!r} must be one of {', '.join(get_args(ScaleRewards))}")
    mode, cap = h["importance_sampling_mode"], h["importance_sampling_cap"]
    if mode is not None and (mode not in get_args(ImportanceMode) or not (math.isfinite(cap) and cap >= 1)):
        raise ValueError(
            f"importance_sampling_mode={mode!r} must be null or one of {', '.join(get_args(ImportanceMode))}, and "
            f"importance_sampling_cap={cap} at least 1"
        )
    if mode is not None and mode.endswith("mask") and cap == 1:
        raise ValueError(
            f"importance_sampling_cap=1 with {mode} drops tokens or responses at random: rounding makes a little more "
            "or less than 1 of a perfect match. Set it above 1, e.g. 2"
        )
    if h["lr_decay_steps"] is not None and h["lr_scheduler_type"] not in ("linear", "cosine"):
        raise ValueError(
            f"lr_decay_steps={h['lr_decay_steps']} has no effect with lr_scheduler_type={h['lr_scheduler_type']}; set "
            "linear or cosine"
        )
    if h["reward_timeout"] is not None and not 0 < h["reward_timeout"] <= 86_400:
        raise ValueError(f"reward_timeout={h['reward_timeout']} must be above 0 and at most 86400 seconds, or null")
    check_freeze(h["freeze"])
    if h["lora"] is not None:
        check_lora(h["lora"])
    if isinstance(h["stop"], str):
        raise ValueError(f"stop={h['stop']!r} must be a list of strings")
    _check_resampling(h)
    _warn_off_policy(h)


def check_freeze(freeze: Any) -> None:
    """ValueError unless it is None or a list of parts that leaves one to be trained."""
    if freeze is None:
        return
    if not isinstance(freeze, list | tuple) or not all(part in get_args(Part) for part in freeze):
        raise ValueError(f"freeze={freeze!r} must be null or a list of {', '.join(get_args(Part))}")
    if set(freeze) == set(get_args(Part)):
        raise ValueError("freeze names all parts, so nothing would be trained; leave at least one out")


def _warn_off_policy(h: Mapping[str, Any]) -> None:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    changed = [f"{k}={h[k]}" for k, v in neutral.items() if h[k] != v]
    if changed and h["importance_sampling_mode"] is None:
        warnings.warn(
            f"{', '.join(changed)}: responses are sampled from a truncated or penalised distribution, but trained as "
            "if drawn from the full one; set importance_sampling_mode (e.g. token_truncate) to correct for it",
            stacklevel=3,
        )


def _check_resampling(h: Mapping[str, Any]) -> None:
    if not h["dynamic_sample"]:
        return
    for name in ("num_iterations", "num_mini_batches"):
        if h[name] > 1:
            raise ValueError(
                f"dynamic_sample with {name}={h[name]} is not supported: a step's groups are known only after its last "
                f"round, when their gradients are summed already; set {name} to 1, or dynamic_sample to false"
            )
    if h["scale_rewards"] == "batch":
        raise ValueError(
            "dynamic_sample with scale_rewards=batch is not supported: the batch's standard deviation is known only "
            "after the last round, and the first round's loss needs it; set scale_rewards to group or none"
        )


def check_batches(h: Mapping[str, Any], data: Any) -> None:
    """Settings of GRPOModule that the data module's batches must allow."""
    if h["dynamic_sample"] and not hasattr(data, "further_prompts"):
        raise ValueError(
            "dynamic_sample draws prompts by the data module's further_prompts(rollout, start, count), which "
            f"{type(data).__name__} lacks; use VLMDataModule, or set dynamic_sample to false"
        )
    batch_size = getattr(data, "batch_size", None)
    if batch_size is not None and h["num_mini_batches"] > batch_size:
        raise ValueError(
            f"num_mini_batches={h['num_mini_batches']} is more than the batch_size={batch_size} groups of a rollout, "
            "and groups are never split; lower it or raise batch_size"
        )


def check_trainer(settings: Mapping[str, Any]) -> None:
    """Settings of Lightning's Trainer that only its own optimization loop has. Lightning refuses them too, without a
    word of what stands in their place here."""
    clip, sums = settings.get("gradient_clip_val"), settings.get("accumulate_grad_batches")
    if clip not in (None, 0):
        raise ValueError(
            f"trainer.gradient_clip_val={clip} is for Lightning's own loop; remove it and set model.max_grad_norm"
        )
    if sums not in (None, 1):
        raise ValueError(
            f"trainer.accumulate_grad_batches={sums} is for Lightning's own loop; remove it. An update sums the "
            "gradients of all its prompts, model.prompts_per_pass at a time: lower that to save memory, raise "
            "data.batch_size for more prompts in an update"
        )


KEPT_ON_RESUME = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "lr_scheduler_type", "warmup_steps", "lr_decay_steps",
    "freeze", "lora", "dtype",
)  # fmt: skip
"""Settings that live on in the checkpoint's optimizer and schedule: a changed one would be ignored."""


def check_reference(saved: Any, module: Any) -> None:
    """A run whose reference model, or base model of adapters, is not the one it started from: ValueError. saved: the
    checkpoint's print of it."""
    base = module.hparams["lora"] is not None
    if (base or module.reference is not None) and saved not in (None, module._reference_print):
        what = "base" if base else "reference"
        raise ValueError(
            f"the {what} model in model={module.hparams['model']!r} is not the one this run started from: its "
            "weights have changed. Put the original folder back, or start a new run"
        )


def _trains(module: Any) -> bool:
    trainer = getattr(module, "_trainer", None)
    return trainer is not None and trainer.state.fn == "fit"


def check_resume(saved: Mapping[str, Any], module: Any) -> None:
    """A training run that continues with other optimizer settings than it began with: ValueError."""
    if not _trains(module):
        return
    changed = [f"{k}={module.hparams[k]} (was {v})" for k, v in saved.items() if module.hparams[k] != v]
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: the optimizer in the checkpoint keeps its own, so the change would be ignored. Set "
            "the old values, or export the checkpoint and start a new run from that folder"
        )


def warn_resume(saved: Mapping[str, Any], module: Any) -> None:
    """Say which other settings a training run that continues did not begin with: they count from here on.

    Args:
        saved: The hyper-parameters in the checkpoint.
    """
    if not _trains(module):
        return
    now = {name: value for name, value in module.hparams.items() if not name.startswith("_")}
    changed = [f"{k}={v!r} (was {saved[k]!r})" for k, v in now.items() if k in saved and saved[k] != v]
    if changed:
        rank_zero_warn(f"the run continues with other settings than those of its checkpoint: {', '.join(changed)}")


# ---- strategy, engine and callbacks ----


def check_stage(stage: Any) -> None:
    if isinstance(stage, bool) or stage not in (1, 2, 3):
        raise ValueError(f"stage={stage!r} must be 1, 2 or 3; without sharding, set strategy rollplex_ddp")


def check_split_adapters(lora: Any, train_tp: int) -> None:
    """Of DeepSpeed's strategies."""
    if lora is not None and train_tp > 1:
        raise ValueError(
            f"lora with train_tp={train_tp} is not supported: tensor parallelism cuts the weights under the adapters, "
            "and not the adapters. Set train_tp to 1; stage 3 shards the frozen weights too"
        )


def check_shared_adapters(lora: Any, degree: int) -> None:
    """Of SharedWeights. degree: the engine's tensor_parallel_size."""
    if lora is not None and degree > 1:
        raise ValueError(
            f"callbacks: SharedWeights with lora and tensor_parallel_size={degree} is not supported: an engine's "
            "ranks read parts of the trainer's tensors, and merged weights are none of them. Take the callback out "
            "(merged weights are copied then), or set tensor_parallel_size to 1"
        )


def check_shared_weights(engine: str, is_vllm: bool) -> None:
    """engine: its class's name."""
    if not is_vllm:
        raise ValueError(
            f"SharedWeights is for VLLMEngine, but the engine is a {engine}: take the callback out "
            "(TorchEngine decodes on the trainer's tensors anyway)"
        )


def check_takes_prefix(engine: str, takes_prefix: bool) -> None:
    """Of PrefillReuse. engine: its class's name."""
    if not takes_prefix:
        raise ValueError(
            f"callbacks: PrefillReuse cannot work with engine={engine}, which keeps a K/V cache of "
            "its own; take the callback out of the list, or use rollplex.engines.torch_engine.TorchEngine"
        )


def check_reuse(sharded: bool) -> None:
    """Of PrefillReuse. sharded: parameters or engines are of several ranks."""
    if sharded:
        raise ValueError(
            "callbacks: PrefillReuse takes the trainer's prefixes before the decode, and with parameters sharded over "
            "several ranks (ZeRO-3, train_tp) or an engine of several ranks each would have to wait for all; take it "
            "out, or use ZeRO-2 with train_tp 1 and tensor_parallel_size 1"
        )


def check_remote(engine: str, takes_vision: bool) -> None:
    """Of the engine inside a RemoteEngine."""
    if engine == "RemoteEngine":
        raise ValueError("RemoteEngine(engine=RemoteEngine) is one process too many: name the engine itself")
    if takes_vision:
        raise ValueError(
            f"vision=shared of {engine} inside a RemoteEngine: the trainer's features are not sent to another process; "
            "set vision to engine, and the engine runs a vision tower of its own"
        )


def check_remote_adapters(lora: Any, degree: int) -> None:
    """degree: of the engine inside a RemoteEngine."""
    if lora is not None and degree > 1:
        raise ValueError(
            f"lora with tensor_parallel_size={degree} of an engine inside a RemoteEngine is not supported: adapters "
            "are sent alone, and no process there holds the whole weights to merge them with. Set "
            "tensor_parallel_size to 1"
        )


def check_vision(shared: bool, sharded: bool) -> None:
    """sharded: trainers or engines are of several ranks."""
    if not (shared and sharded):
        return
    raise ValueError(
        "the engine's vision=shared takes features that the trainer of its own rank computed, and where trainers "
        "(train_tp) or engines (tensor_parallel_size) are of several ranks, requests go to other ranks without them; "
        "set vision=engine, or both degrees to 1"
    )


def check_engine_degree(degree: int) -> None:
    """Of a strategy that knows of no engine of several ranks."""
    if degree > 1:
        raise ValueError(
            f"tensor_parallel_size={degree} of the engine needs a strategy over several devices that knows of such "
            "engines, which this one is not; set strategy rollplex_zero1 or rollplex_zero2, or the degree to 1"
        )


def check_chunk(update_chunk_bytes: int | None, largest: int) -> None:
    """largest: bytes of the optimizer states of the largest parameter."""
    if update_chunk_bytes is not None and update_chunk_bytes < largest:
        raise ValueError(
            f"update_chunk_bytes={update_chunk_bytes} is smaller than the optimizer states of the largest parameter, "
            f"which step together: set at least {largest}, or null to bring all states at once"
        )


def check_offload(offload: Any, update_chunk_bytes: Any, pin: Any) -> None:
    """Of PhaseOffload; which of the states can leave the device depends on the run."""
    if offload != "auto":
        if not isinstance(offload, list | tuple) or not all(isinstance(name, str) for name in offload):
            raise ValueError(f"PhaseOffload: offload={offload!r} must be auto or a list of states")
        unknown = [name for name in offload if name not in LIFETIMES]
        if unknown:
            raise ValueError(f"PhaseOffload: offload names {unknown}; there are {', '.join(LIFETIMES)}")
        twice = sorted({name for name in offload if offload.count(name) > 1})
        if twice:
            raise ValueError(f"PhaseOffload: offload names {', '.join(twice)} twice; name each state once")
    check_flag("PhaseOffload: pin", pin)
    check_whole("PhaseOffload: update_chunk_bytes", update_chunk_bytes, null="all at once")
