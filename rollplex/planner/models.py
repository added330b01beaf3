"""Sizes of the models that the planner knows, or reads from a transformers config.

Shape legend: H hidden size, L layers, F feed-forward size, V vocabulary, h query heads, k key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class VisionShape:
    """A vision tower, as far as the bytes of its activations depend on it."""

    depth: int
    hidden: int
    ffn: int
    heads: int
    gated: bool
    """The feed-forward part multiplies two projections (three matrices instead of two)."""
    patches_per_token: int = 4
    patch_values: int = 3 * 2 * 14 * 14
    """Numbers in a patch: channels, frames, pixels."""
    deepstack: int = 0
    """Layers of the language model that it feeds besides the embeddings."""


@dataclass(frozen=True)
class ModelShape:
    """A vision-language model, as far as memory and time depend on it."""

    name: str
    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    vision_params: int
    """Of vision tower and projector."""
    tied: bool = False
    """Output head and embeddings are one tensor."""
    head_dim: int = 128
    qkv_bias: bool = True
    qk_norm: bool = False
    vision: VisionShape | None = None
    projector_params: int = 0
    """Of vision_params; 0 in the table, which has no more than their sum."""
    sizes: tuple[int, ...] = ()
    """Elements of each parameter in the optimizer's order; empty for models of the table, which are not built."""

    @property
    def qkv_params(self) -> int:
        """Of the fused query, key and value projections of all layers."""
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.layers * rows * (self.hidden + self.qkv_bias)

    @property
    def row_params(self) -> int:
        """Of the projections that tensor parallelism splits by input: o and down."""
        return self.layers * (self.heads * self.head_dim + self.ffn) * self.hidden

    @property
    def embedding_params(self) -> int:
        """Of embeddings and output head."""
        return (1 if self.tied else 2) * self.vocab * self.hidden

    @property
    def language_params(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden + self.qk_norm * 2 * self.layers * self.head_dim
        gate_up = 2 * self.layers * self.hidden * self.ffn
        return self.qkv_params + self.row_params + gate_up + norms + self.embedding_params

    @property
    def feature_width(self) -> int:
        """Numbers that the vision tower gives for one visual token."""
        return self.hidden * (1 + (self.vision.deepstack if self.vision is not None else 0))

    @property
    def params(self) -> int:
        return self.language_params + self.vision_params

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers, at 2 bytes each."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    def check_tp(self, name: str, degree: int) -> None:
        """ValueError when tensor parallelism of this degree cannot split the heads."""
        if degree < 1 or self.heads % degree or self.ffn % degree:
            fits = [t for t in range(1, self.heads + 1) if self.heads % t == 0 and self.ffn % t == 0]
            raise ValueError(
                f"{name}={degree} cannot split {self.name} with {self.heads} heads and ffn {self.ffn}; set one of "
                f"{', '.join(map(str, fits))}"
            )


def _shape(name: str, sizes: tuple[int, int, int, int, int, int], vision_params: int, **more: Any) -> ModelShape:
    """sizes: H, L, F, h, k, V."""
    hidden, layers, ffn, heads, kv_heads, vocab = sizes
    return ModelShape(name, hidden, layers, ffn, heads, kv_heads, vocab, vision_params, **more)


SMALL_TOWER = VisionShape(32, 1280, 3420, 16, gated=True)
LARGE_TOWER = VisionShape(32, 1280, 3456, 16, gated=True)
QWEN3: dict[str, Any] = dict(
    qkv_bias=False,
    qk_norm=True,
    vision=VisionShape(27, 1152, 4304, 16, gated=False, patch_values=3 * 2 * 16 * 16, deepstack=3),
)
MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        _shape("Qwen2.5-VL-3B", (2048, 36, 11008, 16, 2, 151936), 668_684_288, tied=True, vision=SMALL_TOWER),
        _shape("Qwen2.5-VL-7B", (3584, 28, 18944, 28, 4, 152064), 676_550_144, vision=SMALL_TOWER),
        _shape("Qwen2.5-VL-32B", (5120, 64, 27648, 40, 8, 152064), 688_841_984, vision=LARGE_TOWER),
        _shape("Qwen2.5-VL-72B", (8192, 80, 29568, 64, 8, 152064), 704_573_696, vision=LARGE_TOWER),
        _shape("Qwen3-VL-8B", (4096, 36, 12288, 32, 8, 151936), 576_388_336, **QWEN3),
        _shape("Qwen3-VL-32B", (5120, 64, 25600, 64, 8, 151936), 595_266_800, **QWEN3),
    )
}
"""Published configs; parameter counts of the 7B and 32B agree with the published totals."""


