"""CPU threads and cores of the two lanes: all of them for a lane that runs alone, a share for each while both run."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch

from rollplex.timeline import ROLLOUT_LANE, TRAIN_LANE


class LaneThreads:
    """Intra-op thread counts per lane. Two lanes with all threads each oversubscribe the cores and lose to serial.

    Args:
        total: Threads of a lane that runs alone; None is torch's present number.
        rollout: Threads of the rollout lane while the train lane works beside it; None is half of `total`.
        train: Threads of the train lane meanwhile; None is what `rollout` leaves of `total`.
        pin_cores: While both work, keep the rollout lane's thread to the first `rollout` cores that this process may
            use and the train lane's to the others (Linux). A lane that runs alone has all cores again. Helper threads
            of a lane with more than one thread are the operating system's to place.
    """

    def __init__(
        self,
        total: int | None = None,
        rollout: int | None = None,
        train: int | None = None,
        *,
        pin_cores: bool = False,
    ) -> None:
        for name, value in (("threads", total), ("rollout_threads", rollout), ("train_threads", train)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or null for the default")
        if pin_cores and not hasattr(os, "sched_setaffinity"):
            raise ValueError("pin_cores=true needs Linux (os.sched_setaffinity); set it to false")
        self._wanted = (total, rollout, train)
        self.pin_cores = pin_cores
        self.total = self.rollout = self.train = 1
        self.co_running = False
        """Both lanes are at work; written by the train lane, read by the rollout lane between its steps."""
        self._cores: dict[str, set[int]] = {}
        self._all_cores: set[int] = set()
        self._applied = threading.local()

    def settle(self) -> None:
        """Fix the numbers at the start of a run, on the train lane."""
        total, rollout, train = self._wanted
        self.total = total or torch.get_num_threads()
        self.rollout = rollout or max(1, self.total // 2)
        self.train = train or max(1, self.total - self.rollout)
        self._before = torch.get_num_threads()
        if self.pin_cores:
            self._share_cores()

    def _share_cores(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < self.rollout + self.train:
            raise ValueError(
                f"pin_cores=true with rollout_threads={self.rollout} and train_threads={self.train} needs "
                f"{self.rollout + self.train} cores, but this process may use {len(cores)}; lower them or unset it"
            )
        self._all_cores = set(cores)
        self._cores = {ROLLOUT_LANE: set(cores[: self.rollout]), TRAIN_LANE: set(cores[self.rollout :])}

    def restore(self) -> None:
        """Give the train lane's thread its old number (and cores) back."""
        torch.set_num_threads(self._before)
        if self._cores:
            os.sched_setaffinity(0, self._all_cores)
        self._applied = threading.local()

    def apply(self, lane: str) -> None:
        """Set the calling thread's number, and cores, for its next piece of work."""
        beside = self.co_running
        if getattr(self._applied, "beside", None) == beside:
            return
        share = {ROLLOUT_LANE: self.rollout, TRAIN_LANE: self.train}[lane]
        torch.set_num_threads(share if beside else self.total)
        # A thread's first parallel region takes the number set last by any thread, unless it has asked before.
        torch.get_num_threads()
        if self._cores:
            # 0 is the calling thread, not the process.
            os.sched_setaffinity(0, self._cores[lane] if beside else self._all_cores)
        self._applied.beside = beside


def check_cores(cores: Sequence[int]) -> None:
    """ValueError unless they are of those that this process may use, and leave it some."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not set(cores) <= allowed or not allowed - set(cores):
        raise ValueError(
            f"cores={cores} must leave the trainer at least one of the cores that this process may use, which are "
            f"{sorted(allowed)}; unset it to share them"
        )


def leave_cores(cores: Collection[int]) -> dict[int, set[int]]:
    """Keep every thread of this process off `cores`, where it has others; returns thread -> its cores before."""
    found: dict[int, set[int]] = {}
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            before = os.sched_getaffinity(int(task))
            os.sched_setaffinity(int(task), (before - set(cores)) or before)
            found[int(task)] = before
    return found


def return_to_cores(before: Mapping[int, set[int]]) -> None:
    """Undo `leave_cores`; threads that have ended meanwhile are passed over."""
    for task, cores in before.items():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(task, cores)
