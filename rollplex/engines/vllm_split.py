"""vLLM's ranks on the trainer's own tensors, whole or split, by a layout plan (rollplex.weights).

A rank's shard is one or more views of the trainer's tensors: rows of a column-parallel weight, strided columns of a
row-parallel one, its heads of query, key and value. Only what cannot be a view has storage of its own and is filled
again after each update: the parts of other trainer ranks where the trainer is split further than the engine, and the
last rows of a vocabulary that is padded further than the trainer's tensor goes.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from rollplex.checks import check_shared_adapters
from rollplex.engines.vllm_sharing import bind, check_shared
from rollplex.engines.vllm_weights import is_blind, present, wanted
from rollplex.models.split_model import SplitModel
from rollplex.weights.audit import audit, table
from rollplex.weights.families import Heads
from rollplex.weights.gathering import Gathering
from rollplex.weights.layout import Entry, LayoutPlan, plan_layout, shapes_of
from rollplex.weights.shards import padded
from rollplex.weights.views import views

VOCABULARY = ("embed_tokens.weight", "lm_head.weight")


class SplitWeights:
    """A `WeightBinding` (see vllm_weights) of one rank."""

    plan: LayoutPlan
    rank: int

    def place(self, model: nn.Module, source: SplitModel) -> int:
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        check_shared_adapters(source.lora, get_tensor_model_parallel_world_size())
        self._model, self._source = model, source
        shards, tp = source.shards, get_tensor_model_parallel_world_size()
        self.rank = get_tensor_model_parallel_rank() if shards is None else shards.gpu
        self.plan = make_plan(model, source, tp)
        assert self.plan.rollout_rank(self.rank) == get_tensor_model_parallel_rank(), "vLLM's groups are not ours"
        audit(self.plan, whole_shapes(model, source), _engine_shapes(self.plan, model))
        rank_zero_info(table(self.plan))
        small_group = [0] if shards is None else shards.small_group
        self.gathering = Gathering(self.plan, self.rank, small_group, shards and shards.gather_group, source.device)
        self._views = self._present_views()
        parameters = dict(model.named_parameters())
        self._own = {e.name: (e, parameters[e.name].data) for e in self.plan.on(self.rank) if e.layout == "rebuild"}
        for _, own in self._own.values():
            own.zero_()  # padding stays so
        rows = {e.name: self._starts(e) for e in self.plan.on(self.rank) if e.dim == 1 and e.gathered}
        bind(model, {name: views for name, views in self._views.items() if name not in self._own}, columns=rows)
        return self.refresh()

    def _starts(self, entry: Entry) -> tuple[int, ...]:
        return tuple(start for start, _ in self.gathering.parts(entry, self._tensors()))

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self._source.hf.named_parameters())

    def _present_views(self) -> dict[str, tuple[Tensor, ...]]:
        tensors = self._tensors()
        found = views(self.plan, tensors, gpu=self.rank)
        fetched = [e for e in self.plan.on(self.rank) if e.gathered]
        return found | {e.name: tuple(part for _, part in self.gathering.parts(e, tensors)) for e in fetched}

    @property
    def buffers(self) -> list[Tensor]:
        """Storage besides vLLM's parameters: other ranks' parts."""
        return list(self.gathering.buffers.values())

    def refresh(self) -> int:
        """Fetch and fill again what has storage of its own; returns its bytes. A collective where parts are fetched."""
        copied = self.gathering.refresh(self._tensors())
        for entry, own in self._own.values():
            for run, part in zip(self.plan.runs(entry), self._views[entry.name], strict=True):
                own.narrow(entry.dim, run.engine_start, part.shape[entry.dim]).copy_(part)
                copied += part.nbytes
        return copied

    def verify(self) -> None:
        check_shared(self._model, self._views, self._present_views(), own=self._own)


def make_plan(model: nn.Module, source: SplitModel, tp: int) -> LayoutPlan:
    """Of vLLM's `model` at degree `tp` over the trainer's tensors."""
    found: dict[str, Any] = dict(wanted(model, source))
    config = source.config
    train_tp = 1 if source.shards is None else source.shards.topology.train_tp
    return plan_layout(
        config.model_type, whole_shapes(model, source), Heads.of(config), rollout_tp=tp, train_tp=train_tp,
        train_vocab="whole", engine_pads=tp > 1,
        vision="none" if is_blind(model) else "weights",
        padded_vocab=all(_has_room(p) for name, p in found.items() if name.endswith(VOCABULARY)),
    )  # fmt: skip


def whole_shapes(model: nn.Module, source: SplitModel) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Of the trainer's tensors, before they were split over its ranks."""
    shards = source.shards
    return {
        name: (tuple(p.shape) if shards is None else shards.whole_shape(name, p), p.dtype)
        for name, p in wanted(model, source)
        if not name.startswith(source.unread)
    }


def _engine_shapes(plan: LayoutPlan, model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Of vLLM's parameters. The padding of one rank's vocabulary is never looked up, and its logits are cut off."""
    found = shapes_of(present(model))
    if plan.rollout_tp == 1:
        for entry in plan.on(0):
            shape, dtype = found.get(entry.name, ((), None))
            if entry.name.endswith(VOCABULARY) and dtype and shape[0] == padded(entry.shape[0]):
                found[entry.name] = (entry.shape, dtype)
    return found


def _has_room(parameter: torch.Tensor) -> bool:
    """Whether the storage goes on to the padded vocabulary, and no further: in a buffer of many parameters (ZeRO) what
    follows is another one."""
    rows = padded(parameter.shape[0])
    room = parameter.untyped_storage().nbytes() // parameter.itemsize - parameter.storage_offset()
    return rows == parameter.shape[0] or rows * parameter.stride(0) == room
