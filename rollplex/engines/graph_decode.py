"""A decode step of fixed shapes, so that CUDA can replay it as one graph: no launches, no Python per layer.

The step reads everything that changes from one buffer, filled from the host with one copy. Rows are padded to a power
of two; a padding row has no token of its own, reads some prompt and writes to its own row of the own K/V, which is past
the real ones. Rows that come, go or grow change the buffer only, as long as they fit the shapes the step was built for.

A step is built anew (and captured, the old one dropped) when a bundle comes, when rows or tokens outgrow it, and when
half of its rows are gone: until then it also holds the prompt K/V of groups that have ended.

Shape legend: n rows, N rows padded, B groups of a bundle, S places for rows of a group, F = the sum of B*S over the
bundles, W own tokens attended (a power of two, or the whole capacity), h query heads, k key/value heads, r = h/k,
d head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollplex.engines.decode import Bundle, BundlePart, DecodeStep, Layout, OwnKV, by_group, masked_part
from rollplex.engines.rows import RowTable
from rollplex.models.split_model import SplitModel

FIRST_WINDOW = 128
"""Own tokens attended at first (W), doubled when a row outgrows them: what lies past the rows' ends costs time too."""

FEW_ROWS = 8
"""A step for so many rows is not built anew for fewer: they would not be faster."""

WARM_UPS = 2
"""Runs before a capture: libraries choose kernels and allocate workspaces in the first ones."""


def power_of_two(n: int) -> int:
    """The smallest one that is at least n (n >= 1)."""
    return 1 << (n - 1).bit_length()


