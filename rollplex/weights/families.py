"""Which engine tensor is made of which trainer tensors, one table per model family.

Names are vLLM's on the engine's side and transformers' on the trainer's, without the last part (weight or bias); `*`
stands for a number. A table says how a tensor is split over tensor-parallel ranks, never how large it is: sizes come
from the trainer's own tensors and from the head counts of its config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["replicated", "column", "row", "vocab", "fused", "qkv", "vision_qkv", "packed_qkv"]
"""How a module is split.

replicated: every rank holds all of it.
column: rows of the weight (its outputs) and of the bias, evenly.
row: columns of the weight (its inputs), evenly; the bias is replicated.
vocab: rows of the vocabulary, padded to a multiple of `VOCAB_MULTIPLE`.
fused: several column modules, each split, then concatenated.
qkv: queries by query heads, keys and values by KV heads (one head on several ranks when there are more ranks than
    KV heads), then concatenated.
vision_qkv: as qkv, of a tower, which has as many KV heads as query heads.
packed_qkv: one trainer tensor [q; k; v] of equal thirds, each split by heads.
"""

Part = Literal["language", "vision"]

VOCAB_MULTIPLE = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE."""


@dataclass(frozen=True)
class Rule:
    """One line of a table: an engine module and the trainer modules it is made of, in the engine's order."""

    kind: Kind
    engine: str
    sources: tuple[str, ...]
    part: Part
    trainer_kind: Kind | None = None
    """How a tensor-parallel trainer splits its tensors, where that is not the engine's way."""

    def names(self, numbers: Sequence[str], leaf: str) -> tuple[str, ...]:
        """Of tensors: the engine's, then the trainer's; `numbers` stand for the `*`."""
        return tuple(".".join(filter(None, (_filled(text, numbers), leaf))) for text in (self.engine, *self.sources))

    @property
    def group(self) -> str:
        """Name of the engine's module alone, as options use it: qkv_proj, gate_up_proj, ..."""
        return self.engine.rpartition(".")[2]


@dataclass(frozen=True)
class Heads:
    """Head counts that shapes alone do not tell."""

    query: int
    kv: int
    vision: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """From a transformers config of a vision-language model."""
        text, vision = config.text_config, config.vision_config
        of_tower = getattr(vision, "num_heads", None) or vision.num_attention_heads
        return cls(text.num_attention_heads, text.num_key_value_heads, of_tower)


def _language(names: str, kind: Kind, prefix: str = "layers.*.") -> list[Rule]:
    """Rules of language modules whose name is the same on both sides."""
    return [
        Rule(kind, f"language_model.model.{prefix}{name}", (f"model.language_model.{prefix}{name}",), "language")
        for name in names.split()
    ]


def _language_fused(engine: str, sources: str, kind: Kind) -> Rule:
    names = tuple(f"model.language_model.layers.*.{source}" for source in sources.split())
    return Rule(kind, f"language_model.model.layers.*.{engine}", names, "language")


def _vision(names: str, kind: Kind, trainer_kind: Kind | None = None) -> list[Rule]:
    """Rules of vision modules whose name is the same on both sides."""
    return [Rule(kind, f"visual.{name}", (f"model.visual.{name}",), "vision", trainer_kind) for name in names.split()]


def _tower(names: str, kind: Kind, tower: str = "vision_tower.") -> list[Rule]:
    """Rules of vision modules of families whose tower and projector lie beside each other. tower: where the engine has
    it; the projector's names are whole."""
    found = []
    for name in names.split():
        engine, source = (name, name) if name.startswith(PROJECTOR) else (tower + name, f"vision_tower.{name}")
        found.append(Rule(kind, engine.rstrip("."), (f"model.{source}".rstrip("."),), "vision"))
    return found


PROJECTOR = "multi_modal_projector."
TRAINER_TOWERS = ("model.visual.", "model.vision_tower.", f"model.{PROJECTOR}", "model.image_newline")
"""How names of the trainer's begin that an engine without tower has no use for."""

QWEN2_LANGUAGE = [
    *_language("embed_tokens", "vocab", prefix=""),
    *_language("norm", "replicated", prefix=""),
    *_language("input_layernorm post_attention_layernorm", "replicated"),
    *_language("self_attn.o_proj mlp.down_proj", "row"),
    _language_fused("self_attn.qkv_proj", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "qkv"),
    _language_fused("mlp.gate_up_proj", "mlp.gate_proj mlp.up_proj", "fused"),
    Rule("vocab", "language_model.lm_head", ("lm_head",), "language"),
]

QWEN2_VL = [
    *QWEN2_LANGUAGE,
    *_vision("patch_embed.proj blocks.*.norm1 blocks.*.norm2 merger.ln_q", "replicated"),
    # vLLM splits this one as a plain column module and gathers before attention: a rank's rows are not its heads'.
    *_vision("blocks.*.attn.qkv", "column", trainer_kind="packed_qkv"),
    *_vision("blocks.*.mlp.fc1 merger.mlp.0", "column"),
    *_vision("blocks.*.attn.proj blocks.*.mlp.fc2 merger.mlp.2", "row"),
]

