"""The rows of suffix passes: which responses one takes, their ids padded, their log-probs kept.

Shape legend: N rows of a suffix pass, R response tokens (padded).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollplex.bundles import Bundle
from rollplex.data.records import Rollout
from rollplex.step_settings import StepSettings


class ResponseRows:
    """The part of a `GRPOStep` that knows responses as rows."""

    settings: StepSettings
    rollouts: list[list[Rollout | None]]
    _logps: dict[tuple[str, int], Tensor]

    def _passes(self, b: Bundle) -> list[list[tuple[int, int]]]:
        """(group, response) rows of each suffix pass: of every prompt its g shortest left, so that padding is small."""
        g = self.settings.responses_per_pass or self.settings.num_generations
        by_length = {j: sorted(range(len(self.rollouts[j])), key=lambda i: len(self._rollout(j, i))) for j in b.groups}
        starts = range(0, self.settings.num_generations, g)
        return [[(j, i) for j in b.groups for i in by_length[j][start : start + g]] for start in starts]

    def _rollout(self, g: int, i: int) -> Rollout:
        rollout = self.rollouts[g][i]
        assert rollout is not None
        return rollout

    def _pad(self, rows: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """(N, R) ids right-padded with 0, (N,) lengths; R is at least 1."""
        ids = [self._rollout(g, i).token_ids for g, i in rows]
        lengths_N = torch.tensor([len(x) for x in ids])
        ids_NR = torch.zeros(len(ids), max(1, int(lengths_N.max())), dtype=torch.long)
        for n, x in enumerate(ids):
            ids_NR[n, : len(x)] = x
        return ids_NR, lengths_N

    def _keep(self, name: str, rows: Sequence[tuple[int, int]], logps_NR: Tensor) -> None:
        logps_NR = logps_NR.detach().cpu()
        for n, (g, i) in enumerate(rows):
            row = self._logps.setdefault((name, g), torch.zeros(self.settings.num_generations, 0))
            width = max(row.shape[1], logps_NR.shape[1])
            row = torch.nn.functional.pad(row, (0, width - row.shape[1]))
            row[i, : logps_NR.shape[1]] = logps_NR[n]
            self._logps[name, g] = row

    def _padded(self, name: str, rows: Sequence[tuple[int, int]], width: int) -> Tensor:
        out_NR = torch.zeros(len(rows), width)
        for n, (g, i) in enumerate(rows):
            values = self._rollout(g, i).logps if name == "engine" else self._logps[name, g][i]
            length = min(len(self._rollout(g, i)), width)
            out_NR[n, :length] = values[:length]
        return out_NR
