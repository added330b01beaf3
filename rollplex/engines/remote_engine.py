"""Disaggregated placement: an engine in a process of its own, on other devices or another machine than the trainer's.

The trainer's weights are pushed after each update (`remote_weights.py`); requests and responses go over an
authenticated line (`remote_link.py`). The engine on the other side is any of ours, on its own copy of the weights, and
decodes without waiting for the trainer (`remote_server.py`). One that is split over devices (`tensor_parallel_size`) is
as many processes there (`remote_ranks.py`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from rollplex.checks import check_remote, check_remote_adapters
from rollplex.cores import check_cores, leave_cores, return_to_cores
from rollplex.data.records import Request, Rollout
from rollplex.engines.base import EngineContext, RolloutEngine, WindowState
from rollplex.engines.remote_link import (
    FAILED,
    GRACE,
    KEY_VARIABLE,
    Elsewhere,
    EngineProcess,
    EngineProcessError,
    Place,
    deadline,
    of_rank,
    own_host,
    own_local_rank,
    own_rank,
    own_world,
    parse_address,
    read_key,
    receive,
    send,
)
from rollplex.engines.remote_messages import EngineState, Refused, Reply, Start, Update, slim, versions
from rollplex.engines.remote_weights import TRAINER, ModelSpec, WeightChannel, connect, sent, tensors_of
from rollplex.engines.torch_engine import TorchEngine
from rollplex.models.split_model import SplitModel

log = logging.getLogger(__name__)

LOOK = 0.1
"""Seconds that a `step` waits for news: commands of the train lane come between steps."""


class RemoteEngine(RolloutEngine):
    """Runs another engine in a process of its own, with its own copy of the weights. One engine per trainer rank.

    Args:
        engine: What generates there; None is `TorchEngine`. `vision: shared` needs the trainer's process: refused.
            Its `release_kv_cache` has no effect: nobody else is there to use the memory.
        device: Of the engine process: "cpu", or "cuda:N" as the trainer's process counts; with `tensor_parallel_size` T
            the T devices from it on. A list gives one for each rank of the machine.
        cores: CPU cores of the engine process; the trainer's process keeps to its others meanwhile. For one rank per
            machine. None leaves both where they are.
        threads: Intra-op threads of an engine process; None shares its cores among the engine's processes.
        address: HOST:PORT of a running server (`python -m rollplex.engines.remote_server`) here or on another machine;
            a list gives one for each rank. None starts a process here, which ends with the trainer's.
        key_file: File with the secret that trainer and server share; None reads ROLLPLEX_ENGINE_KEY. For `address`.
        bucket_bytes: Most bytes of weights in flight at once, on either side.
        start_timeout: Seconds the process and its engine may take to start.
        timeout: Seconds it may take to answer, or to take over weights.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        device: str | list[str] = "cpu",
        cores: list[int] | None = None,
        threads: int | None = None,
        address: str | list[str] | None = None,
        key_file: str | None = None,
        bucket_bytes: int = 256 * 1024**2,
        start_timeout: float = 600.0,
        timeout: float = 300.0,
    ) -> None:
        self.engine = engine or TorchEngine()
        self.device, self.cores, self.threads = device, cores, threads
        self.address, self.key_file = address, key_file
        self.bucket_bytes, self.start_timeout, self.timeout = bucket_bytes, start_timeout, timeout
        self._check()
        self.sent_bytes = 0
        """Bytes of weights pushed by the last `publish` (or by the start)."""
        self.peak_bytes = 0
        """Largest buffer of that push."""
        self._place: Place | None = None
        self._line: Connection | None = None
        self._weights: WeightChannel | None = None
        self._dead: EngineProcessError | None = None
        self._affinity: dict[int, set[int]] = {}
        self._clear()

    @property
    def pid(self) -> int | None:
        """Of the engine process that this one started; None without one."""
        return self._place.process.pid if isinstance(self._place, EngineProcess) else None

    def _check(self) -> None:
        inner = "RemoteEngine" if isinstance(self.engine, RemoteEngine) else type(self.engine).__name__
        check_remote(inner, self.engine.takes_vision)
        for name in ("bucket_bytes", "start_timeout", "timeout", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        for device in [self.device] if isinstance(self.device, str) else self.device:
            if device.partition(":")[0] not in ("cpu", "cuda"):
                raise ValueError(f'device={device!r} must be "cpu" or "cuda:N"')
        addresses = [self.address] if isinstance(self.address, str) else self.address or []
        for address in addresses:
            parse_address(address)
        if addresses and (self.cores or self.threads):
            raise ValueError("cores and threads are given to the server at an address when it is started (--cores)")
        if self.cores is not None:
            check_cores(self.cores)

    def _clear(self) -> None:
        self._state = EngineState()
        self._news: deque[Update | Refused] = deque()

    # ---- start and end ----

    def start(self, context: EngineContext) -> None:
        assert self._line is None, "the engine was started already"
        self._dead = None
        self._model: SplitModel = context.model
        self._spec = ModelSpec.of(context.model)
        check_remote_adapters(self._spec.lora, self._ranks)
        try:
            self._place, self._line = self._launch()
            self._start_engine(context.processor)
        except BaseException:
            self.close()
            raise

    def _launch(self) -> tuple[Place, Connection]:
        if self.address is not None:
            source = f"key_file={self.key_file!r}" if self.key_file is not None else KEY_VARIABLE
            place: Place = Elsewhere(self.address, read_key(self.key_file), source)
        else:
            place = EngineProcess(device=self._device, cores=self.cores, threads=self.threads, gpus=self._ranks)
            if self.cores is not None:  # nobody else works there
                self._affinity = leave_cores(self.cores)
        try:
            return place, place.connect(self.start_timeout)
        except BaseException:
            place.end(FAILED)
            raise

    def _start_engine(self, processor: Any) -> None:
        assert self._line is not None
        store = self._place.new_store() if isinstance(self._place, EngineProcess) else None
        nccl = self._device.startswith("cuda") and self._model.device.type == "cuda"
        start = Start(self.engine, self._spec, processor, self.bucket_bytes, self.timeout, store, nccl)
        self._call("hello", versions(), limit=self.start_timeout, phase="the start")
        port = self._call("start", start, limit=self.start_timeout, phase="the start")
        with self._transfer("the start"):
            members = 1 + self._ranks
            found: Any = dist.FileStore(store, members) if store else dist.TCPStore(self._place.host, port, None)  # type: ignore[union-attr]
            on = self._model.device if nccl else torch.device("cpu")
            self._weights = connect(
                found, TRAINER, on, host=own_host(self._line), bucket_bytes=self.bucket_bytes, timeout=self.timeout,
                ranks=self._ranks,
            )  # fmt: skip
        self._reply(limit=self.start_timeout, phase="the start")  # it is ready for the weights
        with self._transfer("the start"):
            self._push(everything=True)
        self._reply(limit=self.start_timeout, phase="the start")
        assert self._place is not None
        self._place.settled()

    def close(self) -> None:
        line, self._line = self._line, None
        place, self._place = self._place, None
        failed = self._dead is not None or self._state.window is not WindowState.IDLE
        self._weights = None
        self._clear()
        if line is not None:
            with suppress(OSError):
                send(line, ("goodbye", ()))
            line.close()
        if place is not None:
            place.end(FAILED if failed else GRACE)
        return_to_cores(self._affinity)
        self._affinity = {}

    # ---- protocol ----

    def submit(self, requests: Sequence[Request]) -> None:
        self._call("submit", slim(requests), phase="the submission of requests")

    def step(self) -> list[Rollout]:
        """What came since the last one; waits a moment where nothing did."""
        if not self._news:
            message = self._receive(LOOK, phase="the rollout")
            if message is None:
                return []
            self._news.append(message)
        news = self._news.popleft()
        self._state = news.state
        if isinstance(news, Refused):
            raise self._remote_error(news, "the rollout")
        return list(news.finished)

    @property
    def window(self) -> WindowState:
        return self._state.window

    @property
    def num_running(self) -> int:
        return self._state.num_running

    @property
    def progress(self) -> int:
        return self._state.progress

    def abort(self) -> list[Rollout]:
        if self._line is None or self._dead is not None:
            self._clear()
            return []
        aborted = self._call("abort", phase="an abort")
        # Whole responses may have come meanwhile.
        finished = [r for news in self._news if isinstance(news, Update) for r in news.finished]
        self._clear()
        return finished + aborted

    def publish(self, version: int) -> None:
        """Push what is trained. Both sides copy in buckets; the engine drops its caches."""
        assert self.window is WindowState.IDLE, "weights may change only between rollouts"
        self._call("receive", version, phase="the publication of weights")
        with self._transfer("the publication of weights"):
            self._push(everything=False)
        self._reply(phase="the publication of weights")

    def memory(self) -> dict[str, int]:
        """State (rollplex.residency) -> bytes on the engine's own device, of its first rank; not while it decodes."""
        return dict(self._call("memory", phase="a look at its memory"))

    def _push(self, *, everything: bool) -> None:
        assert self._weights is not None
        sizes = [t.nbytes for kind in sent(self._spec, everything=everything) for t in kind]
        tensors = tensors_of(self._model, self._spec, everything=everything)
        self.sent_bytes = self._weights.push(tensors, sizes)
        self.peak_bytes = self._weights.peak_bytes

    # ---- the line ----

    def _call(self, name: str, *arguments: Any, phase: str, limit: float | None = None) -> Any:
        """Have the other side do it; its answer, or its error."""
        if self._dead is not None:
            raise self._dead
        assert self._line is not None, "the engine is not started, or closed"
        limit = self.timeout if limit is None else limit
        try:
            with deadline(self._line, limit):  # pictures do not fit into the line's buffer
                send(self._line, (name, arguments))
        except TimeoutError as error:
            raise self._failed(f"{self._name} did not take a message within {limit:g} s in {phase}") from error
        except OSError as error:
            raise self._gone(phase) from error
        return self._reply(phase=phase, limit=limit)

    def _reply(self, *, phase: str, limit: float | None = None, silence: str = "did not answer within {:g} s") -> Any:
        """The value of the next answer. silence: what an error says when none comes in `limit` seconds."""
        limit = self.timeout if limit is None else limit
        end = time.monotonic() + limit
        while True:
            message = self._receive(max(0.0, end - time.monotonic()), phase=phase)
            if message is None:
                raise self._failed(f"{self._name} {silence.format(limit)} in {phase}")
            if isinstance(message, Update):
                self._news.append(message)
                continue
            if isinstance(message, Refused):
                self._settle(message.state)
                raise self._remote_error(message, phase)
            assert isinstance(message, Reply)
            self._settle(message.state)
            return message.value

    def _settle(self, state: EngineState) -> None:
        """Of an answer; what happened before it is told first."""
        if self._news:
            self._news.append(Update((), state))
        else:
            self._state = state

    def _receive(self, limit: float, *, phase: str) -> Any:
        assert self._line is not None
        try:
            return receive(self._line, limit)
        except (EOFError, OSError) as error:
            raise self._gone(phase) from error

    @contextmanager
    def _transfer(self, phase: str) -> Iterator[None]:
        """Calls of the weights' group, whose own errors do not say what happened on the other side."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            # What it says, or that it is gone, or else that it stands still.
            silence = f"took no weights for {time.monotonic() - begin:.0f} s and said nothing"
            self._reply(phase=phase, limit=5.0, silence=silence)
            raise self._failed(f"weights did not reach {self._name} in {phase}: {error}") from error

    # ---- errors ----

    @property
    def _ranks(self) -> int:
        """Processes of the engine."""
        return getattr(self.engine, "tensor_parallel_size", 1)

    @property
    def _name(self) -> str:
        where = of_rank(self.address, own_rank(), "address") if self.address else self._device
        mine = f" of rank {own_rank()}" if own_world() > 1 else ""
        return f"RemoteEngine({type(self.engine).__name__} on {where}){mine}"

    @property
    def _device(self) -> str:
        return of_rank(self.device, own_local_rank(), "device")

    def _gone(self, phase: str) -> EngineProcessError:
        fate = self._place.fate() if self._place is not None else "it is closed"
        return self._failed(f"{self._name}: {fate} in {phase}")

    def _failed(self, what: str) -> EngineProcessError:
        what += ". What the engine printed is above; `rollplex fit --ckpt_path last` goes on from the last checkpoint"
        self._dead = EngineProcessError(what)
        self._clear()
        return self._dead

    def _remote_error(self, refused: Refused, phase: str) -> Exception:
        """The engine's own error, as it raised it there."""
        error = refused.error or EngineProcessError(f"{self._name} failed in {phase}:\n{refused.text}")
        error.add_note(f"in {phase}, raised by {self._name}:\n{refused.text}")
        return error
