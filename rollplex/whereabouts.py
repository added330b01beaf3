"""Where every rank of a run is, so that a collective that fails can say whom it waited for.

Each rank notes its phase and unit in the store that the process group was made with, and its last words when it fails.
A rank whose collective breaks, or gets no answer in time, reads the others' notes and raises `RankError`. A rank that
hangs elsewhere meanwhile (in a reward, in an engine) hears of it by a thread, and ends `GRACE` seconds later: a
launcher would wait for it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

GRACE = 30.0
"""Seconds from the failure of one rank after which one that did not notice is ended."""
LOOK = 1.0
"""Seconds between two looks for failed ranks."""
SILENT = 5.0
"""Seconds without an answer after which the store's host counts as one that does not answer."""
SHOWN = 8
"""Ranks that an error names at most."""

_runs = itertools.count()


class RankError(RuntimeError):
    """A collective failed: which rank did not come, where it was last and what it said."""


class Whereabouts:
    """Of one rank among its peers; alone it keeps nothing. `note` is called by the Trainer's thread only."""

    def __init__(self, rank: int = 0, world: int = 1, store: Any = None, reader: Any = None) -> None:
        """store: that this rank's notes go to. reader: another connection to it, as whoever reads may have to wait."""
        self.rank, self.world = rank, world
        self.phase, self.unit = "start", ""
        self._store, self._reader = store, reader or store
        self._host: dict[str, Any] | None = None
        """The last note of rank 0."""
        self._end = threading.Event()
        self._failed = False

    @classmethod
    def connect(cls, rank: int, world: int) -> Whereabouts:
        """Over the store of the default process group. Every rank calls it as often."""
        store: Any = dist.distributed_c10d._get_default_store()
        run = f"rollplex/{next(_runs)}"
        # Waiting calls of others must not hold up ours.
        where = cls(rank, world, *(dist.PrefixStore(run, store.clone()) for _ in range(2)))
        where.note("start")
        threading.Thread(target=where._watch, name="rollplex-ranks", daemon=True).start()
        return where

    @property
    def prefix(self) -> str:
        """What an error begins with."""
        return f"rank {self.rank}: " if self.world > 1 else ""

    @property
    def during(self) -> str:
        """The present phase, and the rank among several."""
        return f"during the {self.phase} phase" + (f" on rank {self.rank}" if self.world > 1 else "")

    def note(self, phase: str, unit: str = "") -> None:
        self.phase, self.unit = phase, unit
        self._write(f"at/{self.rank}", {"phase": phase, "unit": unit, "since": time.time()})

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Note it, and afterwards the phase before again; an error leaves the note."""
        before = self.phase, self.unit
        self.note(phase)
        yield
        self.note(*before)

    def last_words(self, error: BaseException) -> None:
        """This rank fails; the others are told why. Somebody else's failure is not repeated as one's own."""
        if self._failed or not isinstance(error, Exception):  # a wish to stop is none
            return
        self._failed = True
        said = "" if _chain_has(error, RankError) else f"{type(error).__name__}: {error}"
        self._write(f"said/{self.rank}", {"said": said})
        self._write("failed", {"rank": self.rank, "said": said})

    def all_fail(self, error: BaseException) -> bool:
        """This rank fails; whether all others do as well, each by itself. Then they can still do something together,
        and take their time: nobody is ended any more. Takes `SILENT` seconds at most."""
        if self.world == 1:
            return True
        self.last_words(error)
        if _chain_has(error, RankError) or _of_backend(error):
            return False
        told: list[bool] = []
        asking = threading.Thread(target=lambda: told.append(self._all_said()), daemon=True)
        asking.start()
        asking.join(SILENT + LOOK)
        if told != [True]:
            return False
        self._end.set()
        return True

    def _all_said(self) -> bool:
        end = time.monotonic() + SILENT
        while True:
            said = [self._read(f"said/{rank}") for rank in range(self.world)]
            lost = any(words is not None and not words["said"] for words in said)
            if lost or None not in said or time.monotonic() > end:
                return not lost and None not in said
            time.sleep(0.1)

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Around one: RankError instead of the backend's own error."""
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError) or self.world == 1:
                raise
            raise RankError(self.explain(what, time.monotonic() - begin, error)) from error

    def explain(self, what: str, seconds: float, error: BaseException) -> str:
        text = " ".join(str(error).split())
        how = f"got no answer for {seconds:.0f} s" if "imed out" in text or "imeout" in text else "broke"
        return (
            f"{self.prefix}{what} in {_place(self.phase, self.unit)} {how}. {self.others()}. The last checkpoint is "
            f"whole: start the run again with --ckpt_path last. (The backend says: {text[:200]})"
        )

    def others(self) -> str:
        """What is known of the other ranks, those that said why they failed first. Takes `SILENT` seconds at most: no
        limit of the store's own holds when its host is stopped, or cut off."""
        told: list[str] = []
        reading = threading.Thread(target=lambda: told.append(self._others()), daemon=True)
        reading.start()
        reading.join(SILENT)
        return told[0] if told else f"rank 0, which keeps the ranks' notes, does not answer{self._host_was}"

    def _others(self) -> str:
        found = []
        for rank in range(self.world):
            if rank != self.rank:
                said, at = self._read(f"said/{rank}"), self._read(f"at/{rank}")
                found.append((not (said and said["said"]), at["since"] if at else 0.0, _tell(rank, said, at)))
        if self._store is None:
            return f"rank 0 is gone, and with it what the ranks had noted of themselves{self._host_was}"
        told = [text for _, _, text in sorted(found)]
        left = [f"and {len(told) - SHOWN} more"] if len(told) > SHOWN else []
        return "; ".join(told[:SHOWN] + left)

    @property
    def _host_was(self) -> str:
        return f" ({_tell(0, None, self._host)} at the last look)" if self._host else ""

    def close(self) -> None:
        self._end.set()
        self._store = None

    # ---- the store ----

    def _write(self, key: str, value: dict[str, Any]) -> None:
        store = self._store
        if store is None:
            return
        try:
            store.set(key, json.dumps(value))
        except RuntimeError:  # its host is gone, which the next collective says
            self._store = None

    def _read(self, key: str) -> dict[str, Any] | None:
        store = self._reader
        if self._store is None:
            return None
        try:
            return json.loads(store.get(key)) if store.check([key]) else None
        except RuntimeError:
            self._store = None
            return None

    def _watch(self) -> None:
        """End this process when another rank has failed and this one still hangs somewhere."""
        since = None
        while not self._end.wait(LOOK):
            store = self._store
            failed = None if store is None else self._read("failed")
            self._host = self._read("at/0") or self._host  # it holds the store
            if self._end.is_set():
                return
            if failed is None and self._store is not None:
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > GRACE:
                why = (
                    f"rank {failed['rank']} failed ({failed['said'] or 'it lost another one'})"
                    if failed
                    else "rank 0 is gone"
                )
                here = _place(self.phase, self.unit)
                print(f"rank {self.rank}: {why}, and this rank is still in {here} {GRACE:.0f} s later: it is ended",
                      file=sys.stderr, flush=True)  # fmt: skip
                os._exit(1)


def _place(phase: str, unit: str) -> str:
    return f"unit {unit} of the {phase} phase" if unit else f"the {phase} phase"


def _tell(rank: int, said: dict[str, Any] | None, at: dict[str, Any] | None) -> str:
    if said and said["said"]:
        return f"rank {rank} failed with {said['said']}"
    if at is None:
        return f"nothing is known of rank {rank}"
    where = f"{_place(at['phase'], at['unit'])} {max(0.0, time.time() - at['since']):.0f} s ago"
    return f"rank {rank} lost another rank in {where}" if said else f"rank {rank} was last seen to enter {where}"


def _chain_has(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False


def tell_of_ranks(error: BaseException, where: Whereabouts) -> None:
    """A strategy's `on_exception`: leave last words, and add where the others are if a collective failed."""
    if where.world == 1:
        return
    where.last_words(error)
    if not _chain_has(error, RankError) and _of_backend(error):
        error.add_note(where.explain("a collective", 0.0, error))


def _of_backend(error: BaseException | None) -> bool:
    """Whether torch.distributed raised it: its errors have no type of their own on gloo."""
    while error is not None:
        if isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo", "NCCL", "ProcessGroup")):
            return True
        error = error.__cause__ or error.__context__
    return False
