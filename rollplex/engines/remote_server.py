"""The engine's side of `RemoteEngine`: a process that owns one engine and its copy of the weights.

    python -m rollplex.engines.remote_server --address 127.0.0.1:7011 --key-file engine.key

serves one trainer and ends with it. Between its commands the engine decodes on by itself: it waits for nobody.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import torch

from rollplex.engines.remote_commands import Server
from rollplex.engines.remote_link import FOLDER, GRACE, keep_alive, parse_address, prove, read_key

PATIENCE = 10.0
"""Seconds that a caller may take to prove that it knows the key."""
CALLERS = 32
"""Most callers that prove it at once; more wait."""


# ---- the process ----


def wake_with_parent() -> None:
    """Have the system continue this process when its parent ends, should it be stopped (SIGSTOP): it would never see
    that. On Linux."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGCONT)  # PR_SET_PDEATHSIG of <linux/prctl.h>


def end_with_trainer(connection: Connection, parent: int | None, folder: Path | None = None) -> None:
    """A thread that ends this process once the trainer is gone, even if the engine is stuck in a step.

    parent: of a child, whose line a forked data loader of a killed trainer may still hold open. folder: the child's
    own, which a killed trainer cannot remove.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(connection.fileno(), getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR)
        while not poll.poll(500) and (parent is None or os.getppid() == parent):
            pass
        time.sleep(GRACE)  # the main thread sees it too, unless it is stuck
        remove(folder)
        os._exit(1)

    threading.Thread(target=watch, name="rollplex-watch", daemon=True).start()


def remove(folder: Path | None) -> None:
    """Only what a trainer made for its child: the path comes from the command line."""
    if folder is not None and folder.name.startswith(FOLDER):
        shutil.rmtree(folder, ignore_errors=True)


def accept(listener: socket.socket, key: bytes, parent: int | None = None) -> Connection | None:
    """The first trainer that knows the key; None when `parent` is gone.

    Each caller has a thread and PATIENCE seconds, so that one who says nothing keeps nobody else out.
    """
    proved: SimpleQueue[Connection] = SimpleQueue()

    def greet(caller: Connection) -> None:
        try:
            prove(caller, key, PATIENCE, caller=False)
        except (AuthenticationError, OSError) as error:
            print(f"rollplex engine: a caller was turned away: {error or type(error).__name__}", file=sys.stderr)
        else:
            proved.put(caller)

    callers: list[threading.Thread] = []
    listener.settimeout(0.05)
    while proved.empty():
        if parent is not None and os.getppid() != parent:
            return None
        callers = [thread for thread in callers if thread.is_alive()]
        if len(callers) >= CALLERS:
            time.sleep(0.05)
            continue
        with suppress(TimeoutError, ConnectionError):
            line, _ = listener.accept()
            line.setblocking(True)
            callers.append(threading.Thread(target=greet, args=[Connection(line.detach())], daemon=True))
            callers[-1].start()
    return proved.get()


def parse_cores(text: str) -> set[int]:
    """Of this machine, and ours to use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = {int(core) for core in text.split(",") if core.strip().isdigit()}
    if len(cores) != len(text.split(",")) or not cores <= allowed:
        raise argparse.ArgumentTypeError(f"{text!r} must name cores of {sorted(allowed)}, for example 0,1")
    return cores


def parse_threads(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def parse_device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f'{text!r} must be "cpu" or "cuda:N"') from None


def parser() -> argparse.ArgumentParser:
    about = "An engine that a trainer at another place uses (RemoteEngine with `address`)."
    p = argparse.ArgumentParser(prog="python -m rollplex.engines.remote_server", description=about)
    where = p.add_mutually_exclusive_group(required=True)
    where.add_argument("--address", help="HOST:PORT to listen at; any other host than loopback opens it to the network")
    where.add_argument("--child", metavar="SOCKET", help=argparse.SUPPRESS)
    p.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    p.add_argument("--key-file", help="file with the shared secret; without it ROLLPLEX_ENGINE_KEY of the environment")
    p.add_argument("--device", type=parse_device, default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--cores", type=parse_cores, help="CPU cores to stay on, for example 0,1")
    p.add_argument("--threads", type=parse_threads, help="intra-op threads; default: as many as cores")
    return p


def listen(address: str | tuple[str, int]) -> socket.socket:
    """At a Unix socket, or at (host, port). OSError when that is taken."""
    if not isinstance(address, str):
        return socket.create_server(address)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.cores:
        os.sched_setaffinity(0, arguments.cores)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(arguments.threads or cores)
    child, address = bool(arguments.child), arguments.child
    folder = Path(address).parent if child else None
    try:
        if child:
            for number in (signal.SIGINT, signal.SIGTERM):  # a scheduler's reaches all processes; the trainer decides
                signal.signal(number, signal.SIG_IGN)
            wake_with_parent()
            key = sys.stdin.buffer.read()
        else:
            key, address = read_key(arguments.key_file), parse_address(arguments.address)
        listener = listen(address)
    except (ValueError, OSError) as error:
        at = f" at {arguments.address}" if isinstance(error, OSError) and not child else ""
        print(f"rollplex engine: cannot listen{at}: {error}" if at else f"rollplex engine: {error}", file=sys.stderr)
        return 2
    with listener:
        if not child:
            print(f"rollplex engine: waiting for a trainer at {arguments.address}", flush=True)
        connection = accept(listener, key, arguments.parent)
    if connection is None:
        remove(folder)
        return 1
    if not child:
        keep_alive(connection)
    end_with_trainer(connection, arguments.parent, folder)
    server = Server(connection, arguments.device, threads=arguments.threads)
    try:
        server.serve()
    except (EOFError, OSError):  # the trainer is gone
        remove(folder)
    server.close()
    connection.close()
    return 0


if __name__ == "__main__":
    from rollplex.engines import remote_server  # what is pickled has the module's own name

    sys.exit(remote_server.main())
