"""The parameters of a tensor-parallel trainer: which are split, and how a process gets at the others' parts.

The language model's projections are split by heads or features (Megatron-LM, arXiv 1909.08053), everything else is
whole on each rank: embeddings and head, norms, the vision tower. Splitting, and the collectives of forward and
backward, are DeepSpeed's AutoTP; this file says what is split and puts it together again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollplex.ranks import Ranks
from rollplex.rewards.runner import RewardRunner
from rollplex.topology import Topology
from rollplex.updates import BUCKET_BYTES, buckets

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "internvl")
"""transformers' config.model_type of models that tests have trained split."""

LANGUAGE_MODEL = r".*language_model.*\."
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
_PARTIAL = re.compile(rf"{LANGUAGE_MODEL}(q_norm|k_norm)\.(weight|bias)$")
"""Whole, but each rank uses them on its own heads only."""

_SPLIT = re.compile(rf"{LANGUAGE_MODEL}({'|'.join((*COLUMN, *ROW))})\.(weight|bias)$")


def partition_config() -> dict[str, Any]:
    """AutoTP's rules. Its own guess from the model would split the vision tower's packed query, key and value too."""
    rules = ((ROW, "row"), (COLUMN, "column"))
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [rf"{LANGUAGE_MODEL}({'|'.join(names)})\.weight$"], "partition_type": kind}
            for names, kind in rules
        ],
    }


def split_dim(name: str) -> int | None:
    """Along which dimension the parameter `name` is split; None where it is whole on each rank."""
    found = _SPLIT.match(name)
    if found is None:
        return None
    if found[1] in ROW:
        return 1 if found[2] == "weight" else None
    return 0


def check_degrees(stage: int, train_tp: int, engine: Any) -> None:
    """Raise ValueError for degrees that no number of processes would fit; they are counted later."""
    rollout_tp = getattr(engine, "tensor_parallel_size", 1)
    block = Topology(max(train_tp, rollout_tp) if isinstance(train_tp, int) else 1, train_tp, rollout_tp).block
    if stage == 3 and block > 1:
        name = f"train_tp={train_tp}" if train_tp > 1 else f"tensor_parallel_size={rollout_tp} of the engine"
        raise ValueError(f"{name} needs parameters that ZeRO-3 does not cut once more; set stage 1 or 2, or degree 1")


def check_model(config: Any, topology: Topology) -> None:
    """Raise ValueError unless the model's heads and widths can be split `train_tp` ways."""
    tp = topology.train_tp
    if tp == 1:
        return
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"train_tp={tp}: a {config.model_type} was never split ({', '.join(FAMILIES)} can be); set train_tp to 1"
        )
    text = config.text_config
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = int(getattr(text, name))
        if size % tp:
            raise ValueError(f"train_tp={tp} does not divide the model's {name}={size}; set it to a divisor")


def check_names(names: Iterable[str], topology: Topology) -> None:
    """Raise ValueError where nothing would be split."""
    if topology.train_tp > 1 and all(split_dim(name) is None for name in names):
        raise ValueError(
            f"train_tp={topology.train_tp}: the model has no parameter that is split ({', '.join((*COLUMN, *ROW))} of "
            "its language model, by these names; adapters give them others); set train_tp to 1"
        )


