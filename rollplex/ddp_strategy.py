"""The strategy over several devices with everything whole on each: data parallel, one reduction per update."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from rollplex.checkpoints import AtomicCheckpointIO
from rollplex.colocation import WithColocation, check_module, check_same, check_trainer, make_colocation
from rollplex.engines.base import RolloutEngine
from rollplex.ranks import Ranks
from rollplex.trainer_states import WithTrainerStates
from rollplex.updates import WholeGradients


class RollplexDDPStrategy(WithTrainerStates, WithColocation, DDPStrategy):
    """Use as `strategy: rollplex_ddp`, or with settings as a class_path.

    Each rank takes its groups of a rollout batch, with an engine of its own. Backward calls are not hooked: gradients
    are summed over ranks once per update, in flat buckets.

    Args:
        engine: What generates on each rank; None is `TorchEngine`.
        threads: CPU threads of a lane that runs alone; None is torch's number.
        rollout_threads: CPU threads of the rollout lane while both lanes work; None is half of `threads`.
        train_threads: CPU threads of the train lane meanwhile; None is the rest.
        pin_cores: While both lanes work, keep each to cores of its own. For one rank per machine.
        train_sms: CUDA multiprocessors of the train lane meanwhile (a green context); None is all.
        prefix_budget_bytes: Most bytes of prefix state a rank holds at once in the decode window; None is no limit.
        memory_limit_bytes: Most bytes of all states of a rank on its device in the decode window, by the memory ledger:
            a prefix that does not fit beside them runs after the rollout. None is no limit.
        admission: "measure" declines overlap that does not pay, found by measuring; "always" admits what fits.
        rollout_timeout: Seconds without any sign of the engine after which a rollout counts as stalled and the run
            ends with an error; None waits forever.
        collective_timeout: Seconds after which a collective that some rank does not come to is an error, which names
            the rank, its phase and its unit.
        process_group_backend: None is NCCL on CUDA, gloo on a CPU.
    """

    strategy_name = "rollplex_ddp"

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        threads: int | None = None,
        rollout_threads: int | None = None,
        train_threads: int | None = None,
        pin_cores: bool = False,
        train_sms: int | None = None,
        prefix_budget_bytes: int | None = None,
        memory_limit_bytes: int | None = None,
        admission: Literal["measure", "always"] = "measure",
        rollout_timeout: float | None = 600.0,
        collective_timeout: float = 1800.0,
        process_group_backend: str | None = None,
    ) -> None:
        if not collective_timeout > 0:
            raise ValueError(f"collective_timeout={collective_timeout} must be above 0 seconds")
        super().__init__(
            checkpoint_io=AtomicCheckpointIO(), process_group_backend=process_group_backend,
            timeout=timedelta(seconds=collective_timeout),
        )  # fmt: skip
        self.colocation = make_colocation(
            engine, threads=threads, rollout_threads=rollout_threads, train_threads=train_threads, pin_cores=pin_cores,
            train_sms=train_sms, prefix_budget_bytes=prefix_budget_bytes, admission=admission,
            rollout_timeout=rollout_timeout, memory_limit_bytes=memory_limit_bytes,
        )  # fmt: skip
        self.ranks = Ranks()
        self.gradients = WholeGradients()

    def setup(self, trainer: Any) -> None:
        check_trainer(trainer, self.precision_plugin.precision, self.colocation)
        module: Any = self.lightning_module
        check_module(module, self.strategy_name)
        self.ranks = Ranks.connect(self._timeout)
        check_same(module, trainer.datamodule, self.ranks)
        self.gradients = WholeGradients(self.ranks)
        self.colocation.executor.stops_together = not self.ranks.alone
        self.colocation.executor.where = self.ranks.where
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.training:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        _optimizers_to_device(self.optimizers, self.root_device)
        module.place(self.root_device)
        self.colocation.start(trainer, module.actor, module.processor, self.root_device)
        self.hold_states(module)


StrategyRegistry.register(
    "rollplex_ddp", RollplexDDPStrategy, override=True,
    description="GRPO on several devices, everything whole on each, with a colocated rollout engine on each",
)  # fmt: skip
