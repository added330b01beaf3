"""Sizes of the models that the planner knows, or reads from a transformers config.

Shape legend: H hidden size, L layers, F feed-forward size, V vocabulary, h query heads, k key/value heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


QWEN3: dict[str, Any] = dict(qkv_bias=False, qk_norm=True)
MODELS: dict[str, ModelShape] = {
    m.name: m
    for m in (
        _shape("Qwen2.5-VL-3B", (2048, 36, 11008, 16, 2, 151936), 668_684_288, tied=True),
        _shape("Qwen2.5-VL-7B", (3584, 28, 18944, 28, 4, 152064), 676_550_144),
        _shape("Qwen2.5-VL-32B", (5120, 64, 27648, 40, 8, 152064), 688_841_984),
        _shape("Qwen2.5-VL-72B", (8192, 80, 29568, 64, 8, 152064), 704_573_696),
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

    config: Any = AutoConfig.from_pretrained(path)
    text = getattr(config, "text_config", config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    language = {id(p) for p in model.model.language_model.parameters()} | {id(p) for p in model.lm_head.parameters()}
    heads = text.num_attention_heads
    names = [name for name, _ in model.named_parameters()]
    return ModelShape(
        Path(path).name, text.hidden_size, text.num_hidden_layers, text.intermediate_size, heads,
        text.num_key_value_heads, text.vocab_size,
        vision_params=sum(p.numel() for p in model.parameters() if id(p) not in language),
        tied=bool(config.tie_word_embeddings), head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        qkv_bias=any(n.endswith("q_proj.bias") for n in names), qk_norm=any(n.endswith("q_norm.weight") for n in names),
    )  # fmt: skip
