"""Whether a unit may run beside the decode: does its state fit, and does co-running pay?

Co-running slows the decode by a factor 1 + alpha and runs units at r times their speed alone. Over a window of length
w the units gain w r and the decode loses w alpha / (1 + alpha), so it pays if

    r > alpha / (1 + alpha)

Both are measured while training: units alone (after the rollout) and hidden, decode steps with and without a unit
beside them. Some steps are therefore run without overlap: the first one, and one in `probe_every`.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollplex.kinds import check_whole

WEIGHT = 0.2
"""Of a new measurement in the running mean."""

MARGIN = 0.05
"""By how much r must exceed the threshold: the measurements are noisy, and a wrong yes costs time."""


SLACK = 1.02
"""On predicted bytes: small prompts round up more."""


@dataclass
class _Mean:
    value: float = math.nan
    count: int = 0

    def add(self, x: float) -> None:
        self.value = x if self.count == 0 else self.value + max(WEIGHT, 1 / (self.count + 1)) * (x - self.value)
        self.count += 1


@dataclass
class Measurements:
    """Running means of decode and unit times, alone and beside each other."""

    decode: dict[int, list[_Mean]] = field(default_factory=lambda: defaultdict(lambda: [_Mean(), _Mean()]))
    """log2 of the rows -> [alone, co-running] seconds of a decode step."""

    units: dict[str, list[_Mean]] = field(default_factory=lambda: defaultdict(lambda: [_Mean(), _Mean()]))
    """unit kind -> [alone, hidden] seconds per unit of work."""

    def add_decode(self, seconds: float, rows: int, co_running: bool) -> None:
        self.decode[max(rows, 1).bit_length()][co_running].add(seconds)

    def add_unit(self, kind: str, seconds: float, work: float, hidden: bool) -> None:
        self.units[kind][hidden].add(seconds / max(work, 1.0))

    @property
    def alpha(self) -> float | None:
        """Decode slow-down, from batch sizes seen both ways; None until there is one."""
        pairs = [(a, b) for a, b in self.decode.values() if a.count and b.count]
        if not pairs:
            return None
        weights = [min(a.count, b.count) for a, b in pairs]
        ratios = [b.value / a.value - 1.0 for a, b in pairs]
        return max(0.0, sum(w * x for w, x in zip(weights, ratios, strict=True)) / sum(weights))

    def r(self, kind: str) -> float | None:
        """Speed of a kind of unit beside the decode, relative to alone; None until seen both ways."""
        alone, hidden = self.units[kind]
        return alone.value / hidden.value if alone.count and hidden.count else None


class Admission:
    """Asked by the executor for each unit that an opener would let into the window.

    Args:
        budget_bytes: Most bytes of prefix state (boundary tensors and saved activations) held at once; None is no
            limit.
        limit_bytes: Most bytes of all states on the device at once, by the memory ledger; None is no limit.
        measure: Decide from measurements whether co-running pays; False always admits what fits.
        probe_every: Run one step in this many without overlap, to measure.
    """

    def __init__(
        self, budget_bytes: int | None = None, *, limit_bytes: int | None = None, measure: bool = True,
        probe_every: int = 50,
    ) -> None:  # fmt: skip
        check_whole("memory_limit_bytes", limit_bytes, null="no limit")
        check_whole("prefix_budget_bytes", budget_bytes, null="no limit")
        if probe_every < 2:
            raise ValueError(f"probe_every={probe_every} must be at least 2")
        self.budget_bytes = budget_bytes
        self.limit_bytes = limit_bytes
        self.resident: Callable[[], int] = lambda: 0
        """Bytes of all states on the device now; the memory ledger's, where there is one."""
        self.measure = measure
        self.probe_every = probe_every
        self.measurements = Measurements()
        self._rates: dict[str, tuple[float, float]] = {}
        """unit kind -> (largest bytes per token seen, largest density it holds for)."""
        self._some_fit = False
        """A prefix was within the budget."""
        self.steps = -1
        self.admitted = 0
        self.refused: dict[str, set[object]] = {"memory": set(), "slow": set(), "probe": set()}

    def start_step(self) -> None:
        self.steps += 1
        self.admitted = 0
        for units in self.refused.values():
            units.clear()

    @property
    def probing(self) -> bool:
        """This step runs without overlap, to measure decode and units alone."""
        return self.measure and self.steps % self.probe_every == 0

    def admits(self, unit: object, kind: str, work: float, density: float, held_bytes: int | None) -> bool:
        """Whether a ready unit may start now.

        work: its tokens. density: its vision patches per token. held_bytes: prefix state alive; None for a unit that
        adds none.
        """
        reason = self._refusal(kind, work, density, held_bytes)
        if reason is None:
            self.admitted += 1
            return True
        self.refused[reason].add(unit)
        return False

    def fits(self, unit: object, kind: str, work: float, density: float, held_bytes: int) -> bool:
        """As `admits` for a unit that runs while the engine stands still: only its bytes count."""
        if self.has_room(kind, work, density, held_bytes):
            return True
        self.refused["memory"].add(unit)
        return False

    def pays(self, kind: str) -> bool:
        """r > alpha / (1 + alpha) as far as measured; yes while it is not."""
        alpha, r = self.measurements.alpha, self.measurements.r(kind)
        return alpha is None or r is None or r > alpha / (1.0 + alpha) + MARGIN

    def learn_bytes(
        self, unit: str, kind: str, work: float, density: float, bytes_held: int, *, early: bool = True
    ) -> None:
        """After a prefix was computed; early: beside or before the decode.

        A budget that the first such prefix exceeds is too small for the model: ValueError. A larger one that comes
        later is left to run after the rollout from then on, with a warning.
        """
        rate, seen = self._rates.get(kind, (0.0, 0.0))
        self._rates[kind] = (max(rate, bytes_held / max(work, 1.0)), max(seen, density))
        if self.budget_bytes is None or not early:
            return
        if bytes_held <= self.budget_bytes:
            self._some_fit = True
            return
        message = (
            f"prefix_budget_bytes={self.budget_bytes} is smaller than one prefix: {unit} needs {bytes_held} bytes. "
            "Set at least that, lower prompts_per_pass, or turn prefix_checkpointing or prefix_on_host on"
        )
        if not self._some_fit:
            raise ValueError(message)
        warnings.warn(f"{message}; prefixes of its size run after the rollout", stacklevel=2)

    def within_budget(self, held_bytes: int) -> bool:
        return self.budget_bytes is None or held_bytes <= self.budget_bytes

    def has_room(self, kind: str, work: float, density: float, held_bytes: int) -> bool:
        """As `fits`, counted nowhere.

        Bytes per token grow with density, so the largest rate seen bounds every unit that is no denser. One that is
        denser than all before goes alone: then it fits, or the budget is too small for it at all."""
        rate, seen = self._rates.get(kind, (0.0, -1.0))
        if self.limit_bytes is not None and self.resident() + SLACK * rate * work > self.limit_bytes:
            return False
        if self.budget_bytes is None or held_bytes == 0:
            return True
        return density <= seen and held_bytes + SLACK * rate * work <= self.budget_bytes

    def _refusal(self, kind: str, work: float, density: float, held_bytes: int | None) -> str | None:
        if held_bytes is not None and not self.has_room(kind, work, density, held_bytes):
            return "memory"
        if self.probing:
            return "probe"
        return None if not self.measure or self.pays(kind) else "slow"
