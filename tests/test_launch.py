"""How a run of several ranks is started: by Lightning, by torchrun, by SLURM; and that docs/scaling.md names what exists."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from rollplex.cli import RollplexCLI, main

ROOT = Path(__file__).resolve().parent.parent
SCALING = (ROOT / "docs" / "scaling.md").read_text()


def start(launcher: str, arguments: list[str], folder: Path) -> None:
    """`rollplex` on two ranks; fails with their output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    script = folder / "rollplex"  # what pip writes for the console script
    script.write_text("from rollplex.cli import main\n\nmain()\n")
    rollplex = [sys.executable, str(script), *arguments]
    if launcher == "lightning":
        commands, environments = [rollplex], [environment]
    elif launcher.startswith("torchrun"):
        run = [sys.executable, "-m", "torch.distributed.run"]
        place = ["--standalone", "--nproc-per-node", "2"]
        commands = [[*run, *place, "-m", "rollplex", *arguments]]
        if launcher == "torchrun of two nodes":  # the recipe of docs/scaling.md, on every node
            place = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
            place += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
            nodes = ["--trainer.num_nodes", "2", "--trainer.devices", "1"]
            commands = [[*run, *place, "-m", "rollplex", *arguments, *nodes]] * 2
        environments = [environment] * len(commands)
    else:  # what srun sets for two tasks of one node
        job = {
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "rollplex", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_JOB_NODELIST": "localhost", "SLURM_NODELIST": "localhost", "SLURM_NODEID": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        commands = [rollplex, rollplex]
        environments = [environment | job | {"SLURM_PROCID": r, "SLURM_LOCALID": r} for r in ("0", "1")]
    logs = [folder / f"{launcher}.{i}.log" for i in range(len(commands))]
    processes = [
        subprocess.Popen(command, cwd=folder, env=env, stdout=log.open("w"), stderr=subprocess.STDOUT)
        for command, env, log in zip(commands, environments, logs, strict=True)
    ]
    try:
        codes = [process.wait(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * len(codes), "\n".join(log.read_text()[-4000:] for log in logs)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.deepspeed
@pytest.mark.parametrize("launcher", ["lightning", "torchrun", "torchrun of two nodes", "slurm"])
def test_two_ranks_of_the_digits_config(launcher, tmp_path):
    """Two steps under ZeRO-2, a checkpoint, and one more step from it."""
    pytest.importorskip("deepspeed")
    from rollplex.models.tiny import build_tiny

    build_tiny(tmp_path / "models" / "tiny-digits")
    config = ["--config", str(ROOT / "configs" / "digits_zero2_cpu.yaml"), "--trainer.devices", "2"]
    short = ["--trainer.limit_val_batches", "0"]
    start(launcher, ["fit", *config, *short, "--trainer.max_steps", "2"], tmp_path)
    start(launcher, ["fit", *config, *short, "--ckpt_path", "last", "--trainer.max_steps", "3"], tmp_path)
    mark = next(tmp_path.rglob("checkpoints/last.ckpt"))
    assert mark.is_dir() and len(list(mark.rglob("*optim_states.pt"))) == 2  # a shard of each rank


def test_the_script_for_slurm_starts_the_run(tmp_path, monkeypatch, capsys):
    """With an srun that says what it was told to start."""
    for name, text in {"bin/srun": '#!/bin/sh\nprintf "%s\\n" "$@" > told\n', ".venv/bin/activate": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin" / "srun").chmod(0o755)
    script, config = ROOT / "scripts" / "train.sbatch", "configs/qwen2_5_vl_32b_32gpu.yaml"
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "4"}

    def sbatch(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(script), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert sbatch().returncode == 1 and "give the config" in sbatch().stderr
    done = sbatch(config)
    assert done.returncode == 0, done.stderr
    _, program, *arguments = (tmp_path / "told").read_text().splitlines()
    assert program == "rollplex" and arguments[-2:] == ["--ckpt_path", "last"]
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--print_config"])
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    said = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)", script.read_text(), re.M))
    assert end.value.code == 0 and trainer["num_nodes"] == int(said["nodes"]) == 4
    assert trainer["devices"] == int(said["ntasks-per-node"]) == int(said["gpus-per-node"])


# ---- the page ----


@pytest.mark.parametrize(("first", "code"), [(True, 143), (False, 0)])
def test_of_a_stopped_run_the_first_rank_alone_ends_with_the_code_of_its_signal(monkeypatch, capsys, first, code):
    """With another code than 0, a rank that is done would have the launcher kill the first one at its last work."""

    def interrupted(self, subcommand):
        raise SystemExit(1)  # Lightning's

    monkeypatch.setattr(LightningCLI, "_run_subcommand", interrupted)
    cli: Any = object.__new__(RollplexCLI)
    stop = SimpleNamespace(exit_code=143, message="stopped by SIGTERM after 3 updates")
    cli.trainer = SimpleNamespace(callbacks=[object(), stop], is_global_zero=first)
    with pytest.raises(SystemExit) as ended:
        cli._run_subcommand("fit")
    assert ended.value.code == code and "stopped by SIGTERM" in capsys.readouterr().out


def test_what_the_page_on_scaling_names_exists():
    for path in re.findall(r"(?:configs|scripts|docs)/\w+\.\w+", SCALING):
        assert (ROOT / path).exists(), path
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / "train.sbatch")], check=True)


