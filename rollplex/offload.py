"""Storages that leave the device and come back, so that every tensor on them stays valid.

A tensor's storage is copied to host memory and resized to nothing: the tensor keeps its shape, strides and identity,
and so does every view of it. To come back, the storage is resized again and filled. On CUDA the host copies are pinned
and both ways run on a stream of their own; what is brought back must be waited for (`wait`) before it is read. On a CPU
device, where host and device are one memory, the copies are plain: what counts there are the bytes of the storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Copy:
    """What is known of a storage that left at least once."""

    storage: torch.UntypedStorage
    """Kept, so that its identity is not given to another one."""
    nbytes: int
    host: Tensor | None
    """(nbytes,) uint8."""
    away: bool
    coming: Any = None
    """A CUDA event: filled again once it is over."""


def storages_of(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once."""
    found = {s._cdata: s for s in (t.untyped_storage() for t in tensors)}
    return list(found.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that the tensors' storages take now, shared ones counted once."""
    return sum(s.nbytes() for s in storages_of(tensors))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class HostCopies:
    """Moves storages between one device and host memory.

    Args:
        device: The tensors'.
        pin: Pinned host memory on CUDA: copies that run beside the computation. False saves it.
        cuda: For tests; what `torch.cuda` is otherwise.
    """

    def __init__(self, device: torch.device, *, pin: bool = True, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        self._on_cuda = device.type == "cuda"
        self.pin = pin
        self._stream: Any = cuda.Stream(device=device) if self._on_cuda else None
        self._copies: dict[int, _Copy] = {}

    @property
    def _pinned(self) -> bool:
        return self.pin and self._on_cuda

    # ---- moving ----

    def out(self, tensors: Iterable[Tensor], *, unchanged: bool = False) -> int:
        """Free the tensors' storages on the device, keeping their content on the host; returns the bytes freed.

        unchanged: the tensors are never written, so a host copy from an earlier time is still right.
        """
        tensors = list(tensors)
        self._make_resizable(tensors)
        freed = 0
        if self._on_cuda:
            self._stream.wait_stream(self._cuda.current_stream(self.device))
        for storage in storages_of(tensors):
            size = storage.nbytes()
            if size == 0:
                continue
            copy = self._copies.get(storage._cdata)
            if copy is None:
                copy = self._copies[storage._cdata] = _Copy(storage, size, None, False)
            assert copy.nbytes == size and not copy.away, "a storage was resized by someone else"
            if copy.host is None or not unchanged:
                self._copy_out(copy)
            copy.away, copy.coming = True, None
            storage.resize_(0)
            freed += size
        return freed

    def _copy_out(self, copy: _Copy) -> None:
        if copy.host is None:
            copy.host = torch.empty(copy.nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        source = _as_bytes(copy.storage)
        if not self._on_cuda:
            copy.host.copy_(source)
            return
        with self._cuda.stream(self._stream):
            copy.host.copy_(source, non_blocking=self._pinned)
        # The allocator gives the storage to nobody else before this stream has read it.
        source.record_stream(self._stream)

    def back(self, tensors: Iterable[Tensor]) -> int:
        """Start bringing back what is away; returns its bytes. On CUDA, `wait` before the tensors are used."""
        taken = 0
        for copy in self._known(tensors):
            if not copy.away:
                continue
            assert copy.host is not None and copy.storage.nbytes() == 0
            copy.storage.resize_(copy.nbytes)
            target = _as_bytes(copy.storage)
            if self._on_cuda:
                # The memory may be one that earlier work of the calling stream still reads.
                self._stream.wait_stream(self._cuda.current_stream(self.device))
                with self._cuda.stream(self._stream):
                    target.copy_(copy.host, non_blocking=self._pinned)
                    copy.coming = self._stream.record_event()
                target.record_stream(self._stream)
            else:
                target.copy_(copy.host)
                copy.host = None  # the same memory: it would be held twice
            copy.away = False
            taken += copy.nbytes
        return taken

    def wait(self, tensors: Iterable[Tensor]) -> None:
        """The calling stream goes on once the tensors are there."""
        for copy in self._known(tensors):
            if copy.coming is not None:
                self._cuda.current_stream(self.device).wait_event(copy.coming)
                copy.coming = None

    def bring(self, tensors: Iterable[Tensor]) -> int:
        """`back` and `wait`."""
        tensors = list(tensors)
        taken = self.back(tensors)
        self.wait(tensors)
        return taken

    def bring_all(self) -> None:
        """Everything that is still away, as when the run ends."""
        self.bring(_as_bytes(copy.storage) for copy in list(self._copies.values()) if copy.away)
        self._copies.clear()

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """The tensors are given up: drop their host copies."""
        for storage in storages_of(tensors):
            self._copies.pop(storage._cdata, None)

    # ---- looking ----

    def is_away(self, tensor: Tensor) -> bool:
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        return copy is not None and copy.away

    def view(self, tensor: Tensor) -> Tensor:
        """The tensor's values: itself, or of one that is away its copy on the host."""
        copy = self._copies.get(tensor.untyped_storage()._cdata)
        if copy is None or not copy.away:
            return tensor
        assert copy.host is not None
        if self._on_cuda:
            self._stream.synchronize()  # the copy may still be on its way
        flat = copy.host.view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def replaced(self, content: Any) -> Any:
        """A nest of dicts, lists and tuples (a state dict) with the host copy of every tensor that is away."""
        if isinstance(content, Tensor):
            return self.view(content)
        if isinstance(content, Mapping):
            return {key: self.replaced(value) for key, value in content.items()}
        if isinstance(content, list | tuple):
            return type(content)(self.replaced(value) for value in content)
        return content

    def host_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Host memory of the tensors' copies, of those that are back too where it is kept (pinned memory is)."""
        return sum(c.nbytes for c in self._known(tensors) if c.host is not None)

    # ---- inside ----

    def _known(self, tensors: Iterable[Tensor]) -> list[_Copy]:
        found = (self._copies.get(s._cdata) for s in storages_of(tensors))
        return [copy for copy in found if copy is not None]

    def _make_resizable(self, tensors: list[Tensor]) -> None:
        """A tensor that a checkpoint was read into lies in memory that cannot be resized: give it its own."""
        owners: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            owners.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        for mine in owners.values():
            if not mine[0].untyped_storage().resizable():
                assert len(mine) == 1, "tensors that share memory which cannot be resized cannot leave the device"
                mine[0].data = mine[0].detach().clone()


class Parked:
    """A state that can leave the device as a whole: named tensors and the copies that move them."""

    def __init__(self, copies: HostCopies, tensors: Callable[[], Iterable[Tensor]], *, unchanged: bool = False) -> None:
        """tensors: asked each time, because some exist only after the first update."""
        self._copies, self._tensors, self._unchanged = copies, tensors, unchanged

    def out(self) -> int:
        return self._copies.out(self._tensors(), unchanged=self._unchanged)

    def back(self) -> int:
        return self._copies.back(self._tensors())

    def wait(self) -> None:
        self._copies.wait(self._tensors())

    @property
    def host_bytes(self) -> int:
        return self._copies.host_bytes(self._tensors())
