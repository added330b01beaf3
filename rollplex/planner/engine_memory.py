"""What an engine on devices of its own (RemoteEngine) holds there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollplex.planner.configs import engine_settings, remote_engine_of, trainer_of
from rollplex.planner.models import ModelShape
from rollplex.planner.run_memory import RunSettings, run_states
from rollplex.residency import ENGINE_WEIGHTS, KV_POOL


@dataclass(frozen=True)
class EngineMemory:
    """Bytes on each of an engine's GPUs."""

    engines: int
    """One for each rank of the trainer."""
    gpus: int
    """Of one engine."""
    weights: float
    pool: float

    @property
    def total(self) -> float:
        return self.weights + self.pool


def engine_memory(
    content: Mapping[str, Any], shape: ModelShape, run: RunSettings, engines: int, gpu_bytes: float
) -> EngineMemory | None:
    """None where trainer and engine share their devices. run: of one trainer rank.

    A process of one rank holds the model as the trainer sent it, and vLLM computes with these tensors. Several ranks
    hold their shards: matrices are split evenly, with the vision tower's and the vocabulary.
    """
    inner = remote_engine_of(content)
    if inner is None:
        return None
    name, settings = inner
    degree = settings.get("tensor_parallel_size") or 1
    shape.check_tp("tensor_parallel_size", degree)
    on_cpu = trainer_of(content).get("accelerator") == "cpu"
    there = replace(run, zero=0, ranks=1, shared_weights=True, reuse=False, offload=())
    there = replace(there, **engine_settings(name, settings, on_cpu=on_cpu))
    held = {state.name: state.bytes for state in run_states(shape, there)}
    weights = (shape.params + run.lora_params) * run.itemsize / degree + held.get(ENGINE_WEIGHTS, 0.0)
    pool = held.get(KV_POOL, 0.0)
    if there.engine == "vllm" and there.kv_cache_bytes is None:
        pool = max(0.0, there.kv_share * gpu_bytes - weights)
    return EngineMemory(engines, degree, weights, pool)