def merge(shards: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors from those of all ranks of a trainer, in their order."""
    return {name: join(name, [shard[name] for shard in shards]) for name in shards[0]}


def join(name: str, parts: Sequence[Tensor]) -> Tensor:
    dim = split_dim(name)
    return parts[0] if dim is None or len(parts) == 1 else torch.cat(list(parts), dim)


@dataclass(frozen=True)
class Shards:
    """How one process holds the parameters of a `SplitModel`, whose names are those of its transformers model."""

    topology: Topology
    process: int
    train_group: Any
    """Process group of the trainer's ranks; None where there is one."""

    gather_group: Any
    """Of the processes whose shards make this process's engine shard; None where it is one."""

    @property
    def gpu(self) -> int:
        return self.topology.gpu(self.process)

    @property
    def small_group(self) -> list[int]:
        """Processes of `gather_group`."""
        return next(members for members in self.topology.gather_groups() if self.process in members)

    def whole_shape(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        shape, dim = list(parameter.shape), split_dim(name)
        if dim is not None:
            shape[dim] *= self.topology.train_tp
        return tuple(shape)

    def whole(self, name: str, parameter: Tensor) -> Tensor:
        """The whole tensor; the parameter itself where it is not split. A collective of the trainer's ranks."""
        if split_dim(name) is None or self.topology.train_tp == 1:
            return parameter.detach()
        parts = [torch.empty_like(parameter) for _ in range(self.topology.train_tp)]
        dist.all_gather(parts, parameter.detach().contiguous(), group=self.train_group)
        return join(name, parts)

    @contextmanager
    def gathered(self, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[None]:
        """A scope in which these parameters are whole, to be read. A collective of the trainer's ranks."""
        found = list(named)
        held = [(p, p.data) for _, p in found]
        try:
            for name, p in found:
                p.data = self.whole(name, p)
            yield
        finally:
            for p, shard in held:
                p.data = shard


@dataclass(frozen=True)
class TensorParallel:
    """The processes around this one."""

    topology: Topology
    everyone: Ranks
    data: Ranks
    trainer: Ranks
    """Of the same trainer: the same rows, other shards."""

    block: Ranks
    data_group: Any
    """Process group that gradients are averaged over."""

    shards: Shards

    @classmethod
    def connect(cls, topology: Topology, timeout: timedelta | None) -> TensorParallel:
        """A collective of all processes."""
        process = dist.get_rank()
        train_group = _group(topology.train_groups(), timeout)
        gather_group = _group(topology.gather_groups(), timeout)
        everyone = Ranks.connect(timeout)
        return cls(
            topology=topology,
            everyone=everyone,
            data=Ranks.among(topology.data_groups(), timeout, everyone.where),
            trainer=Ranks.among(topology.train_groups(), timeout, everyone.where),
            block=Ranks.among(topology.blocks(), timeout, everyone.where),
            data_group=_group(topology.data_groups(), timeout),
            shards=Shards(topology, process, train_group, gather_group),
        )

    @torch.no_grad()
    def agree_on_whole(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Make the gradients of what is whole on each rank equal on the trainer's ranks.

        Norms of single heads see those of their rank alone: their gradients are summed. The others are equal but for
        what atomics on a GPU round differently, and are averaged; left alone, the ranks' copies would drift apart.
        """
        if self.trainer.alone:
            return
        gradients = []
        for name, p in named:
            if p.grad is not None and split_dim(name) is None:
                gradients.append(p.grad)
                if _PARTIAL.match(name):
                    p.grad *= self.topology.train_tp
        for bucket in buckets(gradients, BUCKET_BYTES):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            dist.all_reduce(flat, group=self.shards.train_group)
            flat /= self.topology.train_tp
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))


def _group(groups: Sequence[Sequence[int]], timeout: timedelta | None) -> Any:
    """This process's group of the default backend; every process makes all of them, in one order."""
    mine = None
    if all(len(members) == 1 for members in groups):
        return mine
    for members in groups:
        group = dist.new_group(list(members), timeout=timeout)
        if dist.get_rank() in members:
            mine = group
    return mine


class SharedRewards:
    """A `RewardRunner` of a tensor-parallel trainer: its first rank calls the user's code, all get the result.

    Scores may be random, or a model's: with scores of their own the ranks would train different models.
    """

    def __init__(self, runner: RewardRunner, trainer: Ranks) -> None:
        self._runner, self._trainer = runner, trainer
        self.num_generations = runner.num_generations

    def score(self, *args: Any, **kwargs: Any) -> Any:
        """A collective of the trainer's ranks."""
        found: Any = None
        if self._trainer.rank == 0:
            try:
                found = self._runner.score(*args, **kwargs)
            except Exception as error:
                found = error
        found = self._trainer.gather(found)[0]
        if isinstance(found, Exception):
            raise found
        return found
