"""What autograd saves for a backward: how many bytes, and where they wait."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class OnHost:
    """A saved tensor that was moved to host memory."""

    copy: Tensor
    device: torch.device


class SavedActivations:
    """A scope in which autograd's saved tensors are counted (parameters left out), and with `host` moved to host memory
    (pinned for a CUDA device) until backward asks for them."""

    def __init__(self, parameters: Iterable[Tensor], *, enabled: bool, host: bool = False) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters} if enabled else set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack) if enabled else nullcontext()
        self._host = host
        self._seen: set[int] = set()
        self._moved: dict[tuple[Any, ...], tuple[StorageWeakRef, OnHost]] = {}
        self.device_bytes = 0
        self.host_bytes = 0

    def besides(self, tensors: Iterable[Tensor]) -> int:
        """device_bytes without the storages of `tensors`, which are counted elsewhere."""
        theirs = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
        return self.device_bytes - sum(size for address, size in theirs.items() if address in self._seen)

    def _pack(self, tensor: Tensor) -> Tensor | OnHost:
        if isinstance(tensor, torch.nn.Parameter):
            return tensor  # itself, no view of it: a sharded one has other storage when backward asks
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters:
            return tensor
        if self._host:
            return self._move(tensor, storage)
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.device_bytes += storage.nbytes()
        return tensor

    def _move(self, tensor: Tensor, storage: torch.UntypedStorage) -> OnHost:
        """One copy, however often a tensor is saved (an input of three projections is saved three times)."""
        key = (
            storage.data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
        )  # fmt: skip
        known = self._moved.get(key)
        if known is not None and not known[0].expired():  # expired: another tensor has the address now
            return known[1]
        pinned = tensor.device.type == "cuda"
        copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        copy.copy_(tensor.detach(), non_blocking=pinned)
        moved = OnHost(copy, tensor.device)
        self._moved[key] = (StorageWeakRef(storage), moved)
        self.host_bytes += copy.numel() * copy.element_size()
        return moved

    def __enter__(self) -> SavedActivations:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)
        self._moved.clear()


def _unpack(saved: Tensor | OnHost) -> Tensor:
    """Copies come back on the stream that runs the backward, in order after what wrote them."""
    return saved.copy.to(saved.device, non_blocking=True) if isinstance(saved, OnHost) else saved
