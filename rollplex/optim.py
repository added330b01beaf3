"""AdamW over the trained parameters, and its learning-rate schedule in optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler


class MasterAdamW(torch.optim.AdamW):
    """AdamW whose weights and moments are float32, for parameters of any dtype.

    At the learning rates of reinforcement learning an update is smaller than half a step of bfloat16 and would round
    away. Each step moves a float32 master and copies it into the parameter, in place: addresses do not change.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        self._trained: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._trained]
        master_of = dict(zip(map(id, self._trained), self._masters, strict=True))
        groups = [group | {"params": [master_of[id(p)] for p in group["params"]]} for group in groups]
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, master in zip(self._trained, self._masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        super().step()
        for parameter, master in zip(self._trained, self._masters, strict=True):
            parameter.copy_(master)
            master.grad = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._trained:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"masters": [m.detach() for m in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        masters = state.pop("masters", None)
        if masters is None or len(masters) != len(self._masters):
            raise ValueError(
                "the checkpoint's optimizer does not fit: it has no float32 masters, or other parts were frozen; "
                "resume with the dtype and freeze of that run"
            )
        super().load_state_dict(state)
        for master, saved in zip(self._masters, masters, strict=True):
            master.copy_(saved)


def make_optimizer(
    parameters: Iterable[nn.Parameter], h: Mapping[str, Any], *, own_masters: bool = True
) -> dict[str, Any]:
    """Lightning's configure_optimizers result from GRPOModule's settings. Weight decay is for matrices only.

    own_masters: hold float32 masters here for parameters of another dtype; False where a strategy does (DeepSpeed).
    """
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": h["weight_decay"]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    settings = {"lr": h["learning_rate"], "betas": (h["adam_beta1"], h["adam_beta2"])}
    narrow = own_masters and any(p.dtype != torch.float32 for p in trained)
    optimizer = MasterAdamW(groups, **settings) if narrow else torch.optim.AdamW(groups, **settings)
    scheduler = get_scheduler(h["lr_scheduler_type"], optimizer, h["warmup_steps"], h["lr_decay_steps"])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
