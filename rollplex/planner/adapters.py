"""Sizes of a model's adapters (LoRA), counted on the meta device: no weight is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def adapter_sizes(folder: str, settings: Mapping[str, Any], freeze: Collection[str]) -> dict[str, Any]:
    """RunSettings' lora_sizes, lora_trained and lora_merged for a model folder. Raises ValueError without one."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    from rollplex.models import lora
    from rollplex.models.registry import split

    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"a plan with lora needs the model's folder, and model={folder!r} has no config.json")
    with torch.device("meta"):
        hf = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
        lora.add_adapters(hf, lora.lora_config(settings))
    split(hf).freeze(list(freeze))  # type: ignore[arg-type]
    own = [p for name, p in hf.named_parameters() if lora.is_adapter(name)]
    return {
        "lora_sizes": tuple(p.numel() for p in own),
        "lora_trained": tuple(p.numel() for p in own if p.requires_grad),
        "lora_merged": sum(layer.base_layer.weight.numel() for _, layer in lora.adapted(hf)),
    }  # fmt: skip
