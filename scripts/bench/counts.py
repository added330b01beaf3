"""Counts what runs through the model: pictures through the vision tower, prompt tokens through the language model.

The layer classes' forwards are wrapped, so a count holds for every module tree of a process (trainer, reference,
embedded engine) and also sees the second forward of a checkpointed layer. Only layer 0 is counted.
"""

from __future__ import annotations

import functools
import threading
from typing import Any


class ForwardCounts:
    """Totals since `reset`. Thread-safe: both lanes count."""

    def __init__(self, *, patches_per_picture: int, prompt_tokens: int) -> None:
        self.patches_per_picture = patches_per_picture
        self.prompt_tokens = prompt_tokens
        """Tokens of each prompt; all prompts of a workload are equally long."""
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.vision_calls = 0
        self.vision_patches = 0
        self.text_calls = 0
        self.text_tokens = 0
        self.text_prompt_tokens = 0

    def result(self) -> dict[str, float]:
        return {
            "vision_calls": self.vision_calls,
            "pictures": self.vision_patches / self.patches_per_picture,
            "prompt_tokens": self.text_prompt_tokens,
            "language_calls": self.text_calls,
            "language_tokens": self.text_tokens,
        }

    def vision(self, patches: int) -> None:
        with self._lock:
            self.vision_calls += 1
            self.vision_patches += patches

    def text(self, rows: int, tokens: int, state: str | None) -> None:
        """`state`: what the pass does, by Rollplex's attention state (its class's name); None: not Rollplex."""
        holds_prompt = tokens >= self.prompt_tokens if state is None else state == "RecordPrefix"
        with self._lock:
            self.text_calls += 1
            self.text_tokens += rows * tokens
            if holds_prompt:
                self.text_prompt_tokens += rows * min(tokens, self.prompt_tokens)

    def install(self) -> None:
        """Wrap the Qwen2.5-VL layers of this process."""
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

        from rollplex.models.attention import STATE_KEYWORD

        block, layer = modeling.Qwen2_5_VLVisionBlock, modeling.Qwen2_5_VLDecoderLayer
        tower = modeling.Qwen2_5_VisionTransformerPretrainedModel
        tower_init, block_forward, layer_forward = tower.__init__, block.forward, layer.forward

        @functools.wraps(tower_init)
        def marked_init(module: Any, *args: Any, **kwargs: Any) -> None:
            tower_init(module, *args, **kwargs)
            module.blocks[0].counted = True

        @functools.wraps(block_forward)
        def counted_block(module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(module, "counted", False):
                self.vision(hidden_states.shape[0])
            return block_forward(module, hidden_states, *args, **kwargs)

        @functools.wraps(layer_forward)
        def counted_layer(module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            if module.self_attn.layer_idx == 0:
                state = kwargs.get(STATE_KEYWORD)
                self.text(*hidden_states.shape[:2], None if state is None else type(state).__name__)
            return layer_forward(module, hidden_states, *args, **kwargs)

        tower.__init__, block.forward, layer.forward = marked_init, counted_block, counted_layer
