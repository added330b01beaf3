"""The protocol between the rollout lane and whatever generates.

Only the rollout lane's thread calls an engine once it has started. An engine generates one batch of requests
by repeated `step()` calls and says in between whether its *decode window* is open: every submitted prompt is
prefilled and rows are still decoding. That is when the train lane may work beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from rollplex.data.records import Request, Rollout

if TYPE_CHECKING:
    from rollplex.models.split_model import SplitModel
    from rollplex.tensor_parallel import Shards


Vision = Literal["engine", "shared"]
"""Who runs the vision tower for an engine's prompts: it does, or it is handed what the trainer's makes of them."""


def is_shared(vision: Vision) -> bool:
    """Of an engine's setting `vision`; ValueError for what is none."""
    if vision not in ("engine", "shared"):
        raise ValueError(f"vision={vision!r} is unknown; set engine or shared")
    return vision == "shared"


class WindowState(StrEnum):
    IDLE = "idle"
    """Nothing unfinished."""
    PREFILL = "prefill"
    """At least one submitted prompt still waits for its prefill."""
    DECODE = "decode"
    """All prompts are prefilled, at least one row decodes: the window is open."""


@dataclass(frozen=True)
class EngineContext:
    """What an engine is started with."""

    model: SplitModel
    """The trainer's model. An embedded engine reads its tensors in place and must not touch its module state."""

    processor: Any
    """The transformers processor (tokenizer included)."""

    device: Any
    """torch.device of the rollout lane."""

    shards: Shards | None = None
    """What this process is among those that share trainers or engines; None where every process has its own."""


class RolloutEngine(ABC):
    """An engine's constructor takes settings only; everything heavy happens in `start`."""

    takes_prefix: bool = False
    """Whether a prompt whose prefix the trainer has computed (`Request.prefix.state`) needs no prefill here."""

    releases_kv: bool = False
    """Whether the K/V memory is given back after each rollout of training and taken again before the next one."""

    needs_whole_weights: bool = False
    """Whether it can only read whole parameters, not the parts that a tensor-parallel trainer's ranks hold."""

    takes_vision: bool = False
    """Whether it is to take the trainer's vision features (`Request.prefix.vision`) in the place of pixels. It copes
    with prompts that come without."""

    @abstractmethod
    def start(self, context: EngineContext) -> None:
        """Build the engine. Called once, on the rollout lane, after the strategy has placed the model."""

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Their prompt K/V is computed by later `step` calls, once per group.

        Raises ValueError when a request can never run (too long for the model or the KV budget).
        """

    @abstractmethod
    def step(self) -> list[Rollout]:
        """One iteration (a prefill or one decode token for every running row). Returns what finished in it."""

    @property
    @abstractmethod
    def window(self) -> WindowState:
        """Valid between steps."""

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Rows that the next decode step will run. Valid between steps."""

    @property
    @abstractmethod
    def progress(self) -> int:
        """A number that grows whenever a step did something (a prefill, a token). Steps that leave it as it was are no
        sign of life."""

    @abstractmethod
    def abort(self) -> list[Rollout]:
        """End every unfinished request now; returns them as they are, finish_reason "abort"."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """The trainer's weights changed: take them over, drop caches computed from the old ones, and report
        `version` on every rollout from now on. Must not be called while requests are unfinished."""

    def release_kv(self) -> int:
        """Give the memory of the K/V pool back; returns the bytes freed, 0 when they were already.

        Only when idle. What the pool held is lost, weights and every other address stay. `publish` may come before or
        after. An engine without a pool does nothing.
        """
        return 0

    def restore_kv(self) -> int:
        """Take the pool's memory again, for the next `submit`; returns the bytes taken, 0 when they were held."""
        return 0

    def state_bytes(self) -> dict[str, int]:
        """State (`KV_POOL`, `ENGINE_WEIGHTS` of rollplex.residency) -> bytes that the engine has on the device now."""
        return {}

    def state_tensors(self) -> dict[str, list[Tensor]]:
        """State -> the tensors behind `state_bytes`, where their storages show what is really held."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice, and after a failed start."""
