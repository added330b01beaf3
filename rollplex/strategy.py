"""The Lightning strategy that owns a colocated engine: model, optimizer and engine on one device."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from rollplex.checkpoints import AtomicCheckpointIO
from rollplex.colocation import Colocation
from rollplex.engines.base import RolloutEngine


class RollplexStrategy(SingleDeviceStrategy):
    """Use as `strategy: rollplex`, or with settings as a class_path.

    Args:
        engine: What generates; None is `TorchEngine`, which decodes on the trainer's own tensors.
        device: "auto" takes the first CUDA device, else the CPU.
        rollout_threads: Intra-op CPU threads of the rollout lane; None leaves torch's default.
        rollout_timeout: Seconds without any sign of the engine after which a rollout counts as stalled and the run
            ends with an error; None waits forever.
    """

    strategy_name = "rollplex"

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        device: str = "auto",
        rollout_threads: int | None = None,
        rollout_timeout: float | None = 600.0,
    ) -> None:
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        super().__init__(device=torch.device(device), checkpoint_io=AtomicCheckpointIO())
        self.colocation = Colocation(engine, threads=rollout_threads, timeout=rollout_timeout)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        module: Any = self.lightning_module
        if not hasattr(module, "actor"):
            raise ValueError(
                f"strategy=rollplex drives a GRPOModule, but the model is a {type(module).__name__}: subclass that"
            )
        module.place(self.root_device)
        self.colocation.start(trainer, module.actor, module.processor, self.root_device)

    def teardown(self) -> None:
        self.colocation.close()
        super().teardown()


StrategyRegistry.register(
    "rollplex", RollplexStrategy, description="GRPO on one device with a colocated rollout engine", override=True
)
