"""Weights on their way to an engine in another process.

A process group of two (trainer rank 0, engine 1), apart from any group of the trainer's, carries them in buckets: gloo
over the CPU, NCCL where both sides have a GPU. At most `bucket_bytes` are in flight on either side, however large a
tensor is. Which tensors there are is said once (`ModelSpec`), and both sides then walk the same list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollplex.models.lora import add_adapters
from rollplex.models.registry import family_of
from rollplex.models.split_model import SplitModel

TRAINER, ENGINE = 0, 1
"""Ranks in the group."""
ALIGNMENT = 64
"""Bytes to which torch aligns what it allocates on a CPU; a tensor out of a file may lie anywhere."""


@dataclass(frozen=True)
class TensorSpec:
    """One parameter or buffer. A tied one names the first that holds its storage."""

    name: str
    same_as: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool
    """Sent after each update; the others at the start only."""
    place: int
    """Its address modulo ALIGNMENT."""

    def empty(self, device: torch.device) -> Tensor:
        """Storage for it, uninitialised, as far from an aligned address as the trainer's: kernels of the CPU sum in
        another order on either side of one."""
        count = torch.Size(self.shape).numel() * self.dtype.itemsize
        raw = torch.empty(count + ALIGNMENT, dtype=torch.uint8, device=device)
        start = (self.place - raw.data_ptr()) % ALIGNMENT
        return raw[start : start + count].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class ModelSpec:
    """All that builds the trainer's model a second time, but its values."""

    config: Any
    """transformers' config."""
    architecture: str
    """Class name in transformers."""
    generation_config: Any
    share_kv: bool
    lora: Any
    """peft's LoraConfig where the model has adapters: the engine runs them too, and they are all that is pushed."""
    version: int
    parameters: tuple[TensorSpec, ...]
    buffers: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, model: SplitModel) -> ModelSpec:
        named = list(model.hf.named_parameters(remove_duplicate=False))
        # A replica of sharded weights is trained though no parameter of it asks for a gradient.
        everything = not any(p.requires_grad for _, p in named)
        return cls(
            config=model.config, architecture=type(model.hf).__name__, generation_config=model.hf.generation_config,
            share_kv=model.share_kv, lora=model.lora, version=model.version,
            parameters=_specs(named, lambda p: everything or p.requires_grad),
            buffers=_specs(list(model.hf.named_buffers(remove_duplicate=False)), lambda _: False),
        )  # fmt: skip

    def build(self, device: torch.device) -> SplitModel:
        """The model with uninitialised storage on `device`."""
        import transformers

        with torch.device("meta"):
            hf: Any = getattr(transformers, self.architecture)(self.config)
            if self.lora is not None:
                add_adapters(hf, self.lora)
        hf.generation_config = self.generation_config
        made: dict[str, Any] = {}
        for spec in self.parameters:
            if spec.same_as not in made:
                made[spec.same_as] = nn.Parameter(spec.empty(device), requires_grad=False)
            _place(hf, spec.name, made[spec.same_as], "_parameters")
        for spec in self.buffers:
            if spec.same_as not in made:
                made[spec.same_as] = spec.empty(device)
            _place(hf, spec.name, made[spec.same_as], "_buffers")
        left = [name for name, p in [*hf.named_parameters(), *hf.named_buffers()] if p.is_meta]
        assert not left, f"the trainer's model lacks {left}"
        model = family_of(self.config.model_type)(hf.eval(), share_kv=self.share_kv)
        model.version = self.version
        return model


def _specs(named: Sequence[tuple[str, Tensor]], trained: Any) -> tuple[TensorSpec, ...]:
    first: dict[int, str] = {}
    return tuple(
        TensorSpec(
            name, first.setdefault(id(t), name), tuple(t.shape), t.dtype, bool(trained(t)), t.data_ptr() % ALIGNMENT
        )
        for name, t in named
    )


def _place(hf: nn.Module, name: str, value: Any, kind: str) -> None:
    owner, _, key = name.rpartition(".")
    getattr(hf.get_submodule(owner), kind)[key] = value


def tensors_of(model: SplitModel, spec: ModelSpec, *, everything: bool) -> list[Tensor]:
    """What one push carries, in the order of `spec`: each storage once."""
    tensors: Mapping[str, Tensor] = dict(model.hf.named_parameters(remove_duplicate=False))
    chosen = [t for t in spec.parameters if t.name == t.same_as and (everything or t.trained)]
    found = [tensors[t.name].detach() for t in chosen]
    if everything:
        tensors = dict(model.hf.named_buffers(remove_duplicate=False))
        found += [tensors[t.name] for t in spec.buffers if t.name == t.same_as]
    return found


class WeightChannel:
    """One side of the group. Both sides make the same calls."""

    def __init__(self, group: Any, side: int, device: torch.device, bucket_bytes: int) -> None:
        self.group, self.side, self.device = group, side, device
        self.bucket_bytes = bucket_bytes
        self.peak_bytes = 0
        """Largest buffer of the last push."""

    @torch.no_grad()
    def push(self, tensors: Sequence[Tensor]) -> int:
        """Trainer: send them; returns the bytes. RuntimeError when the engine does not take them."""
        assert self.side == TRAINER
        for pieces in self._buckets(tensors):
            self._broadcast(torch.cat([piece.to(self.device) for piece in pieces]))
        return sum(t.nbytes for t in tensors)

    @torch.no_grad()
    def pull(self, tensors: Sequence[Tensor]) -> int:
        """Engine: fill them in place; returns the bytes."""
        assert self.side == ENGINE
        for pieces in self._buckets(tensors):
            flat = torch.empty(sum(p.numel() for p in pieces), dtype=torch.uint8, device=self.device)
            self._broadcast(flat)
            for piece, value in zip(pieces, flat.split([p.numel() for p in pieces]), strict=True):
                piece.copy_(value)
        return sum(t.nbytes for t in tensors)

    def _broadcast(self, flat: Tensor) -> None:
        self.peak_bytes = max(self.peak_bytes, flat.nbytes)
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER
        self.group.broadcast([flat], options).wait()

    def _buckets(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Byte views of consecutive tensors, at most `bucket_bytes` together; a larger tensor comes in parts."""
        self.peak_bytes = 0
        bucket: list[Tensor] = []
        room = self.bucket_bytes
        for tensor in tensors:
            assert tensor.is_contiguous(), "a weight that is no contiguous tensor cannot be sent in place"
            rest = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
            while rest.numel():
                piece, rest = rest[:room], rest[room:]
                bucket.append(piece)
                room -= piece.numel()
                if not room:
                    yield bucket
                    bucket, room = [], self.bucket_bytes
        if bucket:
            yield bucket


def connect(
    store: Any, side: int, device: torch.device, *, host: str, bucket_bytes: int, timeout: float
) -> WeightChannel:
    """A collective of the two sides. host: this side's own address that the other one can reach. device: of the
    buckets; a CUDA device takes NCCL, and then the other side must as well."""
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group: Any = dist.ProcessGroupNCCL(store, side, 2, options)
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=host)], limit
        group = gloo(store, side, 2, options)
    return WeightChannel(group, side, device, bucket_bytes)
