"""Chrome traces of steps: which lane ran what, when."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

from rollplex.callbacks.files import free_path, write_whole
from rollplex.callbacks.tracking import log_picture
from rollplex.phases import PhaseCallback
from rollplex.reports.plots import lanes_of, plot_timeline
from rollplex.timeline import GROUPS


class TimelineLogger(PhaseCallback):
    """Writes `timeline/step_000010.json` for https://ui.perfetto.dev, every `every_n_steps` rollout batches.

    W&B gets the same as a picture (`plots/timeline`; needs matplotlib).

    Args:
        every_n_steps: Rollout batches between two files; the first batch is always one.
        keep: Files of this run to keep; older ones go. Files of earlier runs are never touched.
        dirpath: Folder; None is `<default_root_dir>/timeline`.
        log_plots: Draw for W&B.
    """

    def __init__(
        self, every_n_steps: int = 10, keep: int = 20, dirpath: str | None = None, log_plots: bool = True
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("keep", keep)):
            if value < 1:
                raise ValueError(f"TimelineLogger: {name}={value} must be at least 1")
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.dirpath = dirpath
        self.log_plots = log_plots
        self._written: deque[Path] = deque()

    def on_group_finished(self, trainer: Any, group: int) -> None:
        now = time.perf_counter()
        trainer.strategy.colocation.timeline.add(GROUPS, str(group), now, now)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = pl_module.rollouts_done
        if not trainer.is_global_zero or not outputs or (step != 1 and step % self.every_n_steps):
            return
        folder = Path(self.dirpath) if self.dirpath else Path(trainer.default_root_dir) / "timeline"
        path = free_path(folder / f"step_{step:06d}.json")
        write_whole(path, json.dumps(pl_module.colocation.timeline.to_trace()).encode())
        self._written.append(path)
        if self.log_plots:
            rows = lanes_of(pl_module.colocation.timeline.spans())
            log_picture(trainer, "plots/timeline", lambda to: plot_timeline(rows, f"rollout batch {step}", to), folder)
        while len(self._written) > self.keep:
            self._written.popleft().unlink(missing_ok=True)
