"""The ledger of a run: asks whoever holds memory, stage by stage, and checks the answers against the storages.

Holders are the strategy (weights, gradients, optimizer states), the reference model, the engine (K/V pool, weights of
its own) and the step (prefix state). Each says by its own counters what it has on the device; what the allocator says
is the other side of the check: bytes of the storages of the states' tensors, and on CUDA all that is allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rollplex.models.prefix import PrefixState
from rollplex.models.vision import VisionState
from rollplex.offload import HostCopies, Parked, storage_bytes
from rollplex.phases import Phase
from rollplex.residency import ACTIVATIONS, ACTOR_KV, OLD_KV, REFERENCE, REFERENCE_KV, SUFFIX, VISION, Ledger, Stage
from rollplex.units import UnitKind

TOLERANCE = 0.02
"""Of a state's bytes, by which its holder and its storages may differ."""

STAGE_OF = {
    Phase.ROLLOUT: Stage.ROLLOUT, Phase.SCORE: Stage.SCORE, Phase.TRAIN: Stage.TRAIN, Phase.UPDATE: Stage.UPDATE,
}  # fmt: skip
REFERENCE_KINDS = frozenset({UnitKind.REF_PREFIX, UnitKind.REF_SUFFIX})
KV_NAMES = {"act": ACTOR_KV, "ref": REFERENCE_KV, "old": OLD_KV}


class Holder(Protocol):
    """Somebody with states. May also have `peak_bytes` (most since the rollout began), `host_bytes` (of what waits in
    host memory) and `state_tensors` (the tensors whose storages are the truth)."""

    def state_bytes(self) -> Mapping[str, int]:
        """State -> bytes on the device now, by the holder's own counting."""


class ReferenceHolder:
    """The reference model, whose weights can leave the device. They never change."""

    def __init__(self, hf: torch.nn.Module, copies: HostCopies) -> None:
        self._parameters: list[Tensor] = list(hf.parameters())
        self._bytes = storage_bytes(self._parameters)
        self.parked = Parked(copies, lambda: self._parameters, unchanged=True)
        self.away = False

    def out(self) -> None:
        if not self.away:
            self.away = True
            self.parked.out()

    def back(self) -> None:
        if self.away:
            self.away = False
            self.parked.back()

    def wait(self) -> None:
        self.parked.wait()

    def state_bytes(self) -> dict[str, int]:
        return {REFERENCE: 0 if self.away else self._bytes}

    def host_bytes(self) -> dict[str, int]:
        return {REFERENCE: self.parked.host_bytes}

    def state_tensors(self) -> dict[str, list[Tensor]]:
        return {REFERENCE: self._parameters}


