"""One copy of the weights for trainer and vLLM."""

from __future__ import annotations

from typing import Any

from rollplex.checks import check_shared_weights
from rollplex.engines import VLLMEngine
from rollplex.engines.vllm_sharing import SharedWeights as Sharing
from rollplex.engines.vllm_split import SplitWeights
from rollplex.phases import PhaseCallback


class SharedWeights(PhaseCallback):
    """vLLM computes with the trainer's tensors in place: no second copy in memory, nothing copied after an update.

    The addresses are verified before each rollout; caches are reset and the version raised after each update as ever.
    Take the callback out of the list and the engine gets weights of its own, copied after each update: the same tokens.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        engine = pl_module.colocation.engine
        check_shared_weights(type(engine).__name__, isinstance(engine, VLLMEngine))
        # Until the engine is closed; the strategy starts it after it has placed the model.
        split = engine.tensor_parallel_size > 1 or getattr(trainer.strategy, "train_tp", 1) > 1
        engine.bind(SplitWeights() if split else Sharing())
