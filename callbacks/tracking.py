"""What W&B gets besides scalars: how they are summed up, the run's config, pictures of timeline and memory.

Scalars go to every logger by `self.log`, tables of samples by `RolloutLogger`. Nothing here imports wandb before a
WandbLogger of the run has.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from PIL import Image

SUMMARIES = {
    "reward": "last,max,mean",
    "val/reward": "last,max",
    "val/accuracy": "last,max",
    "mismatch_max": "last,max",
    "kl": "last,max",
    "grad_norm": "last,max",
    "time/step": "last,mean",
    "tokens_per_second": "last,mean",
    "overlap_efficiency": "last,mean",
}
"""Metric -> what the run's summary holds of it. Of others W&B keeps the last value."""


def wandb_loggers(trainer: Any) -> list[WandbLogger]:
    """Those of the run; none but on rank 0, whose experiment is the real one."""
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)] if trainer.is_global_zero else []


def log_setup(trainer: Any, environment: dict[str, Any]) -> None:
    """Config beyond the module's hyperparameters, which Lightning logs, and what the summary holds."""
    datamodule = trainer.datamodule
    data = dict(datamodule.state_dict()) if datamodule is not None else {}
    task = getattr(datamodule, "task", None)
    content = {
        "environment": environment,
        "data": data | {"task": type(task).__name__},
        "strategy": type(trainer.strategy).__name__,
        "engine": type(trainer.strategy.colocation.engine).__name__,
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],
    }
    for logger in wandb_loggers(trainer):
        logger.experiment.config.update(content, allow_val_change=True)
        for name, summary in SUMMARIES.items():
            logger.experiment.define_metric(name, summary=summary)


def log_picture(trainer: Any, key: str, draw: Callable[[Path], Path], folder: Path) -> None:
    """A matplotlib picture, where the run has a WandbLogger. draw: writes it to the path it is given.

    Without matplotlib a warning says so, once: a run does not end for a picture.
    """
    loggers = wandb_loggers(trainer)
    if not loggers:
        return
    path = folder / f".{key.replace('/', '-')}.png"
    try:
        draw(path)
        image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    except ValueError as error:
        warnings.warn(f"W&B gets no picture {key}: {error}", stacklevel=2)
        return
    finally:
        path.unlink(missing_ok=True)
    for logger in loggers:
        logger.log_image(key, [image])
