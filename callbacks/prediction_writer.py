"""What `rollplex predict` leaves behind."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from rollplex.callbacks.files import append_jsonl, free_path
from rollplex.data.records import Group


class PredictionWriter(Callback):
    """Writes one line a row: its id, the responses, and their rewards where the task gave any.

    While it runs the file is called `<name>.partial`; the name itself holds a complete prediction. An earlier file is
    kept (the new one becomes predictions-v1.jsonl, ...).

    Args:
        path: None is `<default_root_dir>/predictions.jsonl`.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._partial: Path | None = None

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._partial = None
        if trainer.is_global_zero:
            target = Path(self.path or Path(trainer.default_root_dir) / "predictions.jsonl")
            self._partial = free_path(target.with_name(target.name + ".partial"))

    def on_predict_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        records = pl_module.ranks.gather([prediction(group) for group in outputs or ()])
        if self._partial is not None and any(records):
            # Ranks have every world-th row.
            append_jsonl(self._partial, [r for row in zip_longest(*records) for r in row if r is not None])

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        if self._partial is None or not self._partial.exists():
            return
        target = free_path(Path(self.path or Path(trainer.default_root_dir) / "predictions.jsonl"))
        self._partial.rename(target)
        print(f"predictions: {target}")


def prediction(group: Group) -> dict[str, Any]:
    """The record of one row."""
    record: dict[str, Any] = {
        "id": group.prompt.sample.id,
        "responses": [rollout.text for rollout in group.rollouts],
        "finish_reasons": [rollout.finish_reason for rollout in group.rollouts],
        "tokens": [len(rollout) for rollout in group.rollouts],
    }
    if not torch.isnan(group.rewards).all():
        record["rewards"] = group.rewards.tolist()
        record["components"] = {name: values.tolist() for name, values in group.components.items()}
    return record
