"""The authenticated line between a trainer and an engine process.

Messages are pickles, and whoever may send one may run code: each side unpickles only after both have proved that they
know the key (multiprocessing.connection's HMAC challenge). An engine process that the trainer starts listens on a Unix
socket in a folder of its own, which only this user may enter, with a key made for it. One that was started elsewhere
listens on loopback unless told otherwise; its key comes from a file or the environment. The line is authenticated and
not encrypted: between machines it belongs on a private network.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger(__name__)

KEY_VARIABLE = "ROLLPLEX_ENGINE_KEY"
"""Environment variable that holds the key, where no file does."""
SHORTEST_KEY = 16
GRACE = 5.0
"""Seconds that an engine process may take to end by itself; FAILED: one that is no longer of use."""
FAILED = 1.0
TELL_AFTER = 3.0
"""Seconds without a server after which somebody who waits is told what for."""
FOLDER = "rollplex-engine-"
"""How the name of a child's folder begins."""


class EngineProcessError(RuntimeError):
    """The engine process died, did not answer, or refused; says which, in what, and what to do."""


def read_key(key_file: str | None) -> bytes:
    """The shared secret of trainer and engine process. ValueError without one."""
    if key_file is not None:
        path = Path(key_file)
        if not path.is_file():
            raise ValueError(f"key_file={key_file!r} is no file: write a random key there (`openssl rand -hex 32`)")
        key = path.read_bytes().strip()
    else:
        key = os.environ.get(KEY_VARIABLE, "").encode()
    if len(key) < SHORTEST_KEY:
        raise ValueError(
            f"an engine at an address needs a key of at least {SHORTEST_KEY} bytes, the same on both sides: set "
            f"key_file, or the environment variable {KEY_VARIABLE} (`openssl rand -hex 32` makes one)"
        )
    return key


def parse_address(address: str) -> tuple[str, int]:
    """HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"address={address!r} must be HOST:PORT, for example 127.0.0.1:7011")
    return host, int(port)


@contextmanager
def deadline(connection: Connection, limit: float) -> Iterator[None]:
    """Shuts the line after `limit` seconds, so that whoever reads from it wakes. TimeoutError when it did.

    A limit for the whole exchange: one for each read would let a peer that sends byte by byte go on for ever.
    """
    late = threading.Event()
    with socket.socket(fileno=os.dup(connection.fileno())) as line:

        def cut() -> None:
            late.set()
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(limit, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            if late.is_set():
                raise TimeoutError(f"silent for {limit:.3g} s") from error
            raise
        finally:
            timer.cancel()
            timer.join()
    if late.is_set():
        raise TimeoutError(f"silent for {limit:.3g} s")


def prove(connection: Connection, key: bytes, limit: float, *, caller: bool) -> None:
    """Each side shows the other that it knows the key; the line is closed where one does not.

    Raises AuthenticationError for another key, TimeoutError after `limit` seconds, OSError for a peer that is gone or
    speaks something else.
    """
    steps = (answer_challenge, deliver_challenge)
    try:
        with deadline(connection, limit):
            for step in steps if caller else reversed(steps):
                step(connection, key)
    except BaseException as error:
        connection.close()
        if isinstance(error, EOFError):
            raise ConnectionError("it closed the line") from error
        if isinstance(error, AssertionError):  # of a first message that is no challenge
            raise ConnectionError("it speaks another protocol") from error
        raise


def call(address: str | tuple[str, int], key: bytes, limit: float) -> Connection:
    """A line to who listens at a Unix socket or (host, port), both sides proved. Raises as `prove`."""
    end = time.monotonic() + max(limit, 0.1)
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as line:
        line.settimeout(max(limit, 0.1))
        line.connect(address)
        line.setblocking(True)
        connection = Connection(line.detach())
    prove(connection, key, max(end - time.monotonic(), 0.1), caller=True)
    return connection


def keep_alive(connection: Connection) -> None:
    """Have the system notice a peer whose machine is gone, within a minute or so."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        if line.family not in (socket.AF_INET, socket.AF_INET6):
            return
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def own_host(connection: Connection) -> str:
    """This side's address on the line: what the other one can reach it by."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        return str(line.getsockname()[0]) if line.family in (socket.AF_INET, socket.AF_INET6) else "127.0.0.1"


def of_rank(value: str | list[str], rank: int, name: str) -> str:
    """A rank's own of a setting that may be a list, one for each."""
    if isinstance(value, str):
        return value
    if rank >= len(value):
        raise ValueError(f"{name}={value} has no entry for rank {rank}: give one for each")
    return value[rank]


