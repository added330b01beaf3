"""A second module tree over the tensors of a first."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def point_at(target: nn.Module, source: nn.Module, tensor_of: Callable[[nn.Parameter], Tensor]) -> None:
    """Give every parameter of `target` the tensor that `tensor_of` gives for its namesake in `source`; buffers are
    copied. A parameter that is tied in `source` is in `target` too."""
    own_modules = dict(target.named_modules())
    made: dict[int, nn.Parameter] = {}
    for name, module in source.named_modules():
        mine = own_modules[name]
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(tensor_of(parameter), requires_grad=False)
                mine._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                mine._buffers[key] = buffer.detach().clone()
