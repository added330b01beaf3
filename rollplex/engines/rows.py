"""Host-side book-keeping of the rows that decode: a dense table, slots 0..n-1, retired rows filled from the end.

Shape legend: n rows in use, N rows of room, C room in tokens, M rows of one call, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollplex.data.records import FinishReason, Prompt, Request, Rollout
from rollplex.engines.sampling import seed_array


class RowTable:
    """What is known of each decoding row. All arrays are numpy; only `ids` and `logps` are two-dimensional."""

    def __init__(self) -> None:
        self.n = 0
        self.requests: list[Request] = []
        self.length = np.zeros(0, np.int64)
        """Tokens sampled so far."""
        self.limit = np.zeros(0, np.int64)
        self.start = np.zeros(0, np.int64)
        """Position of response token 0."""
        self.seed = np.zeros(0, np.uint64)
        self.rule = np.zeros(0, np.int64)
        """Index of the row's sampling rule."""
        self.bundle = np.zeros(0, np.int64)
        """Index of the row's bundle among the engine's bundles."""
        self.group = np.zeros(0, np.int64)
        """Index of the row's group in its bundle."""
        self.ids = np.zeros((0, 0), np.int64)
        self.logps = np.zeros((0, 0), np.float32)

    _PER_ROW = ("length", "limit", "start", "seed", "rule", "bundle", "group", "ids", "logps")

    def admit(
        self, requests: Sequence[Request], start: np.ndarray, rule: Sequence[int], bundle: int, group: Sequence[int]
    ) -> np.ndarray:
        """New rows without a token; returns their slots."""
        slots = np.arange(self.n, self.n + len(requests))
        self._room(self.n + len(requests), 1)
        self.requests.extend(requests)
        self.length[slots] = 0
        self.limit[slots] = [r.params.max_tokens for r in requests]
        self.start[slots] = start
        self.seed[slots] = seed_array([r.seed for r in requests])
        self.rule[slots] = rule
        self.bundle[slots] = bundle
        self.group[slots] = group
        self.n += len(requests)
        return slots

    def append(self, slots: np.ndarray, ids_M: np.ndarray, logps_M: np.ndarray) -> None:
        """One more token for each of `slots`."""
        length = self.length[slots]
        self._room(self.n, int(length.max()) + 1)
        self.ids[slots, length] = ids_M
        self.logps[slots, length] = logps_M
        self.length[slots] += 1

    def last_ids(self) -> np.ndarray:
        """The newest token of every row, (n,) int64; every row has one."""
        return self.ids[np.arange(self.n), self.length[: self.n] - 1]

    def retire(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop rows (sorted slots). Rows from the end take their places: returns (holes, movers)."""
        left = self.n - len(slots)
        holes = slots[slots < left]
        movers = np.setdiff1d(np.arange(left, self.n), slots, assume_unique=True)
        for name in self._PER_ROW:
            array = getattr(self, name)
            array[holes] = array[movers]
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            self.requests[hole] = self.requests[mover]
        del self.requests[left:]
        self.n = left
        return holes, movers

    def rollout(self, slot: int, text: str, reason: FinishReason, version: int) -> Rollout:
        request, n = self.requests[slot], int(self.length[slot])
        return Rollout(
            group=request.group,
            index=request.index,
            token_ids=torch.from_numpy(self.ids[slot, :n].copy()),
            logps=torch.from_numpy(self.logps[slot, :n].copy()),
            text=text,
            finish_reason=reason,
            weights_version=version,
        )

    def _room(self, rows: int, tokens: int) -> None:
        have_rows, have_tokens = self.ids.shape
        if rows <= have_rows and tokens <= have_tokens:
            return
        rows = have_rows if rows <= have_rows else max(rows, 2 * have_rows)
        tokens = have_tokens if tokens <= have_tokens else max(tokens, 2 * have_tokens, 16)
        for name in self._PER_ROW:
            old = getattr(self, name)
            new = np.zeros((rows, tokens) if old.ndim == 2 else rows, old.dtype)
            new[tuple(slice(0, s) for s in old.shape)] = old
            setattr(self, name, new)


def empty_rollout(request: Request, version: int) -> Rollout:
    """What a request that never became a row gives when it is aborted."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return Rollout(request.group, request.index, nothing, nothing.float(), "", "abort", version)


class SeenTokens:
    """Which tokens stand in prompt and response, of the rows whose repetition penalty asks for it."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}

    def add(self, slot: int, prompt: Prompt, vocabulary: int, device: torch.device) -> None:
        seen_V = torch.zeros(vocabulary, dtype=torch.bool)
        seen_V[prompt.input_ids] = True
        self._of[slot] = seen_V.to(device)

    def append(self, slots: np.ndarray, ids_M: np.ndarray) -> None:
        for i, slot in enumerate(slots.tolist() if self._of else ()):
            if slot in self._of:
                self._of[slot][ids_M[i]] = True

    def retire(self, gone: np.ndarray, holes: np.ndarray, movers: np.ndarray) -> None:
        """As `RowTable.retire`, which gives holes and movers."""
        for slot in gone.tolist() if self._of else ():
            self._of.pop(slot, None)
        for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
            if mover in self._of:
                self._of[hole] = self._of.pop(mover)

    def of(self, slots: np.ndarray) -> Tensor:
        """(M, V) bool."""
        return torch.stack([self._of[slot] for slot in slots.tolist()])
