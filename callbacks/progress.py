"""Progress of a run: updates, phase and both lanes on a terminal; plain lines where no terminal is."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from rollplex.lane_progress import LaneProgress
from rollplex.phases import Phase, PhaseCallback


class RunTime(ProgressColumn):
    """elapsed<remaining, of the run; lanes begin anew too often to have either."""

    def render(self, task: Task) -> Text:
        if task.description != "update":
            return Text()
        left = task.time_remaining
        return Text(f"{_clock(task.elapsed or 0.0)}<{'?' if left is None else _clock(left)}")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


class LaneBars(Progress):
    """Three rows: updates of the run, responses of the rollout lane, units of the train lane.

    rich redraws it on a thread of its own; what the lanes do is read at that moment.
    """

    ready = False
    """rich asks for a picture before there are rows."""

    def __init__(self, lanes: LaneProgress, total: int | None, done: int, console: Console | None) -> None:
        super().__init__(
            TextColumn("{task.description}"), BarColumn(bar_width=18), TextColumn("{task.fields[count]}"),
            RunTime(), TextColumn("{task.fields[words]}"), console=console, refresh_per_second=4,
        )  # fmt: skip
        self.lanes = lanes
        self.run = self.add_task("update", total=total, completed=done, count="", words="")
        self.rollout = self.add_task("rollout", total=None, count="", words="")
        self.train = self.add_task("train", total=None, count="", words="")
        self.ready = True

    def look(self) -> None:
        """Take over what the lanes have done."""
        now = self.lanes
        rate = now.tokens_per_second
        words = f"{rate:,.0f} tokens/s" if rate else ""
        self._lane(self.rollout, now.finished, now.responses, "responses", words)
        self._lane(self.train, now.units_done, now.units, "units", now.unit.replace("_", " "))

    def _lane(self, task: TaskID, done: int, total: int, what: str, words: str) -> None:
        count = f"{done}/{total} {what}" if total else ""
        self.update(task, completed=done, total=total or 1, count=count, words=words)

    def get_renderable(self) -> RenderableType:
        if self.ready:
            self.look()
        return super().get_renderable()


class PhaseProgressBar(ProgressBar, PhaseCallback):
    """Updates done, reward, tokens per second, the phase and both lanes.

    On a terminal three bars that change in place: the run's updates (with reward and phase), the rollout lane's
    responses (with tokens per second, of the finished ones), the train lane's units (with the one that runs).
    Elsewhere (CI, a log file) one line at the first rollout batch, every `every_n_steps` and the last, and one for each
    validation.

    Args:
        every_n_steps: Rollout batches between two lines where there is no terminal.
        terminal: Whether standard output is a terminal; None looks.
    """

    def __init__(self, every_n_steps: int = 10, terminal: bool | None = None) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"PhaseProgressBar: every_n_steps={every_n_steps} must be at least 1")
        self.every_n_steps = every_n_steps
        self.terminal = terminal
        self._enabled = True
        self._phase = Phase.IDLE
        self.console: Console | None = None
        """Where the bars go; None is standard output."""
        self._bar: LaneBars | None = None
        self._start = 0.0
        self._metrics: dict[str, float] = {}
        self._validated = ""
        """What the last validation found, and when; lines have one of its own for that."""
        self._printed = -1

    # ---- what Lightning asks of a progress bar ----

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(" ".join(map(str, args)), markup=False, highlight=False)
        else:
            print(*args, flush=True, **kwargs)

    # ---- training ----

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._start = time.monotonic()
        self._metrics, self._validated = {}, ""
        self._printed = -1
        if self._enabled and self._on_terminal:
            console = self.console or Console(file=sys.stdout, force_terminal=True)
            lanes = pl_module.colocation.executor.progress
            self._bar = LaneBars(lanes, self._total(trainer), trainer.global_step, console)
            self._bar.start()
            self._show()
        if trainer.global_step > 0:
            total = self._total(trainer)
            self.print(f"going on after update {trainer.global_step}" + (f" of {total}" if total is not None else ""))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            chosen = ("reward", "tokens_per_second")
            self._metrics |= {name: outputs["metrics"][name] for name in chosen if name in outputs["metrics"]}
        if self._bar is not None:
            self._bar.update(self._bar.run, completed=trainer.global_step)
            self._show()
        elif pl_module.rollouts_done == 1 or pl_module.rollouts_done % self.every_n_steps == 0:
            self._line(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        shown = [f"{name} {value:.3f}" for name, value in values.items() if name in ("val/reward", "val/accuracy")]
        self._validated = f"val/accuracy {values['val/accuracy']:.3f}" if "val/accuracy" in values else ""
        self._validated += f" (update {trainer.global_step})" if self._validated else ""
        if self._bar is None and shown:
            when = f"update {trainer.global_step}" if trainer.state.fn == "fit" else "evaluation"
            self.print(f"{when}: {', '.join(shown)}")
        self._show()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._bar is None and self._printed != trainer.global_step:
            self._line(trainer)
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close()

    # ---- phases ----

    def on_phase_start(self, trainer: Any, phase: Phase) -> None:
        self._phase = phase
        self._show()

    def on_phase_end(self, trainer: Any, phase: Phase) -> None:
        self._phase = Phase.IDLE

    # ---- inside ----

    @property
    def _on_terminal(self) -> bool:
        if self.terminal is not None:
            return self.terminal
        # Some CI systems give a terminal without a width: a bar would be cut to nothing there.
        return sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns > 0

    def _total(self, trainer: Any) -> int | None:
        """Updates of the whole run, as far as it is known before."""
        if trainer.max_steps > 0:
            return int(trainer.max_steps)
        batches, epochs = trainer.num_training_batches, trainer.max_epochs
        if epochs is None or epochs < 0 or batches == float("inf"):
            return None
        h = trainer.lightning_module.hparams
        return int(batches * epochs * h["num_iterations"] * h["num_mini_batches"])

    def _show(self) -> None:
        if self._bar is not None:
            task = next(t for t in self._bar.tasks if t.id == self._bar.run)
            of = "?" if task.total is None else f"{task.total:.0f}"
            phase = [] if self._phase is Phase.IDLE else [self._phase.value]
            self._bar.update(
                self._bar.run, count=f"{task.completed:.0f}/{of}", words="  ".join([*self._words(), *phase])
            )

    def _line(self, trainer: Any) -> None:
        total = self._total(trainer)
        seconds = time.monotonic() - self._start
        of = f"/{total}" if total is not None else ""
        self._printed = trainer.global_step
        self.print(f"update {trainer.global_step}{of}: {', '.join([*self._words(), _clock(seconds)])}")

    def _words(self) -> list[str]:
        words = [f"reward {self._metrics['reward']:.3f}"] if "reward" in self._metrics else []
        words += [self._validated] if self._validated and self._bar is not None else []
        if "tokens_per_second" in self._metrics:
            words.append(f"{self._metrics['tokens_per_second']:,.0f} tokens/s")
        return words

    def _close(self) -> None:
        if self._bar is not None:
            self._phase = Phase.IDLE
            self._show()
            self._bar.stop()
            self._bar = None
