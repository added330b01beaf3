"""The trained model as a folder that other programs load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from rollplex.callbacks.files import free_path
from rollplex.export import export
from rollplex.schedule import StopRequested


class ExportModel(Callback):
    """Writes the policy as a plain transformers folder when training ends or is stopped.

    Args:
        dirpath: The folder; None is `<default_root_dir>/export`.
        overwrite: Replace an export that is there; else it is kept and the new one is called `<dirpath>-v1`, ...
    """

    def __init__(self, dirpath: str | None = None, overwrite: bool = False) -> None:
        self.dirpath = dirpath
        self.overwrite = overwrite
        self.exported: Path | None = None
        """The folder written last."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._export(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, StopRequested) and trainer.state.fn == "fit" and pl_module.rollouts_done:
            self._export(trainer, pl_module)

    def _export(self, trainer: Any, module: Any) -> None:
        if trainer.fast_dev_run:
            return
        # Every rank asks: where weights are sharded, they are gathered for it.
        policy = trainer.strategy.whole_model().hf if hasattr(trainer.strategy, "whole_model") else module.policy
        if not trainer.is_global_zero:
            return
        target = Path(self.dirpath or Path(trainer.default_root_dir) / "export")
        if not self.overwrite:
            target = free_path(target)
        self.exported = export(policy, module.processor, target, overwrite=self.overwrite)
        print(f"exported model: {self.exported}")
