"""The models of a run: the policy that is trained, with or without adapters, and its reference.

With adapters (LoRA) the reference has no weights of its own, and a checkpoint holds the adapters alone: the others are
those of the model folder, which a resume compares.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rollplex.models.lora import add_adapters, is_adapter, lora_config
from rollplex.models.registry import load_hf, split
from rollplex.models.split_model import PASS_SETTINGS, SplitModel

PREFIX = "policy."
"""Of the policy's names in a checkpoint."""


def make_models(h: Mapping[str, Any]) -> tuple[SplitModel, SplitModel | None]:
    """Actor, and reference (beta > 0), of GRPOModule's settings. Raises ValueError where nothing would be trained."""
    config: Any = lora_config(h["lora"]) if h["lora"] is not None else None  # first: it may be refused
    hf = load_hf(h["model"], h["dtype"])
    if config is not None:
        add_adapters(hf, config, seed=h["seed"])
    actor = split(hf, **{k: h[k] for k in PASS_SETTINGS})
    actor.freeze(h["freeze"] or [])
    if not any(p.requires_grad for p in hf.parameters()):
        raise ValueError(
            f"lora: target_modules={config.target_modules!r} are all in frozen parts (freeze={h['freeze']}), so "
            "nothing would be trained: name layers of another part, or freeze less"
        )
    if not h["beta"] > 0:
        return actor, None
    if actor.lora is not None:
        return actor, actor.without_adapters()
    return actor, split(copy.deepcopy(hf).requires_grad_(False).eval())


def weights_print(hf: Any) -> list[float]:
    """Sums that tell one model folder's weights from another's; adapters take no part."""
    return [float(p.detach().double().sum()) for name, p in hf.named_parameters() if not is_adapter(name)]


def place_reference(
    reference: SplitModel, actor: SplitModel, device: torch.device, whole: SplitModel | None = None
) -> None:
    """To where the actor is; one without weights of its own follows the actor's. whole: the policy with whole weights,
    where the actor's are shards."""
    if actor.lora is not None:
        reference.bind(whole or actor)
    else:
        reference.hf.to(device)


def keep_adapters_alone(checkpoint: dict[str, Any], actor: SplitModel) -> None:
    """Leave the weights of the model folder out of a checkpoint."""
    if actor.lora is not None:
        checkpoint["state_dict"] = {n: t for n, t in checkpoint["state_dict"].items() if is_adapter(n)}


@contextmanager
def adapters_alone(actor: SplitModel) -> Iterator[None]:
    """As `keep_adapters_alone`, for who asks the modules themselves: a scope in which they give no other weights."""

    def leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in [n for n in state if n.startswith(prefix) and not is_adapter(n.removeprefix(prefix))]:
            del state[name]

    handle = actor.hf.register_state_dict_post_hook(leave_out) if actor.lora is not None else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def with_base_weights(state: Mapping[str, Any], actor: SplitModel) -> dict[str, Any]:
    """Undo of `keep_adapters_alone`, for a load that asks for every name. Adapters that are not trained are what they
    were made as; a checkpoint may lack them."""
    if actor.lora is None:
        return dict(state)
    trained = {n for n, p in actor.hf.named_parameters() if p.requires_grad}
    return {PREFIX + n: t for n, t in actor.hf.state_dict().items() if n not in trained} | dict(state)


def add_base_weights(checkpoint: dict[str, Any], actor: SplitModel) -> None:
    """Into a checkpoint that holds weights; those of shards are loaded by who wrote them."""
    if "state_dict" in checkpoint:
        checkpoint["state_dict"] = with_base_weights(checkpoint["state_dict"], actor)