def model_shape(name: str) -> ModelShape:
    """Of a name in the table (with or without -Instruct and an organisation), or of a transformers folder."""
    short = name.rsplit("/", 1)[-1].removesuffix("-Instruct")
    if short in MODELS:
        return MODELS[short]
    if (Path(name) / "config.json").is_file():
        return _from_folder(name)
    raise ValueError(
        f"model={name!r} is neither a folder with a config.json nor in the planner's table: {', '.join(MODELS)}"
    )


def _from_folder(path: str) -> ModelShape:
    """Counts vision parameters on the meta device: no weight is read."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    try:
        config: Any = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
    except Exception as error:  # transformers' checks of a config raise many kinds
        raise ValueError(
            f"model={path!r}: transformers makes no vision-language model of its config.json "
            f"({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})"
        ) from error
    text = getattr(config, "text_config", config)
    language = {id(p) for p in model.model.language_model.parameters()} | {id(p) for p in model.lm_head.parameters()}
    heads = text.num_attention_heads
    names = [name for name, _ in model.named_parameters()]
    return ModelShape(
        Path(path).name, text.hidden_size, text.num_hidden_layers, text.intermediate_size, heads,
        text.num_key_value_heads, text.vocab_size,
        vision_params=sum(p.numel() for p in model.parameters() if id(p) not in language),
        tied=bool(config.tie_word_embeddings), head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        qkv_bias=any(n.endswith("q_proj.bias") for n in names), qk_norm=any(n.endswith("q_norm.weight") for n in names),
        projector_params=_projector_params(model),
        vision=_tower(config, names),
        sizes=tuple(p.numel() for wide in (True, False) for p in model.parameters() if (p.ndim >= 2) is wide),
    )  # fmt: skip


def _projector_params(model: Any) -> int:
    """As the family says; 0 for a family without passes, which no run trains."""
    from rollplex.models.registry import FAMILIES

    if model.config.model_type not in FAMILIES:
        return 0
    return sum(p.numel() for p in FAMILIES[model.config.model_type](model).part_parameters("projector"))


def _tower(config: Any, names: Sequence[str]) -> VisionShape | None:
    """None for a tower whose config has other names: the bytes of its activations are then not planned."""
    c = config.vision_config
    wide = getattr(c, "embed_dim", c.hidden_size)  # Qwen2-VL's hidden_size is the language model's
    ffn = getattr(c, "intermediate_size", None) or wide * getattr(c, "mlp_ratio", 0)
    depth: Any = getattr(c, "depth", None) or getattr(c, "num_hidden_layers", None)
    heads: Any = getattr(c, "num_heads", None) or getattr(c, "num_attention_heads", None)
    patch = c.patch_size[0] if isinstance(c.patch_size, list | tuple) else c.patch_size
    # Tiles of LLaVA-OneVision keep a token for each patch, InternVL's are shrunk along both sides.
    side = getattr(c, "spatial_merge_size", None) or round(1 / getattr(config, "downsample_ratio", 1.0))
    if not all(isinstance(x, int) and x for x in (depth, wide, ffn, heads, patch, side)):
        return None
    return VisionShape(
        depth, wide, ffn, heads, any("visual" in n and ".mlp.gate_proj" in n for n in names),
        patches_per_token=side**2, patch_values=3 * getattr(c, "temporal_patch_size", 1) * patch**2,
        deepstack=len(getattr(c, "deepstack_visual_indexes", None) or ()),
    )  # fmt: skip
