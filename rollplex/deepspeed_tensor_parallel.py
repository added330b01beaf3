"""AutoTP, DeepSpeed's tensor-parallel training, in groups of our choice."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rollplex.colocation import Colocation
from rollplex.exchange import Exchange
from rollplex.lockstep import Lockstep
from rollplex.models.replica import Replica
from rollplex.models.split_model import SplitModel
from rollplex.ranks import Ranks
from rollplex.rewards.runner import RewardRunner
from rollplex.tensor_parallel import SharedRewards, TensorParallel, check_model, check_names, partition_config
from rollplex.topology import Topology
from rollplex.units import ACTOR_KINDS, UnitKind

log = logging.getLogger(__name__)

NAMES = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu")
"""Where DeepSpeed keeps the groups of the process (deepspeed/utils/groups.py). It makes neighbours a trainer unless
they are there; an engine of a larger degree needs other trainers (rollplex.topology)."""


def section(train_tp: int) -> dict[str, Any]:
    """Of DeepSpeed's config."""
    if train_tp == 1:
        return {}
    return {"tensor_parallel": {"autotp_size": train_tp, "partition_config": partition_config()}}


def set_groups(parallel: TensorParallel) -> None:
    """Before the engine is built. A collective of all processes: also a sole data-parallel rank needs a group."""
    from deepspeed.utils import groups

    data = parallel.data_group
    if data is None:
        alone = [dist.new_group([process]) for process in range(parallel.topology.world)]
        data = alone[dist.get_rank()]
    values = (parallel.shards.train_group, parallel.shards.train_group, data, None)
    for name, value in zip(NAMES, values, strict=True):
        setattr(groups, name, value)


def forget_groups() -> None:
    """A later engine of this process may have another degree."""
    from deepspeed.utils import groups

    for name in NAMES:
        setattr(groups, name, None)


class WithTensorParallel:
    """The part of a strategy that knows which ranks share a trainer or an engine."""

    colocation: Colocation
    lightning_module: Any
    ranks: Ranks
    parallel: TensorParallel | None
    replica: Replica | None
    train_tp: int
    gather_bucket_bytes: int
    world_size: int
    root_device: torch.device
    _timeout: timedelta | None
    _whole_shapes: dict[str, tuple[int, ...]]

    @property
    def topology(self) -> Topology:
        degree = getattr(self.colocation.engine, "tensor_parallel_size", 1)
        return Topology(self.world_size, self.train_tp, degree)

    def _connect(self, module: Any) -> Ranks:
        """All ranks; `self.ranks` are those that have other rows than this one."""
        topology = self.topology
        check_model(module.actor.config, topology)
        check_names((name for name, _ in module.policy.named_parameters()), topology)
        if topology.block == 1:
            self.parallel = None
            self.ranks = Ranks.connect(self._timeout)
            return self.ranks
        self._whole_shapes = {name: tuple(p.shape) for name, p in module.policy.named_parameters()}
        self.parallel = parallel = TensorParallel.connect(topology, self._timeout)
        self.ranks = parallel.data
        executor = self.colocation.executor
        executor.everyone = parallel.everyone
        executor.exchange = Exchange(topology, parallel.shards.process, parallel.block)
        if topology.train_tp > 1:
            set_groups(parallel)
            # NCCL: kernels of two communicators at once, in another order on each rank, may wait for each other.
            waits = topology.rollout_tp > 1 and self.root_device.type == "cuda"
            if waits and parallel.everyone.rank == 0:
                log.warning(
                    "train_tp=%d and tensor_parallel_size=%d: units of the trainer wait for the end of the decode, "
                    "prefix overlap hides those of the reference only (docs/scaling.md)",
                    topology.train_tp,
                    topology.rollout_tp,
                )
            kinds = ACTOR_KINDS | {UnitKind.REWARD}
            executor.lockstep = Lockstep(parallel.trainer, kinds, same_groups=True, after_decode=waits)
        return parallel.everyone

    def _split(self, actor: SplitModel) -> None:
        """After AutoTP has cut the parameters. The embedded engine decodes on whole ones."""
        assert self.parallel is not None
        actor.shards = shards = self.parallel.shards
        now = {name: shards.whole_shape(name, p) for name, p in actor.hf.named_parameters()}
        wrong = [name for name, shape in now.items() if shape != self._whole_shapes[name]]
        assert not wrong, f"AutoTP cut {len(wrong)} parameters in another way than asked for (first: {wrong[0]})"
        if self.colocation.engine.needs_whole_weights:
            self.replica = Replica(actor, self.gather_bucket_bytes)

    def shared_rewards(self, runner: RewardRunner) -> Any:
        """What scores for this rank."""
        shared = self.parallel is not None and not self.parallel.trainer.alone
        return SharedRewards(runner, self.parallel.trainer) if self.parallel is not None and shared else runner

    @contextmanager
    def joined(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """A scope in which these parameters of the policy are whole. A collective of the trainer's ranks."""
        assert self.parallel is not None
        wanted = {id(p) for p in parameters}
        named = self.lightning_module.policy.named_parameters()
        with self.parallel.shards.gathered((name, p) for name, p in named if id(p) in wanted):
            yield
