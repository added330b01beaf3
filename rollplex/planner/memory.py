"""Bytes per GPU of a cluster run: every large state of a step, when it lives, and what fits.

A state has a size, the phases in which it is needed, and a class that says how it may leave the device in the others
(paper: arXiv 2608.14498). Two residencies are compared: *naive*, where everything stays, and *by phase*, where only
what a phase needs is there, trainer and engine share one copy of the weights, optimizer state is streamed in chunks,
and the activations kept for the prefix's backward wait on the host but for the part in use.

Shape legend (formulas): N language parameters, V vision parameters, t_t and t_r training and rollout tensor-parallel
degree, T boundary tokens of a replica, H hidden size, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.planner.hardware import Gpu
from rollplex.planner.models import ModelShape
from rollplex.residency import (
    ACTOR_KV,
    ALL,
    GRADIENTS,
    PA,
    PR,
    REFERENCE,
    REFERENCE_KV,
    Ledger,
    R,
    S,
    Stage,
    State,
    StateClass,
    T,
    U,
)

GIB = 1024**3


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
    remote_engine: bool = False
    """The engine computes elsewhere: its weights and its pool are on no GPU of the trainer's."""


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
    out = [
        *_weights(model, s),
        State(GRADIENTS, 4 * (n / s.train_tp + v), frozenset({T, U}), StateClass.PHASE_LOCAL),
        State(
            "float32 masters and moments", optimizer, frozenset({U}), StateClass.PERMANENT,
            min(optimizer, 2 * optimizer / s.update_chunks),
        ),
        State("rollout KV pool", 0.0 if s.remote_engine else s.kv_pool_gib * GIB, frozenset({R, PR, PA}),
              StateClass.PHASE_LOCAL),
        State(ACTOR_KV, kv, frozenset({PA, S, T}), StateClass.BOUNDARY),
        State("prefix checkpoints", checkpoints, frozenset({PA, T}), StateClass.PHASE_LOCAL,
              checkpoints * s.checkpoint_share),
        State("micro-batch activations", micro, frozenset({PR, PA, S, T}),
              StateClass.PHASE_LOCAL),
        State("workspace", s.workspace_gib * GIB, ALL, StateClass.PHASE_LOCAL),
    ]  # fmt: skip
    if s.reference:
        weights = 2 * n / s.train_tp + 2 * v
        out.append(State(REFERENCE, weights, frozenset({PR, S}), StateClass.REGENERABLE))
        out.append(State(REFERENCE_KV, kv, frozenset({PR, PA, S}), StateClass.BOUNDARY))
    return out


def _weights(model: ModelShape, s: MemorySettings) -> list[State]:
    """Of the actor, as trainer and engine need them on one GPU."""
    n, v = model.language_params, model.vision_params
    trainers = 2 * n / s.train_tp + 2 * v
    if s.remote_engine:
        return [State("actor weights", trainers, ALL, StateClass.REGENERABLE)]
    rebuilt = 2 * model.qkv_params / s.rollout_tp if s.train_tp != s.rollout_tp else 0.0
    return [
        State("actor weights, engine's layout", 2 * n / s.rollout_tp + 2 * v, ALL, StateClass.REGENERABLE),
        # By phase the trainer computes on views of the engine's copy, and only what is no view is there twice.
        State("actor weights, trainer's layout", trainers, frozenset(), StateClass.REGENERABLE),
        State("actor weights rebuilt for the trainer", rebuilt, ALL - {R}, StateClass.REGENERABLE, naive=False),
    ]


def naive_bytes(all_states: list[State]) -> float:
    """Everything resident at once."""
    return Ledger(all_states).naive_total()


def stage_bytes(all_states: list[State]) -> dict[Stage, float]:
    """By phase."""
    return Ledger(all_states).planned_totals()


def fits(all_states: list[State], gpu: Gpu) -> bool:
    return max(stage_bytes(all_states).values()) <= gpu.memory