class PassHolder:
    """The prefix states, the shared vision features and the suffix pass of the step in progress."""

    def __init__(
        self,
        prefixes: Callable[[], Mapping[tuple[str, int], PrefixState]],
        features: Callable[[], Sequence[VisionState]],
        suffix_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._prefixes, self._features, self._suffix_bytes = prefixes, features, suffix_bytes

    def _passes(self) -> list[PrefixState | VisionState]:
        return [*self._prefixes().values(), *self._features()]

    def _sum(self, size: Callable[[PrefixState], int]) -> dict[str, int]:
        out: dict[str, int] = {}
        for (kind, _), state in self._prefixes().items():
            out[KV_NAMES[kind]] = out.get(KV_NAMES[kind], 0) + size(state)
        return out

    def state_bytes(self) -> dict[str, int]:
        out = self._sum(lambda state: state.nbytes)
        features = sum(state.nbytes for state in self._features())
        saved = sum(state.saved_bytes for state in self._passes())
        found = ((VISION, features), (ACTIVATIONS, saved), (SUFFIX, self._suffix_bytes()))
        return out | {name: size for name, size in found if size}

    def host_bytes(self) -> dict[str, int]:
        waiting = sum(state.host_bytes for state in self._passes())
        return {ACTIVATIONS: waiting} if waiting else {}

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """Of the boundary; saved activations belong to autograd and are taken as counted."""
        out: dict[str, list[Tensor]] = {}
        for (kind, _), state in self._prefixes().items():
            out.setdefault(KV_NAMES[kind], []).extend(state.leaves)
        for features in self._features():
            out.setdefault(VISION, []).extend(features.leaves.values())
        return out


class MemoryWatch:
    """Fills a ledger while a run goes on."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.holders: dict[str, Any] = {}
        self.mismatches: list[str] = []
        """What was found wrong at the end of a phase, once each."""
        self._device: torch.device | None = None
        self._stage: Stage | None = None
        self._beside: Stage | None = None
        """In the rollout: the stage of the last unit beside it."""
        self._unaccounted = 0.0

    def start(self, device: torch.device) -> None:
        self.ledger, self.mismatches, self._device = Ledger(), [], device
        self._stage = self._beside = None

    def stop(self) -> None:
        """Hold nothing of the run any more; what was recorded stays readable."""
        self.holders.clear()
        self._stage = self._beside = None

    def new_step(self) -> None:
        self.ledger.new_step()
        self._unaccounted = 0.0

    def passes_of(
        self,
        prefixes: Callable[[], Mapping[tuple[str, int], PrefixState]],
        features: Callable[[], Sequence[VisionState]],
        suffix_bytes: Callable[[], int],
    ) -> None:
        """Whose prefixes, vision features and suffix activations are alive from here on."""
        self.holders["passes"] = PassHolder(prefixes, features, suffix_bytes)

    # ---- events of a step ----

    def phase_started(self, phase: Phase) -> None:
        """After the callbacks: what they moved has moved."""
        self._stage, self._beside = STAGE_OF.get(phase), None
        self.sample()

    def unit_ended(self, kind: UnitKind) -> None:
        """Inside the rollout, the stage is that of the model which ran beside the engine."""
        if self._stage is Stage.ROLLOUT and kind is not UnitKind.REWARD:
            self._beside = Stage.PREFIX_REF if kind in REFERENCE_KINDS else Stage.PREFIX_ACT
        self.sample(self._beside)

    def inside_unit(self) -> None:
        """A suffix unit of the actor is about to run its backward; afterwards its activations are gone."""
        self.sample(Stage.PREFIX_ACT if self._stage is Stage.ROLLOUT else None)

    def phase_ended(self, phase: Phase) -> None:
        """Before the callbacks move anything."""
        if self._stage is Stage.ROLLOUT:  # an engine's memory grows and shrinks while this thread does other things
            self.ledger.record(self._beside or Stage.ROLLOUT, self._ask("peak_bytes"), self._ask("host_bytes"))
        else:
            self.sample()
        if self._stage is not None:
            self.check()
        self._stage = self._beside = None

    # ---- asking ----

    def sample(self, stage: Stage | None = None) -> None:
        """Record what everybody holds now."""
        stage = stage or self._stage
        if stage is not None:
            self.ledger.record(stage, self._ask("state_bytes"), self._ask("host_bytes"))

    def device_bytes(self) -> int:
        """Held on the device now, by all."""
        return sum(self._ask("state_bytes").values())

    def _ask(self, question: str) -> dict[str, int]:
        out: dict[str, int] = {}
        for holder in list(self.holders.values()):
            ask = getattr(holder, question, None)
            if ask is None and question == "peak_bytes":
                ask = holder.state_bytes
            answer: Mapping[str, int] = ask() if ask is not None else {}
            for name, size in answer.items():
                out[name] = out.get(name, 0) + size
        return out

    # ---- checking ----

    def check(self) -> list[str]:
        """Compare each state's bytes with its storages, and the sum with the allocator; returns and warns of what does
        not agree."""
        found = []
        said, seen = self._ask("state_bytes"), self._storages()
        for name, real in seen.items():
            if abs(said.get(name, 0) - real) > TOLERANCE * max(real, said.get(name, 0)):
                found.append(f"{name}: the ledger has {said.get(name, 0)} bytes on the device, its storages {real}")
        if self._device is not None and self._device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self._device)
            total = sum(seen.values())
            self._unaccounted = max(self._unaccounted, float(allocated - total))
            if total > allocated * (1 + TOLERANCE):
                found.append(f"the states' storages take {total} bytes, the allocator has given out {allocated}")
        for message in found:
            if message not in self.mismatches:
                warnings.warn(f"memory ledger, {self._stage and self._stage.value}: {message}", stacklevel=3)
        self.mismatches += found
        return found

    def _storages(self) -> dict[str, int]:
        tensors: dict[str, list[Tensor]] = {}
        for holder in list(self.holders.values()):
            answer: Mapping[str, Iterable[Tensor]] = getattr(holder, "state_tensors", dict)()
            for name, some in answer.items():
                tensors.setdefault(name, []).extend(some)
        return {name: storage_bytes(some) for name, some in tensors.items()}

    def metrics(self) -> dict[str, float]:
        """memory/{stage} of the step in progress, and on CUDA what no state accounts for."""
        out = {f"memory/{stage.key}": size for stage, size in self.ledger.step.totals().items()}
        if self._device is not None and self._device.type == "cuda":
            out["memory/unaccounted"] = self._unaccounted
        return out
