"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft, inside the transformers model: y = W x + (alpha / r) B A x.

Trainer and embedded engine run the adapter layers themselves, on the same tensors, so what they compute is the same to
the bit, and an update is seen without merging anything. The reference model is a module tree over the same W without
adapters: it has no weights of its own. vLLM gets W + (alpha / r) B A for the adapted layers and W for the others.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rollplex.models.lora_settings import as_list, check_lora, check_matches, check_ranks

ADAPTER = "default"
"""peft's name of the one adapter."""

LANGUAGE_LINEARS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Where nothing else is said: every linear layer of the language model but the output head."""


def lora_config(settings: Mapping[str, Any]) -> Any:
    """peft's LoraConfig."""
    check_lora(settings)
    try:
        from peft import LoraConfig
    except ImportError:
        raise ImportError('lora needs peft: install "rollplex[lora]", or take the setting out') from None
    targets = settings.get("target_modules") or LANGUAGE_LINEARS
    return LoraConfig(**(dict(settings) | {"target_modules": targets}))


def add_adapters(hf: Any, config: Any, seed: int | None = None) -> None:
    """Put adapters into a transformers model, in place; only they are trained then.

    config: of `lora_config`. seed: of their initial weights, which are the same on every rank and in every run; None
    leaves torch's generator to it.
    """
    from peft import inject_adapter_in_model

    check_ranks(config, hf.modules())  # before memory is taken for them
    modules, asked = [name for name, _ in hf.named_modules()], dict(vars(config))  # peft may change the config
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, hf, adapter_name=ADAPTER)
        except ValueError as error:
            raise ValueError(f"lora: target_modules={_shown(asked)} do not fit this model: {error}") from error
    wrong = [name for name, layer in adapted(hf) if type(layer.base_layer) is not nn.Linear]
    head = hf.get_output_embeddings()
    wrong += [name for name, layer in adapted(hf) if layer is head]
    if wrong:
        raise ValueError(
            f"lora: target_modules={_shown(asked)} takes in {', '.join(wrong[:5])}: only linear layers other "
            "than the output head can have adapters. Name fewer, or set exclude_modules"
        )
    check_matches(asked, modules, [name for name, _ in adapted(hf)])
    check_ranks(config, (layer.base_layer for _, layer in adapted(hf)))


def _shown(asked: Mapping[str, Any]) -> str:
    """target_modules as set: peft keeps a list as a set, in any order."""
    targets = asked["target_modules"]
    return repr(targets if isinstance(targets, str) else sorted(as_list(targets)))


def config_of(hf: Any) -> Any | None:
    """The LoraConfig of a model with adapters, else None."""
    return getattr(hf, "peft_config", {}).get(ADAPTER)


def adapted(hf: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of every layer with an adapter."""
    for name, module in hf.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def is_adapter(name: str) -> bool:
    """Whether a parameter's (or module's) name is inside an adapter."""
    return any(part.startswith("lora_") for part in name.split("."))


def plain_name(name: str) -> str:
    """The name that a weight has in a model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def merged(layer: Any) -> Tensor:
    """W + (alpha / r) B A of an adapted layer, in storage of its own."""
    return layer.base_layer.weight.detach() + layer.get_delta_weight(ADAPTER).detach()


def whole_weights(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as of a model without adapters, tied ones once: the model's own tensors, merged ones where there
    is an adapter, made one at a time."""
    layers = {f"{name}.base_layer.weight": layer for name, layer in adapted(hf)}
    for name, parameter in hf.named_parameters():
        if not is_adapter(name):
            yield plain_name(name), merged(layers[name]) if name in layers else parameter.detach()


class MergedWeights:
    """Merged weights that stay at their addresses: for an engine that computes with the trainer's tensors, and with
    these where there is an adapter."""

    def __init__(self, hf: nn.Module) -> None:
        self._layers = {f"{plain_name(name)}.weight": layer for name, layer in adapted(hf)}
        self.tensors = {name: merged(layer) for name, layer in self._layers.items()}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @torch.no_grad()
    def refresh(self) -> int:
        """Take over the present weights; returns the bytes written."""
        for name, own in self.tensors.items():
            layer: Any = self._layers[name]
            own.copy_(layer.get_delta_weight(ADAPTER)).add_(layer.base_layer.weight)
        return self.nbytes


def adapter_state(hf: nn.Module) -> dict[str, Tensor]:
    """The adapters under the names of peft's adapter_model.safetensors."""
    return {
        "base_model.model." + name.replace(f".{ADAPTER}.", "."): parameter.detach().cpu().contiguous()
        for name, parameter in hf.named_parameters()
        if is_adapter(name)
    }


def save_adapter(hf: Any, folder: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, for `PeftModel.from_pretrained(base, folder)`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config: Any = copy.deepcopy(config_of(hf))
    config.inference_mode, config.base_model_name_or_path = True, hf.config._name_or_path or None
    config.save_pretrained(folder)
    save_file(adapter_state(hf), folder / "adapter_model.safetensors", metadata={"format": "pt"})
