"""What settings of LoRA must be: of the right kind before anything is loaded, and fit for the model when it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from rollplex.kinds import check_flag, check_whole

SETTINGS = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "init_lora_weights", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern",
)  # fmt: skip
"""What of peft's LoraConfig may be set. Others would train whole weights besides, change W, or draw dropout masks that
rollout and update do not share."""

INITS = (True, False, "gaussian")
"""Ways of initialising that leave W as it is."""


def check_lora(settings: Any) -> None:
    """ValueError for settings that cannot be used, before anything is loaded."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"lora={settings!r} must be null or a mapping of {', '.join(SETTINGS)}")
    unknown = sorted(map(str, set(settings) - set(SETTINGS)))
    if unknown:
        raise ValueError(f"lora has {', '.join(unknown)}, which cannot be set; it takes {', '.join(SETTINGS)}")
    for name in ("r", "lora_alpha"):
        check_whole(f"lora: {name}", settings.get(name, 1))
    check_flag("lora: use_rslora", settings.get("use_rslora", False))
    init = settings.get("init_lora_weights", True)
    if not any(init is known or (init == known and isinstance(init, str)) for known in INITS):
        raise ValueError(
            f"lora: init_lora_weights={init!r} is not supported: the reference is the model with its adapters off, so "
            f"W must stay what it was; set one of {', '.join(map(str, INITS))}"
        )
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        _check_names(name, settings.get(name))
    _check_layers(settings)
    for name in ("rank_pattern", "alpha_pattern"):
        _check_pattern(name, settings.get(name))


def _check_names(name: str, value: Any) -> None:
    """None, one pattern, or a list of names."""
    listed = isinstance(value, list | tuple) and len(value) > 0 and all(v and isinstance(v, str) for v in value)
    if value is None or listed:
        return
    if not isinstance(value, str) or not value:
        raise ValueError(f"lora: {name}={value!r} must be a list of names, or one regular expression of whole names")
    _compiles(name, value)


def _compiles(name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"lora: {name} has {pattern!r}, which is no regular expression: {error}") from error


def _check_layers(settings: Mapping[str, Any]) -> None:
    layers = settings.get("layers_to_transform")
    if layers is None:
        if settings.get("layers_pattern") is not None:
            raise ValueError("lora: layers_pattern has no effect without layers_to_transform; set that too")
        return
    listed = layers if isinstance(layers, list | tuple) else [layers]
    if not listed or not all(type(n) is int and n >= 0 for n in listed):
        raise ValueError(f"lora: layers_to_transform={layers!r} must be a layer's number, from 0, or a list of them")
    for pattern in as_list(settings.get("layers_pattern")):
        _compiles("layers_pattern", pattern)
    if not isinstance(settings.get("target_modules"), list | tuple):
        raise ValueError(
            f"lora: layers_to_transform={layers!r} goes with target_modules as a list of names only, e.g. [q_proj, "
            "v_proj]: set one; a regular expression can name the layers itself"
        )


def _check_pattern(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise ValueError(f"lora: {name}={value!r} must be a mapping of names or regular expressions to whole numbers")
    for key, number in value.items():
        if not key or not isinstance(key, str):
            raise ValueError(f"lora: {name} has {key!r}, which must be a module's name or a regular expression")
        _compiles(name, key)
        check_whole(f"lora: {name}: {key}", number)


def as_list(value: Any) -> list[Any]:
    """[] for None, itself for a list, else a list of one."""
    if value is None:
        return []
    return list(value) if isinstance(value, Collection) and not isinstance(value, str) else [value]


def check_ranks(config: Any, layers: Iterable[nn.Module]) -> None:
    """ValueError for a rank above min(in, out) of every one of these layers: B A can have no more."""
    most = max((min(layer.in_features, layer.out_features) for layer in layers if type(layer) is nn.Linear), default=0)
    for name, rank in (("r", config.r), *(("rank_pattern: " + k, v) for k, v in (config.rank_pattern or {}).items())):
        if most and rank > most:
            raise ValueError(
                f"lora: {name}={rank} is more than {most}, the largest rank that the weights to be adapted can have: "
                "lower it"
            )


def check_matches(asked: Mapping[str, Any], modules: Collection[str], adapted: Collection[str]) -> None:
    """ValueError for a name, pattern or layer in the settings that the model has nothing for.

    Args:
        asked: `target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern`, `rank_pattern`,
            `alpha_pattern`, as they were set.
        modules: names of all modules.
        adapted: of those with an adapter.
    """
    for name, among in (("target_modules", adapted), ("exclude_modules", modules)):
        value = asked[name]
        listed = not isinstance(value, str)
        _said(name, [v for v in as_list(value) if not any(_is(v, n, listed) for n in among)], among is adapted)
    for name in ("rank_pattern", "alpha_pattern"):
        keys = asked[name] or {}
        _said(name, [k for k in keys if not any(re.match(rf"(.*\.)?({k})$", n) for n in adapted)], True)
    patterns = as_list(asked["layers_pattern"]) or [r"[^.]*"]
    numbers = {int(m[1]) for n in adapted for p in patterns if (m := re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", n))}
    _said("layers_to_transform", [n for n in as_list(asked["layers_to_transform"]) if n not in numbers], True)


def _is(wanted: str, name: str, listed: bool) -> bool:
    """Whether peft takes a module for one that is named."""
    if listed:
        return name == wanted or name.endswith("." + wanted)
    return wanted == "all-linear" or re.fullmatch(wanted, name) is not None


def _said(setting: str, unmatched: list[Any], adapted: bool) -> None:
    if unmatched:
        where = "among the layers with adapters" if adapted else "in this model"
        raise ValueError(
            f"lora: {setting} has {', '.join(map(str, sorted(unmatched)))}, which matches nothing {where}: correct it, "
            "or take it out"
        )
