"""How each family is made small: transformers' config, model class and processor of the settings of `models.tiny`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex.models.byte_tokenizer import (
    CHAT_TEMPLATE,
    INTERNVL,
    INTERNVL_CHAT_TEMPLATE,
    LLAVA_CHAT_TEMPLATE,
    LLAVA_ONEVISION,
    QWEN3_CHAT_TEMPLATE,
    TOKEN_IDS,
    VOCAB_SIZE,
    byte_tokenizer,
)

if TYPE_CHECKING:
    from rollplex.models.tiny import TinySettings

PATCH, MERGE, TEMPORAL_PATCH = 14, 2, 2
QWEN3_PATCH = 16
TILE = 56
"""Side in pixels of the tiles that LLaVA-OneVision and InternVL cut pictures into."""

LLAVA_GRIDS = [[TILE * h, TILE * w] for h in (1, 2) for w in (1, 2)] + [[4 * TILE, 4 * TILE]]
LLAVA_ASPECT = "anyres_max_9"
"""As published: features of the largest grid, 16 tiles, are scaled down to 9."""

MOST_TILES = 4
"""Of an InternVL picture, besides the small whole one."""


@dataclass(frozen=True)
class Family:
    """How one family is made small."""

    config: Callable[[TinySettings], Any]
    """The transformers config of the settings."""

    model_class: Callable[[], type[Any]]
    processor: Callable[[TinySettings], Any]


def _transformers(name: str) -> Callable[[], Any]:
    """A class of transformers, imported when it is asked for."""

    def get() -> Any:
        import transformers

        return getattr(transformers, name)

    return get


def _text(settings: TinySettings, rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "attention_dropout": settings.attention_dropout,
        "tie_word_embeddings": settings.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": TOKEN_IDS["<|im_end|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0} | rope,
    }


def _qwen_tokens(settings: TinySettings) -> dict[str, Any]:
    return {
        "image_token_id": TOKEN_IDS["<|image_pad|>"],
        "video_token_id": TOKEN_IDS["<|video_pad|>"],
        "vision_start_token_id": TOKEN_IDS["<|vision_start|>"],
        "vision_end_token_id": TOKEN_IDS["<|vision_end|>"],
        "tie_word_embeddings": settings.tie_word_embeddings,
    }


def _qwen_tower(settings: TinySettings, patch: int) -> dict[str, Any]:
    """The vision config of Qwen2.5-VL and Qwen3-VL, as far as they are alike."""
    return {
        "depth": settings.vision_depth,
        "hidden_size": settings.vision_hidden,
        "intermediate_size": settings.vision_intermediate,
        "num_heads": settings.vision_heads,
        "out_hidden_size": settings.hidden_size,
        "patch_size": patch,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
    }


def _mrope_section(settings: TinySettings) -> list[int]:
    """Frequencies given to time, height and width; they sum to half of the head size."""
    half = settings.hidden_size // settings.heads // 2
    time = half // 4
    height = (half - time) // 2
    return [time, height, half - time - height]


# ---- Qwen2-VL, Qwen2.5-VL, Qwen3-VL ----------------------------------------------------------------------------------


def _qwen2_vl_config(settings: TinySettings) -> Any:
    from transformers import Qwen2VLConfig

    ratio, rest = divmod(settings.vision_intermediate, settings.vision_hidden)
    if rest:
        raise ValueError(
            f"vision_intermediate={settings.vision_intermediate} must be a multiple of "
            f"vision_hidden={settings.vision_hidden} for family=qwen2_vl"
        )
    return Qwen2VLConfig(
        text_config=_text(settings, {"mrope_section": _mrope_section(settings)}),
        vision_config={
            "depth": settings.vision_depth,
            "embed_dim": settings.vision_hidden,
            "hidden_size": settings.hidden_size,
            "mlp_ratio": ratio,
            "num_heads": settings.vision_heads,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": TEMPORAL_PATCH,
        },
        **_qwen_tokens(settings),
    )


def _qwen2_5_vl_config(settings: TinySettings) -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config=_text(settings, {"mrope_section": _mrope_section(settings)}),
        vision_config=_qwen_tower(settings, PATCH)
        | {"tokens_per_second": 2, "window_size": 112, "fullatt_block_indexes": [settings.vision_depth - 1]},
        **_qwen_tokens(settings),
    )


def _qwen3_vl_config(settings: TinySettings) -> Any:
    from transformers import Qwen3VLConfig

    third = settings.hidden_size // settings.heads // 2 // 3  # interleaved: time has what is left
    half = settings.hidden_size // settings.heads // 2
    text = _text(settings, {"mrope_section": [half - 2 * third, third, third], "mrope_interleaved": True})
    return Qwen3VLConfig(
        text_config=text | {"head_dim": settings.hidden_size // settings.heads},
        vision_config=_qwen_tower(settings, QWEN3_PATCH)
        | {
            "num_position_embeddings": 64,
            # What is added behind the last layer would reach no later token.
            "deepstack_visual_indexes": list(range(min(settings.vision_depth, settings.layers - 1))),
        },
        **_qwen_tokens(settings),
    )


def _qwen_processor(name: str, video: str, patch: int) -> Callable[[TinySettings], Any]:
    def make(settings: TinySettings) -> Any:
        import transformers

        size = {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels}
        shape = {"patch_size": patch, "merge_size": MERGE, "temporal_patch_size": TEMPORAL_PATCH}
        return getattr(transformers, name)(
            image_processor=transformers.Qwen2VLImageProcessor(size=size, **shape),
            # cap_pixels_per_frame: set, because its default is announced to change.
            video_processor=getattr(transformers, video)(size=size, cap_pixels_per_frame=False, **shape),
            tokenizer=byte_tokenizer(),
            chat_template=CHAT_TEMPLATE if patch == PATCH else QWEN3_CHAT_TEMPLATE,
        )

    return make


# ---- LLaVA-OneVision and InternVL ------------------------------------------------------------------------------------


def _tile_tower(settings: TinySettings) -> dict[str, Any]:
    return {
        "hidden_size": settings.vision_hidden,
        "intermediate_size": settings.vision_intermediate,
        "num_hidden_layers": settings.vision_depth,
        "num_attention_heads": settings.vision_heads,
    }


def _llava_onevision_config(settings: TinySettings) -> Any:
    from transformers import LlavaOnevisionConfig

    return LlavaOnevisionConfig(
        text_config=_text(settings, {}) | {"model_type": "qwen2"},
        vision_config=_tile_tower(settings)
        | {"model_type": "siglip_vision_model", "image_size": TILE, "patch_size": PATCH, "vision_use_head": False},
        image_token_index=TOKEN_IDS["<|image_pad|>"],
        video_token_index=TOKEN_IDS["<|video_pad|>"],
        image_grid_pinpoints=LLAVA_GRIDS,
        vision_aspect_ratio=LLAVA_ASPECT,
        tie_word_embeddings=settings.tie_word_embeddings,
    )


def _llava_onevision_processor(settings: TinySettings) -> Any:
    from transformers import LlavaOnevisionImageProcessor, LlavaOnevisionProcessor, LlavaOnevisionVideoProcessor

    size = {"height": TILE, "width": TILE}
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=LLAVA_GRIDS),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=byte_tokenizer(LLAVA_ONEVISION),
        num_image_tokens=(TILE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=LLAVA_ASPECT,
        chat_template=LLAVA_CHAT_TEMPLATE,
    )


def _internvl_config(settings: TinySettings) -> Any:
    from transformers import InternVLConfig

    return InternVLConfig(
        text_config=_text(settings, {}) | {"model_type": "qwen2"},
        vision_config=_tile_tower(settings)
        | {"attention_bias": True, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]},
        image_token_id=TOKEN_IDS["<|image_pad|>"],
        image_seq_length=(TILE // PATCH // 2) ** 2,
        tie_word_embeddings=settings.tie_word_embeddings,
    )


def _internvl_processor(settings: TinySettings) -> Any:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor, InternVLVideoProcessor

    size = {"height": TILE, "width": TILE}
    attributes = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    return InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=MOST_TILES),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=byte_tokenizer(INTERNVL, attributes),
        image_seq_length=(TILE // PATCH // 2) ** 2,
        chat_template=INTERNVL_CHAT_TEMPLATE,
    )


FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        _qwen2_vl_config, _transformers("Qwen2VLForConditionalGeneration"),
        _qwen_processor("Qwen2VLProcessor", "Qwen2VLVideoProcessor", PATCH),
    ),
    "qwen2_5_vl": Family(
        _qwen2_5_vl_config, _transformers("Qwen2_5_VLForConditionalGeneration"),
        _qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", PATCH),
    ),
    "qwen3_vl": Family(
        _qwen3_vl_config, _transformers("Qwen3VLForConditionalGeneration"),
        _qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", QWEN3_PATCH),
    ),
    "llava_onevision": Family(
        _llava_onevision_config, _transformers("LlavaOnevisionForConditionalGeneration"), _llava_onevision_processor
    ),
    "internvl": Family(_internvl_config, _transformers("InternVLForConditionalGeneration"), _internvl_processor),
}  # fmt: skip
