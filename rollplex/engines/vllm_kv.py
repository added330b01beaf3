"""The memory of vLLM's KV cache, given back while the trainer works and taken again before the next rollout."""

from __future__ import annotations

from typing import Any

import torch

from rollplex.residency import ENGINE_WEIGHTS, KV_POOL


class KVMemory:
    """On CUDA vLLM's sleep mode does it (addresses stay, graphs stay valid). On a CPU that mode does nothing, so the
    storage behind all layers' views is resized: the views stay valid too.

    Only KV memory is touched, by its tag: a full sleep would move weights away and wake with others, and here they are
    the trainer's.
    """

    def __init__(self, engine: Any, caches: list[torch.Tensor], *, on_cpu: bool) -> None:
        """caches: one view per layer."""
        self._engine = engine
        self._on_cpu = on_cpu
        self._device = caches[0].device
        self._caches = caches
        self._storages = list({s.data_ptr(): s for s in (t.untyped_storage() for t in caches)}.values())
        self._sizes = [s.nbytes() for s in self._storages]
        self.released = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache, held or not."""
        return sum(self._sizes)

    @property
    def held(self) -> int:
        """Bytes that it has now: on a CPU of its storages, on CUDA what is in use on the whole device."""
        if self._on_cpu:
            return sum(s.nbytes() for s in self._storages)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    @property
    def resident(self) -> int:
        """Bytes of it on the device now."""
        return 0 if self.released else self.nbytes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Whose storages show what is held; on CUDA a released cache keeps its addresses, and shows nothing."""
        return [] if self.released and not self._on_cpu else self._caches

    def release(self) -> int:
        """Bytes given back, as measured; 0 when they were already. No request is unfinished, no prefix is cached."""
        if self.released:
            return 0
        self._engine.step()  # the worker forgets the requests that ended last
        before = self.held
        if self._on_cpu:
            for storage in self._storages:
                storage.resize_(0)
        else:
            self._engine.engine_core.engine_core.pause_scheduler("abort")
            self._engine.release_kv_cache_memory()
        self.released = True
        return before - self.held

    def restore(self) -> int:
        """Bytes taken, as measured; 0 when they were held."""
        if not self.released:
            return 0
        if not self._on_cpu:
            torch.cuda.empty_cache()  # what the trainer's allocator keeps for later is not free to vLLM's
        before = self.held
        if self._on_cpu:
            for storage, size in zip(self._storages, self._sizes, strict=True):
                storage.resize_(size)
                # What a block holds past its tokens is read: it must not be a NaN.
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
        else:
            self._engine.wake_up(["kv_cache"])
            self._engine.engine_core.engine_core.resume_scheduler()
        self.released = False
        return self.held - before


class HeldStates:
    """The part of the engine that tells the memory ledger what it has: the KV cache, and weights that are its own."""

    _kv: KVMemory
    _own_weights: tuple[list[torch.Tensor], int]
    """And their bytes: asked after every step."""

    def state_bytes(self) -> dict[str, int]:
        return {KV_POOL: self._kv.resident, ENGINE_WEIGHTS: self._own_weights[1]}

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        return {KV_POOL: self._kv.tensors, ENGINE_WEIGHTS: self._own_weights[0]}