QWEN2_5_VL = [
    *QWEN2_LANGUAGE,
    *_vision("patch_embed.proj blocks.*.norm1 blocks.*.norm2 merger.ln_q", "replicated"),
    *_vision("blocks.*.attn.qkv", "packed_qkv"),
    Rule(
        "fused",
        "visual.blocks.*.mlp.gate_up_proj",
        ("model.visual.blocks.*.mlp.gate_proj", "model.visual.blocks.*.mlp.up_proj"),
        "vision",
    ),
    *_vision("merger.mlp.0", "column"),
    *_vision("blocks.*.attn.proj blocks.*.mlp.down_proj merger.mlp.2", "row"),
]

QWEN3_VL = [
    *QWEN2_LANGUAGE,
    *_language("self_attn.q_norm self_attn.k_norm", "replicated"),
    *_vision("patch_embed.proj pos_embed blocks.*.norm1 blocks.*.norm2", "replicated"),
    *_vision("merger.norm deepstack_merger_list.*.norm", "replicated"),
    *_vision("blocks.*.attn.qkv", "packed_qkv"),
    *_vision("blocks.*.mlp.linear_fc1 merger.linear_fc1 deepstack_merger_list.*.linear_fc1", "column"),
    *_vision("blocks.*.mlp.linear_fc2 merger.linear_fc2 deepstack_merger_list.*.linear_fc2", "row"),
    *_vision("blocks.*.attn.proj", "row"),
]

TEXT_MODELS = [*QWEN2_LANGUAGE, *_language("self_attn.q_norm self_attn.k_norm", "replicated")]
"""Of qwen2, qwen3 and llama, each of which lacks some of the names."""

SIGLIP = "vision_tower.vision_model."
LLAVA_ONEVISION = [
    *TEXT_MODELS,
    Rule("replicated", "", ("model",), "vision"),  # image_newline
    *_tower("embeddings.patch_embedding embeddings.position_embedding", "replicated", SIGLIP),
    *_tower("encoder.layers.*.layer_norm1 encoder.layers.*.layer_norm2", "replicated", SIGLIP),
    Rule(
        "vision_qkv",
        f"{SIGLIP}encoder.layers.*.self_attn.qkv_proj",
        tuple(f"model.vision_tower.encoder.layers.*.self_attn.{name}_proj" for name in "qkv"),
        "vision",
    ),
    *_tower("encoder.layers.*.mlp.fc1", "column", SIGLIP),
    *_tower("encoder.layers.*.mlp.fc2 encoder.layers.*.self_attn.out_proj", "row", SIGLIP),
    *_tower(f"{PROJECTOR}linear_1 {PROJECTOR}linear_2", "replicated"),
]

INTERNVL = [
    *TEXT_MODELS,
    # vLLM keeps the attention of this tower whole on each rank, and splits the rest.
    *_tower("embeddings embeddings.patch_embeddings.projection encoder.layer.* layernorm", "replicated"),
    *_tower("encoder.layer.*.layernorm_before encoder.layer.*.layernorm_after", "replicated"),
    *_tower("encoder.layer.*.attention.q_proj encoder.layer.*.attention.k_proj", "replicated"),
    *_tower("encoder.layer.*.attention.v_proj encoder.layer.*.attention.projection_layer", "replicated"),
    *_tower("encoder.layer.*.attention.q_norm encoder.layer.*.attention.k_norm", "replicated"),
    *_tower("encoder.layer.*.mlp.fc1", "column"),
    *_tower("encoder.layer.*.mlp.fc2", "row"),
    *_tower(f"{PROJECTOR}layer_norm {PROJECTOR}linear_1 {PROJECTOR}linear_2", "replicated"),
]

TABLES: dict[str, list[Rule]] = {
    "qwen2_vl": QWEN2_VL, "qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL, "llava_onevision": LLAVA_ONEVISION,
    "internvl": INTERNVL,
}  # fmt: skip
"""transformers' config.model_type -> table."""

WHOLE_TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose tower vLLM can keep whole on each rank (mm_encoder_tp_mode=data)."""


def table_of(family: str) -> list[Rule]:
    if family not in TABLES:
        raise ValueError(f"no layout table for model_type={family!r}; there are {', '.join(TABLES)}")
    return TABLES[family]


@dataclass(frozen=True)
class Match:
    """A rule applied to names that exist."""

    rule: Rule
    engine: str
    sources: tuple[str, ...]


def match(table: Iterable[Rule], names: Iterable[str]) -> list[Match]:
    """The engine tensors that these trainer tensors make, in the trainer's order.

    Names that no rule speaks of are left out (`audit` reports them); a group with members missing is an error.
    """
    known = list(names)
    rules = [(re.compile(re.escape(rule.sources[0]).replace(r"\*", r"(\d+)")), rule) for rule in table]
    found = []
    for name in known:
        module, _, leaf = name.rpartition(".")
        for pattern, rule in rules:
            hit = pattern.fullmatch(module)
            if hit:
                engine, *sources = rule.names(hit.groups(), leaf)
                found.append(Match(rule, engine, tuple(sources)))
    missing = sorted({source for each in found for source in each.sources} - set(known))
    if missing:
        raise ValueError(f"the trainer lacks {', '.join(missing[:5])}, which its neighbours need to be fused")
    return found


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern
