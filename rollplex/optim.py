"""AdamW over the trained parameters, and its learning-rate schedule in optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rollplex.checks import check_chunk
from rollplex.offload import HostCopies


def packed(sizes: Iterable[int], most: int) -> list[list[int]]:
    """Sizes in order, as many to a part as `most` allows; one that is larger is a part of its own."""
    parts: list[list[int]] = [[]]
    for size in sizes:
        if parts[-1] and sum(parts[-1]) + size > most:
            parts.append([])
        parts[-1].append(size)
    return parts


class StreamedAdamW(torch.optim.AdamW):
    """AdamW whose states may wait in host memory, and which can step part by part so that they are never all there.

    AdamW works on each element alone, so a step in parts gives the same bits as a whole one. Without `stream` this is
    torch's AdamW.
    """

    _copies: HostCopies | None = None
    _chunk_bytes: int | None = None
    on_chunk: Callable[[], None] = staticmethod(lambda: None)
    """Called when the states of a part are on the device, before it steps."""

    def stream(self, copies: HostCopies, chunk_bytes: int | None = None) -> None:
        """Let `copies` move the states. chunk_bytes: step in parts whose states take at most that; None is at once.

        Two parts are on the device at once: one that steps, the next one on its way. Raises ValueError when the states
        of one parameter are larger than a part.
        """
        if chunk_bytes is not None:
            check_chunk(chunk_bytes, max(self.step_bytes(p) for p in self._all()))
        self._copies, self._chunk_bytes = copies, chunk_bytes

    # ---- what there is ----

    def _all(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def moments(self) -> list[Tensor]:
        """First and second moments; none before the first step."""
        return [t for p in self._all() for t in self._moments_of(p)]

    def masters(self) -> list[Tensor]:
        """Float32 weights beside the parameters; none when the parameters are float32."""
        return []

    def _moments_of(self, p: nn.Parameter) -> list[Tensor]:
        state = self.state.get(p, {})
        return [t for name, t in state.items() if name != "step" and isinstance(t, Tensor)]

    def _states_of(self, part: Iterable[nn.Parameter]) -> list[Tensor]:
        return [t for p in part for t in self._moments_of(p)]

    def step_bytes(self, p: nn.Parameter) -> int:
        """Of the states that a step of this parameter needs on the device."""
        return 2 * p.numel() * p.element_size()

    # ---- stepping ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._chunk_bytes is None:
            if self._copies is not None:
                self._copies.bring([*self.moments(), *self.masters()])
            self._step_part(self._all())
        else:
            self._step_in_parts()
        return loss

    def _step_in_parts(self) -> None:
        assert self._copies is not None
        parts = self._parts()
        self._copies.back(self._states_of(parts[0]))
        for part, following in zip(parts, [*parts[1:], []], strict=True):
            self._copies.back(self._states_of(following))
            self._copies.wait(self._states_of(part))
            self.on_chunk()
            self._step_part(part)
            self._copies.out(self._states_of(part))

    def _parts(self) -> list[list[nn.Parameter]]:
        """The parameters in order, as many to a part as its bytes allow."""
        assert self._chunk_bytes is not None
        everything = iter(self._all())
        sizes = packed([self.step_bytes(p) for p in self._all()], self._chunk_bytes)
        return [[next(everything) for _ in part] for part in sizes]

    def _step_part(self, part: list[nn.Parameter]) -> None:
        """torch's step over some of the parameters."""
        chosen = {id(p) for p in part}
        whole = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in chosen]
        try:
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, whole, strict=True):
                group["params"] = parameters

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """As ever; states that are away are given as their copies in host memory."""
        return self._present(super().state_dict())

    def _present(self, content: dict[str, Any]) -> dict[str, Any]:
        return content if self._copies is None else self._copies.replaced(content)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._copies is not None:
            self._copies.forget(self.moments())
        super().load_state_dict(state_dict)


class MasterAdamW(StreamedAdamW):
    """AdamW whose weights and moments are float32, for parameters of any dtype.

    At the learning rates of reinforcement learning an update is smaller than half a step of bfloat16 and would round
    away. Each step moves a float32 master and copies it into the parameter, in place: addresses do not change.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        self._trained: list[nn.Parameter] = [p for group in groups for p in group["params"]]
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._trained]
        self._trained_of = dict(zip(map(id, self._masters), self._trained, strict=True))
        master_of = dict(zip(map(id, self._trained), self._masters, strict=True))
        groups = [group | {"params": [master_of[id(p)] for p in group["params"]]} for group in groups]
        super().__init__(groups, **settings)

    def masters(self) -> list[Tensor]:
        return [m.detach() for m in self._masters]

    def _states_of(self, part: Iterable[nn.Parameter]) -> list[Tensor]:
        part = list(part)
        return [*super()._states_of(part), *(m.detach() for m in part)]

    def step_bytes(self, p: nn.Parameter) -> int:
        return 12 * p.numel()

    @torch.no_grad()
    def _step_part(self, part: list[nn.Parameter]) -> None:
        for master in part:
            grad = self._trained_of[id(master)].grad
            master.grad = None if grad is None else grad.float()
        super()._step_part(part)
        for master in part:
            self._trained_of[id(master)].copy_(master)
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._trained:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self._present({"masters": self.masters()})

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
        if self._copies is not None:
            self._copies.bring(self.masters())
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
    groups = [group for group in groups if group["params"]]  # adapters are matrices all; DeepSpeed drops an empty group
    narrow = own_masters and any(p.dtype != torch.float32 for p in trained)
    optimizer = (MasterAdamW if narrow else StreamedAdamW)(groups, **settings)
    scheduler = get_scheduler(h["lr_scheduler_type"], optimizer, h["warmup_steps"], h["lr_decay_steps"])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
