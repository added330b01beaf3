"""Whether a folder's processor makes prompts for the folder's model: class, tokens, and every size that both know.

Wrong ones mostly run: a patch of another size, or a placeholder of another number, shows as an error in the middle of
a step, or as pictures that the model sees otherwise than it was trained to. So all is compared when the processor is
read, before any weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.image_utils import SizeDict


@dataclass(frozen=True)
class Agreement:
    """A size that processor and model must have in common."""

    what: str
    processor: str
    """Path of attributes of the processor."""

    config: str
    """Path of attributes of the model's config; what `wanted` is computed of where that is set."""

    wanted: Callable[[Any], Any] | None = None
    """Of the config; None takes what lies at `config`."""


def _patches(config: Any) -> int:
    """Patches of a tile along both sides."""
    vision = config.vision_config
    return (_side(vision.image_size) // _side(vision.patch_size)) ** 2


def _tile_tokens(config: Any) -> int:
    """Tokens of an InternVL tile, whose patches are joined along both sides."""
    return round(_patches(config) * config.downsample_ratio**2)


def _tile(config: Any) -> dict[str, int]:
    side = _side(config.vision_config.image_size)
    return {"height": side, "width": side}


def _side(size: Any) -> int:
    return size[0] if isinstance(size, list | tuple) else size


def _grids(kind: str) -> list[Agreement]:
    """Of processors that give pixels by patches."""
    names = {
        "patch_size": "patch_size", "merge_size": "spatial_merge_size", "temporal_patch_size": "temporal_patch_size",
    }  # fmt: skip
    return [Agreement(name, f"{kind}_processor.{name}", f"vision_config.{theirs}") for name, theirs in names.items()]


TOKENS = [Agreement(f"{kind} placeholder", f"{kind}_token_id", f"{kind}_token_id") for kind in ("image", "video")]
TILE = Agreement("size of a tile", "image_processor.size", "vision_config.image_size", _tile)
"""Frames of videos are compared row by row (`check_tiles`): a checkpoint may be right for pictures alone."""
QWEN = [*TOKENS, *_grids("image"), *_grids("video")]
AGREEMENTS: Mapping[str, list[Agreement]] = {
    "qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN,
    "llava_onevision": [
        *TOKENS, TILE,
        Agreement("tokens of a tile", "num_image_tokens", "vision_config.image_size and patch_size", _patches),
        Agreement("grids of tiles", "image_processor.image_grid_pinpoints", "image_grid_pinpoints"),
        Agreement("most tiles of a picture", "vision_aspect_ratio", "vision_aspect_ratio"),
        Agreement("choice of patches", "vision_feature_select_strategy", "vision_feature_select_strategy"),
    ],
    "internvl": [
        TOKENS[0], TILE,
        Agreement("tokens of a tile", "image_seq_length", "vision_config and downsample_ratio", _tile_tokens),
    ],
}  # fmt: skip
"""config.model_type -> what must agree."""


def check_processor(processor: Any, config: Any, path: str) -> None:
    """ValueError, with all that is wrong, unless `processor` goes with the model of `config`, both of folder `path`.

    Families that are not in `AGREEMENTS` are not checked.
    """
    if config.model_type not in AGREEMENTS:
        return
    faults = list(_faults(processor, config))
    if faults:
        raise ValueError(
            f"model={path!r}: its processor is not that of its model (model_type={config.model_type}): "
            f"{'; '.join(faults)}. Put the files of the checkpoint's own processor and tokenizer back into the folder"
        )


def _faults(processor: Any, config: Any) -> Iterator[str]:
    wanted = processor_name(config.model_type)
    if all(parent.__name__ != wanted for parent in type(processor).__mro__):
        yield f"it is a {type(processor).__name__}, and the model needs a {wanted}"
        return  # all else follows from it
    yield from _token_faults(processor, config)
    for a in AGREEMENTS[config.model_type]:
        ours = _plain(_at(processor, a.processor))
        theirs = _plain(a.wanted(config) if a.wanted is not None else _at(config, a.config))
        if ours != theirs:
            yield f"{a.what}: {a.processor}={ours} of the processor, {theirs} by the config's {a.config}"


def _token_faults(processor: Any, config: Any) -> Iterator[str]:
    known = processor.tokenizer.get_vocab()
    for kind in ("image", "video"):
        token = getattr(processor, f"{kind}_token", None)
        if hasattr(config, f"{kind}_token_id") and token not in known:
            yield f"the tokenizer has no {kind} placeholder {token!r}"
    rows, last = config.get_text_config().vocab_size, max(known.values())
    if last >= rows:
        yield f"the tokenizer's last token is {last}, and the model has embeddings for {rows}"
    if processor.tokenizer.eos_token_id is None:
        yield "the tokenizer has no eos_token, so no response would end"


def processor_name(model_type: str) -> str:
    """The class that transformers takes for a model."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


def _at(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _plain(value: Any) -> Any:
    """Without what differs in form alone: tuples for lists, transformers' SizeDict for a mapping."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return dict(value) if isinstance(value, SizeDict) else value
