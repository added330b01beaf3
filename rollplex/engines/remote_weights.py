"""Weights on their way to an engine in another process.

A process group (trainer rank 0, the engine's ranks from 1 on), apart from any group of the trainer's, carries them in
buckets: gloo over the CPU, NCCL where both sides have a GPU. At most `bucket_bytes` are in flight on either side,
however large a tensor is. Which tensors there are is said once (`ModelSpec`), and all then walk the same list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollplex.models.lora import add_adapters, is_adapter
from rollplex.models.registry import family_of
from rollplex.models.split_model import SplitModel

TRAINER, ENGINE = 0, 1
"""Ranks in the group; ENGINE is the first of an engine's."""
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

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Storage for it, uninitialised, as far from an aligned address as the trainer's: kernels of the CPU sum in
        another order on either side of one."""
        raw = torch.empty(self.nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
        start = (self.place - raw.data_ptr()) % ALIGNMENT
        return raw[start : start + self.nbytes].view(self.dtype).view(self.shape)


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
        replica = not any(p.requires_grad for _, p in named)
        shards = model.shards
        whole = None if shards is None else {name: shards.whole_shape(name, p) for name, p in named}

        def trained(name: str, tensor: Tensor) -> bool:
            return tensor.requires_grad or (replica and (model.lora is None or is_adapter(name)))

        return cls(
            config=model.config, architecture=type(model.hf).__name__, generation_config=model.hf.generation_config,
            share_kv=model.share_kv, lora=model.lora, version=model.version,
            parameters=_specs(named, trained, whole),
            buffers=_specs(list(model.hf.named_buffers(remove_duplicate=False)), lambda *_: False),
        )  # fmt: skip

    def build(self, device: torch.device) -> SplitModel:
        """The model with uninitialised storage on `device`; on "meta" with none, for an engine of several ranks."""
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
        assert device.type == "meta" or not left, f"the trainer's model lacks {left}"
        model = family_of(self.config.model_type)(hf.eval(), share_kv=self.share_kv)
        model.version = self.version
        return model


def _specs(
    named: Sequence[tuple[str, Tensor]], trained: Any, whole: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[TensorSpec, ...]:  # fmt: skip
    """whole: shapes of parameters that this process may have parts of."""
    first: dict[int, str] = {}
    return tuple(
        TensorSpec(
            name, first.setdefault(id(t), name), tuple(t.shape) if whole is None else whole[name], t.dtype,
            trained=bool(trained(name, t)), place=t.data_ptr() % ALIGNMENT,
        )
        for name, t in named
    )  # fmt: skip


def _place(hf: nn.Module, name: str, value: Any, kind: str) -> None:
    owner, _, key = name.rpartition(".")
    getattr(hf.get_submodule(owner), kind)[key] = value


def sent(spec: ModelSpec, *, everything: bool) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """(parameters, buffers) that one push carries, in its order: each storage once."""
    parameters = [t for t in spec.parameters if t.name == t.same_as and (everything or t.trained)]
    return parameters, [t for t in spec.buffers if t.name == t.same_as] if everything else []


def tensors_of(model: SplitModel, spec: ModelSpec, *, everything: bool) -> Iterator[Tensor]:
    """The tensors of `sent`. Of a split trainer each is made whole when its turn comes: a collective of its ranks."""
    parameters, buffers = sent(spec, everything=everything)
    named: Mapping[str, Tensor] = dict(model.hf.named_parameters(remove_duplicate=False))
    for t in parameters:
        held = named[t.name].detach()
        yield held if model.shards is None else model.shards.whole(t.name, held).contiguous()
    named = dict(model.hf.named_buffers(remove_duplicate=False))
    yield from (named[t.name] for t in buffers)


class WeightChannel:
    """One side of the group. Both sides make the same calls."""

    def __init__(self, group: Any, side: int, device: torch.device, bucket_bytes: int) -> None:
        self.group, self.side, self.device = group, side, device
        self.bucket_bytes = bucket_bytes
        self.peak_bytes = 0
        """Largest buffer of the last push."""

    @torch.no_grad()
    def push(self, tensors: Iterable[Tensor], sizes: Sequence[int]) -> int:
        """Trainer: send them; returns the bytes. sizes: of each, in bytes; a tensor is asked for when its turn comes.

        RuntimeError when the engine does not take them."""
        assert self.side == TRAINER
        source = (t for t in tensors if t.numel())
        flat = torch.empty(0, dtype=torch.uint8)
        for cut in self._cuts(sizes):
            pieces = []
            for index, start, count in cut:
                if start == 0:
                    flat = _as_bytes(next(source))
                    assert flat.numel() == sizes[index]
                pieces.append(flat[start : start + count].to(self.device))
            self._broadcast(torch.cat(pieces))
        return sum(sizes)

    @torch.no_grad()
    def pull(self, tensors: Sequence[Tensor]) -> int:
        """Engine: fill them in place; returns the bytes."""
        targets = [_as_bytes(t) for t in tensors]
        for index, start, part in self._arriving([t.nbytes for t in tensors]):
            targets[index][start : start + part.numel()].copy_(part)
        return sum(t.nbytes for t in tensors)

    @torch.no_grad()
    def arrive(self, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
        """Engine: as `pull`, one whole tensor after the other, in storage of its own that goes with the caller's
        reference: besides a bucket at most one tensor is held here. Empty ones do not come."""
        raw = torch.empty(0, dtype=torch.uint8)
        for index, start, part in self._arriving([t.nbytes for t in specs]):
            spec = specs[index]
            if start == 0:
                raw = torch.empty(spec.nbytes, dtype=torch.uint8, device=self.device)
            raw[start : start + part.numel()].copy_(part)
            if start + part.numel() == spec.nbytes:
                whole, raw = raw.view(spec.dtype).view(spec.shape), raw[:0].clone()
                yield whole
                del whole

    def _arriving(self, sizes: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
        """(tensor, its first byte, bytes) as they come."""
        assert self.side >= ENGINE
        for cut in self._cuts(sizes):
            flat = torch.empty(sum(count for _, _, count in cut), dtype=torch.uint8, device=self.device)
            self._broadcast(flat)
            parts = flat.split([count for _, _, count in cut])
            yield from ((index, start, part) for (index, start, _), part in zip(cut, parts, strict=True))

    def leave(self) -> None:
        """Close this side's connections: whoever waits for it in a call gets an error."""
        self.group = None

    def _broadcast(self, flat: Tensor) -> None:
        self.peak_bytes = max(self.peak_bytes, flat.nbytes)
        options = dist.BroadcastOptions()
        options.rootRank = TRAINER
        self.group.broadcast([flat], options).wait()

    def _cuts(self, sizes: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
        """Buckets of (tensor, first byte, bytes), at most `bucket_bytes` together; a larger tensor comes in parts."""
        self.peak_bytes = 0
        bucket: list[tuple[int, int, int]] = []
        room = self.bucket_bytes
        for index, size in enumerate(sizes):
            start = 0
            while start < size:
                count = min(room, size - start)
                bucket.append((index, start, count))
                start, room = start + count, room - count
                if not room:
                    yield bucket
                    bucket, room = [], self.bucket_bytes
        if bucket:
            yield bucket


def _as_bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), "a weight that is no contiguous tensor cannot be sent in place"
    if not tensor.numel():
        return tensor.new_empty(0, dtype=torch.uint8)
    return tensor.view(-1).view(torch.uint8)


def connect(
    store: Any, side: int, device: torch.device, *, host: str, bucket_bytes: int, timeout: float, ranks: int = 1
) -> WeightChannel:
    """A collective of the trainer and the engine's `ranks`. host: this side's own address that the others can reach.
    device: of the buckets; a CUDA device takes NCCL, and then the others must as well."""
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group: Any = dist.ProcessGroupNCCL(store, side, 1 + ranks, options)
    else:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = [gloo.create_device(hostname=host)], limit
        group = gloo(store, side, 1 + ranks, options)
    return WeightChannel(group, side, device, bucket_bytes)
