"""The `rollplex` command: LightningCLI's fit, validate, test and predict, and export, plan, report, verify."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningCLI, instantiate_class
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers.utils import logging as transformers_logging

import rollplex.ddp_strategy
import rollplex.deepspeed_strategy
import rollplex.strategy  # noqa: F401  (they register their names)
from rollplex.checks import check_trainer
from rollplex.config_names import check_command
from rollplex.data.datamodule import VLMDataModule
from rollplex.engines.remote_link import EngineProcessError
from rollplex.export import main as export_main
from rollplex.module import GRPOModule
from rollplex.planner.command import main as plan_main
from rollplex.reports.command import main as report_main


def _verify(arguments: list[str]) -> None:
    from rollplex.verify import main  # it builds on the class below

    main(arguments)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "export": export_main, "plan": plan_main, "report": report_main, "verify": _verify,
}  # fmt: skip
"""Subcommands that are not the Trainer's, with parsers of their own."""

RUNS = ("fit", "validate", "test", "predict")
HELP = """usage: rollplex COMMAND [options]

Reinforcement learning of vision-language models: synchronous GRPO, whose training work is done while
the engine decodes.

  fit       train, from a config: rollplex fit --config FILE.yaml [--SECTION.SETTING VALUE ...]
  validate  evaluate on the validation rows, with the same config and options
  test      evaluate on the test rows
  predict   write responses to the test rows to a file
  export    write the model of a checkpoint as a plain transformers folder
  plan      memory and seconds of a config before it is run; needs no GPU
  report    one HTML page of a run: curves, samples, memory, timeline
  verify    train a few batches under every schedule and compare them; compare the engine with the trainer

rollplex COMMAND --help lists the options of each.
"""

DEFAULT_CALLBACKS = (
    "rollplex.callbacks.GracefulStop",
    "rollplex.callbacks.PhaseProgressBar",
    "rollplex.callbacks.PredictionWriter",
    "rollplex.callbacks.EnvironmentLogger",
)
"""What every run gets unless its YAML has one of the same class (for the bar: any other bar, or none)."""