def test_every_run_on_the_page_parses(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    lines = [
        line
        for block in re.findall(r"```bash\n(.*?)```", SCALING, re.S)
        for line in block.replace("\\\n", "").splitlines()
    ]
    runs = [
        re.split(r"\brollplex fit\b", line.partition("#")[0])[1].split() for line in lines if "rollplex fit" in line
    ]
    assert len(runs) >= 4
    for arguments in runs:
        with pytest.raises(SystemExit) as end:
            main(["fit", *arguments, "--print_config"])
        assert end.value.code == 0, arguments
        assert yaml.safe_load(capsys.readouterr().out)["model"]


def test_settings_and_defaults_on_the_page_are_those_of_the_code():
    import inspect

    from rollplex import GRPOModule, RollplexDDPStrategy
    from rollplex.engines import RemoteEngine

    def default(owner: type, name: str) -> float:
        return inspect.signature(owner).parameters[name].default

    found = {
        "`rollout_timeout`": default(RollplexDDPStrategy, "rollout_timeout"),
        "`collective_timeout`": default(RollplexDDPStrategy, "collective_timeout"),
        "`reward_timeout`": default(GRPOModule, "reward_timeout"),
    }
    for name, seconds in found.items():
        assert re.search(rf"\| {name} \|[^|]*\| {seconds:.0f} s \|", SCALING), name
    pair = f"{default(RemoteEngine, 'timeout'):.0f} s, {default(RemoteEngine, 'start_timeout'):.0f} s"
    assert f"| `RemoteEngine` | {pair} |" in SCALING


def test_a_wrong_setting_is_one_line_and_any_other_error_keeps_its_traceback(monkeypatch, capsys, tmp_path):
    from rollplex.models.tiny import build_tiny

    build_tiny(tmp_path / "models" / "tiny-digits")
    monkeypatch.chdir(tmp_path)
    fit = ["fit", "--config", str(ROOT / "configs" / "digits_cpu.yaml"), "--trainer.logger", "false"]
    wrong, words = ["--trainer.devices", "2"], "strategy=rollplex uses one device"
    monkeypatch.setattr(sys, "argv", ["rollplex", *fit, *wrong])
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and f"error: {words}" in err and "Traceback" not in err
    monkeypatch.setattr(sys, "argv", ["rollplex", *fit, "--trainer.accelerator", "mps"])
    with pytest.raises(SystemExit) as lacking:  # Lightning's own words of what the machine lacks
        main()
    err = capsys.readouterr().err
    assert lacking.value.code == 2 and "error: `MPSAccelerator` can not run" in err and "Traceback" not in err
    monkeypatch.setattr(sys, "argv", ["rollplex", *fit, *wrong])
    with pytest.raises(ValueError, match=words):  # from Python it is the error itself
        main([*fit, *wrong])
    monkeypatch.setenv("ROLLPLEX_TRACEBACK", "1")
    with pytest.raises(ValueError, match=words):
        main()
    monkeypatch.delenv("ROLLPLEX_TRACEBACK")
    monkeypatch.setattr("rollplex.tasks.digits.Digits.samples", lambda self, split: int("x"))
    monkeypatch.setattr(sys, "argv", ["rollplex", *fit])
    with pytest.raises(ValueError, match="invalid literal"):
        main()


REMOTE = "{class_path: rollplex.engines.RemoteEngine, init_args: {%s}}"
NOBODY = "address: '127.0.0.1:1', key_file: key, start_timeout: 0.1"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--model.dynamic_sample", "true", "--model.num_mini_batches", "2"], "dynamic_sample with num_mini_batches=2"),
        (["--model.lora", "{r: 0}"], "lora: r=0 must be a whole number"),
        (["--trainer.gradient_clip_val", "1.0"], "trainer.gradient_clip_val=1.0 is for Lightning's own loop"),
        (["--trainer.accumulate_grad_batches", "2"], "trainer.accumulate_grad_batches=2 is for Lightning's own loop"),
        (["--data.task.image_size", "2"], "image_size=2 must be at least 8"),
        (["--trainer.strategy.engine", REMOTE % "timeout: -1"], "timeout=-1"),
        (["--trainer.callbacks", "[]", "--trainer.strategy.engine", REMOTE % NOBODY], "no engine server answers at 127.0.0.1:1"),
    ],
)  # fmt: skip
def test_a_setting_that_a_constructor_refuses_is_one_line_too(monkeypatch, capsys, tmp_path, wrong, words):
    from rollplex.models.tiny import build_tiny

    build_tiny(tmp_path / "models" / "tiny-digits")
    (tmp_path / "key").write_text("k" * 32)
    monkeypatch.chdir(tmp_path)
    strategy = ["--trainer.strategy", "rollplex.RollplexStrategy"]
    fit = ["fit", "--config", str(ROOT / "configs" / "digits_cpu.yaml"), "--trainer.logger", "false", *strategy]
    monkeypatch.setattr(sys, "argv", ["rollplex", *fit, *wrong])
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and f"error: {words}" in err and "Traceback" not in err and "Union" not in err


def test_what_the_parser_no_longer_hands_over_is_still_told(monkeypatch, capsys, tmp_path):
    """The errors beside the first one are in a variable of jsonargparse, which another version may not have."""
    from rollplex import cli

    monkeypatch.setattr(cli, "_package", lambda error, found=cli._package: (found(error)[0], {}))
    monkeypatch.chdir(ROOT)
    wrong = ["--trainer.strategy", "rollplex.RollplexStrategy", "--trainer.strategy.engine", REMOTE % "timeout: -1"]
    monkeypatch.setattr(sys, "argv", ["rollplex", "fit", "--config", "configs/digits_cpu.yaml", *wrong])
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and "error: " in err and "timeout=-1" in err and "Traceback" not in err
