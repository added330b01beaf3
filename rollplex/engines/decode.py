"""One decode step's attention: every row reads its group's prompt and its own tokens.

The prompt part of a bundle (prompts of equal length, prefilled together) is one attention whose query axis holds all
rows and query heads of a group, so its K/V is read once per group and never copied to rows. The own part has one query
token per row. The two are merged by their log-sum-exp (rollplex.models.attention).

Shape legend: N decoding rows, B groups of a bundle, S most rows a group of it has, h query heads, k key/value heads,
r = h/k, P prompt tokens, T own tokens (padded to the longest row), C capacity in own tokens, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollplex.data.records import Request
from rollplex.engines.rows import RowTable
from rollplex.models.attention import fold, merge_parts, part_forward, unfold
from rollplex.models.prefix import PrefixState
from rollplex.models.split_model import SplitModel

FIRST_CAPACITY = 8
"""Own tokens a row has room for at first; doubled when a row outgrows it."""


def kv_bytes(kv: Sequence[tuple[Tensor, Tensor]]) -> int:
    return sum(t.numel() * t.element_size() for pair in kv for t in pair)


class Bundle:
    """The prompt K/V of groups that were prefilled together, and how many of their rows are unfinished."""

    def __init__(
        self, prefix: PrefixState, groups: Sequence[Sequence[Request]], *, borrowed: bool = False
    ) -> None:  # fmt: skip
        """borrowed: the K/V is the trainer's."""
        self.borrowed = borrowed
        self.kv: list[tuple[Tensor, Tensor]] = prefix.kv()
        # A copy: the view would keep the hidden states of all prompt tokens alive.
        self.last_hidden_BH = prefix.last_hidden_BH.clone()
        self.next_position_B: np.ndarray = prefix.next_position_B.cpu().numpy()
        self.groups = list(groups)
        self.unfinished_B = np.array([len(g) for g in groups], dtype=np.int64)

    @property
    def nbytes(self) -> int:
        return kv_bytes(self.kv)

    @property
    def own_bytes(self) -> int:
        """Of K/V that is not the trainer's; every layer has as much."""
        return 0 if self.borrowed else len(self.kv) * kv_bytes(self.kv[:1])

    def shrink(self) -> np.ndarray | None:
        """Free the K/V of finished groups once they are half of the bundle (each shrink copies what stays).

        Returns the new index of every old group (-1: gone), or None when nothing changed.
        """
        keep = np.flatnonzero(self.unfinished_B > 0)
        if len(keep) * 2 > len(self.groups):
            return None
        index = torch.from_numpy(keep).to(self.last_hidden_BH.device)
        self.kv = [(k[index], v[index]) for k, v in self.kv]
        self.borrowed = False
        self.last_hidden_BH = self.last_hidden_BH[index]
        self.next_position_B = self.next_position_B[keep]
        moved = np.full(len(self.groups), -1, dtype=np.int64)
        moved[keep] = np.arange(len(keep))
        self.groups = [self.groups[i] for i in keep]
        self.unfinished_B = self.unfinished_B[keep]
        return moved


