"""A reward worker: a spawned process that scores one response after another, and its handle in the trainer.

Messages are plain pickles sent as bytes. (`Connection.send` would move tensors through shared-memory files, which
leak when a worker is killed.)
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollplex.rewards.outcome import Outcome, TimeLimit, describe
from rollplex.rewards.scorers import score, scorers_of

HOME_CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
"""Cores that this process might use when it started."""

GRACE = 5.0
"""Seconds past the time limit after which the kernel ends a worker whose parent did not."""


def worker_main(conn: Connection, task_bytes: bytes, timeout: float | None, cores: set[int]) -> None:
    """Body of the process. It ends when the pipe closes or the parent is gone."""
    # Ctrl-C and a scheduler's SIGTERM reach the whole process group; the parent decides, and may want these rewards
    # for the step it finishes before it saves.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # a lane's share of them may be what the thread that started it had
    torch.set_num_threads(1)  # the cores belong to the trainer; parallelism is the number of workers
    try:
        scorers = scorers_of(pickle.loads(task_bytes))
    except BaseException as error:
        conn.send_bytes(pickle.dumps(describe(error)))
        return
    conn.send_bytes(pickle.dumps(None))
    no_limit = TimeLimit(None, allowed=timeout)
    # The parent kills in time. If it died first while C code holds the GIL here, only the kernel can.
    last_resort = timeout + GRACE if timeout is not None and hasattr(signal, "setitimer") else None
    sample_bytes, unpickled = b"", b""
    sample: Any = None
    try:
        while True:
            sample_bytes = conn.recv_bytes() or sample_bytes
            number, rollouts_bytes = pickle.loads(conn.recv_bytes())
            if last_resort is not None:
                signal.setitimer(signal.ITIMER_REAL, last_resort)
            try:
                if sample_bytes is not unpickled:
                    sample, unpickled = pickle.loads(sample_bytes), sample_bytes
                rollouts = pickle.loads(rollouts_bytes)
            except Exception as error:
                failed = f"row or response cannot be unpickled: {describe(error)}"
                outcomes: list[Outcome] | Outcome = Outcome(reason="raised", message=failed)
            else:
                try:
                    outcomes = score(scorers[number], sample, rollouts, no_limit)
                except (SystemExit, KeyboardInterrupt) as error:  # the reward's own: no signal raises them here
                    outcomes = Outcome(reason="raised", message=describe(error))
            if last_resort is not None:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            conn.send_bytes(pickle.dumps(outcomes))
    except (EOFError, OSError):
        return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class Worker:
    """Handle of one process. States: starting, idle, busy (`job` is set), dead."""

    def __init__(self, task_bytes: bytes, timeout: float | None, start_limit: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.conn, child = context.Pipe()
        # daemon: the interpreter must not wait for it at exit.
        self.process = context.Process(
            target=worker_main, args=(child, task_bytes, timeout, HOME_CORES), name="rollplex-reward", daemon=True
        )
        self.process.start()
        child.close()
        self.ready = False
        self.job: int | None = None
        self.deadline: float | None = time.monotonic() + start_limit
        self._timeout = timeout
        self._sample: bytes = b""

    @property
    def idle(self) -> bool:
        return self.ready and self.job is None

    def submit(self, job: int, sample: bytes, work: bytes, extra: float = 0.0) -> None:
        """Start a reward. The sample travels only when it differs from the last one.

        work: pickled (number of the scorer, pickled list of responses). extra: seconds beyond the time limit.
        Raises OSError if the process is gone.
        """
        self.job = job
        self.deadline = None if self._timeout is None else time.monotonic() + self._timeout + extra
        self.conn.send_bytes(b"" if sample is self._sample else sample)
        self.conn.send_bytes(work)
        self._sample = sample

    def receive(self) -> list[Outcome] | Outcome | None:
        """The outcomes of the job (one for all its responses if it failed), or None when the process says it is ready.

        Raises EOFError or OSError if the process is gone, RuntimeError if it could not load the task.
        """
        message = pickle.loads(self.conn.recv_bytes())
        if self.ready:
            self.job = None
            self.deadline = None
            return message
        if message is not None:
            raise RuntimeError(f"a reward worker could not load the task: {message}; set workers to 0 to stay inline")
        self.ready = True
        self.deadline = None
        return None

    def kill(self) -> None:
        """End this process, and only this one; what a reward itself started is the reward's."""
        self.process.kill()
        self.process.join()
        self.conn.close()

    def stop(self) -> None:
        """Let an idle process end by itself; kill it otherwise."""
        if self.idle:
            self.conn.close()
            self.process.join(2.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.conn.close()
