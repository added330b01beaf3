"""One contender's process, and the parent's handle on it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.counts import ForwardCounts
from bench.gate import Gate, Missing, Stop
from bench.workload import Workload

OURS = ("serial_unshared", "serial", "overlap", "overlap_streaming", "reuse_streaming")
REMOTE = ("disaggregated", "disaggregated_overlap")
"""Rollplex with the engine in a process of its own, on cores of its own."""
TRL = ("trl", "trl_tuned")

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",
    "WANDB_MODE": "disabled",
    "DO_NOT_TRACK": "1",
}
"""Environment of every contender. OpenMP keeps its default waiting: it spins for about a millisecond after a parallel
region and then sleeps, so an idle contender costs nothing (its `idle_cpu` says so). OMP_WAIT_POLICY=passive would slow
whoever runs with several threads: a decode step of `serial` by a third."""


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class ContenderError(RuntimeError):
    """A contender's process failed; the message holds its traceback."""


def serve(connection: Connection, log: str, contender: str, fields: dict[str, Any], options: dict[str, Any]) -> None:
    """Main function of a contender's process."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    try:
        workload = Workload(**fields)
        counts = counts_for(workload, options["folder"])
        if contender in (*OURS, *REMOTE):
            from bench.ours import run
        else:
            from bench.trl_side import run
        counts.install()
        run(Gate(connection, counts), workload, contender, options)
    except (Stop, EOFError, BrokenPipeError):
        pass
    except Missing as missing:
        connection.send(("missing", str(missing)))
    except BaseException:
        traceback.print_exc()
        connection.send(("error", traceback.format_exc()))


def counts_for(workload: Workload, folder: str) -> ForwardCounts:
    """Counters that know how many tokens this workload's prompts have."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": workload.prompt_text(0)}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = len(tokenizer(text)["input_ids"]) - 1 + workload.visual_tokens
    return ForwardCounts(patches_per_picture=4 * workload.visual_tokens, prompt_tokens=tokens)


class Contender:
    """A running contender, from the parent's side."""

    def __init__(self, name: str, workload: Workload, options: dict[str, Any], logs: Path) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, str(self.log), name, workload.to_dict(), options), name=f"bench-{name}"
        )
        self._process.start()
        theirs.close()
        self._ready = False

    def wait_ready(self) -> None:
        """Until it stands before its first step. Raises Missing when it cannot run here."""
        self._receive("ready")
        self._ready = True

    def step(self) -> dict[str, Any]:
        """Let it do one step; what it says about it."""
        self._connection.send("step")
        return self._receive("done")

    def close(self) -> None:
        """Ask it to stop; end it when it does not."""
        try:
            self._connection.send("stop")
        except (BrokenPipeError, OSError):
            pass
        self._process.join(30 if self._ready else 0)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _receive(self, expected: str) -> Any:
        try:
            kind, content = self._connection.recv()
        except EOFError:
            self._process.join(10)
            raise ContenderError(f"{self.name} ended with code {self._process.exitcode}; see {self.log}") from None
        if kind == "missing":
            raise Missing(content)
        if kind == "error":
            raise ContenderError(f"{self.name} failed (log: {self.log}):\n{content}")
        assert kind == expected, (kind, expected)
        return content
