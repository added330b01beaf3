"""Rollplex: synchronous GRPO for vision-language models, with prefix work hidden under rollout decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollplex.data.datamodule import VLMDataModule
    from rollplex.data.records import Group, Rollout, Sample
    from rollplex.ddp_strategy import RollplexDDPStrategy
    from rollplex.deepspeed_strategy import RollplexDeepSpeedStrategy
    from rollplex.module import GRPOModule
    from rollplex.phases import Phase, PhaseCallback
    from rollplex.strategy import RollplexStrategy
    from rollplex.tasks.base import VLMTask

_WHERE = {
    "GRPOModule": "rollplex.module",
    "Group": "rollplex.data.records",
    "Phase": "rollplex.phases",
    "PhaseCallback": "rollplex.phases",
    "Rollout": "rollplex.data.records",
    "RollplexDDPStrategy": "rollplex.ddp_strategy",
    "RollplexDeepSpeedStrategy": "rollplex.deepspeed_strategy",
    "RollplexStrategy": "rollplex.strategy",
    "Sample": "rollplex.data.records",
    "VLMDataModule": "rollplex.data.datamodule",
    "VLMTask": "rollplex.tasks.base",
}

__all__ = [
    "GRPOModule",
    "Group",
    "Phase",
    "PhaseCallback",
    "Rollout",
    "RollplexDDPStrategy",
    "RollplexDeepSpeedStrategy",
    "RollplexStrategy",
    "Sample",
    "VLMDataModule",
    "VLMTask",
]


def __getattr__(name: str) -> Any:
    # Lazy: a task file that needs VLMTask should not pay for Lightning and transformers.
    if name in _WHERE:
        import importlib

        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'rollplex' has no attribute {name!r}")
