"""What runs of a family, and which configs of it have no exact prefix/suffix split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Support:
    """What runs beside the embedded engine, which decodes every family. Refusals and the table in the docs read it."""

    video: Literal["frames", "as pictures"] = "frames"
    """as pictures: the processor makes a picture of each frame, and the model knows no other."""

    vllm: bool = True
    shared_weights: bool = True
    """vLLM can compute on the trainer's tensors (`SharedWeights`)."""

    features_by_item: bool = False
    """With `vision: shared` vLLM gets a tensor for each picture or video, and no method of its model reads them."""

    towerless: bool = True
    """A vLLM that gets features can do without a tower. Qwen3-VL's forgets its DeepStack layers with it."""

    tensor_parallel: bool = True
    """There is a layout table (rollplex.weights.families) for vLLM's tensor-parallel ranks."""


def refuse_unsplittable(config: Any) -> None:
    """ValueError for a config whose passes would not be those of full sequences, naming what to set."""
    _refuse_dropout(config)
    _refuse_windows(config)


def _refuse_dropout(config: Any) -> None:
    parts = [getattr(config, name, None) for name in ("text_config", "vision_config")]
    for part in [config, *filter(None, parts)]:
        for name, value in part.to_dict().items():
            if name.endswith(("dropout", "dropout_prob")) and isinstance(value, float) and value > 0:
                raise ValueError(
                    f"{name}={value} in the model's config: with dropout the rollout and the update see different "
                    f"policies, so the ratio is not 1 at the first step. Set {name}=0.0"
                )


def _refuse_windows(config: Any) -> None:
    kinds = set(getattr(getattr(config, "text_config", config), "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ValueError(
            f"the model's config has layer_types {', '.join(sorted(kinds))}: a response is split from its prompt where "
            "every layer attends to all of it (full_attention), and other layers keep other states. Set "
            "use_sliding_window=false where the checkpoint has it, or take a model with full attention alone"
        )
