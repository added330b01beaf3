"""Bytes per GPU: every large state of a step, when it lives, and what fits.

A state has a size, the phases in which it is needed, and a class that says how it may leave the device in the others
(paper: arXiv 2608.14498). Two residencies are compared: *naive*, where everything stays, and *by phase*, where only
what a phase needs is there, trainer and engine share one copy of the weights, optimizer state is streamed in chunks,
and the activations kept for the prefix's backward wait on the host but for the part in use.

Shape legend (formulas): N language parameters, V vision parameters, t_t and t_r training and rollout tensor-parallel
degree, T boundary tokens of a replica, H hidden size, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollplex.planner.hardware import Gpu
from rollplex.planner.models import ModelShape

GIB = 1024**3


class Stage(StrEnum):
    """A step as memory sees it: PREFIX is in the decode window, by model."""

    ROLLOUT = "rollout"
    PREFIX_REF = "prefix (reference)"
    PREFIX_ACT = "prefix (actor)"
    SCORE = "score"
    TRAIN = "train"
    UPDATE = "update"


R, PR, PA, S, T, U = Stage
ALL = frozenset(Stage)


class StateClass(StrEnum):
    PERMANENT = "permanent"
    """The source of truth: float32 masters and moments. Streamed in chunks at the update, on the host otherwise."""
    REGENERABLE = "regenerable"
    """Copies of permanent state in another type or layout."""
    BOUNDARY = "boundary"
    """Prefix K/V: made in the window, read in a later phase."""
    PHASE_LOCAL = "phase-local"
    """Gone when its phase ends."""


@dataclass(frozen=True)
class MemorySettings:
    """What the sizes depend on, besides model and GPU. Defaults are those of the paper's 32B example."""

    train_tp: int = 1
    rollout_tp: int = 1
    data_parallel: int = 1
    shard_optimizer: bool = False
    """ZeRO: masters and moments over the data-parallel ranks."""
    boundary_tokens: int = 131_072
    """Prompt tokens of a rollout batch per training replica whose prefix state is held."""
    micro_tokens: int = 16_384
    """Tokens of one training pass."""
    kv_pool_gib: float = 26.0
    workspace_gib: float = 14.0
    """Of trainer and engine together: contexts, kernels' work space, fragmentation."""
    update_chunks: int = 16
    """The update streams optimizer state in this many parts; two are on the device at once."""
    checkpoint_share: float = 0.25
    """Part of the prefix checkpoints that is on the device; the others wait on the host."""
    reference: bool = True


@dataclass(frozen=True)
class State:
    """One kind of bytes on each GPU."""

    name: str
    bytes: float
    needed: frozenset[Stage]
    kind: StateClass
    resident: float | None = None
    """Bytes while it is needed, if not all of it is there at once."""
    naive: bool = True
    """False: exists only by phase (what sharing the weights costs)."""

    def at(self, stage: Stage) -> float:
        """Bytes on the device in a stage, by phase."""
        if stage not in self.needed:
            return 0.0
        return self.bytes if self.resident is None else self.resident


def states(model: ModelShape, s: MemorySettings) -> list[State]:
    """Every large state of a step, per GPU."""
    model.check_tp("train_tp", s.train_tp)
    model.check_tp("rollout_tp", s.rollout_tp)
    n, v = model.language_params, model.vision_params
    layers_hidden = model.layers * model.hidden
    optimizer = 12 * (n / s.train_tp + v) / (s.data_parallel if s.shard_optimizer else 1)
    kv = s.boundary_tokens * model.kv_bytes_per_token / s.train_tp
    checkpoints = s.boundary_tokens * 2 * layers_hidden / s.train_tp
    # Checkpointed: the input of each layer, and one layer's activations.
    micro = s.micro_tokens * (2 * layers_hidden + 34 * model.hidden) / s.train_tp
    rebuilt = 2 * model.qkv_params / s.rollout_tp if s.train_tp != s.rollout_tp else 0.0
    out = [
        State("actor weights, engine's layout", 2 * n / s.rollout_tp + 2 * v, ALL, StateClass.REGENERABLE),
        # By phase the trainer computes on views of the engine's copy, and only what is no view is there twice.
        State("actor weights, trainer's layout", 2 * n / s.train_tp + 2 * v, frozenset(), StateClass.REGENERABLE),
        State("actor weights rebuilt for the trainer", rebuilt, ALL - {R}, StateClass.REGENERABLE, naive=False),
        State("gradients", 4 * (n / s.train_tp + v), frozenset({T, U}), StateClass.PHASE_LOCAL),
        State(
            "float32 masters and moments", optimizer, frozenset({U}), StateClass.PERMANENT,
            min(optimizer, 2 * optimizer / s.update_chunks),
        ),
        State("rollout KV pool", s.kv_pool_gib * GIB, frozenset({R, PR, PA}), StateClass.PHASE_LOCAL),
        State("actor prefix K/V", kv, frozenset({PA, S, T}), StateClass.BOUNDARY),
        State("prefix checkpoints", checkpoints, frozenset({PA, T}), StateClass.PHASE_LOCAL,
              checkpoints * s.checkpoint_share),
        State("micro-batch activations", micro, frozenset({PR, PA, S, T}),
              StateClass.PHASE_LOCAL),
        State("workspace", s.workspace_gib * GIB, ALL, StateClass.PHASE_LOCAL),
    ]  # fmt: skip
    if s.reference:
        weights = 2 * n / s.train_tp + 2 * v
        out.append(State("reference weights", weights, frozenset({PR, S}), StateClass.REGENERABLE))
        out.append(State("reference prefix K/V", kv, frozenset({PR, PA, S}), StateClass.BOUNDARY))
    return out


def naive_bytes(all_states: list[State]) -> float:
    """Everything resident at once."""
    return sum(s.bytes for s in all_states if s.naive)


def stage_bytes(all_states: list[State]) -> dict[Stage, float]:
    """By phase."""
    stages = [stage for stage in Stage if stage is not PR or any(s.name == "reference weights" for s in all_states)]
    return {stage: sum(s.at(stage) for s in all_states) for stage in stages}


def fits(all_states: list[State], gpu: Gpu) -> bool:
    return max(stage_bytes(all_states).values()) <= gpu.memory
