"""CPU threads of the two lanes: all of them for a lane that runs alone, a share for each while both run."""

from __future__ import annotations

import threading

import torch

from rollplex.timeline import ROLLOUT_LANE, TRAIN_LANE


class LaneThreads:
    """Intra-op thread counts per lane. Two lanes with all threads each oversubscribe the cores and lose to serial.

    Args:
        total: Threads of a lane that runs alone; None is torch's present number.
        rollout: Threads of the rollout lane while the train lane works beside it; None is half of `total`.
        train: Threads of the train lane meanwhile; None is what `rollout` leaves of `total`.
    """

    def __init__(self, total: int | None = None, rollout: int | None = None, train: int | None = None) -> None:
        for name, value in (("threads", total), ("rollout_threads", rollout), ("train_threads", train)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or null for the default")
        self._wanted = (total, rollout, train)
        self.total = self.rollout = self.train = 1
        self.co_running = False
        """Both lanes are at work; written by the train lane, read by the rollout lane between its steps."""
        self._applied = threading.local()

    def settle(self) -> None:
        """Fix the numbers at the start of a run, on the train lane."""
        total, rollout, train = self._wanted
        self.total = total or torch.get_num_threads()
        self.rollout = rollout or max(1, self.total // 2)
        self.train = train or max(1, self.total - self.rollout)
        self._before = torch.get_num_threads()

    def restore(self) -> None:
        """Give the train lane's thread its old number back."""
        torch.set_num_threads(self._before)
        self._applied = threading.local()

    def apply(self, lane: str) -> None:
        """Set the calling thread's number for its next piece of work."""
        share = {ROLLOUT_LANE: self.rollout, TRAIN_LANE: self.train}[lane]
        number = share if self.co_running else self.total
        if getattr(self._applied, "number", None) != number:
            torch.set_num_threads(number)
            # A thread's first parallel region takes the number set last by any thread, unless it has asked before.
            torch.get_num_threads()
            self._applied.number = number
