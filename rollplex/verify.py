"""`rollplex verify`: a config's first rollout batches under every schedule, and how far apart the results are; and how
far the config's engine is from the trainer."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from jsonargparse import Namespace
from jsonargparse.typing import NonNegativeFloat, PositiveInt
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from transformers.utils import logging as transformers_logging

from rollplex.ablation import Recorder, RunTrace, Schedule
from rollplex.cli import RollplexCLI
from rollplex.comparison import Case, case_table, difference_table, dumps, judge, work_table
from rollplex.grpo.losses import LossType
from rollplex.parity import EngineParity, parity_lines, parity_table
from rollplex.strategy import RollplexStrategy

SERIAL = Schedule("serial")
OTHERS = (
    Schedule("overlap", ("PrefixOverlap",)),
    Schedule("streaming", ("PrefixOverlap", "GroupStreaming")),
    Schedule("streaming, prefill reused", ("PrefillReuse", "PrefixOverlap", "GroupStreaming")),
    Schedule("streaming, any order", ("PrefixOverlap", "GroupStreaming"), deterministic=False),
)

TRAINER: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "limit_val_batches": 0, "num_sanity_val_steps": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1,
    "max_steps": -1, "max_epochs": -1, "min_steps": None, "min_epochs": None, "max_time": None,
    "fast_dev_run": False, "profiler": None,
}  # fmt: skip
"""Settings of the Trainer that change nothing of the steps; the recorder ends the run."""

KEPT = ("SharedWeights",)
"""Callbacks of the config that stay whatever the schedule: how the engine gets its weights is not one of it."""

SWEEP = [
    {"loss_type": loss_type, "beta": beta, "num_mini_batches": mini_batches, "num_iterations": iterations}
    for loss_type, beta, (mini_batches, iterations) in itertools.product(
        get_args(LossType), (0.0, 0.04), ((1, 1), (2, 1), (1, 2), (2, 2))
    )
]
"""Model settings that `--cases all` goes through."""


class VerifyCLI(RollplexCLI):
    """The settings of `rollplex fit` plus verify's own; builds trainer, model and data once per schedule."""

    def __init__(self, args: list[str]) -> None:
        about = (
            "Train a few rollout batches under every schedule from one seed, and compare with the serial schedule. "
            "Then compare the engine's log-probabilities and greedy tokens with the trainer's, before and after them."
        )
        super().__init__(
            args=args,
            run=False,
            save_config_callback=None,
            load_from_checkpoint_support=False,  # it would save the config's hyperparameters, not those of `build`
            parser_kwargs={"prog": "rollplex verify", "description": about},
        )
        self.parsed = self.config

    def add_arguments_to_parser(self, parser: Any) -> None:
        # A config that `fit` saved has its arguments too.
        parser.add_method_arguments(
            Trainer, "fit", skip={"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        )
        parser.add_argument("--steps", type=PositiveInt, default=3, help="rollout batches per schedule")
        parser.add_argument(
            "--tolerance", type=NonNegativeFloat, default=1e-6,
            help="relative, where sums may have another order: streaming in any order, and everything on CUDA",
        )  # fmt: skip
        parser.add_argument("--cases", choices=["one", "all"], default="one", help="all: sweep loss settings as well")
        parser.add_argument(
            "--engine_parity", choices=["also", "only", "skip"], default="also",
            help="compare the engine with the trainer: after the schedules, or nothing else, or not",
        )  # fmt: skip
        parser.add_argument(
            "--engine_tolerance", type=NonNegativeFloat | None, default=None,
            help="nats, at temperature 1 and above (divided by a lower one). Default: 1e-5 on the largest difference "
            "in float32; 3e-2 on the mean in bfloat16, where greedy tokens are not judged",
        )  # fmt: skip
        parser.add_argument("--batch_size", type=PositiveInt | None, default=None, help="prompts per rollout batch")
        parser.add_argument("--json", type=str | None, default=None, help="write all numbers to this file")

    def parse_arguments(self, parser: Any, args: Any) -> None:
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Not at once but in `build`."""

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        return LightningCLI._instantiate_trainer(self, config, callbacks)  # no default callbacks

    def build(self, schedule: Schedule, settings: dict[str, Any], threads: int) -> None:
        """Fresh trainer, model and data under a schedule, with these settings of the model instead of the config's."""
        self.config = copy.deepcopy(self.parsed)
        self.config.trainer.update(Namespace(TRAINER))
        kept = [copy.deepcopy(callback) for name, callback in self.listed.items() if name in KEPT]
        self.config.trainer.callbacks = kept + [self._callback(name, schedule) for name in schedule.callbacks]
        self.config.trainer.strategy = self.pinned_strategy(threads)[0]
        for name, value in settings.items():
            self.config[f"model.init_args.{name}"] = value
        if self.parsed.batch_size is not None:
            self.config["data.init_args.batch_size"] = int(self.parsed.batch_size)
        super(RollplexCLI, self).instantiate_classes()

    @property
    def schedules(self) -> list[Schedule]:
        """Those that the config's engine can do."""
        strategy: Any = self.parsed.trainer.strategy
        options: Any = strategy.get("init_args") if isinstance(strategy, Namespace) else None
        engine: Any = options.get("engine") if options else None
        takes = engine is None or pkgutil.resolve_name(engine.class_path).takes_prefix
        return [s for s in OTHERS if takes or "PrefillReuse" not in s.callbacks]

    @property
    def listed(self) -> dict[str, Namespace]:
        """Class name -> callback of the config."""
        listed = self.parsed.trainer.callbacks or []
        return {c.class_path.rpartition(".")[2]: c for c in (listed if isinstance(listed, list) else [listed])}

    def _callback(self, name: str, schedule: Schedule) -> Namespace:
        """As the config sets it, if it does."""
        callback = copy.deepcopy(self.listed.get(name)) or Namespace(class_path=f"rollplex.callbacks.{name}")
        if name == "GroupStreaming":
            callback.init_args = callback.get("init_args") or Namespace()
            callback.init_args.deterministic = schedule.deterministic
        return callback

    def pinned_strategy(self, threads: int) -> tuple[Any, set[str]]:
        """The config's strategy, with what fits admitted whether that pays or not, and one number of CPU threads (sums
        over another number round differently). Also the names of what could be set."""
        strategy = copy.deepcopy(self.parsed.trainer.strategy)
        pins = {"threads": threads, "rollout_threads": threads, "train_threads": threads, "admission": "always"}
        if strategy == RollplexStrategy.strategy_name:
            strategy = Namespace(class_path="rollplex.RollplexStrategy", init_args=Namespace(pins))
        options: Any = strategy.get("init_args") if isinstance(strategy, Namespace) else None
        found = {name for name in pins if name in (options or ())}
        for name in found:
            options[name] = pins[name]
        return strategy, found


class Verifier:
    """Runs schedules one after another in this process."""

    def __init__(self, cli: VerifyCLI) -> None:
        self.cli = cli
        self.torch_threads = torch.get_num_threads()
        self.threads = max(1, self.torch_threads // 2)
        seed = cli.parsed.seed_everything
        self.seed = 0 if isinstance(seed, bool) else int(seed)
        self.device = torch.device("cpu")

    def run(self, schedule: Schedule, settings: dict[str, Any]) -> RunTrace:
        """One schedule from the start."""
        recorder = Recorder(self.cli.parsed.steps)
        self._fit(schedule, settings, recorder, quiet=schedule is not SERIAL)  # warnings are shown with the first run
        return recorder.trace

    def parity(self, *, quiet: bool) -> EngineParity:
        """The engine against the trainer, in a serial run of its own."""
        parity = EngineParity(self.cli.parsed.steps, self.cli.parsed.engine_tolerance)
        self._fit(SERIAL, {}, parity, quiet=quiet)
        return parity

    def _fit(self, schedule: Schedule, settings: dict[str, Any], watch: Callback, *, quiet: bool) -> None:
        cli = self.cli
        torch.set_num_threads(self.torch_threads)
        try:
            with warnings.catch_warnings():
                if quiet:
                    warnings.simplefilter("ignore")
                seed_everything(self.seed, workers=True, verbose=False)
                cli.build(schedule, settings, self.threads)
                cli.trainer.callbacks.append(watch)  # type: ignore[attr-defined]
                fit = {"ckpt_path": cli.parsed.ckpt_path, "weights_only": cli.parsed.get("weights_only")}
                cli.trainer.fit(cli.model, datamodule=cli.datamodule, **fit)
                self.device = cli.trainer.strategy.root_device
        except Exception as error:
            error.add_note(f"under the schedule: {schedule.name}" + (f", with {settings}" if settings else ""))
            raise
        finally:
            for name in ("trainer", "model", "datamodule", "config_init"):
                vars(cli).pop(name, None)
            torch.set_num_threads(self.torch_threads)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def case(self, settings: dict[str, Any]) -> Case:
        """Serial, the others against it, and serial again when something differs."""
        serial = self.run(SERIAL, settings)
        results = []
        for schedule in self.cli.schedules:
            trace = self.run(schedule, settings)
            exact = schedule.deterministic and self.device.type == "cpu"
            results.append(judge(serial, schedule, trace, None if exact else self.cli.parsed.tolerance))
        reproducible = True
        if any(r.faults for r in results):
            bar = None if self.device.type == "cpu" else self.cli.parsed.tolerance
            reproducible = not judge(serial, SERIAL, self.run(SERIAL, settings), bar).faults
        return Case(settings, serial, tuple(results), reproducible)


# ---- the command ----


def verify(arguments: list[str], console: Console | None = None) -> int:
    """Runs and prints; 0: all within tolerance, 1: something differs, 2: a setting is wrong."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    try:
        with _quiet():
            cli = VerifyCLI(arguments)
            target = Path(cli.parsed.json) if cli.parsed.json else None
            if target is not None:
                target.parent.mkdir(parents=True, exist_ok=True)
            return _verify(Verifier(cli), console, target)
    except (ValueError, OSError) as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        print(f"rollplex verify: {text}", file=sys.stderr)
        return 2


def _verify(verifier: Verifier, console: Console, target: Path | None) -> int:
    options = verifier.cli.parsed
    for note in _notes(verifier):
        console.print(note, markup=False, highlight=False)
    cases = [] if options.engine_parity == "only" else _schedules(verifier, console)
    passed = all(case.passed for case in cases)
    report: dict[str, Any] = {}
    if options.engine_parity != "skip":
        parity = verifier.parity(quiet=bool(cases))
        passed = passed and parity.passed
        report["engine"] = [asdict(check) | {"passed": check.passed} for check in parity.checks]
        console.print(parity_table(parity))
        for line in parity_lines(parity):
            console.print(line, markup=False, highlight=False)
    if cases:
        report |= {"case": cases[0].as_json(), "sweep": [case.as_json() for case in cases[1:]]}
    if target is not None:
        head = {"passed": passed, "steps": options.steps, "tolerance": options.tolerance, "seed": verifier.seed}
        target.write_text(dumps(head | report))
    console.print("PASSED" if passed else "FAILED", style="bold")
    return 0 if passed else 1


def _schedules(verifier: Verifier, console: Console) -> list[Case]:
    """The config's case, and those of the sweep if asked for; prints them."""
    cases = [verifier.case({})]
    console.print(difference_table(cases[0]), work_table(cases[0]))
    for r in cases[0].results:
        console.print(r.summary, markup=False, highlight=False)
    if verifier.cli.parsed.cases == "all":
        for number, settings in enumerate(SWEEP, 1):
            console.print(f"case {number} of {len(SWEEP)}: {settings}", markup=False, highlight=False)
            cases.append(verifier.case(settings))
        console.print(case_table(cases[1:]))
    if not all(case.reproducible for case in cases):
        console.print("The serial schedule does not reproduce itself either: look for a reward, task or kernel that is")
        console.print("not deterministic before blaming a schedule.")
    return cases


def _notes(verifier: Verifier) -> list[str]:
    """What is not as the config says."""
    cli = verifier.cli
    dropped = sorted(set(cli.listed) - {*KEPT, *(name for schedule in OTHERS for name in schedule.callbacks)})
    notes = ["Loggers, checkpoints and validation are off."]
    pinned = cli.pinned_strategy(verifier.threads)[1]
    if "admission" in pinned:
        notes.append("Units are admitted to the decode window whether that pays or not.")
    if "threads" in pinned:
        notes.append(f"CPU threads: {verifier.threads} for either lane, alone or not, under every schedule.")
    if dropped:
        notes.append(f"Callbacks left out: {', '.join(dropped)}.")
    left_out = [s.name for s in OTHERS if s not in cli.schedules]
    if left_out:
        notes.append(f"Left out, because the engine keeps a K/V cache of its own: {', '.join(left_out)}.")
    if cli.parsed.model.init_args.get("dtype") == "bfloat16" and cli.parsed.tolerance < 1e-2:
        notes.append(
            f"dtype is bfloat16: sums in another order differ by several 1e-3, and the tolerance is "
            f"{cli.parsed.tolerance:g}; --tolerance 1e-2 suits it."
        )
    if isinstance(cli.parsed.seed_everything, bool):
        notes.append(f"seed_everything is {cli.parsed.seed_everything}; every run starts from {verifier.seed}.")
    return notes


@contextmanager
def _quiet() -> Iterator[None]:
    """No banners of four trainers and model loads."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    bar = transformers_logging.is_progress_bar_enabled()
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        transformers_logging.disable_progress_bar()
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bar:
            transformers_logging.enable_progress_bar()


def main(arguments: list[str]) -> None:
    """`rollplex verify`."""
    raise SystemExit(verify(arguments))
