"""What of a DeepSpeed engine's state may leave the device between phases, and its sizes.

DeepSpeed moves its own buffers (`offload_states`, `reload_states`). Parameters stay: it would allocate them anew, and
an engine that reads them in place would read freed memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from rollplex.models.replica import Replica
from rollplex.residency import ENGINE_WEIGHTS

MASTERS = {
    1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat",
}  # fmt: skip
"""Stage -> where DeepSpeed's optimizer keeps its float32 weights."""

MOVABLE = ("optimizer_moments", "masters")
NAMES = (*MOVABLE, "gradients", "parameters")


class StateOffload:
    """Of one `deepspeed.DeepSpeedEngine`."""

    def __init__(self, engine: Any, stage: int) -> None:
        self.engine, self.stage = engine, stage
        self.away: set[str] = set()

    def bytes(self) -> dict[str, int]:
        """Name -> bytes on the engine's device now, of this rank's part. Shared storage counts once, with the first."""
        optimizer, device = self.engine.optimizer, torch.device(self.engine.device)
        masters = getattr(optimizer, MASTERS[self.stage])
        moments = [t for s in optimizer.optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.ndim]
        parameters = list(self.engine.module.parameters())
        held = [t for p in parameters for t in (p.data, getattr(p, "ds_tensor", p.data))]
        gradients = [p.grad for p in parameters if p.grad is not None]
        seen: set[int] = set()
        named = zip(NAMES, (moments, masters, gradients, held), strict=True)
        found = {
            name: 0 if name in self.away else _storage_bytes(tensors, device, seen) for name, tensors in named
        }  # fmt: skip
        found["gradients"] += self._reduced_bytes()
        return found

    def _reduced_bytes(self) -> int:
        """Of the rank's part of reduced gradients: under ZeRO-3 a buffer that stays, before that there from the
        reduction to the step."""
        if self.stage == 3:
            return self.engine.optimizer.grad_partitions_flat_buffer.nbytes
        parts = self.engine.optimizer.averaged_gradients.values()
        return sum(t.numel() * t.element_size() for part in parts if part is not None for t in part)

    def offload(self, names: Collection[str], *, pin_memory: bool = True) -> None:
        """Move states to host memory, until `reload`. ValueError for what cannot be moved, before anything is."""
        self.check(names)
        if not names:
            return
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        kinds = {"optimizer_moments": OffloadStateTypeEnum.optim_states, "masters": OffloadStateTypeEnum.hp_params}
        self.engine.offload_states(include=[kinds[name] for name in names], pin_memory=pin_memory)
        self.away |= set(names)

    def reload(self) -> None:
        """Bring back everything that is away: DeepSpeed knows no part of it."""
        if self.away:
            self.engine.reload_states()
            self.away.clear()

    def check(self, names: Collection[str]) -> None:
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise ValueError(f"offload: {', '.join(unknown)} is unknown; states are {', '.join(NAMES)}")
        if "parameters" in names:
            raise ValueError(
                "offload: parameters cannot leave the device under DeepSpeed, which allocates them anew where the "
                f"rollout engine reads the old place; take it out ({', '.join(MOVABLE)} can)"
            )
        if "gradients" in names:
            raise ValueError("offload: gradients are freed after each update, nothing is there to move; take it out")
        if self.stage == 3 and type(self.engine.optimizer.optimizer).__name__ != "FusedAdam":
            raise ValueError(
                f"offload: ZeRO-3 moves {', '.join(names)} of DeepSpeed's FusedAdam only, and the optimizer is "
                f"{type(self.engine.optimizer.optimizer).__name__}; set stage 1 or 2, or no offload"
            )


class WithStateOffload:
    """The part of a strategy that the memory ledger asks, and whose states PhaseOffload moves."""

    states: StateOffload | None
    replica: Replica | None
    root_device: torch.device

    def state_bytes(self) -> dict[str, int]:
        """State -> bytes of this rank's part on the device now; the engine's weights where they are the replica."""
        found = self.states.bytes() if self.states is not None else {}
        return found | ({ENGINE_WEIGHTS: self.replica.nbytes} if self.replica is not None else {})

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """Of what is no buffer of DeepSpeed's: the tensors behind `state_bytes`. An engine may have more of its own."""
        return {ENGINE_WEIGHTS: self.replica.tensors} if self.replica is not None else {}

    def refusals(self) -> dict[str, str]:
        """State -> why DeepSpeed cannot move it at this stage."""
        found = {}
        for name in NAMES:
            try:
                assert self.states is not None
                self.states.check([name])
            except ValueError as error:
                found[name] = str(error)
        return found

    def offload(self, names: Collection[str]) -> None:
        if self.states is not None:
            self.states.offload(names, pin_memory=self.root_device.type == "cuda")

    def reload(self, names: Collection[str]) -> None:
        """All that is away: DeepSpeed knows no part of it."""
        if self.states is not None:
            self.states.reload()


def _storage_bytes(tensors: Iterable[Tensor], device: torch.device, seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != device.type or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        total += storage.nbytes()
    return total
