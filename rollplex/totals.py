"""Sums over the suffix passes of one update."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex.grpo.importance import MismatchStats, WeightStats
from rollplex.grpo.losses import LossSums


@dataclass
class StepTotals:
    """Sums over the suffix passes of one update, for the metrics."""

    loss: float = 0.0
    sums: LossSums | None = None
    mismatch: MismatchStats | None = None
    weights: WeightStats | None = None

    def add(self, sums: LossSums, mismatch: MismatchStats, weights: WeightStats) -> None:
        self.loss += float(sums.loss.detach())
        sums = LossSums(**{**sums.__dict__, "loss": sums.loss.detach()})
        self.sums = sums if self.sums is None else self.sums + sums
        self.mismatch = mismatch if self.mismatch is None else self.mismatch + mismatch
        self.weights = weights if self.weights is None else self.weights + weights
