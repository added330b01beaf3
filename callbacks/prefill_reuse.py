"""One pass over the prompt for engine and actor: beyond the paper, where both compute it."""

from __future__ import annotations

import warnings
from typing import Any

from rollplex.phases import PhaseCallback


class PrefillReuse(PhaseCallback):
    """Runs the actor's prefix units before the engine starts, which takes their K/V instead of prefilling.

    Before an update, the prompt under the engine's weights and under the actor's is the same computation. Prefixes
    that `prefix_budget_bytes` has no room for are prefilled by the engine as ever. Needs an engine that reads the
    trainer's tensors (TorchEngine); with another one it is refused.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        engine = pl_module.colocation.engine
        if not engine.takes_prefix:
            raise ValueError(
                f"callbacks: PrefillReuse cannot work with engine={type(engine).__name__}, which keeps a K/V cache of "
                "its own; take the callback out of the list, or use rollplex.engines.torch_engine.TorchEngine"
            )
        if not pl_module.hparams["share_prefix"]:
            warnings.warn("PrefillReuse has no effect with share_prefix=false: there is no pass to reuse", stacklevel=2)
        pl_module.colocation.executor.reuse_prefill = True
