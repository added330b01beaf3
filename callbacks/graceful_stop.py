"""Ctrl-C and SIGTERM end a run so that it continues as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from rollplex.callbacks.files import free_path
from rollplex.schedule import StopRequested

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop(Callback):
    """On Ctrl-C or SIGTERM: give up the current step if it has not updated yet (else finish it), save, end.

    The checkpoint is ModelCheckpoint's last one (`<dirpath>/last.ckpt`; without a ModelCheckpoint
    `<default_root_dir>/checkpoints/last.ckpt`), and `--ckpt_path last` continues from it: the batch that was given up
    is done again, and the run ends with exactly the weights of one that was never stopped. A second Ctrl-C ends at
    once, without saving. Nothing is saved when nothing has been trained yet, or while weights are half updated.

    A run that ends by itself leaves its end in the last checkpoint too, if ModelCheckpoint keeps one (`save_last`).

    Args:
        save_on_error: Save in the same way when the run ends by an error (an engine that fails, a bad reward class). A
            checkpoint takes all ranks: of several, nothing is saved when only some of them fail.
    """

    def __init__(self, save_on_error: bool = True) -> None:
        self.save_on_error = save_on_error
        self.message: str | None = None
        """What happened, one line, once the run was stopped."""
        self.exit_code: int | None = None
        """What the shell expects of a program that ended by this signal: 128 + its number."""
        self._executor: Any = None
        self._previous: dict[signal.Signals, Any] = {}
        self._own_dirpath = False

    # ---- signals ----

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.message = self.exit_code = None
        checkpointer = trainer.checkpoint_callback
        # Lightning gives it a folder later, a new one in each run, where "last" would find nothing.
        self._own_dirpath = isinstance(checkpointer, ModelCheckpoint) and checkpointer.dirpath is not None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._install(trainer)

    def _install(self, trainer: Trainer) -> None:
        """Lightning has put its own handlers in place by now; they would let a rollout run on."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._executor = getattr(getattr(trainer.strategy, "colocation", None), "executor", None)
        if self._executor is None:
            return
        self._executor.stop_requested = None
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: Any) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._executor.stop_requested is not None:
            raise KeyboardInterrupt
        self._executor.stop_requested = name
        again = "; Ctrl-C again ends at once, without saving" if number == signal.SIGINT else ""
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"\n{name}: stopping at the next safe point{again}\n".encode())

    def _restore(self) -> None:
        previous, self._previous = self._previous, {}
        for number, handler in previous.items():
            if signal.getsignal(number) == self._on_signal:  # else Lightning has put back what was before itself
                signal.signal(number, handler)
        self._executor = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    # ---- the end ----

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """ModelCheckpoint(save_last=True) saves every so many updates; the end of a run is rarely one of those."""
        checkpointer = trainer.checkpoint_callback
        if not isinstance(checkpointer, ModelCheckpoint) or not checkpointer.save_last or trainer.fast_dev_run:
            return
        if checkpointer._last_global_step_saved != trainer.global_step:
            trainer.save_checkpoint(self._path(trainer), weights_only=False)
            checkpointer._last_global_step_saved = trainer.global_step

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        asked = isinstance(exception, StopRequested)
        if asked or (self.save_on_error and isinstance(exception, Exception)):
            saved = self._save(trainer, pl_module, exception)
            if asked:
                name = str(exception)
                self.exit_code = 128 + signal.Signals[name]
                self.message = f"stopped by {name} after {trainer.global_step} updates; {saved}"
            elif trainer.state.fn == "fit":
                os.write(2, f"\nthe run failed after {trainer.global_step} updates; {saved}\n".encode())
        self._restore()

    def _save(self, trainer: Any, module: Any, exception: BaseException) -> str:
        """Save if that makes sense; what came of it, in words."""
        if _diverged(exception):
            return "nothing saved: the weights have diverged, and the last checkpoint is from before"
        if trainer.state.fn != "fit" or trainer.fast_dev_run or module.rollouts_done == 0:
            return "there was nothing to save"
        if module.updates_in_step:
            return "nothing saved: the weights are between two batches"
        if not isinstance(exception, StopRequested) and not _all_fail(trainer, exception):
            return "nothing saved: it takes all ranks, and others have not failed, or lost one that has"
        path = self._path(trainer)
        _rewind(trainer)
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except Exception as error:  # the reason for the end must not be hidden by this one
            return f"saving {path} failed: {type(error).__name__}: {error}"
        return f"saved {path}; continue with --ckpt_path {'last' if self._own_dirpath else path}"

    def _path(self, trainer: Trainer) -> Path:
        """The last checkpoint of this run, never one of an earlier run."""
        checkpointer = trainer.checkpoint_callback
        if not isinstance(checkpointer, ModelCheckpoint) or not checkpointer.dirpath:
            return free_path(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")
        if not checkpointer.last_model_path:
            name = f"{checkpointer.CHECKPOINT_NAME_LAST}{checkpointer.FILE_EXTENSION}"
            checkpointer.last_model_path = str(free_path(Path(checkpointer.dirpath) / name))
        return Path(checkpointer.last_model_path)


def _all_fail(trainer: Any, error: BaseException) -> bool:
    """Whether every rank is here. Saving alone, this one would meet the others in a collective of their own."""
    where = getattr(getattr(getattr(trainer.strategy, "colocation", None), "executor", None), "where", None)
    return where is None or where.all_fail(error)


def _diverged(error: BaseException | None) -> bool:
    """Whether numbers that are not finite are behind it."""
    while error is not None:
        if isinstance(error, FloatingPointError):
            return True
        error = error.__cause__
    return False


def _rewind(trainer: Trainer) -> None:
    """Take back what Lightning's loops counted of the batch that was given up.

    As saved, `ready` would be one ahead of `completed`. Lightning's restart takes that back in the counters of the
    epoch but not in the totals, skips a batch that was an epoch's last one, continues a validation with the rows of
    its first batches, and moves the step that loggers see by one.
    """
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.batch_progress
    if trainer.validating:
        # Whole validation again. Lightning knows "in the middle of it" by one batch started and not processed.
        validation = loop.val_loop.batch_progress
        done = validation.current.completed
        trackers: tuple[Any, Any] = (validation.total, validation.current)
        for tracker in trackers:
            tracker.completed -= done
            tracker.processed = tracker.completed
            tracker.started = tracker.ready = tracker.completed + 1
        return
    if progress.current.processed == progress.current.ready:
        return
    progress.total.reset_on_restart()
    progress.current.reset_on_restart()
    progress.is_last_batch = False
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is not None and loop._should_check_val_fx(fetcher):
        # Lightning will take it that the batch before is not quite over, and count it once more.
        loop._batches_that_stepped -= 1