class RollplexCLI(LightningCLI):
    """Model, data, trainer and callbacks from YAML and dotted overrides; classes by class_path."""

    def __init__(self, **kwargs: Any) -> None:
        arguments = kwargs.get("args")
        arguments = sys.argv[1:] if arguments is None else arguments
        if isinstance(arguments, list):
            alone = not kwargs.get("run", True)
            if alone or (arguments and arguments[0] in RUNS):
                ours = type(self).__module__.partition(".")[0] == __package__
                check_command(arguments if alone else arguments[1:], closed=ours)
        super().__init__(
            GRPOModule,
            VLMDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        check_trainer(config)
        chosen = config.get("callbacks") or []
        chosen = list(chosen) if isinstance(chosen, list | tuple) else [chosen]
        defaults = []
        for path in DEFAULT_CALLBACKS:
            default = instantiate_class((), {"class_path": path})
            kind = ProgressBar if isinstance(default, ProgressBar) else type(default)
            off = kind is ProgressBar and config.get("enable_progress_bar") is False
            if not off and not any(isinstance(callback, kind) for callback in [*chosen, *callbacks]):
                defaults.append(default)
        # First: when a run is stopped, its checkpoint is saved before anything else is done.
        return super()._instantiate_trainer(config | {"callbacks": [*defaults, *chosen]}, callbacks)

    def predict(self, **kwargs: Any) -> None:
        """Predictions go to a file (PredictionWriter): they need not be kept in memory too."""
        if kwargs.get("return_predictions") is None:
            kwargs["return_predictions"] = False
        self.trainer.predict(**kwargs)

    def _check_last(self, subcommand: str) -> None:
        """Without a last checkpoint Lightning goes on with untrained weights, and would evaluate those."""
        if subcommand == "fit" or self._get(self.config_init, "ckpt_path") != "last":
            return
        trainer: Any = self.trainer
        if not any(c._find_last_checkpoints(trainer) for c in trainer.checkpoint_callbacks):
            where = [c.dirpath for c in trainer.checkpoint_callbacks]
            raise SystemExit(
                f"error: --ckpt_path last found no checkpoint (looked in {', '.join(map(str, where)) or 'no folder'}). "
                "Give the path of a checkpoint, or run `rollplex fit` with this config first"
            )

    def _run_subcommand(self, subcommand: str) -> None:
        """A run that was asked to stop ends with one line and, of several ranks the first, the exit code of its
        signal."""
        self._check_last(subcommand)
        try:
            super()._run_subcommand(subcommand)
        except SystemExit:  # Lightning's answer to KeyboardInterrupt, after its clean-up
            callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
            stopped = next((c for c in callbacks if getattr(c, "exit_code", None) is not None), None)
            if stopped is None:
                raise
            print(stopped.message, flush=True)
            # A launcher kills the others once one has failed, and rank 0 may still be writing.
            raise SystemExit(stopped.exit_code if self.trainer.is_global_zero else 0) from None


IRRELEVANT = (
    "Using ModelCheckpoint with manual optimization",  # a step has ended when it saves
    ".*treespec, LeafSpec.* is deprecated",
    "Checkpoint directory .* exists and is not empty",  # a new run says so itself, and what to do
    "The dirpath has changed from",  # of an earlier run's best score, which is not used
    r"It is recommended to use `self\.log\('(val|test)/",  # every rank logs the mean over all ranks (evaluation.py)
)
"""Warnings of Lightning that nobody who uses Rollplex can act on."""


QUOTED = tuple(
    os.path.join(folder, "")
    for package in ("rollplex", "rollplex.callbacks", "lightning")
    for folder in getattr(importlib.util.find_spec(package), "submodule_search_locations", None) or ()
)
_with_place = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """What a run says to its user, without the line of our source that says it."""
    if issubclass(category, UserWarning) and filename.startswith(QUOTED):
        return f"warning: {message}\n"
    return _with_place(message, category, filename, lineno, line)


def _worth_telling(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("💡", "TPU available"))


TRACEBACK = "ROLLPLEX_TRACEBACK"
"""Environment variable that keeps the traceback of a wrong setting."""
STEPS = {"training_step", "validation_step", "test_step", "predict_step"}


def _package(error: BaseException) -> tuple[str, dict[str, Any]]:
    """The package that raised it, and the variables there."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return "", {}
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0], frames[-1].f_locals


def _unwrapped(error: BaseException | None) -> BaseException | None:
    """Our own error inside the parser's: it wraps what a constructor raises, once for each class around it.

    Of the types that a setting may have, it chains the error of the first one only, and that need not be ours; the
    others are in a variable of its own, as long as it has that.
    """
    if error is None:
        return None
    package, variables = _package(error)
    if package == "rollplex":
        return error
    if package != "jsonargparse":
        return None
    wrapped = [error.__cause__, error.__context__, *variables.get("exceptions", [])]
    return next((found for inner in wrapped if (found := _unwrapped(inner)) is not None), None)


def _all_of_parser(error: BaseException | None) -> bool:
    while error is not None and _package(error)[0] == "jsonargparse":
        error = error.__cause__ or error.__context__
    return error is None


def of_settings(error: BaseException) -> BaseException | None:
    """What one of our own checks said of a setting before any work, so that its message is all there is to say.

    An engine process that does not come up while the strategy is set up counts too, and what the parser itself says:
    it may quote an error of ours among those of other types without chaining it. None for any other error.
    """
    ours = _unwrapped(error) or (error if _all_of_parser(error) else None)
    names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    early = "setup" in names if isinstance(ours, EngineProcessError) else isinstance(ours, ValueError)
    if isinstance(error, MisconfigurationException):  # Lightning's own, of what this machine or its Trainer lacks
        ours, early = error, _package(error)[0] == "lightning"
    return ours if early and not names & STEPS else None


def _check_subcommand(arguments: list[str]) -> None:
    """Ends with our own page where no command is given or help is asked for, and with one line for an unknown one."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if arguments else sys.stderr)
        raise SystemExit(0 if arguments else 2)
    names = (*RUNS, *COMMANDS)
    if not arguments[0].startswith("-") and arguments[0] not in names:
        near = difflib.get_close_matches(arguments[0], names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"error: there is no command {arguments[0]!r}; {hint}There are {', '.join(names)}", file=sys.stderr)
        raise SystemExit(2)


def main(args: list[str] | None = None) -> None:
    """Console entry point. A wrong setting ends it with one line and exit code 2."""
    for message in IRRELEVANT:
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = _format_warning
    transformers_logging.disable_progress_bar()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_worth_telling)
    # A task named by class_path lives in the user's folder, which a console script does not search.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    arguments = sys.argv[1:] if args is None else args
    _check_subcommand(arguments)
    if arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
        return
    try:
        RollplexCLI(args=args)
    except (ValueError, EngineProcessError, MisconfigurationException) as error:
        ours = of_settings(error)
        if args is not None or os.environ.get(TRACEBACK) or ours is None:
            raise
        lines = [str(ours), *getattr(ours, "__notes__", []), f"({TRACEBACK}=1 shows where)"]
        print("error: " + "\n".join(lines), file=sys.stderr)
        raise SystemExit(2) from None
