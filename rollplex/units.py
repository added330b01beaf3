"""Units of train-lane work: what there is to do in a step, in which phase, and what must come before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from rollplex.phases import Phase


class UnitKind(StrEnum):
    VISION = "vision"
    REWARD = "reward"
    REF_PREFIX = "ref_prefix"
    REF_SUFFIX = "ref_suffix"
    OLD_PREFIX = "old_prefix"
    OLD_SUFFIX = "old_suffix"
    ACT_PREFIX = "act_prefix"
    ACT_SUFFIX = "act_suffix"
    ACT_BACKWARD = "act_backward"


PHASE_OF: dict[UnitKind, Phase] = {
    UnitKind.VISION: Phase.SCORE,
    UnitKind.REWARD: Phase.SCORE,
    UnitKind.REF_PREFIX: Phase.SCORE,
    UnitKind.REF_SUFFIX: Phase.SCORE,
    UnitKind.OLD_PREFIX: Phase.SCORE,
    UnitKind.OLD_SUFFIX: Phase.SCORE,
    UnitKind.ACT_PREFIX: Phase.TRAIN,
    UnitKind.ACT_SUFFIX: Phase.TRAIN,
    UnitKind.ACT_BACKWARD: Phase.TRAIN,
}
"""The phase a unit belongs to; run earlier, it is hidden under the rollout."""

PREFIX_KINDS = frozenset({UnitKind.VISION, UnitKind.REF_PREFIX, UnitKind.OLD_PREFIX, UnitKind.ACT_PREFIX})
"""Units that need no response."""

PREFILL_KINDS = frozenset({UnitKind.OLD_PREFIX, UnitKind.ACT_PREFIX})
"""Prefix units under the weights that sample: they compute what the engine's prefill computes."""

ACCUMULATING_KINDS = frozenset({UnitKind.ACT_SUFFIX, UnitKind.ACT_BACKWARD})
"""Units that add to parameter gradients: their order decides the rounding of the sums."""

ORDERED_KINDS = (frozenset({UnitKind.REWARD}), ACCUMULATING_KINDS)
"""Sorts of units whose order among themselves shows in the result: sums round, and rewards are the user's code, which
may draw random numbers or keep state."""

ACTOR_KINDS = ACCUMULATING_KINDS | PREFILL_KINDS | {UnitKind.OLD_SUFFIX}
"""Units that run the actor's modules: where its parameters are sharded, every rank must run them in the same order."""

UnitId = tuple[UnitKind, int]


@dataclass(frozen=True)
class Unit:
    """One piece of train-lane work. Runs exactly once."""

    kind: UnitKind
    index: int
    """Its bundle (of prompts that share a prefix pass); its group for rewards."""

    run: Callable[[], None]
    groups: tuple[int, ...]
    """The groups (indices in the rollout batch) it works on."""

    needs: tuple[UnitId, ...] = ()
    """Units that must be done before."""

    needs_responses: bool = True
    """False for prefix units: they may start before their groups are complete."""

    work: float = 1.0
    """Prompt tokens, to compare the speed and size of units of one kind."""

    density: float = 0.0
    """Vision patches per prompt token."""

    lean: Callable[[], None] | None = None
    """In the place of `run`, or after it, where the budget has no room: the same result, less held for backward."""

    runs_tower: Callable[[], bool] | None = None
    """Asked before it runs: whether it runs the vision tower itself, though most of its kind read shared features."""

    @property
    def id(self) -> UnitId:
        return (self.kind, self.index)

    @property
    def sort(self) -> str:
        """What it is measured with: units of equal speed and size per token."""
        tower = self.runs_tower is not None and self.runs_tower()
        return f"{self.kind.value}, tower included" if tower else self.kind.value

    @property
    def phase(self) -> Phase:
        return PHASE_OF[self.kind]

    def __str__(self) -> str:
        return f"{self.kind.value}[{self.index}]"


_KIND_ORDER = {kind: i for i, kind in enumerate(UnitKind)}


def by_order(units: Iterable[Unit]) -> list[Unit]:
    """Bundle after bundle within a phase, so that little is alive at once and sums have one order."""
    phases = {Phase.SCORE: 0, Phase.TRAIN: 1}
    return sorted(units, key=lambda u: (phases[u.phase], u.kind is not UnitKind.REWARD, u.index, _KIND_ORDER[u.kind]))
