"""What a run refuses of settings that clash, said by its plan: the run's own checks, on what the config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.checks import (
    check_batches,
    check_engine_degree,
    check_remote,
    check_remote_adapters,
    check_reuse,
    check_shared_adapters,
    check_shared_weights,
    check_split_adapters,
    check_stage,
    check_takes_prefix,
    check_trainer,
    check_vision,
)
from rollplex.planner.configs import (
    arguments_of,
    callbacks_of,
    data_of,
    engine_entry,
    model_of,
    sharding_of,
    strategy_of,
)
from rollplex.planner.names import class_at
from rollplex.tensor_parallel import check_degrees, check_model
from rollplex.topology import Topology

TORCH_ENGINE = "rollplex.engines.TorchEngine"
"""Of a strategy, and of a RemoteEngine, that names none."""


@dataclass(frozen=True)
class Engine:
    """As far as checks ask one."""

    name: str
    kind: type
    takes_vision: bool
    tensor_parallel_size: int

    @classmethod
    def of(cls, entry: Any) -> Engine:
        path = entry.get("class_path", TORCH_ENGINE) if isinstance(entry, Mapping) else entry or TORCH_ENGINE
        settings = engine_entry(entry)
        kind = class_at("engine", str(path))
        degree = settings.get("tensor_parallel_size", 1)
        return cls(kind.__name__, kind, settings.get("vision") == "shared", degree)

    def like(self, name: str) -> bool:
        """Whether it is, or inherits from, an engine of this name."""
        return any(parent.__name__ == name for parent in self.kind.__mro__)


@dataclass(frozen=True)
class Data:
    """As far as `check_batches` asks a data module of ours."""

    batch_size: int | None
    further_prompts: bool = True


def check_model_folder(path: str, content: Mapping[str, Any], gpus: int, train_tp: int, rollout_tp: int) -> None:
    """ValueError for what the run finds out of the model's folder, before it loads a weight. A name of the planner's
    table is none."""
    from transformers import AutoConfig

    from rollplex.models.registry import check_vllm, family_of, load_processor

    if not (Path(path) / "config.json").is_file():
        return
    config: Any = AutoConfig.from_pretrained(path)
    family_of(config.model_type)
    load_processor(path)
    entry = strategy_of(content).get("engine")
    inner = Engine.of(arguments_of(entry).get("engine"))
    for engine, degree in ((Engine.of(entry), rollout_tp), (inner, inner.tensor_parallel_size)):
        if engine.like("VLLMEngine"):
            check_vllm(config, degree)
    if sharding_of(content).kind == "zero":  # other strategies run no degrees: flags say those of a cluster
        check_model(config, Topology(gpus, train_tp, rollout_tp))


def check_clashes(content: Mapping[str, Any], gpus: int, train_tp: int, rollout_tp: int) -> None:
    """ValueError for what the run would refuse. The degrees are the config's, or those of flags."""
    sharding, strategy, model = sharding_of(content), strategy_of(content), model_of(content)
    entry, callbacks = strategy.get("engine"), callbacks_of(content)
    engine = Engine.of(entry)
    if engine.like("RemoteEngine"):
        inner = Engine.of(arguments_of(entry).get("engine"))
        check_remote("RemoteEngine" if inner.like("RemoteEngine") else inner.name, inner.takes_vision)
        check_remote_adapters(model.get("lora"), inner.tensor_parallel_size)
    if sharding.kind == "zero":
        check_stage(sharding.stage)
        check_degrees(sharding.stage, train_tp, Engine(engine.name, engine.kind, engine.takes_vision, rollout_tp))
        Topology(gpus, train_tp, rollout_tp)
        check_split_adapters(model.get("lora"), train_tp)
    elif sharding.kind in ("plain", "ddp"):
        check_engine_degree(engine.tensor_parallel_size)
    if "SharedWeights" in callbacks:
        check_shared_weights(engine.name, engine.like("VLLMEngine"))
        check_shared_adapters(model.get("lora"), rollout_tp)
    sharded = sharding.kind == "zero" and ((sharding.stage == 3 and gpus > 1) or max(train_tp, rollout_tp) > 1)
    if "PrefillReuse" in callbacks:
        check_reuse(sharded)
        check_takes_prefix(engine.name, bool(getattr(engine.kind, "takes_prefix", False)))
    check_vision(engine.takes_vision, sharding.kind == "zero" and max(train_tp, rollout_tp) > 1)
    check_trainer(content.get("trainer") or {})
    found = {"dynamic_sample": False, "num_mini_batches": 1} | model
    check_batches(found, Data(data_of(content).get("batch_size")))