class OwnKV:
    """K/V of the tokens the rows sampled: per layer one (2, rows, k, C, d) tensor, grown by doubling."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.spare: list[torch.Size] = []
        """Sizes given back by `release`, for `restore`."""

        self._like: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.layers)

    def ensure(self, layers: int, rows: int, tokens: int, most_rows: int, most_tokens: int, like: Tensor) -> None:
        """Room for `rows` rows of `tokens` tokens; what is held stays.

        `like` (.., k, .., d) gives heads, head size, dtype and device; `most_*` bound the doubling.
        """
        have_rows, have_tokens = (self.layers[0].shape[1], self.layers[0].shape[3]) if self.layers else (0, 0)
        if rows <= have_rows and tokens <= have_tokens:
            return
        if rows > have_rows:
            have_rows = max(rows, min(most_rows, 2 * have_rows))
        if tokens > have_tokens:
            have_tokens = max(tokens, min(most_tokens, max(2 * have_tokens, FIRST_CAPACITY)))
        shape = (2, have_rows, like.shape[1], have_tokens, like.shape[3])
        for i in range(layers):
            # Zeros, because places past a row's end are masked by adding -inf: they must never hold a NaN.
            new = like.new_zeros(shape)
            if i < len(self.layers):
                old = self.layers[i]
                new[:, : old.shape[1], :, : old.shape[3]] = old
                self.layers[i] = new
            else:
                self.layers.append(new)
        self._like = like.new_empty(0)

    def move(self, holes: np.ndarray, movers: np.ndarray, tokens: int) -> None:
        """Rows `movers` take the places `holes`; `tokens` is the longest row's length."""
        if not self.layers or not tokens:
            return
        known = movers < self.layers[0].shape[1]  # rows that have no own K/V yet may lie past the storage
        if not known.any():
            return
        to, source = (torch.from_numpy(a[known]).to(self.layers[0].device) for a in (holes, movers))
        for layer in self.layers:
            layer[:, to, :, :tokens] = layer[:, source, :, :tokens]

    def release(self) -> int:
        """Free the storage; returns its bytes."""
        freed = self.nbytes
        if self.layers:
            self.spare = [t.shape for t in self.layers]
        self.layers = []
        return freed

    def restore(self) -> int:
        """Take back what `release` freed (contents are gone); returns its bytes."""
        if not self.layers and self._like is not None:
            self.layers = [self._like.new_zeros(shape) for shape in self.spare]
            self.spare = []
            return self.nbytes
        return 0


@dataclass(frozen=True)
class BundlePart:
    """Which rows of the batch belong to one bundle."""

    bundle: Bundle
    slots_F: Tensor | None
    """(B*S,) int64: the batch row of each (group, place); missing ones repeat some row. None: row i is place i."""


@dataclass(frozen=True)
class Layout:
    """How the batch's rows lie in its bundles; valid until a row comes or goes."""

    parts: tuple[BundlePart, ...]
    place_N: Tensor | None
    """(N,) int64: where a row's result stands in the parts' results, concatenated. None: in order."""


