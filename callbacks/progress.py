"""One progress bar for the whole run, with the phase; plain lines where no terminal is."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from rollplex.phases import Phase, PhaseCallback


class PhaseProgressBar(ProgressBar, PhaseCallback):
    """Updates done, reward, tokens per second and the phase.

    On a terminal one bar that changes in place; elsewhere (CI, a log file) one line at the first rollout batch, every
    `every_n_steps` and the last, and one for each validation.

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
        self._bar: Any = None
        self._start = 0.0
        self._metrics: dict[str, float] = {}
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
            self._bar.write(" ".join(map(str, args)), file=sys.stdout)
        else:
            print(*args, flush=True, **kwargs)

    # ---- training ----

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._start = time.monotonic()
        self._metrics = {}
        self._printed = -1
        if self._enabled and self._on_terminal:
            self._bar = tqdm(
                total=self._total(trainer), initial=trainer.global_step, unit="update", dynamic_ncols=True,
                file=sys.stdout, bar_format="{n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining} {desc}",
            )  # fmt: skip
            self._show()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            chosen = ("reward", "tokens_per_second")
            self._metrics |= {name: outputs["metrics"][name] for name in chosen if name in outputs["metrics"]}
        if self._bar is not None:
            self._bar.update(trainer.global_step - self._bar.n)
            self._show()
        elif pl_module.rollouts_done == 1 or pl_module.rollouts_done % self.every_n_steps == 0:
            self._line(trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        shown = [f"{name} {value:.3f}" for name, value in values.items() if name in ("val/reward", "val/accuracy")]
        self._metrics |= {name: values[name] for name in ("val/accuracy",) if name in values}
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
            phase = "" if self._phase is Phase.IDLE else self._phase.value
            self._bar.set_description_str("  ".join([*self._words(), phase]))

    def _line(self, trainer: Any) -> None:
        total = self._total(trainer)
        seconds = int(time.monotonic() - self._start)
        of = f"/{total}" if total is not None else ""
        self._printed = trainer.global_step
        words = [*self._words(), f"{seconds // 60}:{seconds % 60:02d} min"]
        self.print(f"update {trainer.global_step}{of}: {', '.join(words)}")

    def _words(self) -> list[str]:
        words = [f"{name} {self._metrics[name]:.3f}" for name in ("reward", "val/accuracy") if name in self._metrics]
        if "tokens_per_second" in self._metrics:
            words.append(f"{self._metrics['tokens_per_second']:,.0f} tokens/s")
        return words

    def _close(self) -> None:
        if self._bar is not None:
            self._phase = Phase.IDLE
            self._show()
            self._bar.close()
            self._bar = None
