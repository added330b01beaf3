"""Runs of several ranks in which one is killed, hangs or fails, for test_deadlines.py: one process that forks the ranks of one
run after another, because a rank takes seconds to import and a run does not.

    python kill_runs.py FOLDER MODEL STAGE JOBS(json)

Every rank writes its output to FOLDER/<job>.<rank>.log; FOLDER/<job>.json says how and when each ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import PictureTask, run, weights
from zero_runs import STEPS, callbacks, strategy

from rollplex import whereabouts
from rollplex.callbacks import GracefulStop
from rollplex.engines import TorchEngine
from rollplex.phases import PhaseCallback

WORLD = 2
PATIENCE = 60
"""Seconds after which a rank that still runs is a failure."""
DEADLINE = 6.0
"""collective_timeout and rollout_timeout of runs in which something hangs."""


class Events(PhaseCallback):
    """Counts what happens on a rank, and kills or stops it at the `number`-th event."""

    def __init__(self, number: int | None = None, how: int = signal.SIGKILL) -> None:
        self.number, self.how, self.seen = number, how, []

    def _event(self, name: str) -> None:
        self.seen.append(name)
        if len(self.seen) - 1 == self.number:
            print(f"killed at {name}", flush=True)
            os.kill(os.getpid(), self.how)

    def on_phase_start(self, trainer, phase):
        self._event(f"{phase} phase")

    def on_unit_start(self, trainer, unit):
        self._event(f"start of {unit}")

    def on_unit_end(self, trainer, unit):
        self._event(f"end of {unit}")

    def on_group_finished(self, trainer, group):
        self._event(f"group {group} complete")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._event("end of a step")


class SleepyTask(PictureTask):
    """Its reward never comes back on rank 1, in the second step."""

    calls = 0

    def reward(self, sample, response):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls > 8:
            time.sleep(1000)
        return super().reward(sample, response)


class SleepyData(PictureTask):
    """A row of its never becomes a prompt on rank 1: the fifth that it asks for, of the third step."""

    calls = 0

    def messages(self, sample):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls > 4:
            time.sleep(1000)
        return super().messages(sample)


class SleepyEngine(TorchEngine):
    """Never comes back from a step on rank 1, in the second step."""

    def step(self):
        if os.environ["RANK"] == "1" and self._version > 0:
            time.sleep(1000)
        return super().step()


class FailingEngine(TorchEngine):
    """Raises on rank 1, in the second step."""

    def step(self):
        if os.environ["RANK"] == "1" and self._version > 0:
            raise RuntimeError("no more")
        return super().step()


class FailingEverywhere(PhaseCallback):
    """Raises on every rank, in the second step."""

    def on_phase_start(self, trainer, phase):
        if phase == "train" and trainer.global_step:
            raise RuntimeError("no more")


def one_rank(job: dict[str, Any], folder: Path, model: str, stage: int) -> None:
    """What a forked process does."""
    torch.set_num_threads(1)
    whereabouts.GRACE = 2.0
    rank = int(os.environ["RANK"])
    number = job["at"] if job.get("rank") == rank else None
    events = Events(number, signal.SIGSTOP if job.get("hang") == "stop" else signal.SIGKILL)
    saves = ModelCheckpoint(dirpath=folder / job["folder"], every_n_train_steps=1, save_last=True, save_top_k=0)
    settings: dict[str, Any] = {"collective_timeout": DEADLINE, "rollout_timeout": DEADLINE} if job.get("hang") else {}
    task = {"reward": SleepyTask, "data": SleepyData}.get(job.get("hang", ""), PictureTask)()
    if job.get("hang") == "engine":
        settings["engine"] = SleepyEngine()
    if job.get("fail") == "engine":
        settings["engine"] = FailingEngine()
    options = {"strategy": strategy(stage, **settings), "devices": WORLD, "enable_checkpointing": True}
    order: list[Callback] = [saves, events, *callbacks()]
    if "fail" in job:
        whereabouts.SILENT = 0.5  # before the grace of the other rank
        saves = ModelCheckpoint(dirpath=folder / job["folder"], every_n_train_steps=100)
        order = [GracefulStop(), saves, *callbacks(), *([FailingEverywhere()] if job["fail"] == "all" else [])]
    module = run(
        model, folder / job["name"], trainer=options, callbacks=order, task=task, reward_timeout=None,
        ckpt_path=job.get("ckpt_path"), **STEPS,
    )  # fmt: skip
    torch.save({"events": events.seen, "weights": weights(module)}, folder / f"{job['name']}.{rank}.pt")


def fork(job: dict[str, Any], rank: int, port: int, folder: Path, model: str, stage: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"{job['name']}.{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": job["name"], "GROUP_RANK": "0",
        "LOCAL_WORLD_SIZE": str(WORLD), "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    code = 1
    try:
        one_rank(job, folder, model, stage)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_job(job: dict[str, Any], folder: Path, model: str, stage: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    begin = time.monotonic()
    pids = {fork(job, rank, port, folder, model, stage): rank for rank in range(WORLD)}
    ended: list[dict[str, Any]] = [{} for _ in range(WORLD)]
    first = None
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid:
            first = first or now
            code = os.waitstatus_to_exitcode(status)
            ended[pids.pop(pid)] = {"code": code, "seconds": now - begin, "after_first": now - first}
        elif now - (first or begin) > PATIENCE or (first and job.get("hang") == "stop"):
            for pid, rank in pids.items():
                ended[rank] = {"code": None, "seconds": now - begin, "after_first": PATIENCE}
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pids = {}
        time.sleep(0.01)
    (folder / f"{job['name']}.json").write_text(json.dumps({"job": job, "ended": ended}))
    return ended


def with_points(jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Kill jobs name a seed: of it come the rank and the event at which it dies."""
    out = []
    for job in jobs:
        if "seed" in job:
            rng = random.Random(job["seed"])
            rank = rng.randrange(WORLD)
            events = torch.load(folder / f"straight.{rank}.pt", weights_only=False)["events"]
            job = job | {"rank": rank, "at": rng.randrange(len(events))}
        out.append(job)
    return out


def main(folder: str, model: str, stage: str, jobs: str) -> None:
    """The straight run first: its events are those among which a kill chooses."""
    run_job({"name": "straight", "folder": "straight"}, Path(folder), model, int(stage))
    for job in with_points(json.loads(jobs), Path(folder)):
        run_job(job, Path(folder), model, int(stage))


if __name__ == "__main__":
    main(*sys.argv[1:])
