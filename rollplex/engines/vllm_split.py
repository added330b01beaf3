"""vLLM's tensor-parallel ranks on the trainer's own full tensors, by a layout plan (rollplex.weights).

A rank's shard is one or more views of the trainer's tensors: rows of a column-parallel weight, strided columns of a
row-parallel one, its heads of query, key and value. Only what cannot be a view has storage of its own and is filled
again after each update: the last rows of a vocabulary that is padded further than the trainer's tensor goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rollplex.engines.vllm_sharing import bind, check_shared
from rollplex.engines.vllm_weights import wanted
from rollplex.models.split_model import SplitModel
from rollplex.weights.audit import audit
from rollplex.weights.families import Heads
from rollplex.weights.layout import LayoutPlan, plan_layout, shapes_of
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
        parameters = dict(model.named_parameters())
        self._own = {e.name: (e, parameters[e.name].data) for e in self.plan.on(self.rank) if e.layout == "rebuild"}
        for _, own in self._own.values():
            own.zero_()  # padding stays so
        bind(model, {name: views for name, views in self._views.items() if name not in self._own})
        return self.refresh()

    def _present_views(self) -> dict[str, tuple[Tensor, ...]]:
        return views(self.plan, dict(self._source.hf.named_parameters()), gpu=self.rank)

    def refresh(self) -> int:
        """Fill again what has storage of its own; returns its bytes."""
        copied = 0
        for entry, own in self._own.values():
            for run, part in zip(self.plan.runs(entry), self._views[entry.name], strict=True):
                own.narrow(entry.dim, run.engine_start, part.shape[entry.dim]).copy_(part)
                copied += part.nbytes
        return copied

    def verify(self) -> None:
        check_shared(self._model, self._views, self._present_views(), own=self._own)


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
