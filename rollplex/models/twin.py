"""A second module tree over the tensors of a first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rollplex.models.lora import adapted, add_adapters, is_adapter, merged, plain_name


def empty_tree(hf: Any, lora: Any | None) -> Any:
    """A transformers model like `hf`, in evaluation mode and without storage. lora: adapters that it is to have."""
    with torch.device("meta"):
        tree = type(hf)(copy.deepcopy(hf.config))
        if lora is not None:
            add_adapters(tree, lora)
    tree.generation_config = copy.deepcopy(hf.generation_config)
    return tree.eval()


def point_at(target: nn.Module, source: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor]) -> None:
    """Give every parameter of `target` the tensor that `tensor_of` gives for its namesake in `source`; buffers are
    copied. A parameter that is tied in `source` is in `target` too. Adapters are left out where `target` has none."""
    own_modules = dict(target.named_modules())
    adapters = any(is_adapter(name) for name in own_modules)
    made: dict[int, nn.Parameter] = {}
    for name, module in source.named_modules():
        if is_adapter(name) and not adapters:
            continue
        mine = own_modules[name if adapters else plain_name(name)]
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(tensor_of(parameter), requires_grad=False)
                mine._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                mine._buffers[key] = buffer.detach().clone()


def same_storage(target: nn.Module, source: nn.Module) -> bool:
    """True when every parameter of `target` lies at the address of its namesake in `source`."""
    theirs = {plain_name(name): p for name, p in source.named_parameters(remove_duplicate=False)}
    mine = {plain_name(name): p for name, p in target.named_parameters(remove_duplicate=False)}
    return all(p.data_ptr() == theirs[name].data_ptr() for name, p in mine.items())


def merged_model(hf: Any) -> Any:
    """A transformers model without adapters and with merged weights. Tensors without an adapter are `hf`'s own."""
    tree = empty_tree(hf, None)
    layers = {id(layer.base_layer.weight): layer for _, layer in adapted(hf)}
    point_at(tree, hf, lambda p: merged(layers[id(p)]) if id(p) in layers else p.detach())
    return tree