def by_group(rows: np.ndarray, group_N: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of one bundle, ascending, put group by group: (rows, their groups, their numbers within their group)."""
    order = np.argsort(group_N[rows], kind="stable")
    rows = rows[order]
    group = group_N[rows]
    return rows, group, np.arange(len(rows)) - np.searchsorted(group, group)


def make_layout(bundles: Sequence[Bundle], bundle_N: np.ndarray, group_N: np.ndarray, device: torch.device) -> Layout:
    """bundle_N and group_N (index in the bundle) int64 per row."""
    n = len(bundle_N)
    place_N = np.empty(n, dtype=np.int64)
    parts, base = [], 0
    for b, bundle in enumerate(bundles):
        rows, group, rank = by_group(np.flatnonzero(bundle_N == b), group_N)
        if not len(rows):
            continue
        groups, most = len(bundle.groups), int(rank.max()) + 1
        slots = np.full((groups, most), rows[0], dtype=np.int64)
        slots[group, rank] = rows
        place_N[rows] = base + group * most + rank
        base += groups * most
        in_order = slots.size == n and bool((slots.ravel() == np.arange(n)).all())
        parts.append(BundlePart(bundle, None if in_order else torch.from_numpy(slots.ravel()).to(device)))
    ordered = base == n and bool((place_N == np.arange(n)).all())
    return Layout(tuple(parts), None if ordered else torch.from_numpy(place_N).to(device))


def masked_part(
    q_Nkrd: Tensor, k_NkTd: Tensor, v_NkTd: Tensor, hidden_NT: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q to the tokens that hidden_NT (bool) does not hide, one at least: out, lse (N, k, r) float32."""
    scores = (q_Nkrd.float() @ k_NkTd.float().transpose(-1, -2)) * scale
    scores = scores.masked_fill(hidden_NT[:, None, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse.unsqueeze(-1)).to(v_NkTd.dtype) @ v_NkTd, lse


class DecodeStep:
    """Attention state of one decode step (see models.attention.AttentionState)."""

    def __init__(self, layout: Layout, own: OwnKV, lengths_N: np.ndarray, device: torch.device) -> None:
        """lengths_N int64: own tokens each row holds already; this step writes one more at that index."""
        self.layout, self.own = layout, own
        self.tokens = int(lengths_N.max()) + 1
        self.even = bool((lengths_N == lengths_N[0]).all())
        if not self.even:
            self.rows_N = torch.arange(len(lengths_N), device=device)
            self.lengths_N = torch.from_numpy(lengths_N).to(device)
            self.hidden_NT = torch.arange(self.tokens, device=device) > self.lengths_N.unsqueeze(1)
            self.bias: Tensor | None = None

    def attend(self, layer: int, q_Nh1d: Tensor, k_Nk1d: Tensor, v_Nk1d: Tensor, scale: float) -> Tensor:
        n, h, _, d = q_Nh1d.shape
        kv = k_Nk1d.shape[1]
        keys, values = self._write(layer, k_Nk1d, v_Nk1d)
        own = self._own_part(q_Nh1d.reshape(n, kv, h // kv, d), keys, values, scale)
        out, lse = self._prompt_part(layer, q_Nh1d, scale)
        merged, _ = merge_parts(out, lse, own[0].reshape(n, h, d), own[1].reshape(n, h))
        return merged.unsqueeze(1)

    def _write(self, layer: int, k_Nk1d: Tensor, v_Nk1d: Tensor) -> tuple[Tensor, Tensor]:
        n = k_Nk1d.shape[0]
        keys, values = self.own.layers[layer][:, :n, :, : self.tokens].unbind(0)
        if self.even:
            keys[:, :, -1:] = k_Nk1d
            values[:, :, -1:] = v_Nk1d
        else:
            keys[self.rows_N, :, self.lengths_N] = k_Nk1d.squeeze(2)
            values[self.rows_N, :, self.lengths_N] = v_Nk1d.squeeze(2)
        return keys, values

    def _own_part(self, q_Nkrd: Tensor, k_NkTd: Tensor, v_NkTd: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        if self.even:
            out, lse, _ = part_forward(q_Nkrd, k_NkTd, v_NkTd, False, scale)
            return out, lse
        if q_Nkrd.device.type == "cpu":
            if self.bias is None:
                bias_NT = torch.zeros(self.hidden_NT.shape, dtype=q_Nkrd.dtype).masked_fill(self.hidden_NT, -torch.inf)
                self.bias = bias_NT[:, None, None].expand(*q_Nkrd.shape[:3], self.tokens)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_Nkrd, k_NkTd, v_NkTd, 0.0, False, attn_mask=self.bias, scale=scale
            )
        return masked_part(q_Nkrd, k_NkTd, v_NkTd, self.hidden_NT, scale)  # CUDA's flash kernel takes no mask

    def _prompt_part(self, layer: int, q_Nh1d: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """out (N, h, d), lse (N, h)."""
        outs, lses = [], []
        for part in self.layout.parts:
            pk_BkPd, pv_BkPd = part.bundle.kv[layer]
            q = q_Nh1d if part.slots_F is None else q_Nh1d[part.slots_F]
            f, h = q.shape[:2]
            out, lse, _ = part_forward(fold(q, pk_BkPd.shape[0], pk_BkPd.shape[1]), pk_BkPd, pv_BkPd, False, scale)
            outs.append(unfold(out, f, h, 1).squeeze(2))
            lses.append(unfold(lse, f, h, 1).squeeze(2))
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        lse = torch.cat(lses) if len(lses) > 1 else lses[0]
        if self.layout.place_N is not None:
            out, lse = out[self.layout.place_N], lse[self.layout.place_N]
        return out, lse


def decode_step(
    model: SplitModel, rows: RowTable, layout: Layout, own: OwnKV, kv: list[tuple[Tensor, Tensor]], most_rows: int
) -> Tensor:
    """Hidden states (n, H) of the rows' newest tokens. kv: any bundle's, for its shapes."""
    n, device = rows.n, kv[0][0].device
    written_N = rows.length[:n] - 1
    longest = int(rows.limit[:n].max()) - 1
    own.ensure(len(kv), n, int(written_N.max()) + 1, most_rows, longest, kv[0][0])
    state = DecodeStep(layout, own, written_N, device)
    ids_N1 = torch.from_numpy(rows.last_ids()).to(device).unsqueeze(1)
    position_N1 = torch.from_numpy(rows.start[:n] + written_N).to(device).unsqueeze(1)
    return model.run_text(model.embed(ids_N1), position_N1.expand(3, n, 1), state)[:, 0]
