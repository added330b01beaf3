"""Stopped, killed and failed runs continue bit for bit as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import PictureTask
from stops import COMPARED, Finally, StopAt, compared, differences, fit

from rollplex.callbacks import GracefulStop
from rollplex.cli import main
from rollplex.lanes import EngineError
from rollplex.models.tiny import build_tiny
from rollplex.phases import Phase, PhaseCallback
from rollplex.rewards.runner import RewardRunner

ROOT = Path(__file__).resolve().parent.parent
UPDATES = {"num_iterations": 2, "num_mini_batches": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("stop") / "tiny")


def options(kind: str) -> dict:
    """The same run, ended by epochs or by updates (then of four updates a batch)."""
    if kind == "epochs":
        return {}
    return {"trainer": {"max_epochs": -1, "max_steps": 24}, **UPDATES}


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory):
    """Runs that were never stopped, by kind."""
    return {kind: fit(model, tmp_path_factory.mktemp(kind), **options(kind)) for kind in ("epochs", "steps")}


POINTS = {
    "rollout": ("on_phase_start", 1, "rollout"),
    "rollout-of-the-epochs-last-batch": ("on_phase_start", 2, "rollout"),
    "rollout-of-an-epochs-first-batch": ("on_phase_start", 3, "rollout"),
    "a-group-finished": ("on_group_finished", 4, ""),
    "unit": ("on_unit_start", 2, "act_backward"),
    "update": ("on_phase_start", 2, "update"),
    "between-batches": ("on_train_batch_end", 4, ""),
    "before-validation": ("on_train_batch_end", 2, ""),
    "validation": ("on_phase_start", 2, "evaluate", "SIGTERM", 2),
    "validation-of-the-last-epoch": ("on_phase_start", 5, "evaluate", "SIGINT"),
}


MANY_UPDATES = ("unit", "update", "rollout-of-an-epochs-first-batch", "validation")
"""Points tried too when each batch has four updates and their number ends the run."""


@pytest.mark.parametrize(("point", "kind"), [(p, "epochs") for p in POINTS] + [(p, "steps") for p in MANY_UPDATES])
def test_a_stopped_run_ends_like_one_that_was_not(model, straight, tmp_path, point, kind):
    first = Finally()
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=StopAt(*POINTS[point]), callbacks=[first], **options(kind))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    second = fit(model, tmp_path, ckpt_path="last", **options(kind))
    assert not differences(compared(second.checkpoint), compared(straight[kind].checkpoint))
    for name in ("losses", "steps", "validations"):
        assert getattr(first, name) + getattr(second, name) == getattr(straight[kind], name), name


def test_stopping_twice_in_one_batch(model, straight, tmp_path):
    for _ in range(2):
        with pytest.raises(SystemExit):
            fit(model, tmp_path, stop=StopAt("on_unit_start", 2, "act_suffix"), ckpt_path="last")
    last = fit(model, tmp_path, ckpt_path="last")
    assert not differences(compared(last.checkpoint), compared(straight["epochs"].checkpoint))


def test_every_checkpoint_of_a_run_continues_to_the_same_end(model, tmp_path):
    """What is left after kill -9: ModelCheckpoint's files, of each batch and of each validation.

    Lightning takes a validation that was due then as done, so rewards must not draw from the global generators here.
    Of its counters only those that training depends on come out the same.
    """
    savers = [
        ModelCheckpoint(dirpath=tmp_path / "batches", every_n_train_steps=1, save_top_k=-1, filename="{step}"),
        ModelCheckpoint(dirpath=tmp_path / "validations", monitor="val/reward", save_top_k=-1, filename="v-{step}"),
    ]
    whole = fit(model, tmp_path / "whole", task=PictureTask(12), callbacks=savers)
    saved = sorted((tmp_path / "batches").iterdir()) + sorted((tmp_path / "validations").iterdir())
    assert len(saved) == 6 + 2
    for path in saved:
        resumed = fit(model, tmp_path / path.stem, task=PictureTask(12), ckpt_path=str(path))
        done = torch.load(path, weights_only=False)["rollplex"]["rollouts_done"]
        assert resumed.losses == whole.losses[done:] and resumed.steps == whole.steps[done:]
        if resumed.losses:
            final = {name: resumed.checkpoint[name] for name in COMPARED}
            assert not differences(final, {name: whole.checkpoint[name] for name in COMPARED}), path.name


def test_the_end_of_a_run_is_in_its_last_checkpoint(model, tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=4, save_last=True, save_top_k=0)
    last = fit(model, tmp_path, saver=saver)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["last.ckpt"]
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 6 and not differences(saved["state_dict"], last.checkpoint["state_dict"])
    more = fit(model, tmp_path, saver=saver, ckpt_path="last", trainer={"max_epochs": 3})
    assert more.losses == fit(model, tmp_path / "straight", trainer={"max_epochs": 3}).losses[6:]


def test_nothing_is_saved_before_anything_is_trained(model, tmp_path):
    stop, graceful = StopAt("on_phase_start", 0, "rollout"), GracefulStop()
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=stop, graceful=graceful)
    assert not list(tmp_path.rglob("*.ckpt"))
    assert graceful.message == "stopped by SIGTERM after 0 updates; there was nothing to save"


def test_message_names_the_checkpoint_and_the_signal(model, tmp_path):
    graceful = GracefulStop()
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=StopAt("on_phase_start", 1, "score", "SIGINT"), graceful=graceful)
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert graceful.message == f"stopped by SIGINT after 1 updates; saved {path}; continue with --ckpt_path last"
    assert graceful.exit_code == 130


def test_an_earlier_runs_checkpoint_is_kept_and_told_of_before_the_next(model, tmp_path, monkeypatch):
    said: list[list[str]] = []
    monkeypatch.setattr("rollplex.checkpoints.warnings.warn", lambda text, *_, **__: said[-1].append(str(text)))
    for step, more in ((1, {}), (2, {}), (3, {"ckpt_path": str(tmp_path / "checkpoints" / "last-v1.ckpt")})):
        said.append([])
        with pytest.raises(SystemExit):
            fit(
                model,
                tmp_path if step < 3 else tmp_path / "other",
                stop=StopAt("on_phase_start", step, "rollout"),
                **more,
            )
    told = [[text for text in texts if "earlier run" in text] for texts in said]
    assert [len(texts) for texts in told] == [0, 1, 0]
    assert told[1][0].startswith(f"{tmp_path / 'checkpoints'} holds checkpoints of an earlier run (last.ckpt); ")
    steps = {p.name: torch.load(p, weights_only=False)["global_step"] for p in (tmp_path / "checkpoints").iterdir()}
    assert steps == {"last.ckpt": 1, "last-v1.ckpt": 2}


def test_without_a_model_checkpoint_the_path_is_told(model, tmp_path):
    graceful = GracefulStop()
    with pytest.raises(SystemExit):
        fit(
            model, tmp_path, stop=StopAt("on_phase_start", 1, "rollout"), graceful=graceful, saver=None,
            trainer={"enable_checkpointing": False},
        )  # fmt: skip
    path = tmp_path / "checkpoints" / "last.ckpt"
    assert graceful.message is not None and graceful.message.endswith(f"--ckpt_path {path}")
    assert torch.load(path, weights_only=False)["rollplex"]["rollouts_done"] == 1


def test_handlers_and_threads_are_as_before(model, tmp_path):
    import threading

    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], threading.active_count()
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=StopAt("on_unit_start", 1, "act_prefix"))
    assert ([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], threading.active_count()) == before
    fit(model, tmp_path / "whole", trainer={"max_epochs": 1})
    assert ([signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], threading.active_count()) == before


def test_second_ctrl_c_ends_at_once_and_saves_nothing(model, tmp_path):
    class Twice(StopAt):
        def on_unit_end(self, trainer, unit):
            raise AssertionError("a unit ran on after the second Ctrl-C")

        def on_unit_start(self, trainer, unit):
            if self.module.rollouts_done == 1:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

        def on_train_batch_end(self, *args):
            Twice.on_unit_end = PhaseCallback.on_unit_end

    Twice.on_unit_end, armed = PhaseCallback.on_unit_end, Twice.on_unit_end
    Twice.on_train_batch_end = lambda self, *args: setattr(Twice, "on_unit_end", armed)
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=Twice("", 0))
    assert not list(tmp_path.rglob("*.ckpt"))


def test_reward_workers_are_closed_when_a_run_is_stopped(model, tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(RewardRunner, "close", lambda self: closed.append(self))
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=StopAt("on_phase_start", 1, "train"))
    assert closed


class FailAt(PhaseCallback):
    def __init__(self, phase: Phase, step: int) -> None:
        self.phase, self.step = phase, step

    def on_phase_start(self, trainer, phase):
        if phase is self.phase and trainer.lightning_module.rollouts_done == self.step:
            raise EngineError("out of luck")


def test_a_failed_run_continues_too(model, straight, tmp_path):
    with pytest.raises(EngineError, match="out of luck"):
        fit(model, tmp_path, callbacks=[FailAt(Phase.TRAIN, 2)])
    last = fit(model, tmp_path, ckpt_path="last")
    assert not differences(compared(last.checkpoint), compared(straight["epochs"].checkpoint))


def test_a_run_that_failed_between_two_updates_saves_nothing(model, tmp_path, capfd):
    class FailSecond(FailAt):
        seen = 0

        def on_phase_start(self, trainer, phase):
            self.seen += phase is Phase.UPDATE and trainer.lightning_module.rollouts_done == 1
            if self.seen == 2:
                raise EngineError("out of luck")

    with pytest.raises(EngineError):
        fit(model, tmp_path, callbacks=[FailSecond(Phase.UPDATE, 1)], **options("steps"))
    assert not list(tmp_path.rglob("*.ckpt"))
    assert "nothing saved: the weights are between two batches" in capfd.readouterr().err


def test_save_on_error_can_be_off(model, tmp_path):
    with pytest.raises(EngineError):
        fit(model, tmp_path, callbacks=[FailAt(Phase.SCORE, 1)], graceful=GracefulStop(save_on_error=False))
    assert not list(tmp_path.rglob("*.ckpt"))


# ---- rows of the reports ----


def test_ckpt_02_warm_up_continues(model, tmp_path):
    settings = {"warmup_steps": 5, "lr_scheduler_type": "constant_with_warmup"}
    whole = fit(model, tmp_path / "whole", **settings)
    first = Finally()
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=StopAt("on_phase_start", 3, "rollout"), callbacks=[first], **settings)
    second = fit(model, tmp_path, ckpt_path="last", **settings)
    lrs = [out["metrics"]["lr"] for out in first.outputs + second.outputs]
    assert lrs == [out["metrics"]["lr"] for out in whole.outputs] == pytest.approx([0, 2e-3, 4e-3, 6e-3, 8e-3, 1e-2])
    assert len(second.losses) == 3 and second.losses == whole.losses[3:]
    rows = [[g.prompt.sample.id for g in out["groups"]] for out in second.outputs]
    assert rows == [[g.prompt.sample.id for g in out["groups"]] for out in whole.outputs[3:]]
    assert not differences(compared(second.checkpoint), compared(whole.checkpoint))


def test_settings_that_change_on_resume_are_told(model, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("rollplex.checks.rank_zero_warn", said.append)
    for name, settings in (("same", {}), ("other", {"temperature": 0.9})):
        with pytest.raises(SystemExit):
            fit(model, tmp_path / name, stop=StopAt("on_phase_start", 5, "rollout"))
        fit(model, tmp_path / name, ckpt_path="last", **settings)
    what = "the run continues with other settings than those of its checkpoint"
    assert said == [f"{what}: temperature=0.9 (was 1.0)"]


def test_ckpt_04_first_rollout_after_resume_is_of_the_resumed_weights(model, tmp_path):
    settings = {"learning_rate": 0.1, "max_grad_norm": None}
    with pytest.raises(SystemExit):
        fit(model, tmp_path, stop=StopAt("on_phase_start", 1, "rollout"), **settings)
    resumed = fit(model, tmp_path, ckpt_path="last", **settings)
    base = fit(model, tmp_path / "base", learning_rate=0.0)
    assert resumed.outputs[0]["metrics"]["mismatch_max"] < 1e-5
    assert {r.weights_version for g in resumed.outputs[0]["groups"] for r in g.rollouts} == {1}

    def first_logps(out):
        return torch.stack([r.logps[0] for g in out["groups"] for r in g.rollouts])

    # The same batch under the base weights: the engine would have told another story.
    assert [g.prompt.sample.id for g in base.outputs[1]["groups"]] == [
        g.prompt.sample.id for g in resumed.outputs[0]["groups"]
    ]
    assert (first_logps(resumed.outputs[0]) - first_logps(base.outputs[1])).abs().max() > 0.1


def test_ckpt_08_global_step_counts_optimizer_updates_once(model, tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path / "kept", every_n_train_steps=8, save_top_k=-1, filename="{step}")
    last = fit(model, tmp_path, callbacks=[saver], **options("steps"))
    assert [out["metrics"]["updates"] for out in last.outputs] == [4, 8, 12, 16, 20, 24]
    assert last.checkpoint["global_step"] == last.checkpoint["rollplex"]["weights_version"] == 24
    assert last.checkpoint["lr_schedulers"][0]["last_epoch"] == 24
    moments = last.checkpoint["optimizer_states"][0]["state"].values()
    assert max(state["step"].item() for state in moments) == 24  # a vision tower skips a mini-batch without images
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == ["step=16.ckpt", "step=24.ckpt", "step=8.ckpt"]


# ---- real processes, through the command line ----

CONFIG = """
seed_everything: 0
model:
  class_path: rollplex.GRPOModule
  init_args: {{model: {model}, num_generations: 4, max_completion_length: 3, learning_rate: 1.0e-3, warmup_steps: 3,
    lr_scheduler_type: constant_with_warmup}}
