"""What a process with an engine does for its trainer, or for the first rank of the engine: its commands, one by one."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from rollplex.data.records import Rollout
from rollplex.engines.base import EngineContext, RolloutEngine, WindowState
from rollplex.engines.remote_link import EngineProcessError, own_host, receive, send
from rollplex.engines.remote_messages import (
    EngineState,
    Join,
    Refused,
    Reply,
    Start,
    Update,
    check_versions,
    versions,
)
from rollplex.engines.remote_ranks import Follower, LedEngine, ReceivedWeights, join_ranks, leave_ranks
from rollplex.engines.remote_weights import ENGINE, ModelSpec, WeightChannel, connect, tensors_of
from rollplex.models.split_model import SplitModel

LOST = 3
"""Exit code of the first rank when another one is lost: it may be waiting for that one in a collective."""


@dataclass
class Server:
    """Answers one trainer, or, as a further rank of an engine, the first one."""

    connection: Connection
    device: torch.device
    threads: int | None = None
    engine: RolloutEngine | None = None
    weights: WeightChannel | None = None
    model: SplitModel | None = None
    spec: ModelSpec | None = None
    follows: bool = False
    """Whether it is a further rank, which steps when it is told to."""
    commands: dict[str, Callable[..., Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.commands = {
            "hello": lambda theirs: check_versions(versions(), theirs),
            "start": self._start, "join": self._join, "receive": self._receive, "publish": self._publish,
            "submit": self._submit, "step": self._follow, "abort": self._abort, "memory": self._memory,
            "close": self.close,
        }  # fmt: skip
        self._sending = threading.Lock()

    def serve(self) -> None:
        """Until the other side says goodbye or is gone."""
        while True:
            busy = not self.follows and self.engine is not None and self._state().window is not WindowState.IDLE
            try:
                message = receive(self.connection, 0.0 if busy else None)
            except (EOFError, OSError):
                raise
            except Exception as error:  # of what cannot be read here: a class that only the trainer has
                self._refuse(error)
                continue
            if message is not None:
                name, arguments = message
                if name == "goodbye":
                    return
                self._answer(name, arguments)
            elif busy:
                self._step()

    def _send(self, message: Any) -> None:
        with self._sending:
            send(self.connection, message)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            value = self.commands[name](*arguments)
        except Exception as error:
            self._refuse(error)
        else:
            self._send(Reply(value, self._state()))

    def _step(self) -> None:
        engine = self._engine
        try:
            finished = tuple(engine.step())
        except Exception as error:
            with suppress(Exception):
                self._engine.abort()  # nothing may go on after it
            self._refuse(error)
        else:
            self._send(Update(finished, self._state()))

    def _refuse(self, error: Exception) -> None:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            sendable = None
        else:
            sendable = error
        self._send(Refused(sendable, text, self._state()))

    def _lost(self, what: str) -> None:
        """Another rank is: tell the trainer and end, from whatever this one waits in. Called in a thread."""
        with suppress(OSError):
            self._send(Refused(EngineProcessError(what), "", EngineState()))
        os._exit(LOST)

    def _state(self) -> EngineState:
        if self.engine is None:
            return EngineState()
        try:
            return EngineState(self.engine.window, self.engine.num_running, self.engine.progress)
        except Exception:  # of an engine that failed, or is closed
            return EngineState()

    @property
    def _engine(self) -> RolloutEngine:
        assert self.engine is not None, "the engine is not started"
        return self.engine

    # ---- the start ----

    def _start(self, start: Start) -> None:
        """Build the model, fill it, and start the engine on it. Between, the trainer is told the port of the store,
        and when to send."""
        self.close()
        if start.ranks > 1:
            self._hire(start)
        store: Any
        if start.store is not None:
            store = dist.FileStore(start.store, 1 + start.ranks)
        else:
            store = dist.TCPStore(own_host(self.connection), 0, None, is_master=True, wait_for_workers=False)
        self._send(Reply(getattr(store, "port", None), self._state()))
        if start.ranks > 1:
            self._lead(start, store)
            return
        with self._in_step():
            self.weights = self._channel(start, store, ENGINE, own_host(self.connection))
            self.spec, self.model = start.model, start.model.build(self.device)
            self._send(Reply(None, self._state()))
            self.weights.pull(list(tensors_of(self.model, self.spec, everything=True)))
        self.engine = start.engine
        share_weights(self.engine)
        self.engine.start(EngineContext(model=self.model, processor=start.processor, device=self.device))

    def _channel(self, start: Start, store: Any, side: int, host: str) -> WeightChannel:
        device = self.device if start.over_nccl else torch.device("cpu")
        return connect(
            store, side, device, host=host, bucket_bytes=start.bucket_bytes, timeout=start.timeout, ranks=start.ranks
        )

    def _hire(self, start: Start) -> None:
        """The processes of an engine's further ranks."""
        threads = self.threads or max(1, torch.get_num_threads() // start.ranks)
        torch.set_num_threads(threads)
        followers = [Follower(rank, self.device, threads, self._lost) for rank in range(1, start.ranks)]
        self.engine = LedEngine(start.engine, followers)
        for follower in followers:
            follower.connect()

    def _lead(self, start: Start, store: Any) -> None:
        """Start an engine of several ranks, this one the first."""
        engine, host = self._engine, own_host(self.connection)
        assert isinstance(engine, LedEngine)
        meeting = engine.followers[0].process.new_store()
        joins = [Join(start, f.rank, getattr(store, "port", None), host, meeting) for f in engine.followers]
        engine.join(joins, lambda: self._join_as(Join(start, 0, None, host, meeting), store))

    def _join(self, join: Join) -> None:
        """Be a further rank."""
        self.follows = True
        start = join.start
        store: Any
        if start.store is not None:
            store = dist.FileStore(start.store, 1 + start.ranks)
        else:
            assert join.port is not None
            store = dist.TCPStore(join.host, join.port, None)
        self.engine = start.engine
        self._join_as(join, store)

    def _join_as(self, join: Join, store: Any) -> None:
        """One rank's part of the start: a collective of all, and of the trainer."""
        start, rank = join.start, join.rank
        join_ranks(join.meeting, rank, start.ranks, self.device)
        with self._in_step():
            self.weights = self._channel(start, store, ENGINE + rank, join.host)
            self.spec, self.model = start.model, start.model.build(torch.device("meta"))
            ready = (lambda: self._send(Reply(None, self._state()))) if rank == 0 else (lambda: None)
            engine: Any = start.engine
            engine.bind(ReceivedWeights(self.weights, start.model, ready))
            engine.start(EngineContext(model=self.model, processor=start.processor, device=self.device))

    # ---- commands ----

    def _receive(self, version: int) -> None:
        """New weights; the trainer sends them once it has the first answer."""
        assert self._engine.window is WindowState.IDLE, "weights may change only between rollouts"
        assert self.weights is not None and self.model is not None and self.spec is not None
        self._send(Reply(None, self._state()))  # from here on both sides are in the group's calls
        if isinstance(self._engine, LedEngine):
            self._publish(version)
            return
        with self._in_step():
            self.weights.pull(list(tensors_of(self.model, self.spec, everything=False)))
        self.model.version = version
        self._engine.publish(version)

    def _publish(self, version: int) -> None:
        """Of an engine of several ranks, which takes the weights in while it publishes."""
        assert self.model is not None
        with self._in_step():
            self._engine.publish(version)
        self.model.version = version

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """While both sides are in the group's calls: an error here must not leave the trainer waiting in one."""
        try:
            yield
        except BaseException:
            if self.weights is not None:
                self.weights.leave()
            self.weights = None
            gc.collect()
            raise

    def _submit(self, requests: Sequence[Any]) -> None:
        self._engine.submit(requests)

    def _follow(self) -> None:
        self._engine.step()  # its responses are the first rank's

    def _abort(self) -> list[Rollout] | None:
        aborted = self._engine.abort()
        return None if self.follows else aborted

    def _memory(self) -> dict[str, int]:
        """State -> bytes on this process's device: the engine's states, and the weights that it reads in place."""
        from rollplex.offload import storage_bytes
        from rollplex.residency import ENGINE_WEIGHTS

        found = dict(self._engine.state_bytes())
        if self.model is not None and self.model.device.type != "meta":
            read = storage_bytes([p.data for p in self.model.hf.parameters()])
            found[ENGINE_WEIGHTS] = found.get(ENGINE_WEIGHTS, 0) + read
        return found

    def close(self) -> None:
        engine, self.engine, self.weights, self.model = self.engine, None, None, None
        if engine is not None:
            engine.close()
        if self.follows or isinstance(engine, LedEngine):
            leave_ranks()


def share_weights(engine: RolloutEngine) -> None:
    """vLLM computes on the received tensors: the process has no other use for them."""
    from rollplex.engines.vllm_engine import VLLMEngine

    if isinstance(engine, VLLMEngine):
        from rollplex.engines.vllm_sharing import SharedWeights

        engine.bind(SharedWeights())
