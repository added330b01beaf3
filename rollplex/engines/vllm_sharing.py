"""vLLM on the trainer's own tensors: no second copy of any weight, nothing to copy after an update.

A parameter of vLLM's that is one tensor of the trainer's (or a view of one) is bound to it. One that vLLM fuses from
several (query, key and value; gate and up) becomes as many matrix products, over the trainer's tensors in place.
Adapters (LoRA) are merged: an adapted weight, and no other, has storage of its own, filled again after each update.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rollplex.engines.vllm_weights import engine_name, present, wanted
from rollplex.models.lora import MergedWeights, is_adapter, plain_name
from rollplex.models.split_model import SplitModel

Views = Mapping[str, tuple[Tensor, ...]]
"""vLLM's parameter name -> what it is made of, in order along the rows; all are views of the trainer's storage."""

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PREFIXES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "visual.": "model.visual.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
}
"""vLLM's names -> transformers'."""


def whole_views(model: nn.Module, source: SplitModel, own: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, ...]]:
    """For an engine that is not split over devices: every parameter is one or more whole tensors of the trainer's or of
    `own`, by transformers' names."""
    everything = source.hf.named_parameters(remove_duplicate=False)
    tensors = {plain_name(name): p.detach() for name, p in everything if not is_adapter(name)} | dict(own)
    tensors = {engine_name(name, source): t for name, t in tensors.items()}
    found = {}
    for name, _ in present(model):
        sources = _sources(name)
        unknown = [s for s in sources if s not in tensors]
        if unknown:
            raise ValueError(f"weights cannot be shared: the trainer has no {', '.join(unknown)} for vLLM's {name}")
        found[name] = tuple(tensors[s] for s in sources)
    return found


def _sources(name: str) -> list[str]:
    """transformers' names of what vLLM's parameter `name` is made of."""
    for ours, theirs in PREFIXES.items():
        if name.startswith(ours):
            name = theirs + name.removeprefix(ours)
            break
    owner, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return [name]
    parent, dot, module = owner.rpartition(".")
    return [f"{parent}{dot}{part}.{kind}" for part in FUSED.get(module, (module,))]


class SharedWeights:
    """A `WeightBinding` (see vllm_weights) that copies nothing."""

    def __init__(self, views: Callable[[nn.Module, SplitModel, Mapping[str, Tensor]], Views] = whole_views) -> None:
        """views: what each parameter is made of, from vLLM's model, the trainer's and the merged weights."""
        self._views_of = views

    def place(self, model: nn.Module, source: SplitModel) -> int:
        self._model, self._source = model, source
        self._merged = MergedWeights(source.hf)
        self._views = self._views_of(model, source, self._merged.tensors)
        used = {v.untyped_storage().data_ptr() for views in self._views.values() for v in views}
        needless = (*source.unread, *self._merged.tensors)
        places = ((n, p.untyped_storage().data_ptr()) for n, p in wanted(model, source) if not n.startswith(needless))
        unused = [n for n, place in places if place not in used]
        if unused:
            raise ValueError(f"weights cannot be shared: vLLM's model has no place for {', '.join(unused)}")
        modules = dict(model.named_modules())
        for name, parameter in present(model):
            _check_shape(name, parameter, self._views[name], modules[name.rpartition(".")[0]])
        bind(model, self._views)
        return self._merged.nbytes

    @property
    def buffers(self) -> list[Tensor]:
        """What has storage of its own: merged weights."""
        return list(self._merged.tensors.values())

    def refresh(self) -> int:
        return self._merged.refresh()  # elsewhere the optimizer wrote where the engine reads

    def verify(self) -> None:
        """Every address is still the trainer's, and the engine's."""
        check_shared(self._model, self._views, self._views_of(self._model, self._source, self._merged.tensors))


def bind(model: nn.Module, shared: Views, columns: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Let vLLM's parameters in `shared` be their views, in place of storage of their own.

    columns: names whose views are blocks of columns, not of rows -> the first column of each.
    """
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    fused: dict[str, dict[str, tuple[Tensor, ...]]] = {}
    for name, views in shared.items():
        module, _, kind = name.rpartition(".")
        if len(views) == 1:
            parameters[name].data = views[0]
        else:
            fused.setdefault(module, {})[kind] = views
            parameters[name].data = views[0].new_empty(0)
    for name, parts in fused.items():
        starts = (columns or {}).get(f"{name}.weight")
        if starts is None:
            read_blocks(modules[name], parts["weight"], parts.get("bias"))
        else:
            read_columns(modules[name], parts["weight"], starts)


def check_shared(model: nn.Module, bound: Views, now: Views, *, own: Collection[str] = ()) -> None:
    """Raise unless the trainer's views are where they were at the start, and vLLM's parameters at them.

    own: names of what vLLM has a copy of.
    """
    moved = [name for name, views in bound.items() if pointers(views) != pointers(now[name])]
    engine = dict(model.named_parameters())
    single = {name: views[0] for name, views in bound.items() if len(views) == 1 and name not in own}
    moved += [name for name, view in single.items() if engine[name].data_ptr() != view.data_ptr()]
    if moved:
        raise RuntimeError(
            f"{len(moved)} weights are no longer shared (first: {moved[0]}): something gave the trainer's or the "
            "engine's parameters new storage after the engine had started. Update parameters in place only"
        )


def pointers(views: tuple[Tensor, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Address and shape of each."""
    return [(v.data_ptr(), tuple(v.shape)) for v in views]


def _check_shape(name: str, parameter: Tensor, views: tuple[Tensor, ...], module: nn.Module) -> None:
    """Rows add up. The rows that vLLM pads a vocabulary with are never looked up, and their logits are cut off."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rows, rest = sum(v.shape[0] for v in views), {tuple(v.shape[1:]) for v in views}
    wanted = module.org_vocab_size if isinstance(module, VocabParallelEmbedding) else parameter.shape[0]
    if rows != wanted or rest != {tuple(parameter.shape[1:])}:
        shapes = [tuple(v.shape) for v in views]
        raise ValueError(
            f"weights cannot be shared: vLLM's {name} is {tuple(parameter.shape)}, the trainer has {shapes}"
        )
    if any(v.dtype != parameter.dtype for v in views):
        raise ValueError(
            f"weights cannot be shared: vLLM's {name} is {parameter.dtype}, the trainer's {views[0].dtype}"
        )


def read_blocks(layer: Any, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...] | None) -> None:
    """Let a fused linear layer of vLLM's multiply by each of its blocks where it lies."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Blocks(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            pass

        def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            parts = biases or (None,) * len(weights)
            linear = torch.nn.functional.linear
            return torch.cat([linear(x, w, b) for w, b in zip(weights, parts, strict=True)], dim=-1)

    layer.quant_method = Blocks()


def read_columns(layer: Any, weights: tuple[Tensor, ...], starts: tuple[int, ...]) -> None:
    """Let a linear layer of vLLM's multiply parts of its input by blocks of columns where they lie, and add up."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    class Columns(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: nn.Module) -> None:
            pass

        def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
            linear = torch.nn.functional.linear
            out = linear(x.narrow(-1, starts[0], weights[0].shape[1]), weights[0], bias)
            for start, w in zip(starts[1:], weights[1:], strict=True):
                out = out + linear(x.narrow(-1, start, w.shape[1]), w)
            return out

    layer.quant_method = Columns()
