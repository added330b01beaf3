"""One pass over the prompt for engine and actor: beyond the paper, where both compute it."""

from __future__ import annotations

import warnings
from typing import Any

from rollplex.checks import check_takes_prefix
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
        check_takes_prefix(type(engine).__name__, engine.takes_prefix)
        if not pl_module.hparams["share_prefix"]:
            warnings.warn("PrefillReuse has no effect with share_prefix=false: there is no pass to reuse", stacklevel=2)
        pl_module.colocation.executor.reuse_prefill = True