def own_rank() -> int:
    """Of the trainer's process; not every launcher says it in the environment."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def own_world() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def own_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))


class EngineProcess:
    """A process on this machine that runs the engine server, a child of this one.

    gpus: how many GPUs it sees, of this process's from "cuda:N" on; None: all that this process sees, and it computes
    on the N-th.
    """

    def __init__(self, *, device: str, cores: Sequence[int] | None, threads: int | None, gpus: int | None = 1) -> None:
        environment = _environment(device, gpus)
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER)  # 0700
        self.address = str(Path(self._folder.name) / "line")
        self._stores = itertools.count()
        self.key = secrets.token_bytes(32)
        command = [sys.executable, "-m", "rollplex.engines.remote_server", "--child", self.address]
        command += ["--parent", str(os.getpid())]
        command += ["--device", device if gpus is None else device.partition(":")[0]]
        command += ["--threads", str(threads)] if threads else []
        command += ["--cores", ",".join(map(str, cores))] if cores else []
        # In a session of its own: Ctrl-C is for the trainer, which may finish its step first.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once; `connect` says so
            self.process.stdin.write(self.key)
            self.process.stdin.close()

    def new_store(self) -> str:
        """A file in which the two sides of a process group find each other."""
        return str(Path(self._folder.name) / f"store-{next(self._stores)}")

    def connect(self, limit: float) -> Connection:
        end = time.monotonic() + limit
        while True:
            try:
                return call(self.address, self.key, end - time.monotonic())
            except OSError:  # it does not listen yet, or does not answer
                self._check_alive("while it started")
            if time.monotonic() > end:
                raise EngineProcessError(f"the engine process did not come up within {limit:g} s: raise start_timeout")
            time.sleep(0.02)

    def settled(self) -> None:
        """Both sides have found each other: nothing of it needs to be on disk any more, or is left there by a kill."""
        self._folder.cleanup()

    def _check_alive(self, when: str) -> None:
        if self.process.poll() is not None:
            raise EngineProcessError(f"{self.fate()} {when}; what it printed is above")

    def fate(self) -> str:
        """How it ended, or that it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        code = self.process.returncode
        who = f"the engine process (pid {self.process.pid})"
        if code is None:
            return f"{who} closed its line"
        if code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"{who} was ended by {signal.Signals(-code).name}{hint}"
        return f"{who} ended with exit code {code}"

    def end(self, patience: float = GRACE) -> None:
        """Gone when this returns, by force after `patience` seconds. Safe to call twice."""
        try:
            self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()


def _environment(device: str, gpus: int | None) -> dict[str, str]:
    """Of a child: it sees the GPUs that it is to have, and nothing of the trainer's process group."""
    environment = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    kind, _, index = device.partition(":")
    if kind == "cuda" and index and gpus is not None:
        first, visible = int(index), environment.get("CUDA_VISIBLE_DEVICES", "")
        seen = visible.split(",") if visible else [str(i) for i in range(first + gpus)]
        if len(seen) < first + gpus:
            raise ValueError(
                f"device={device!r} of an engine on {gpus} GPU(s) needs cuda:{first + gpus - 1}, and this process sees "
                f"{len(seen)} (CUDA_VISIBLE_DEVICES={visible}): set device to an earlier one, or let it see more"
            )
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen[first : first + gpus])
    return environment


class Elsewhere:
    """An engine server that somebody else started, at an address."""

    def __init__(self, address: str | list[str], key: bytes, source: str) -> None:
        """address: with several ranks a list, one for each. source: where the key comes from, for an error."""
        if isinstance(address, str) and own_world() > 1:
            raise ValueError(
                f"address={address!r} is one server, which serves one rank, and the trainer has {own_world()}: give a "
                "list with one for each"
            )
        self.host, self.port = parse_address(of_rank(address, own_rank(), "address"))
        self.key, self.source = key, source

    def connect(self, limit: float) -> Connection:
        begin = time.monotonic()
        end, told = begin + limit, False
        while True:
            try:
                connection = call((self.host, self.port), self.key, end - time.monotonic())
            except AuthenticationError as error:
                raise EngineProcessError(
                    f"the engine server at {self.host}:{self.port} has another key than {self.source} gives: start it "
                    "with the same one (--key-file, or the environment variable)"
                ) from error
            except OSError as error:
                if time.monotonic() + 0.2 > end:  # the next try would have no time to say why
                    raise EngineProcessError(
                        f"no engine server answers at {self.host}:{self.port} ({error}): start `python -m "
                        f"rollplex.engines.remote_server --address {self.host}:{self.port}` there. A server serves one "
                        "run and ends with it: set address to another one for each run and rank"
                    ) from error
                if not told and time.monotonic() - begin > TELL_AFTER:
                    told = True
                    log.warning(
                        "no engine server answers at %s:%d yet (%s); it has %.0f s (start_timeout)",
                        self.host, self.port, error, limit,
                    )  # fmt: skip
                time.sleep(0.2)
            else:
                keep_alive(connection)
                return connection

    def settled(self) -> None:
        pass

    def fate(self) -> str:
        return f"the engine server at {self.host}:{self.port} is gone"

    def end(self, patience: float = GRACE) -> None:
        pass


Place = EngineProcess | Elsewhere


class _Pickler(pickle.Pickler):
    """Tensors travel as numpy arrays: in the message itself, and an order of magnitude faster than torch's own way."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return _tensor, (thing.detach().cpu().contiguous().numpy(),)
        return NotImplemented


def _tensor(array: Any) -> torch.Tensor:
    """A copy, aligned as torch's own: unaligned ones are summed in another order."""
    return torch.from_numpy(array).clone()


def send(connection: Connection, message: Any) -> None:
    """OSError when the other side is gone."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    connection.send_bytes(buffer.getbuffer())


def receive(connection: Connection, limit: float | None) -> Any:
    """The next message; None when none comes in `limit` seconds. EOFError or OSError when the other side is gone."""
    if limit is not None and not wait([connection], limit):
        return None
    return pickle.loads(connection.recv_bytes())
