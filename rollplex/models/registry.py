"""From a transformers folder to a SplitModel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from rollplex.models.internvl import InternVL
from rollplex.models.llava_onevision import LlavaOnevision
from rollplex.models.processors import check_processor
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.qwen2_vl import Qwen2VL
from rollplex.models.qwen3_vl import Qwen3VL
from rollplex.models.split_model import SplitModel

FAMILIES: dict[str, type[SplitModel]] = {
    family.model_type: family for family in (Qwen2VL, Qwen2_5VL, Qwen3VL, LlavaOnevision, InternVL)
}
"""transformers' config.model_type -> the family's split passes."""

_CROSS = "its pictures enter by cross-attention layers, whose keys and values are no part of the prompt's"
_HYBRID = "it has linear-attention layers, whose state is no keys and values and is not handled"
_WINDOWS = "it attends in sliding windows, and to all of a picture at once"
_NOT_YET = "its passes split exactly, but no family file says where its parts are yet (docs/families.md)"
REFUSED = {
    "mllama": _CROSS, "qwen3_5": _HYBRID, "qwen3_5_moe": _HYBRID, "gemma3": _WINDOWS, "gemma3n": _WINDOWS,
    "gemma4": _WINDOWS,
    **dict.fromkeys(("qwen3_vl_moe", "glm4v", "glm4v_moe", "smolvlm", "idefics3"), _NOT_YET),
    **dict.fromkeys(("mistral3", "llava", "paligemma"), _NOT_YET),
}  # fmt: skip
"""model_type -> why there are no passes for it, where we know."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def family_of(model_type: str) -> type[SplitModel]:
    if model_type not in FAMILIES:
        reason = f": {REFUSED[model_type]}" if model_type in REFUSED else ""
        raise ValueError(
            f"model_type={model_type!r} has no exact prefix/suffix split in Rollplex{reason}; supported: "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def check_vllm(config: Any, tensor_parallel_size: int) -> None:
    """ValueError for what vLLM has no way to do with the model of this config."""
    family = family_of(config.model_type)
    refusal = family.engine_refusal(config)
    if refusal is not None:
        raise ValueError(
            f"vLLM does not compute what the config of model_type={family.model_type!r} says: {refusal}; use "
            "TorchEngine"
        )
    if tensor_parallel_size > 1 and not family.support.tensor_parallel:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} needs a layout table for model_type={family.model_type!r} "
            "(rollplex.weights.families), and there is none; set it to 1"
        )


def check_folder(path: str) -> None:
    """A readable message before anything slow, instead of a failed download."""
    if not (Path(path) / "config.json").is_file():
        raise ValueError(
            f"model={path!r} is not a folder with a transformers model (no config.json there). Give the folder that "
            "save_pretrained or a download wrote; a tiny one comes from `python -m rollplex.models.tiny --out DIR`"
        )


def load_hf(path: str, dtype: str) -> Any:
    """The transformers model on the CPU, in training mode."""
    check_folder(path)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; set one of {', '.join(DTYPES)}")
    family_of(AutoConfig.from_pretrained(path).model_type)
    return AutoModelForImageTextToText.from_pretrained(path, dtype=DTYPES[dtype]).train()


def load_processor(path: str) -> Any:
    """The folder's processor. ValueError where there is none, or not that of the folder's model."""
    check_folder(path)
    config: Any = AutoConfig.from_pretrained(path)
    try:
        processor = AutoProcessor.from_pretrained(path)
    except Exception as error:  # another family's tokenizer lacks attributes, a missing file is an OSError, ...
        raise ValueError(
            f"model={path!r}: transformers makes no processor of the files there ({type(error).__name__}: "
            f"{str(error).strip()[:300]}). Put the files of the checkpoint's own processor and tokenizer there"
        ) from error
    check_processor(processor, config, path)
    return processor


def split(hf: Any, **options: Any) -> SplitModel:
    """Wrap a transformers model in its family's passes."""
    return family_of(hf.config.model_type)(hf, **options)


def context_length(path: str) -> int:
    """Most tokens of a sequence (max_position_embeddings), from the folder's config alone."""
    check_folder(path)
    config = AutoConfig.from_pretrained(path)
    return int(getattr(config, "text_config", config).max_position_embeddings)


def family_table() -> str:
    """What runs of each family, as the Markdown table of docs/families.md."""
    head = ["`model_type`", "class in transformers", "embedded engine", "vLLM, weights copied", "vLLM, `SharedWeights`"]
    head += ["vLLM, `vision: shared`", "video", "tensor parallel"]
    rows = [head, ["---"] * len(head)]
    for name, family in FAMILIES.items():
        s = family.support
        vision = "yes" if s.towerless else "yes, keeps its tower"
        more = (s.vllm, s.shared_weights)
        words = ["yes", *("yes" if x else "no" for x in more), vision, s.video]
        words += ["yes" if s.tensor_parallel else "no"]
        rows.append([f"`{name}`", f"`{MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]}`", *words])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
