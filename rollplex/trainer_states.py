"""What a one-device strategy holds of the trainer: weights, gradients and optimizer states, and how they leave.

Any strategy that offers `state_bytes`, `offload` and `reload` can take part in offload by phase. `refusals` says of
each state that it cannot move why not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn

from rollplex.offload import HostCopies, Parked, storage_bytes
from rollplex.optim import StreamedAdamW
from rollplex.residency import GRADIENTS, MASTERS, MOMENTS, PARAMETERS


class TrainerStates:
    def __init__(self, policy: nn.Module, optimizers: Callable[[], Iterable[Any]], copies: HostCopies) -> None:
        """optimizers: asked each time; their states appear with the first update."""
        self.copies = copies
        self._parameters = list(policy.parameters())
        self._optimizers = optimizers
        self._weights = storage_bytes(self._parameters)
        self._parked = {
            MOMENTS: Parked(copies, lambda: self._of_optimizer("moments")),
            MASTERS: Parked(copies, lambda: self._of_optimizer("masters")),
        }

    @property
    def optimizer(self) -> StreamedAdamW | None:
        """The optimizer, if its states can move."""
        found = next(iter(self._optimizers()), None)
        return found if isinstance(found, StreamedAdamW) else None

    def _of_optimizer(self, what: str) -> list[Tensor]:
        return getattr(self.optimizer, what)() if self.optimizer is not None else []

    # ---- bytes ----

    def state_bytes(self) -> dict[str, int]:
        """Bytes on the device now: of whole states by what was moved, of gradients by what there is."""
        out = {PARAMETERS: self._weights}
        out[GRADIENTS] = sum(p.grad.numel() * p.grad.element_size() for p in self._parameters if p.grad is not None)
        for name, what in ((MOMENTS, "moments"), (MASTERS, "masters")):
            tensors = self._of_optimizer(what)
            if tensors:
                out[name] = sum(t.numel() * t.element_size() for t in tensors if not self.copies.is_away(t))
        return out

    def host_bytes(self) -> dict[str, int]:
        found = {name: parked.host_bytes for name, parked in self._parked.items()}
        return {name: size for name, size in found.items() if size}

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """The tensors behind `state_bytes`: what their storages take is the truth it is checked against."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        out: dict[str, list[Tensor]] = {PARAMETERS: [*self._parameters], GRADIENTS: gradients}
        return out | {MOMENTS: self._of_optimizer("moments"), MASTERS: self._of_optimizer("masters")}

    # ---- moving ----

    def refusals(self) -> dict[str, str]:
        """State -> why it cannot leave the device."""
        out = {
            PARAMETERS: "trainer and engine compute with them in every phase",
            GRADIENTS: "on one device they are freed after each update anyway, and exist only while they grow",
        }
        if self.optimizer is None:
            kind = type(next(iter(self._optimizers()), None)).__name__
            out[MOMENTS] = out[MASTERS] = f"the optimizer is a {kind}, not one of rollplex.optim"
        elif not self.optimizer.masters():
            out[MASTERS] = "float32 parameters have none; they are the masters themselves"
        return out

    def offload(self, names: Collection[str]) -> None:
        """Free the states' device memory, their content waits on the host."""
        for name in names:
            self._parked[name].out()

    def reload(self, names: Collection[str]) -> None:
        """Start bringing them back; the optimizer's step waits for them."""
        for name in names:
            self._parked[name].back()


class WithTrainerStates:
    """The part of a strategy with a plain optimizer that the ledger asks, and that PhaseOffload moves."""

    colocation: Any
    optimizers: Any
    states: TrainerStates

    def hold_states(self, module: Any) -> None:
        """Once the optimizer is there and the engine has started."""
        self.states = TrainerStates(module.policy, lambda: self.optimizers, self.colocation.copies)

    def state_bytes(self) -> dict[str, int]:
        """State -> bytes on the device now."""
        return self.states.state_bytes()

    def host_bytes(self) -> dict[str, int]:
        return self.states.host_bytes()

    def state_tensors(self) -> dict[str, list[Tensor]]:
        return self.states.state_tensors()

    def offload(self, names: Collection[str]) -> None:
        """Move states to the host."""
        self.states.offload(names)

    def reload(self, names: Collection[str]) -> None:
        """Start bringing them back; whoever needs them waits."""
        self.states.reload(names)

    def refusals(self) -> dict[str, str]:
        """State -> why it cannot be moved."""
        return self.states.refusals()

    def stream_update(self, chunk_bytes: int | None) -> None:
        """Let the optimizer wait for its moved states, and step in parts of at most `chunk_bytes` of them."""
        optimizer = self.states.optimizer
        assert optimizer is not None
        optimizer.stream(self.colocation.copies, chunk_bytes)
        optimizer.on_chunk = self.colocation.watch.sample
