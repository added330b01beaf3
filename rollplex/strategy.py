"""The Lightning strategy that owns a colocated engine: model, optimizer and engine on one device."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from rollplex.checkpoints import AtomicCheckpointIO
from rollplex.colocation import WithColocation, check_module, check_trainer, make_colocation
from rollplex.engines.base import RolloutEngine
from rollplex.ranks import Ranks
from rollplex.trainer_states import WithTrainerStates
from rollplex.updates import WholeGradients


class RollplexStrategy(WithTrainerStates, WithColocation, SingleDeviceStrategy):
    """Use as `strategy: rollplex`, or with settings as a class_path.

    Args:
        engine: What generates; None is `TorchEngine`, which decodes on the trainer's own tensors.
        device: "auto" takes the first CUDA device, else the CPU.
        threads: CPU threads of a lane that runs alone; None is torch's number.
        rollout_threads: CPU threads of the rollout lane while both lanes work; None is half of `threads`.
        train_threads: CPU threads of the train lane meanwhile; None is the rest.
        pin_cores: While both lanes work, keep each to cores of its own.
        train_sms: CUDA multiprocessors of the train lane meanwhile (a green context); None is all.
        prefix_budget_bytes: Most bytes of prefix state held at once in the decode window; None is no limit.
        memory_limit_bytes: Most bytes of all states on the device in the decode window, by the memory ledger: a prefix
            that does not fit beside them runs after the rollout. None is no limit.
        admission: "measure" declines overlap that does not pay, found by measuring; "always" admits what fits.
        rollout_timeout: Seconds without any sign of the engine after which a rollout counts as stalled and the run
            ends with an error; None waits forever.
    """

    strategy_name = "rollplex"

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        device: str = "auto",
        threads: int | None = None,
        rollout_threads: int | None = None,
        train_threads: int | None = None,
        pin_cores: bool = False,
        train_sms: int | None = None,
        prefix_budget_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        admission: Literal["measure", "always"] = "measure",
        rollout_timeout: float | None = 600.0,
    ) -> None:
        if device == "auto":
            device = "cuda:0" if torch.cuda.is_available() else "cpu"
        super().__init__(device=torch.device(device), checkpoint_io=AtomicCheckpointIO())
        self.colocation = make_colocation(
            engine, threads=threads, rollout_threads=rollout_threads, train_threads=train_threads, pin_cores=pin_cores,
            train_sms=train_sms, prefix_budget_bytes=prefix_budget_bytes, admission=admission,
            rollout_timeout=rollout_timeout, memory_limit_bytes=memory_limit_bytes,
        )  # fmt: skip
        self.ranks = Ranks()
        self.gradients = WholeGradients()

    def setup(self, trainer: Any) -> None:
        self._check(trainer)
        super().setup(trainer)
        module: Any = self.lightning_module
        check_module(module, self.strategy_name)
        module.place(self.root_device)
        self.colocation.start(trainer, module.actor, module.processor, self.root_device)
        self.hold_states(module)

    def _check(self, trainer: Any) -> None:
        """What this strategy cannot do, said before a model is touched."""
        devices = trainer._accelerator_connector._devices_flag
        wanted = int(devices) if str(devices).isdigit() else 1
        nodes = int(trainer._accelerator_connector._num_nodes_flag)
        if wanted > 1 or nodes > 1:
            raise ValueError(
                f"strategy=rollplex uses one device, but devices={devices} and num_nodes={nodes} were set; "
                "set both to 1, or strategy to rollplex_ddp, rollplex_zero1, rollplex_zero2 or rollplex_zero3"
            )
        check_trainer(trainer, self.precision_plugin.precision, self.colocation)


StrategyRegistry.register(
    "rollplex", RollplexStrategy, description="GRPO on one device with a colocated rollout engine", override=True
)
