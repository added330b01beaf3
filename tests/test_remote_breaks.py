"""Whole runs whose engine process is stopped or killed in the middle of a decode or of a push of weights, and Ctrl-C."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import run as train
from runs import same_bits, weights
from test_plan_run import config_of
from test_remote_engine import HERE, STEPS, alive

from rollplex import RollplexStrategy
from rollplex.engines import RemoteEngine, remote_link
from rollplex.engines.remote_link import EngineProcessError
from rollplex.lanes import EngineError
from rollplex.phases import Phase, PhaseCallback

pytestmark = pytest.mark.slow


class Break(PhaseCallback):
    """Sends the engine's process (or, `group`, this run's whole group) a signal in the third rollout batch."""

    def __init__(self, at: str, number: str, to: str = "engine", pid_file: str | None = None) -> None:
        self.at, self.number, self.to, self.pid_file = at, number, to, pid_file
        self.module, self.pid = None, 0

    def on_train_start(self, trainer, pl_module):
        self.module = pl_module
        self.pid = trainer.strategy.colocation.engine.pid
        if self.pid_file:
            Path(self.pid_file).write_text(str(self.pid))

    def _break(self) -> None:
        number = signal.Signals[self.number]
        if self.to == "engine":
            os.kill(self.pid, number)
        elif self.to == "trainer":
            os.kill(os.getpid(), number)
        else:
            os.killpg(0, number)

    def on_window_open(self, trainer):
        if self.at == "decode" and self.module is not None and self.module.rollouts_done == 2:
            self.module = None
            self._break()

    def on_phase_start(self, trainer, phase):
        if self.at == "push" and phase is Phase.PUBLISH and self.module is not None and self.module.rollouts_done == 2:
            self.module = None
            channel = trainer.strategy.colocation.engine._weights
            broadcast, calls = channel._broadcast, itertools.count()

            def counted(flat):
                if next(calls) == 5:
                    self._break()
                broadcast(flat)

            channel._broadcast = counted


def checkpointed(model, root: Path, callbacks=(), *, timeout: float = 100.0, rollout_timeout=100.0, **settings):
    engine = RemoteEngine(threads=1, bucket_bytes=20_000, timeout=timeout)
    saves = ModelCheckpoint(dirpath=root / "checkpoints", every_n_train_steps=1, save_last=True, save_top_k=1)
    strategy = RollplexStrategy(engine=engine, rollout_timeout=rollout_timeout)
    options = {"strategy": strategy, "enable_checkpointing": True}
    return train(
        model, root, trainer=options, callbacks=[saves, *callbacks], max_completion_length=80, **(STEPS | settings)
    )


def engine_folders() -> set[str]:
    return {p.name for p in Path(tempfile.gettempdir()).glob(f"{remote_link.FOLDER}*")}


@pytest.fixture(scope="module")
def straight(parity_folder, tmp_path_factory):
    return weights(checkpointed(parity_folder, tmp_path_factory.mktemp("straight")))


@pytest.mark.parametrize(
    ("at", "number", "message"),
    [
        ("decode", "SIGSTOP", "the engine gave no sign of life for 12 s during the rollout phase"),
        ("decode", "SIGKILL", r"the engine failed during the rollout phase .* was ended by SIGKILL"),
        (
            "push",
            "SIGSTOP",
            r"RemoteEngine\(TorchEngine on cpu\) took no weights for 5 s .* the publication of weights",
        ),
        (
            "push",
            "SIGKILL",
            r"RemoteEngine\(TorchEngine on cpu\): .* was ended by SIGKILL .* the publication of weights",
        ),
    ],
)
def test_the_run_ends_the_process_is_gone_and_the_last_checkpoint_goes_on(
    parity_folder, tmp_path, straight, at, number, message
):
    before, broken = engine_folders(), Break(at, number)
    with pytest.raises((EngineError, EngineProcessError), match=message):
        checkpointed(parity_folder, tmp_path, [broken], timeout=5.0, rollout_timeout=12.0)
    end = time.monotonic() + 10  # a lane that is stuck ends it meanwhile
    while alive(broken.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(broken.pid) and engine_folders() == before
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    again = checkpointed(parity_folder, tmp_path, ckpt_path=last)
    assert same_bits(weights(again), straight)


@pytest.mark.parametrize("to", ["trainer", "group"])
def test_ctrl_c_ends_trainer_and_engine_with_a_checkpoint(parity_folder, tmp_path, to):
    """Of a terminal, which sends it to all processes of the group, or of a scheduler, to the trainer alone."""
    engine = {"class_path": "rollplex.engines.RemoteEngine", "init_args": {"threads": 1}}
    config = config_of(parity_folder, tmp_path, strategy={"engine": engine}, model={"max_completion_length": 80})
    saves = {"dirpath": str(tmp_path / "checkpoints"), "save_last": True, "every_n_train_steps": 100}
    config["trainer"] |= {"max_steps": 50, "enable_checkpointing": True}
    pid_file, folder = tmp_path / "pid", tmp_path / "tmp"
    folder.mkdir()
    config["trainer"]["callbacks"] = [
        {"class_path": "rollplex.callbacks.GracefulStop"},
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves},
        {
            "class_path": "test_remote_breaks.Break",
            "init_args": {"at": "decode", "number": "SIGINT", "to": to, "pid_file": str(pid_file)},
        },
    ]
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    search = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "rollplex", "fit", "--config", str(path)], capture_output=True, text=True, timeout=200,
        env=os.environ | {"PYTHONPATH": search, "TMPDIR": str(folder)}, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 130 and "stopped by SIGINT after 2 updates; saved" in done.stdout, done.stderr[-3000:]
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert not alive(int(pid_file.read_text()))
    assert not [p for p in folder.iterdir() if p.name.startswith("rollplex")]
