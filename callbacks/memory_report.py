"""What was in memory when: the residency ledger of a run, as a table and a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rollplex.callbacks.files import check_folder, free_path, write_whole
from rollplex.callbacks.tracking import log_picture
from rollplex.phases import PhaseCallback
from rollplex.reports.plots import plot_memory
from rollplex.reports.tables import ledger_table
from rollplex.residency import Ledger, profile_to_json


class MemoryReport(PhaseCallback):
    """Prints the ledger when training ends, and writes `memory.json` (which `rollplex report` and `rollplex plan
    --calibrate` plot). W&B gets the plot as `plots/memory` (needs matplotlib).

    A column is one instant, that of the stage's largest sum: a state that was large at another time of the stage has
    less there. Its most in any stage is in the file's `largest`.

    Args:
        print_table: False writes the file only.
        dirpath: Folder; None is `default_root_dir`.
        log_plots: Draw for W&B.
    """

    def __init__(self, print_table: bool = True, dirpath: str | None = None, log_plots: bool = True) -> None:
        self.print_table = print_table
        self.dirpath = dirpath
        self.log_plots = log_plots
        self.written: Path | None = None
        """The file, once there is one."""

    def _folder(self, trainer: Any) -> Path:
        return Path(self.dirpath or trainer.default_root_dir)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            check_folder("MemoryReport", self._folder(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._report(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and pl_module.colocation.watch.ledger.states:
            self._report(trainer, pl_module)  # out of memory, perhaps: then it is of most interest

    def _report(self, trainer: Any, module: Any) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        ledger: Ledger = module.colocation.watch.ledger
        content = {
            "states": profile_to_json(ledger.recorded()),
            "classes": {s.name: s.kind.value for s in ledger.states},
            "largest": ledger.run.largest,
        }
        path = free_path(self._folder(trainer) / "memory.json")
        write_whole(path, json.dumps(content, indent=1).encode())
        self.written = path
        if self.log_plots and ledger.recorded():
            draw = partial(plot_memory, ledger.recorded(), "Bytes on the device at each stage's peak")
            log_picture(trainer, "plots/memory", draw, path.parent)
        if self.print_table:
            classes = {s.name: s.kind.value for s in ledger.states}
            Console().print(ledger_table("Bytes on the device at each stage's peak", ledger.recorded(), classes))
