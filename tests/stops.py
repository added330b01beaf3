"""Small runs that are stopped at a chosen point, and what a checkpoint is compared by."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import PictureTask

from rollplex import GRPOModule, PhaseCallback, RollplexStrategy, VLMDataModule
from rollplex.callbacks import GracefulStop


class StopAt(PhaseCallback):
    """Sends this process a real signal at one point of a run.

    event: hook name. step: rollout batches done by then. what: the phase, or the unit kind, of the event ("" any).
    """

    def __init__(self, event: str, step: int, what: str = "", number: str = "SIGTERM", nth: int = 1) -> None:
        self.event, self.step, self.what, self.number, self.nth = event, step, what, number, nth
        self.module: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.module = pl_module

    def _at(self, event: str, what: str = "") -> None:
        if self.module is None or (event, self.module.rollouts_done) != (self.event, self.step):
            return
        if self.what in ("", what):
            self.nth -= 1
            if self.nth == 0:
                number = signal.Signals[self.number]
                if number != signal.SIGKILL:  # or it would be the test session that ends
                    assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
                os.kill(os.getpid(), number)

    def on_phase_start(self, trainer, phase):
        self._at("on_phase_start", phase.value)

    def on_group_finished(self, trainer, group):
        self._at("on_group_finished")

    def on_unit_start(self, trainer, unit):
        self._at("on_unit_start", unit.kind.value)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._at("on_train_batch_end")

    def on_validation_epoch_end(self, trainer, pl_module):
        self._at("on_validation_epoch_end")


class Finally(PhaseCallback):
    """The final checkpoint, and what validation and the loggers were told."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] = {}
        self.validations: list[tuple[int, float]] = []
        self.outputs: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)
        self.losses.append(outputs["metrics"]["loss"])
        self.steps.append(trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_validation_end(self, trainer, pl_module):
        self.validations.append((trainer.global_step, float(trainer.callback_metrics["val/reward"])))

    def on_train_end(self, trainer, pl_module):
        path = Path(trainer.default_root_dir) / "final.ckpt"
        trainer.save_checkpoint(path)
        self.checkpoint = torch.load(path, weights_only=False)


def fit(
    model: Any, root: Any, *, stop: StopAt | None = None, callbacks: Sequence[Callback] = (), task: Any = None,
    ckpt_path: str | None = None, graceful: GracefulStop | None = None, saver: Any = "default",
    trainer: dict[str, Any] | None = None, **settings: Any,
) -> Finally:  # fmt: skip
    """3 batches an epoch, 2 epochs, validation (of 2 batches) after each second batch of an epoch."""
    seed_everything(0, verbose=False)
    defaults = dict(num_generations=2, max_completion_length=4, learning_rate=1e-2, seed=7)
    module = GRPOModule(model=str(model), **(defaults | settings))
    data = VLMDataModule(task=task or RandomPictureTask(12), batch_size=4, val_batch_size=8, seed=3)
    last = Finally()
    options: dict[str, Any] = dict(
        accelerator="cpu", max_epochs=2, val_check_interval=2, num_sanity_val_steps=0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(root),
    )  # fmt: skip
    if saver == "default":
        saver = ModelCheckpoint(dirpath=Path(root) / "checkpoints", every_n_train_steps=10**6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        added = [graceful or GracefulStop(), saver, last, *callbacks, stop]
        run = Trainer(
            strategy=RollplexStrategy(), callbacks=[c for c in added if c is not None], **(options | (trainer or {}))
        )
        run.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return last


class RandomPictureTask(PictureTask):
    """Its reward draws from torch's global generator, so a resumed run must find that generator as it was."""

    def reward(self, sample, response):
        return super().reward(sample, response) + 0.1 * float(torch.rand(()))


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Paths at which two checkpoints differ, bit for bit."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        return [] if same else [where]
    if isinstance(a, dict) and isinstance(b, dict):
        missing = [f"{where}.{key}" for key in a.keys() ^ b.keys()]
        return missing + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [where]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a} != {b}"]


COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "rollplex", "global_step", "epoch")


def compared(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What must be equal; of the loops' counters, those that later steps depend on."""
    loops = checkpoint["loops"]["fit_loop"]
    names = ("epoch_loop.batch_progress", "epoch_progress", "epoch_loop.state_dict")
    names += ("epoch_loop.manual_optimization.optim_step_progress",)
    return {name: checkpoint[name] for name in COMPARED} | {name: loops[name] for name in names}
