"""vLLM's tensor-parallel ranks on the trainer's own full tensors, by a layout plan (rollplex.weights).

A rank's shard is one or more views of the trainer's tensors: rows of a column-parallel weight, strided columns of a
row-parallel one, its heads of query, key and value. Only what cannot be a view has storage of its own and is filled
again after each update: the last rows of a vocabulary that is padded further than the trainer's tensor goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollplex.engines.vllm_sharing import pointers, read_blocks
from rollplex.engines.vllm_weights import wanted
from rollplex.models.split_model import SplitModel
from rollplex.weights.audit import audit
from rollplex.weights.families import Heads
from rollplex.weights.layout import Entry, LayoutPlan, plan_layout, shapes_of
from rollplex.weights.shards import padded
from rollplex.weights.views import views

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


class SplitWeights:
    """A `WeightBinding` (see vllm_weights) of one rank; the trainer's tensors are whole on every rank."""

    plan: LayoutPlan
    rank: int

    def place(self, model: nn.Module, source: SplitModel) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        self._model, self._source = model, source
        self.rank = get_tensor_model_parallel_rank()
        self.plan = make_plan(model, source, get_tensor_model_parallel_world_size())
        audit(self.plan, shapes_of(wanted(model, source)), shapes_of(model.named_parameters()))
        self._views = self._present_views()
        self._own: list[tuple[Entry, Tensor]] = []
        self._bind()
        return self.refresh()

    def _present_views(self) -> dict[str, tuple[Tensor, ...]]:
        return views(self.plan, dict(self._source.hf.named_parameters()), gpu=self.rank)

    def _bind(self) -> None:
        parameters, modules = dict(self._model.named_parameters()), dict(self._model.named_modules())
        fused: dict[str, dict[str, tuple[Tensor, ...]]] = {}
        for entry in self.plan.on(self.rank):
            parameter, parts = parameters[entry.name], self._views[entry.name]
            module, _, kind = entry.name.rpartition(".")
            if entry.layout == "rebuild":
                parameter.data.zero_()  # padding stays so
                self._own.append((entry, parameter.data))
            elif len(parts) == 1:
                parameter.data = parts[0]
            else:
                fused.setdefault(module, {})[kind] = parts
                parameter.data = parts[0].new_empty(0)
        for name, blocks in fused.items():
            read_blocks(modules[name], blocks["weight"], blocks.get("bias"))

    def refresh(self) -> int:
        """Fill again what has storage of its own; returns its bytes."""
        copied = 0
        for entry, own in self._own:
            for run, part in zip(self.plan.runs(entry), self._views[entry.name], strict=True):
                own.narrow(entry.dim, run.engine_start, part.shape[entry.dim]).copy_(part)
                copied += part.nbytes
        return copied

    def verify(self) -> None:
        now, engine = self._present_views(), dict(self._model.named_parameters())
        shared = [entry.name for entry in self.plan.on(self.rank) if entry.layout != "rebuild"]
        moved = [name for name in self._views if pointers(self._views[name]) != pointers(now[name])]
        single = [name for name in shared if len(self._views[name]) == 1]
        moved += [name for name in single if engine[name].data_ptr() != self._views[name][0].data_ptr()]
        if moved:
            raise RuntimeError(
                f"{len(moved)} weights of rank {self.rank} are no longer shared (first: {moved[0]}): something gave "
                "the trainer's or the engine's parameters new storage after the engine's start. Update in place only"
            )


def make_plan(model: nn.Module, source: SplitModel, tp: int) -> LayoutPlan:
    """Of vLLM's `model` at degree `tp` over a trainer with whole tensors."""
    found: dict[str, Any] = dict(wanted(model, source))
    config = source.config
    return plan_layout(
        config.model_type, shapes_of(found.items()), Heads.of(config), rollout_tp=tp,
        vision="weights" if any(name.startswith("visual.") for name, _ in model.named_parameters()) else "none",
        padded_vocab=all(_has_room(p) for name, p in found.items() if name.endswith(VOCABULARY)),
    )  # fmt: skip


def _has_room(parameter: torch.Tensor) -> bool:
    """Whether the storage goes on to the padded vocabulary."""
    rows = padded(parameter.shape[0])
    room = parameter.untyped_storage().nbytes() // parameter.itemsize - parameter.storage_offset()
    return rows * parameter.stride(0) <= room
