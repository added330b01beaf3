"""The strategy over several devices whose states DeepSpeed shards (ZeRO, arXiv 1910.02054)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, StrategyRegistry
from torch import nn

from rollplex.checks import check_split_adapters, check_stage
from rollplex.colocation import LastWords, check_module, check_same, check_trainer, make_colocation
from rollplex.deepspeed_build import warn_of_locks
from rollplex.deepspeed_checkpoints import WithShardedCheckpoints
from rollplex.deepspeed_gradients import ShardedGradients
from rollplex.deepspeed_offload import StateOffload, WithStateOffload
from rollplex.deepspeed_tensor_parallel import WithTensorParallel, forget_groups, section
from rollplex.engines.base import RolloutEngine
from rollplex.lockstep import Lockstep
from rollplex.models.replica import Replica
from rollplex.models.split_model import SplitModel
from rollplex.ranks import Ranks
from rollplex.tensor_parallel import TensorParallel, check_degrees
from rollplex.updates import GradientUpdate, WholeGradients

NEVER = 10**9


class _Precision(DeepSpeedPrecision):
    """Model and prompts stay as they are: the model's dtype is its own, and prompts are frozen records."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


class RollplexDeepSpeedStrategy(
    WithTensorParallel, WithStateOffload, WithShardedCheckpoints, LastWords, DeepSpeedStrategy
):  # fmt: skip
    """Use as `strategy: rollplex_zero1`, `rollplex_zero2` or `rollplex_zero3`, or with settings as a class_path.

    Each rank takes its groups of a rollout batch, with an engine of its own; gradients are reduced once per update.
    Masters and moments are float32 and sharded, whatever the model's dtype. Stage 1 and 2: the embedded engine and
    SharedWeights read the parameters in place, as with `rollplex`. Stage 3: parameters are sharded as well; each rank
    holds one whole copy for its engine, gathered after every update.

    Args:
        stage: 1 shards the optimizer, 2 gradients as well, 3 parameters too. Without sharding: `rollplex_ddp`.
        train_tp: Ranks that share one trainer, each with a part of the language model's matrices (stage 1 and 2). The
            engine's degree is its own `tensor_parallel_size`; one must divide the other.
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
        gather_bucket_bytes: Most bytes of parameters gathered at once for the engine's copy (stage 3).
        zero_optimization: More entries of DeepSpeed's section of that name.
        collective_timeout: Seconds after which a collective that some rank does not come to is an error.
        process_group_backend: None is NCCL on CUDA, gloo on a CPU.
    """

    strategy_name = "rollplex_zero"
    keeps_masters = True
    """DeepSpeed holds float32 masters."""

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
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
        gather_bucket_bytes: int = 512 * 1024**2,
        zero_optimization: dict[str, Any] | None = None,
        collective_timeout: float = 1800.0,
        process_group_backend: str | None = None,
        train_tp: int = 1,
    ) -> None:
        self.stage = stage
        self._check_settings(zero_optimization or {}, gather_bucket_bytes, collective_timeout)
        self.train_tp = train_tp
        check_degrees(stage, train_tp, engine)
        zero = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True, "reduce_scatter": True}
        config = {
            "train_micro_batch_size_per_gpu": 1, "steps_per_print": NEVER, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero | (zero_optimization or {}),
            **section(train_tp),
        }  # fmt: skip
        super().__init__(
            config=config, process_group_backend=process_group_backend, timeout=timedelta(seconds=collective_timeout)
        )
        self.gather_bucket_bytes = gather_bucket_bytes
        self.colocation = make_colocation(
            engine, threads=threads, rollout_threads=rollout_threads, train_threads=train_threads, pin_cores=pin_cores,
            train_sms=train_sms, prefix_budget_bytes=prefix_budget_bytes, admission=admission,
            rollout_timeout=rollout_timeout, memory_limit_bytes=memory_limit_bytes,
        )  # fmt: skip
        self.ranks = Ranks()
        self.parallel: TensorParallel | None = None
        """Set where trainers or engines are of several ranks."""
        self.gradients: GradientUpdate = WholeGradients()
        self.replica: Replica | None = None
        """While training: the whole weights, where parameters are sharded and the engine needs a tensor of its own."""
        self.states: StateOffload | None = None
        """While training: sizes of the sharded states, and their way to host memory and back."""
        self._linear = torch.nn.functional.linear

    def _check_settings(self, zero: dict[str, Any], bucket_bytes: int, timeout: float) -> None:
        check_stage(self.stage)
        if zero.get("stage", self.stage) != self.stage or zero.get("offload_param"):
            raise ValueError(
                f"zero_optimization={zero}: the stage is set by `stage` ({self.stage}), and parameters cannot be "
                "offloaded (the engine's copy is gathered from them); take these entries out"
            )
        if bucket_bytes < 1 or not timeout > 0:
            raise ValueError(f"gather_bucket_bytes={bucket_bytes} and collective_timeout={timeout} must be above 0")

    # ---- set-up ----

    def setup_environment(self) -> None:
        """As the parent's, on any device."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        from deepspeed.accelerator import get_accelerator

        chosen = get_accelerator().device_name()
        if chosen.split(":")[0] != self.root_device.type:
            raise ValueError(
                f"DeepSpeed computes on {chosen} and the trainer on {self.root_device.type}: set the environment "
                f"variable DS_ACCELERATOR={self.root_device.type}, or trainer.accelerator"
            )
        reset_seed()
        self.set_world_ranks()
        self.topology  # noqa: B018 (degrees that do not fit the number of processes, before any of them waits)
        warn_of_locks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: Any) -> None:
        check_trainer(trainer, self.precision_plugin.precision, self.colocation, split_engine=True)
        module: Any = self.lightning_module
        check_module(module, self.strategy_name)
        check_split_adapters(module.hparams["lora"], self.train_tp)
        self.precision_plugin = _Precision("32-true")
        everyone = self._connect(module)
        check_same(module, trainer.datamodule, everyone)
        executor = self.colocation.executor
        executor.stops_together = not everyone.alone
        executor.where = everyone.where
        if trainer.training:
            self._configure(module)
            super().setup(trainer)
            self.gradients = ShardedGradients(self.deepspeed_engine, self.ranks, self.parallel)
            self.states = StateOffload(self.deepspeed_engine, self.stage)
            if self.stage == 3:
                executor.lockstep = None if self.ranks.alone else Lockstep(self.ranks)
                self.replica = Replica(module.actor, self.gather_bucket_bytes)
                module.actor.before_prefix_backward = self._count_anew
            elif self.train_tp > 1:
                self._split(module.actor)
        else:
            # Nothing to shard: the rollout engine is all that computes.
            DDPStrategy.setup(self, trainer)
        served, refresh = (None, None) if self.replica is None else (self.replica.model, self._refresh)
        if served is not None and module.actor.lora is not None:
            self._refresh()  # the reference reads what is not trained, too, and a remote engine is sent it once
        module.place(self.root_device, served)
        self.colocation.start(
            trainer, module.actor, module.processor, self.root_device, served=served, refresh=refresh,
            shards=self.parallel.shards if self.parallel is not None else None,
        )  # fmt: skip

    def _configure(self, module: Any) -> None:
        """What DeepSpeed must know of the module's settings; its own default would clip at 1."""
        assert isinstance(self.config, dict)
        self.exclude_frozen_parameters = module.hparams["lora"] is not None
        self.config["gradient_clipping"] = module.hparams["max_grad_norm"] or 0.0
        if module.hparams["dtype"] == "bfloat16":
            self.config["bf16"] = {"enabled": True, "check_grad_overflow": True}

    # ---- set-up of the parts ----

    def _refresh(self) -> None:
        assert self.replica is not None
        self.replica.refresh(self.gathered)

    def _count_anew(self) -> None:
        """A module's parameters are released when its backward has come as often as its last forward was called.
        Between a prefix's forward and backward come those of its suffixes, which used the count up: the whole model
        would stay gathered from one backward to the next.
        """
        self.deepspeed_engine.optimizer.parameter_offload.release_backward_leftovers()
        module: Any = self.lightning_module
        for part in module.policy.modules():
            part.ds_grads_remaining = 1

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """The model is loaded whole, on the CPU, and sharded by `_setup_model_and_optimizer`."""
        self._init_config_if_needed()
        yield

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> tuple[Any, Any]:
        import deepspeed

        module: Any = model
        self._linear = torch.nn.functional.linear
        if self.stage == 3:
            module.actor.call_modules_alone()
            # One parameter after the other goes to the device and is cut there; the engine would move all first.
            deepspeed.zero.Init(module=module.policy, config_dict_or_path=self.config)
        engine, sharded, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank),
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, sharded

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """A scope in which these parameters are whole on every rank, to be read. A collective where they are cut."""
        if self.train_tp > 1:
            with self.joined(parameters):
                yield
            return
        away = [p for p in parameters if getattr(getattr(p, "ds_status", None), "name", "") == "NOT_AVAILABLE"]
        if not away:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(away):
            yield

    def whole_model(self) -> SplitModel:
        """The policy with whole weights, as of the last update. Every rank asks: under stage 3 this may gather."""
        module: Any = self.lightning_module
        if self.replica is None:
            if module.actor.shards is None:
                return module.actor
            whole = Replica(module.actor, self.gather_bucket_bytes)
            whole.refresh(self.gathered)
            return whole.model
        if self.replica.model.version != module.actor.version or not self.replica.filled:
            self._refresh()
        return self.replica.model

    # ---- steps ----

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Not through the engine's forward: a step is many passes of parts of the model, each with its own hooks."""
        module: Any = self.lightning_module
        return module.training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        return module.validation_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if isinstance(self.gradients, ShardedGradients) and self.gradients.nothing:
            closure()
            self.deepspeed_engine.global_steps += 1  # an update that moves nothing is one
            return None
        self.colocation.watch.sample()  # gradients are reduced, and sharded from stage 2 on
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def teardown(self) -> None:
        self.colocation.executor.where.close()
        self.colocation.close()
        if isinstance(self.gradients, ShardedGradients):
            self.gradients.abandon()
            self.gradients = WholeGradients()
        torch.nn.functional.linear = self._linear  # ZeRO-3 replaces it
        self.replica = self.states = None
        executor = self.colocation.executor
        executor.lockstep = executor.exchange = executor.everyone = None
        if self.train_tp > 1:
            forget_groups()
        module: Any = self.lightning_module
        if hasattr(module, "close_rewards"):
            module.close_rewards()
        super().teardown()


for _stage in (1, 2, 3):
    StrategyRegistry.register(
        f"rollplex_zero{_stage}", RollplexDeepSpeedStrategy, override=True, stage=_stage,
        description=f"GRPO on several devices, DeepSpeed ZeRO-{_stage}, with a colocated rollout engine on each",
    )  # fmt: skip
