"""A plan: memory per phase, whether it fits, and predicted step times, before a GPU is touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollplex.checks import check_chunk
from rollplex.planner.engine_memory import EngineMemory
from rollplex.planner.fitting import Change, fitting_changes, run_changes
from rollplex.planner.hardware import Gpu
from rollplex.planner.memory import GIB, MemorySettings, naive_bytes, stage_bytes, states
from rollplex.planner.models import ModelShape
from rollplex.planner.run_memory import RunSettings, in_config_words, resident, run_states, smallest_chunk, with_pool
from rollplex.planner.simulate import Model, Placement, Rates, StepTime, Workload, compare
from rollplex.residency import Ledger, State


@dataclass(frozen=True)
class Plan:
    """Everything that is printed."""

    shape: ModelShape
    gpu: Gpu
    place: Placement
    memory: MemorySettings
    workload: Workload
    states: list[State]
    changes: list[Change] | None
    """Empty: it fits. None: nothing that the planner knows makes it fit."""
    times: dict[str, StepTime] = field(default_factory=dict)
    run: RunSettings | None = None
    """Of a rank of the config's run, planned as it is configured."""
    rates: Rates = field(default_factory=Rates)
    assumptions: tuple[str, ...] = ()
    """What the figures rest on and nobody said."""
    engine: EngineMemory | None = None
    """On the engine's own GPUs, where it has some."""

    @property
    def first_assumed(self) -> str | None:
        """The length of a prompt, where nobody said it: on none does so much depend."""
        return next(
            (text for text in self.assumptions if text.startswith(f"{self.workload.prompt_tokens} tokens a prompt")),
            None,
        )

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.states)

    @property
    def without_offload(self) -> float | None:
        """Bytes of the largest stage of the config's run without PhaseOffload; None of a cluster."""
        if self.run is None:
            return None
        return max(stage_bytes(run_states(self.shape, resident(self.run))).values())

    @property
    def advice(self) -> list[str] | None:
        """The changes in words."""
        if self.changes is None:
            return None
        if self.run is None:
            return [str(c) for c in self.changes]
        return [in_config_words(c.name, c.old, c.new, self.run.ranks) for c in self.changes]

    @property
    def layout(self) -> dict[str, float]:
        """Bytes of the language model by what sharing takes from one layout to the other."""
        s = self.shape
        same = s.language_params - s.row_params - s.qkv_params
        if self.place.train_tp == self.place.rollout_tp:
            return {"same order": 2.0 * s.language_params, "strided": 0.0, "rebuilt": 0.0}
        return {"same order": 2.0 * same, "strided": 2.0 * s.row_params, "rebuilt": 2.0 * s.qkv_params}

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.shape.name,
            "gpu": self.gpu.name,
            "params": self.shape.params,
            "states_gib": {s.name: s.bytes / GIB for s in self.states},
            "naive_gib": naive_bytes(self.states) / GIB,
            "without_offload_gib": self.without_offload / GIB if self.without_offload is not None else None,
            "stages_gib": {stage.value: size / GIB for stage, size in stage_bytes(self.states).items()},
            "gpu_gib": self.gpu.memory / GIB,
            "engine_gpus": self._engine_gpus(),
            "fits": self.changes == [],
            "changes": self.advice,
            "layout": {name: size / (2 * self.shape.language_params) for name, size in self.layout.items()},
            "rebuilt_gib": self.layout["rebuilt"] / self.place.rollout_tp / GIB,
            "second_copy_gib": 2 * self.shape.language_params / self.place.train_tp / GIB,
            "seconds": {name: time.total for name, time in self.times.items()},
            "assumptions": list(self.assumptions),
        }

    def _engine_gpus(self) -> dict[str, Any] | None:
        if self.engine is None:
            return None
        e = self.engine
        return {"engines": e.engines, "gpus": e.gpus, "weights_gib": e.weights / GIB, "kv_pool_gib": e.pool / GIB}


def make_plan(
    shape: ModelShape, gpu: Gpu, place: Placement, memory: MemorySettings, workload: Workload,
    run: RunSettings | None = None, rates: Rates | None = None,
) -> Plan:  # fmt: skip
    rates = rates or Rates()
    times = compare(Model(shape, gpu, rates), workload, place)
    if run is None:
        found, changes = states(shape, memory), fitting_changes(shape, memory, gpu)
    else:
        run = with_pool(run, shape, gpu.memory)
        if "language_model" not in run.freeze:  # without it the largest parameter that is trained is not known here
            check_chunk(run.update_chunk_bytes, smallest_chunk(shape, run))
        found, changes = run_states(shape, run), run_changes(shape, run, gpu)
    return Plan(shape, gpu, place, memory, workload, found, changes, times, run, rates)
