"""The residency ledger: every large state of a step, when it is needed, and how many bytes of it are on the device.

Plan and run share it. The plan fills it with sizes from shapes and asks what each stage would hold; the run records
what each stage did hold. Both are read as a *profile*: state -> stage -> bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Stage(StrEnum):
    """A step as memory sees it: PREFIX is in the decode window, by model."""

    ROLLOUT = "rollout"
    PREFIX_REF = "prefix (reference)"
    PREFIX_ACT = "prefix (actor)"
    SCORE = "score"
    TRAIN = "train"
    UPDATE = "update"

    @property
    def key(self) -> str:
        """As metrics and files call it."""
        return self.name.lower()


ORDER = tuple(Stage)
ALL = frozenset(Stage)
R, PR, PA, S, T, U = Stage


class StateClass(StrEnum):
    PERMANENT = "permanent"
    """The source of truth: float32 weights and moments. Streamed in chunks at the update, on the host otherwise."""
    REGENERABLE = "regenerable"
    """Copies of permanent state in another type or layout."""
    BOUNDARY = "boundary"
    """Prefix K/V: made in the window, read in a later phase."""
    PHASE_LOCAL = "phase-local"
    """Gone when its phase ends."""


class Place(StrEnum):
    DEVICE = "device"
    HOST = "host"
    ABSENT = "absent"


@dataclass(frozen=True)
class State:
    """One kind of bytes on each GPU."""

    name: str
    bytes: float
    needed: frozenset[Stage]
    kind: StateClass
    resident: float | None = None
    """Most bytes on the device at once while it is needed, if not all of it is there."""
    naive: bool = True
    """False: exists only by phase (what sharing the weights costs)."""
    left: float = 0.0
    """Bytes that stay on the device where it is not needed: all of it when nothing takes it away."""
    elsewhere: Mapping[Stage, float] = field(default_factory=dict)
    """Bytes on the device in stages that have another amount than these."""

    @property
    def producer(self) -> Stage | None:
        """The first stage that has it."""
        return next((stage for stage in ORDER if stage in self.needed), None)

    @property
    def last_consumer(self) -> Stage | None:
        """The stage after which it may go."""
        return next((stage for stage in reversed(ORDER) if stage in self.needed), None)

    def at(self, stage: Stage) -> float:
        """Bytes on the device in a stage."""
        if stage in self.elsewhere:
            return self.elsewhere[stage]
        if stage not in self.needed:
            return self.left
        return self.bytes if self.resident is None else self.resident


# ---- what a run of this program holds ----

PARAMETERS = "parameters"
MASTERS = "masters"
MOMENTS = "optimizer_moments"
GRADIENTS = "gradients"
REFERENCE = "reference_weights"
ENGINE_WEIGHTS = "engine_weights"
KV_POOL = "kv_pool"
ACTOR_KV = "actor_prefix_kv"
REFERENCE_KV = "reference_prefix_kv"
OLD_KV = "old_prefix_kv"
VISION = "vision_features"
ACTIVATIONS = "prefix_activations"
SUFFIX = "suffix_activations"

LIFETIMES: dict[str, tuple[StateClass, frozenset[Stage]]] = {
    PARAMETERS: (StateClass.PERMANENT, ALL),
    MASTERS: (StateClass.PERMANENT, frozenset({U})),
    MOMENTS: (StateClass.PERMANENT, frozenset({U})),
    GRADIENTS: (StateClass.PHASE_LOCAL, frozenset({T, U})),
    REFERENCE: (StateClass.REGENERABLE, frozenset({PR, S})),
    ENGINE_WEIGHTS: (StateClass.REGENERABLE, frozenset({R, PR, PA})),
    KV_POOL: (StateClass.PHASE_LOCAL, frozenset({R, PR, PA})),
    REFERENCE_KV: (StateClass.BOUNDARY, frozenset({PR, PA, S})),
    OLD_KV: (StateClass.BOUNDARY, frozenset({PA, S})),
    ACTOR_KV: (StateClass.BOUNDARY, frozenset({PA, S, T})),
    VISION: (StateClass.BOUNDARY, frozenset({R, PR, PA, S, T})),
    ACTIVATIONS: (StateClass.PHASE_LOCAL, frozenset({PA, S, T})),
    SUFFIX: (StateClass.PHASE_LOCAL, frozenset({T})),
}
"""State -> (class, stages that need it), with prefix work in the decode window."""


def run_state(
    name: str, size: float, *, kind: StateClass | None = None, resident: float | None = None, left: float = 0.0,
    needed: frozenset[Stage] | None = None, elsewhere: Mapping[Stage, float] | None = None,
) -> State:  # fmt: skip
    """A state of LIFETIMES with its size; what is said here replaces the table. Others count as always needed."""
    usual_kind, usual_needed = LIFETIMES.get(name, (StateClass.PERMANENT, ALL))
    needed = usual_needed if needed is None else needed
    return State(name, size, needed, kind or usual_kind, resident, left=left, elsewhere=elsewhere or {})


# ---- the ledger ----

Profile = dict[str, dict[Stage, float]]
"""State -> stage -> bytes on the device."""


@dataclass
class Peaks:
    """The largest sums seen, stage by stage, and what they were made of."""

    at_peak: dict[Stage, dict[str, float]] = field(default_factory=dict)
    """Stage -> the states when their sum was largest."""
    largest: dict[str, float] = field(default_factory=dict)
    """State -> most bytes seen in any stage."""

    def record(self, stage: Stage, device: Mapping[str, float]) -> None:
        if stage not in self.at_peak or sum(device.values()) > sum(self.at_peak[stage].values()):
            self.at_peak[stage] = dict(device)
        for name, size in device.items():
            self.largest[name] = max(self.largest.get(name, 0.0), size)

    def totals(self) -> dict[Stage, float]:
        return {stage: sum(self.at_peak[stage].values()) for stage in ORDER if stage in self.at_peak}


class Ledger:
    """Named states. Planned: where each should be. Recorded: where each was."""

    def __init__(self, states: Iterable[State] = ()) -> None:
        self._states: dict[str, State] = {}
        self.run = Peaks()
        """Since the start of the run."""
        self.step = Peaks()
        """Since the start of the step."""
        self.device: dict[str, float] = {}
        """Bytes on the device when it was last recorded."""
        self.host: dict[str, float] = {}
        self.declare(*states)

    def declare(self, *states: State) -> None:
        """Add states; one of the same name is replaced."""
        for state in states:
            self._states[state.name] = state

    @property
    def states(self) -> list[State]:
        return list(self._states.values())

    # ---- planned ----

    def planned(self) -> Profile:
        stages = self._stages()
        return {s.name: {stage: s.at(stage) for stage in stages} for s in self.states}

    def planned_totals(self) -> dict[Stage, float]:
        return {stage: sum(s.at(stage) for s in self.states) for stage in self._stages()}

    def naive_total(self) -> float:
        """Everything resident at once."""
        return sum(s.bytes for s in self.states if s.naive)

    def _stages(self) -> list[Stage]:
        """Without the reference's window where there is no reference."""
        return [stage for stage in ORDER if stage is not PR or REFERENCE in self._states]

    # ---- recorded ----

    def new_step(self) -> None:
        self.step = Peaks()

    def record(self, stage: Stage, device: Mapping[str, float], host: Mapping[str, float] | None = None) -> None:
        """What is held now, in bytes. A state that was never declared is, with its lifetime in LIFETIMES."""
        self.device, self.host = dict(device), dict(host or {})
        self.step.record(stage, device)
        self.run.record(stage, device)
        for name in {*self.device, *self.host}:
            size = max(self.device.get(name, 0.0) + self.host.get(name, 0.0), self.run.largest.get(name, 0.0))
            known = self._states.get(name)
            if known is None:
                self.declare(run_state(name, size))
            elif known.bytes < size:
                self.declare(replace(known, bytes=size))

    def place(self, name: str) -> Place:
        """Where a state was when it was last recorded."""
        if self.device.get(name, 0.0) > 0:
            return Place.DEVICE
        return Place.HOST if self.host.get(name, 0.0) > 0 else Place.ABSENT

    def recorded(self) -> Profile:
        """Each stage at the moment of its largest sum."""
        stages = [stage for stage in ORDER if stage in self.run.at_peak]
        return {s.name: {stage: self.run.at_peak[stage].get(s.name, 0.0) for stage in stages} for s in self.states}


def profile_totals(profile: Profile) -> dict[Stage, float]:
    stages = [stage for stage in ORDER if any(stage in row for row in profile.values())]
    return {stage: sum(row.get(stage, 0.0) for row in profile.values()) for stage in stages}


def profile_to_json(profile: Profile) -> dict[str, dict[str, float]]:
    return {name: {stage.key: size for stage, size in row.items()} for name, row in profile.items()}


def profile_from_json(content: Mapping[str, Mapping[str, float]]) -> Profile:
    return {name: {Stage[key.upper()]: float(size) for key, size in row.items()} for name, row in content.items()}