class StaticStep(DecodeStep):
    """DecodeStep whose shapes do not depend on the rows: it attends over W tokens and hides those past a row's end."""

    def __init__(self, layout: Layout, layers: list[Tensor], rows_N: Tensor, tokens_W: Tensor, lengths_N: Tensor):
        """layers: per layer (2, N, k, W, d) of the own K/V; rows_N and tokens_W count from 0."""
        self.layout, self.layers = layout, layers
        self.rows_N, self.lengths_N = rows_N, lengths_N
        self.hidden_NT = tokens_W > lengths_N.unsqueeze(1)

    def _write(self, layer: int, k_Nk1d: Tensor, v_Nk1d: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer].unbind(0)
        keys[self.rows_N, :, self.lengths_N] = k_Nk1d.squeeze(2)
        values[self.rows_N, :, self.lengths_N] = v_Nk1d.squeeze(2)
        return keys, values

    def _own_part(self, q_Nkrd: Tensor, k_NkTd: Tensor, v_NkTd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return masked_part(q_Nkrd, k_NkTd, v_NkTd, self.hidden_NT, scale)


class StaticShapes:
    """What one built step reads and writes; every tensor stays where it is."""

    def __init__(self, rows: RowTable, bundles: Sequence[Bundle], own: OwnKV, padded: int, window: int) -> None:
        device = own.layers[0].device
        self.padded, self.window = padded, window
        self.own = list(own.layers)
        self.kv = [bundle.kv for bundle in bundles]
        """Each bundle's K/V. `Bundle.shrink` makes a new list: this one is then no longer the bundle's."""
        most = [min(power_of_two(int(b.unfinished_B.max())), padded) for b in bundles]
        self._width = most
        sizes = [len(b.groups) * m for b, m in zip(bundles, most, strict=True)]
        self._base = np.cumsum([0, *sizes])[:-1].tolist()
        # [ids | lengths | starts | places], N each, then the bundles' slots: one copy brings all of it.
        self.host = np.zeros(4 * padded + sum(sizes), np.int64)
        self.buffer = torch.zeros(len(self.host), dtype=torch.int64, device=device)
        self.ids_N, self.lengths_N, self.starts_N, place_N, *slots = self.buffer.split([padded] * 4 + sizes)
        parts = [BundlePart(b, s) for b, s in zip(bundles, slots, strict=True)]
        self.layout = Layout(tuple(parts), place_N)
        self._rows_N = torch.arange(padded, device=device)
        self._tokens_W = torch.arange(window, device=device)
        self._layers = [t[:, :padded, :, :window] for t in self.own]
        self._known: tuple[np.ndarray, np.ndarray] | None = None

    def hold(self, rows: RowTable, bundles: Sequence[Bundle], own: OwnKV) -> bool:
        """Whether the rows fit. No group has more of them than places: it had no more unfinished ones at the start."""
        mine = {id(kv) for kv in self.kv}
        return (
            rows.n <= self.padded
            and int(rows.length[: rows.n].max()) <= self.window
            and len(own.layers) == len(self.own)
            and all(a is b for a, b in zip(own.layers, self.own, strict=True))
            and all(id(b.kv) in mine for b in bundles)
        )

    def fill(self, rows: RowTable, bundles: Sequence[Bundle]) -> None:
        """Bring the rows into the buffer. What padding rows hold, and read, is row and place 0 of anything."""
        n, padded = rows.n, self.padded
        inputs = self.host[: 3 * padded].reshape(3, padded)
        inputs[:] = 0
        inputs[:, :n] = rows.last_ids(), rows.length[:n] - 1, rows.start[:n]
        number = {id(kv): i for i, kv in enumerate(self.kv)}
        bundle_N = np.array([number[id(b.kv)] for b in bundles])[rows.bundle[:n]]
        group_N = rows.group[:n]
        if self._known is None or not (
            np.array_equal(bundle_N, self._known[0]) and np.array_equal(group_N, self._known[1])
        ):
            self._place(bundle_N, group_N)
            self._known = bundle_N, group_N.copy()
        self.buffer.copy_(torch.from_numpy(self.host))

    def _place(self, bundle_N: np.ndarray, group_N: np.ndarray) -> None:
        place_N = self.host[3 * self.padded : 4 * self.padded]
        slots_F = self.host[4 * self.padded :]
        self.host[3 * self.padded :] = 0
        for b, (base, width) in enumerate(zip(self._base, self._width, strict=True)):
            mine, group, rank = by_group(np.flatnonzero(bundle_N == b), group_N)
            place_N[mine] = base + group * width + rank
            slots_F[place_N[mine]] = mine

    def run(self, model: SplitModel) -> Tensor:
        """(N, H). Only device work whose shapes and addresses are the same in every run."""
        state = StaticStep(self.layout, self._layers, self._rows_N, self._tokens_W, self.lengths_N)
        position_N1 = (self.starts_N + self.lengths_N).unsqueeze(1)
        embeds = model.embed(self.ids_N.unsqueeze(1))
        return model.run_text(embeds, position_N1.expand(3, self.padded, 1), state)[:, 0]


class GraphDecode:
    """Builds, captures and replays static steps, one at a time."""

    def __init__(self, capture: bool) -> None:
        """capture=False runs the same steps without a graph, on any device."""
        self.capture = capture
        self.captures = 0
        """Steps built (and captured) since the start."""
        self.replays = 0
        """Decode steps run with them."""
        self._shapes: StaticShapes | None = None
        self._out_NH: Tensor | None = None
        self._graph: Any = None
        self._pool: Any = None
        self._stream: Any = None

    @property
    def held_kv(self) -> list[list[tuple[Tensor, Tensor]]]:
        """The prompt K/V that the built step keeps alive."""
        return [] if self._shapes is None else self._shapes.kv

    def holds(self, rows: RowTable, bundles: Sequence[Bundle], own: OwnKV, more: bool) -> bool:
        """Whether the built step fits the rows. more: others wait, so that few rows are no reason for a smaller one."""
        shapes = self._shapes
        if shapes is None or not shapes.hold(rows, bundles, own):
            return False
        return more or shapes.padded <= FEW_ROWS or 2 * rows.n > shapes.padded

    def build(self, model: SplitModel, rows: RowTable, bundles: Sequence[Bundle], own: OwnKV) -> None:
        """A step for these rows; the own K/V gets its final capacity, because growing it would end the step."""
        self.forget()
        n = rows.n
        padded, capacity, kv = power_of_two(n), int(rows.limit[:n].max()) - 1, bundles[0].kv
        own.ensure(len(kv), padded, capacity, padded, capacity, kv[0][0])
        window = max(FIRST_WINDOW, power_of_two(int(rows.length[:n].max())))
        shapes = StaticShapes(rows, bundles, own, padded, min(window, own.layers[0].shape[3]))
        if self.capture:
            shapes.fill(rows, bundles)  # the warm-up writes K/V: only where the step itself will
            self._out_NH = self._captured(model, shapes)
        self._shapes = shapes
        self.captures += 1

    def step(self, model: SplitModel, rows: RowTable, bundles: Sequence[Bundle]) -> Tensor:
        """Hidden states (n, H) of the rows' newest tokens, valid until the next step."""
        shapes = self._shapes
        assert shapes is not None, "no step is built"
        shapes.fill(rows, bundles)
        self.replays += 1
        if not self.capture:
            return shapes.run(model)[: rows.n]
        assert self._out_NH is not None
        self._graph.replay()
        return self._out_NH[: rows.n]

    def _captured(self, model: SplitModel, shapes: StaticShapes) -> Tensor:
        device = shapes.buffer.device
        current = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                shapes.run(model)
        current.wait_stream(self._stream)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Another thread allocates and launches meanwhile: only this thread's calls may be refused.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            out_NH = shapes.run(model)
        # The old graph kept the pool alive until here: the allocator takes no pool again that no graph uses.
        old, self._graph = self._graph, graph
        if old is not None:
            old.reset()
        return out_NH

    def forget(self) -> None:
        """Let go of the rows' tensors. A graph is never replayed after this; it keeps its pool for the next one."""
        self._shapes = self._out_NH = None

    def drop(self) -> None:
        """Give everything back: graph and pool too. Needed when weights moved, and to free memory."""
        self.forget()
        graph, self._graph, self._pool = self._graph, None, None
        if graph is not None:
            graph.reset()
