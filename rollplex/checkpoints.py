"""Checkpoints that a crash cannot damage, and what they hold of the global random generators."""

from __future__ import annotations

import os
import random
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, then renames: a file under its final name is always complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        for left in target.parent.glob(f".{target.name}.*.partial"):  # by a process that was killed while saving
            left.unlink(missing_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            super().save_checkpoint(checkpoint, partial, storage_options)
            with open(partial, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if Path(path).is_dir():
            raise ValueError(
                f"ckpt_path={str(path)!r} is a folder, a checkpoint of a rollplex_zero strategy: set the one that "
                "wrote it, or export it and start from that model"
            )
        try:
            return super().load_checkpoint(path, *args, **kwargs)
        except FileNotFoundError:
            raise
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            raise ValueError(f"checkpoint {path} cannot be read, it is incomplete or damaged: {error}") from error


def rng_states() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators, in types that a weights-only load accepts."""
    name, keys, *rest = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Undo of `rng_states`."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


class RandomStates:
    """The global generators of a run. Sampling and data order do not use them; users' rewards and tasks may.

    What was given up is done again after a resume: a checkpoint written then holds the states from before it.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None

    def begin(self) -> None:
        """Something that may be given up begins."""
        self._before = rng_states()

    def end(self) -> None:
        """It is complete."""
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        return self._before or rng_states()

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self._loaded, self._before = states, None

    def restore(self) -> None:
        """Set what was loaded; once."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            set_rng_states(loaded)


def warn_of_earlier(trainer: Any) -> None:
    """A new run that will save beside the checkpoints of an earlier one: `last` is then the newest of all runs."""
    folders = {str(callback.dirpath) for callback in trainer.checkpoint_callbacks if getattr(callback, "dirpath", None)}
    for folder in sorted(folders):
        found = sorted(path.name for path in Path(folder).glob("*.ckpt"))
        if found and trainer.is_global_zero:
            warnings.warn(
                f"{folder} holds checkpoints of an earlier run ({', '.join(found[:3])}{', ...' * (len(found) > 3)}); "
                "this one starts anew and saves beside them (last-v1.ckpt and so on), and --ckpt_path last will take "
                "the newest. To go on with the earlier run give --ckpt_path last; to keep the two apart set "
                "the ModelCheckpoint's dirpath and the loggers' save_dir to another folder",
                stacklevel=2,
            )


class WithRandomStates:
    """The part of a LightningModule that keeps them; the module calls begin and end around a training batch."""

    random_states: RandomStates
    rollouts_done: int
    trainer: Any

    def on_train_start(self) -> None:
        if not self.rollouts_done:
            warn_of_earlier(self.trainer)
        self.random_states.restore()  # only now: setting up draws from the generators too

    def on_validation_epoch_start(self) -> None:
        self.random_states.begin()

    def on_validation_epoch_end(self) -> None:
        self.random_states.end()
