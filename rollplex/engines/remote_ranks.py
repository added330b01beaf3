"""An engine of several processes behind one server: its first rank leads, the others do what it does, step by step.

Every rank has the scheduler of the whole engine, so all must submit, step, abort and publish alike and in one order.
The first rank tells the others each command before it runs its own part of it, and goes on when they are through.
Weights come to all ranks at once, one tensor after the other, and each keeps its part: none ever holds the whole model.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollplex.data.records import Request, Rollout
from rollplex.engines.base import EngineContext, RolloutEngine, WindowState
from rollplex.engines.remote_link import GRACE, EngineProcess, EngineProcessError, receive, send
from rollplex.engines.remote_messages import Join, Refused
from rollplex.engines.remote_weights import ModelSpec, WeightChannel, sent
from rollplex.models.split_model import SplitModel

STARTUP = 300.0
"""Seconds that a further rank's process may take until it listens."""


def join_ranks(meeting: str, rank: int, ranks: int, device: torch.device) -> None:
    """The default process group of the engine's ranks, and what vLLM reads of a launcher. A collective of them."""
    index = device.index or 0 if device.type == "cuda" else 0
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(index), "WORLD_SIZE": str(ranks)}
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks)


def leave_ranks() -> None:
    """Safe without."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


class ReceivedWeights:
    """A `WeightBinding` (see vllm_weights) of one rank: what the trainer sends, cut as vLLM cuts a checkpoint."""

    def __init__(self, channel: WeightChannel, spec: ModelSpec, ready: Callable[[], None]) -> None:
        """ready: called when vLLM's modules are there; from then on the trainer sends."""
        self._channel, self._spec, self._ready = channel, spec, ready

    def place(self, model: nn.Module, source: SplitModel) -> int:
        self._model: Any = model
        self._source = source
        self._ready()
        filled = self._fill(everything=True)
        empty = sorted({name for name, _ in model.named_parameters()} - filled)
        if empty:
            raise RuntimeError(f"vLLM's model has parameters that no tensor of the trainer's fills: {empty}")
        return self._bytes()

    def refresh(self) -> int:
        """Takes what the trainer sends now: all ranks and the trainer are in it together."""
        self._fill(everything=False)
        return self._bytes()

    def verify(self) -> None:
        pass

    def _bytes(self) -> int:
        return sum(p.nbytes for p in self._model.parameters())

    def _fill(self, *, everything: bool) -> set[str]:
        from rollplex.engines.vllm_weights import engine_name

        parameters, buffers = sent(self._spec, everything=everything)
        coming = self._channel.arrive([*parameters, *buffers])

        def named() -> Iterator[tuple[str, Tensor]]:
            for spec in parameters:
                if spec.nbytes:
                    yield engine_name(spec.name, self._source), next(coming)

        with torch.no_grad():
            names = named()
            filled = set(self._model.load_weights(names))
        for _ in names:  # what vLLM had no use for was sent all the same
            pass
        for _ in coming:
            pass
        return filled


class Follower:
    """A further rank, as the first one sees it.

    lost: called, in a thread, with what happened when the rank's process is gone, or has failed while the first one is
    still in the command: it may wait there for good.
    """

    def __init__(self, rank: int, device: torch.device, threads: int, lost: Callable[[str], None]) -> None:
        self.rank, self._lost = rank, lost
        where = f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else device.type
        self.process = EngineProcess(device=where, cores=None, threads=threads, gpus=None)
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._taken = threading.Event()
        self._ends = False
        self._line: Connection | None = None

    def connect(self) -> None:
        self._line = self.process.connect(STARTUP)
        threading.Thread(target=self._read, args=[self._line], name=f"rollplex-rank-{self.rank}", daemon=True).start()

    def tell(self, name: str, *arguments: Any) -> None:
        assert self._line is not None
        with suppress(OSError):  # the reader says that it is gone
            send(self._line, (name, arguments))

    def answer(self, limit: float | None = None) -> Any:
        """The next one: Reply or Refused; None when none comes in `limit` seconds."""
        try:
            return self._answers.get(timeout=limit)
        except Empty:
            return None
        finally:
            self._taken.set()

    def _read(self, line: Connection) -> None:
        while True:
            try:
                message = receive(line, None)
            except (EOFError, OSError):
                if not self._ends:
                    self._lost(f"rank {self.rank} of the engine is gone: {self.process.fate()}")
                return
            self._taken.clear()
            self._answers.put(message)
            if isinstance(message, Refused) and not self._taken.wait(GRACE):
                self._lost(f"rank {self.rank} of the engine failed:\n{message.text}")

    def dismiss(self) -> None:
        self._ends = True
        if self._line is not None:
            self.tell("goodbye")

    def end(self) -> None:
        self.dismiss()
        self.process.end()
        if self._line is not None:
            self._line.close()


class LedEngine(RolloutEngine):
    """Of the first rank: its own part of the engine, and the followers, as one engine."""

    def __init__(self, engine: RolloutEngine, followers: Sequence[Follower]) -> None:
        self.engine, self.followers = engine, followers
        self._broken = False

    def join(self, joins: Sequence[Join], start: Callable[[], None]) -> None:
        """Start all ranks. start: this one's own part."""
        for follower, join in zip(self.followers, joins, strict=True):
            follower.tell("join", join)
        self._together("the start", start)
        for follower in self.followers:
            follower.process.settled()

    def start(self, context: EngineContext) -> None:
        raise AssertionError("ranks are started by `join`")

    def submit(self, requests: Sequence[Request]) -> None:
        self._all("submit", requests)

    def step(self) -> list[Rollout]:
        return self._all("step")

    def abort(self) -> list[Rollout]:
        return self._all("abort")

    def publish(self, version: int) -> None:
        self._all("publish", version)

    @property
    def window(self) -> WindowState:
        return self.engine.window

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def progress(self) -> int:
        return self.engine.progress

    def state_bytes(self) -> dict[str, int]:
        """Of this rank; the others hold as much."""
        return self.engine.state_bytes()

    def close(self) -> None:
        for follower in self.followers:
            follower.dismiss()
        try:
            self.engine.close()
        finally:
            for follower in self.followers:
                follower.end()

    def _all(self, name: str, *arguments: Any) -> Any:
        if self._broken:
            raise EngineProcessError(f"ranks of the engine are out of step after an error: {name} is not possible")
        for follower in self.followers:
            follower.tell(name, *arguments)
        return self._together(name, lambda: getattr(self.engine, name)(*arguments))

    def _together(self, name: str, own: Callable[[], Any]) -> Any:
        """This rank's part, then what the others say. Its own error is theirs too, as they see the same requests; one
        that only some had is not mended, because their schedulers are no longer equal."""
        error: Exception | None = None
        value = None
        try:
            value = own()
        except Exception as found:
            error = found
        answers = [follower.answer(GRACE if error is not None else None) for follower in self.followers]
        refused = [(f.rank, a) for f, a in zip(self.followers, answers, strict=True) if isinstance(a, Refused)]
        self._broken = len(refused) != (len(answers) if error is not None else 0)
        if error is not None:
            raise error
        if refused:
            rank, said = refused[0]
            raise EngineProcessError(f"rank {rank} of the engine failed in {name}:\n{said.text}")
        return value