data:
  class_path: rollplex.VLMDataModule
  init_args:
    task: {{class_path: rollplex.tasks.digits.Digits}}
    batch_size: 4
    val_batch_size: 8
trainer:
  accelerator: cpu
  strategy: rollplex
  max_steps: 4
  limit_val_batches: 1
  val_check_interval: 3
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  enable_model_summary: false
  default_root_dir: {root}
  logger: {{class_path: lightning.pytorch.loggers.CSVLogger, init_args: {{save_dir: {root}}}}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {root}/checkpoints, every_n_train_steps: 1, save_top_k: 1, save_last: true}}
"""
STOP = """
    - class_path: stops.StopAt
      init_args: {{event: {event}, step: 2, what: {what}, number: {number}}}
"""


def start(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    command = [
        sys.executable,
        "-c",
        "from rollplex.cli import main; main()",
        "fit",
        "--config",
        str(folder / "config.yaml"),
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def command_line_run(model, tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    done = start(root, CONFIG.format(model=model, root=root))
    assert done.returncode == 0, done.stderr
    assert "update 1/4: reward" in done.stdout and "update 4/4: reward" in done.stdout
    return torch.load(root / "checkpoints" / "last.ckpt", weights_only=False)


@pytest.mark.parametrize(
    ("number", "event", "what", "code"),
    [
        ("SIGTERM", "on_phase_start", "rollout", 143),
        ("SIGINT", "on_unit_start", "act_backward", 130),
        ("SIGKILL", "on_unit_start", "act_suffix", -9),
    ],
)
def test_a_process_that_was_stopped_or_killed_continues(model, command_line_run, tmp_path, number, event, what, code):
    text = CONFIG.format(model=model, root=tmp_path)
    stopped = start(tmp_path, text + STOP.format(event=event, what=what, number=number))
    assert stopped.returncode == code, stopped.stderr
    assert "Traceback" not in stopped.stderr
    if number != "SIGKILL":
        lines = [line for line in stopped.stdout.splitlines() if line.startswith("stopped by")]
        path = tmp_path / "checkpoints" / "last.ckpt"
        assert lines == [f"stopped by {number} after 2 updates; saved {path}; continue with --ckpt_path last"]
    if number == "SIGKILL":
        again = start(tmp_path, text, "--ckpt_path", "last")
        assert again.returncode == 0, again.stderr
    else:
        (tmp_path / "config.yaml").write_text(text)
        main(["fit", "--config", str(tmp_path / "config.yaml"), "--ckpt_path", "last"])
    final = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert not differences(compared(final), compared(command_line_run))
