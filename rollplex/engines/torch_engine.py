"""The embedded engine: batched decode on the trainer's own tensors, no second copy of any weight.

A prompt is prefilled once per group, prompts of equal token length (or of one `Request.prefix` pass) together. A pass
that the trainer has computed is taken as it is. All running rows decode one token per step as one batch; rows retire
the step they end, and waiting ones take their slots.

Shape legend: N decoding rows, M rows of one sampling call, U rows of distinct logits, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rollplex.data.records import FinishReason, Request, Rollout, SamplingParams
from rollplex.engines.base import EngineContext, RolloutEngine, Vision, WindowState, is_shared
from rollplex.engines.decode import Bundle, Layout, OwnKV, decode_step, kv_bytes, make_layout
from rollplex.engines.graph_decode import GraphDecode
from rollplex.engines.rows import RowTable, SeenTokens, empty_rollout
from rollplex.engines.sampling import RuleBook, check_params, check_request, not_finite, sample
from rollplex.engines.text import Detokenizer
from rollplex.engines.waiting import WaitingGroups, features_of
from rollplex.models.split_model import SplitModel
from rollplex.residency import KV_POOL

LOGITS_BYTES = 128 * 1024**2
"""Largest float32 logits block held at once."""


class TorchEngine(RolloutEngine):
    """Decodes with the trainer's weights in the trainer's process. Vision placeholder tokens are never sampled.

    Args:
        max_num_seqs: Rows decoded at once, over all groups.
        max_prefill_tokens: Prompt tokens of one step. Prompts of a prefix pass stay together; a longer one is alone.
        vision: "shared" takes the features of the actor's vision pass; "engine" runs the tower itself.
        cuda_graphs: Steps of fixed shapes, each replayed as a CUDA graph; "eager": without a graph, on any device.
            Either gives own K/V room for the longest response at once.
        release_kv_cache: Give own K/V back after each rollout of training; CUDA graphs are then captured again.
    """

    takes_prefix = needs_whole_weights = True

    def __init__(
        self, *, max_num_seqs: int = 256, max_prefill_tokens: int = 8192, vision: Vision = "engine",
        cuda_graphs: bool | Literal["eager"] = False, release_kv_cache: bool = False,
    ) -> None:  # fmt: skip
        if max_num_seqs < 1 or max_prefill_tokens < 1:
            raise ValueError(f"{max_num_seqs=} and {max_prefill_tokens=} must be at least 1")
        if cuda_graphs not in (False, True, "eager"):
            raise ValueError(f'{cuda_graphs=} must be true, false or "eager"')
        self.max_num_seqs = max_num_seqs
        self.max_prefill_tokens = max_prefill_tokens
        self.releases_kv, self.takes_vision = release_kv_cache, is_shared(vision)
        self.decode_steps = 0
        """Decode steps since the start."""
        self.decoded_rows = 0
        """Rows those steps ran, summed: a response of R tokens costs R-1."""
        self.prefilled_groups = 0
        """Prompts computed by this engine."""
        self.taken_groups = 0
        """Prompts whose prefix came from the trainer."""
        self._context: EngineContext | None = None
        self._model: SplitModel | None = None
        self._own = OwnKV()
        self._fixed_shapes = bool(cuda_graphs)
        self._graphs = GraphDecode(capture=cuda_graphs is True)
        self._clear()

    def _clear(self) -> None:
        self._waiting = WaitingGroups()
        self._bundles: list[Bundle] = []
        self._admissible: deque[tuple[Bundle, int, Request]] = deque()
        self._rows = RowTable()
        self._rules = RuleBook((), 0, torch.device("cpu"))
        self._layout: Layout | None = None
        self._seen = SeenTokens()
        self._graphs.drop()

    # ---- protocol ----

    def start(self, context: EngineContext) -> None:
        assert self._model is None, "the engine was started already"
        device = context.model.device
        if self._graphs.capture and device.type != "cuda":
            raise ValueError(f"cuda_graphs=True needs a CUDA device, and the model is on {device}: set it to false")
        self._detokenizer = Detokenizer(getattr(context.processor, "tokenizer", context.processor))
        self._model = context.model.alias()
        self._context = context
        self._version = context.model.version
        text_config: Any = getattr(self._model.config, "text_config", self._model.config)
        self._limit = int(text_config.max_position_embeddings)

    def submit(self, requests: Sequence[Request]) -> None:
        model = self._started
        vocabulary = model.head_weight.shape[0]
        if self.window is WindowState.IDLE:
            self._rules = RuleBook(model.banned_token_ids, vocabulary, model.device)
        checked: set[SamplingParams] = set()
        groups: dict[tuple[int, int], list[Request]] = {}
        for r in requests:
            if r.params not in checked:
                check_params(r.params, vocabulary)
                checked.add(r.params)
            check_request(r, model.media_names, self._limit, f"the model's max_position_embeddings of {self._limit}:")
            groups.setdefault((r.group, id(r.prompt)), []).append(r)
        self._waiting.extend(groups.values())

    @torch.no_grad()  # not inference_mode: its tensors could not be used by the trainer's graph
    def step(self) -> list[Rollout]:
        finished = self._admit()
        if self._fits():
            self._prefill()
            finished += self._admit()
        elif self._rows.n:
            finished += self._decode()
        return finished

    @property
    def window(self) -> WindowState:
        if self._waiting:
            return WindowState.PREFILL
        return WindowState.DECODE if self._rows.n or self._admissible else WindowState.IDLE

    @property
    def num_running(self) -> int:
        return self._rows.n

    @property
    def progress(self) -> int:
        return self.decode_steps + self.prefilled_groups + self.taken_groups

    def abort(self) -> list[Rollout]:
        rollouts = [self._rollout(slot, "abort") for slot in range(self._rows.n)]
        unborn = [r for _, _, r in self._admissible] + [r for group in self._waiting for r in group]
        rollouts += [empty_rollout(r, self._version) for r in unborn]
        self._clear()
        return rollouts

    def publish(self, version: int) -> None:
        assert self.window is WindowState.IDLE, "weights may change only between rollouts"
        model, source = self._started, self._source
        if not model.shares_storage_with(source):
            self._graphs.drop()  # it reads the old addresses
            model.bind(source)
        self._version = model.version = version

    def release_kv(self) -> int:
        assert self.window is WindowState.IDLE, "K/V may be released only between rollouts"
        self._graphs.drop()
        return self._own.release()

    def restore_kv(self) -> int:
        return self._own.restore()

    def close(self) -> None:
        self._clear()
        self._own = OwnKV()
        self._model = self._context = None

    @property
    def prompt_kv_bytes(self) -> int:
        """Bytes of the prompts' K/V held now."""
        held = [b.kv for b in self._bundles] + self._graphs.held_kv
        return sum(kv_bytes(kv) for kv in {id(kv): kv for kv in held}.values())

    def state_tensors(self) -> dict[str, list[Tensor]]:
        mine = [t for b in self._bundles if not b.borrowed for pair in b.kv for t in pair]
        return {KV_POOL: mine + self._own.layers}

    def state_bytes(self) -> dict[str, int]:
        return {KV_POOL: self._own.nbytes + sum(b.own_bytes for b in self._bundles)}

    @property
    def graph_captures(self) -> int:  # GraphDecode says what these count
        return self._graphs.captures

    @property
    def graph_replays(self) -> int:
        return self._graphs.replays

    @property
    def _started(self) -> SplitModel:
        assert self._model is not None, "the engine is not started, or closed"
        return self._model

    @property
    def _source(self) -> SplitModel:
        assert self._context is not None
        return self._context.model

    @property
    def _device(self) -> torch.device:
        return self._started.device

    # ---- prefill ----

    def _fits(self) -> bool:
        """A group is prefilled when all its rows (at most max_num_seqs) can start."""
        free = self.max_num_seqs - self._rows.n
        return bool(self._waiting) and free >= min(len(self._waiting.first), self.max_num_seqs)

    def _prefill(self) -> None:
        """Compute, or take from the trainer, the first waiting group's prompt and those that go with it."""
        assert not self._admissible  # they would have the free slots
        given = self._waiting.first[0].prefix
        chosen = self._waiting.take(self.max_num_seqs - self._rows.n, self.max_prefill_tokens)
        if given is not None and given.state is not None:
            state = given.state
            assert state.version == self._version, "a prefix of other weights than those that sample"
            self.taken_groups += len(chosen)
        else:
            state = self._started.prefix([g[0].prompt for g in chosen], grad=False, vision=features_of(chosen))
            self.prefilled_groups += len(chosen)
        bundle = Bundle(state, chosen, borrowed=given is not None and state is given.state)
        self._bundles.append(bundle)
        self._admissible.extend((bundle, g, r) for g, group in enumerate(chosen) for r in group)

    def _admit(self) -> list[Rollout]:
        """Give free slots to rows whose prompt is prefilled; their first token comes from the prompt itself."""
        finished: list[Rollout] = []
        while self._admissible and self._rows.n < self.max_num_seqs:
            bundle = self._admissible[0][0]
            taken: list[tuple[int, Request]] = []
            free = self.max_num_seqs - self._rows.n
            while self._admissible and len(taken) < free and self._admissible[0][0] is bundle:
                _, group, request = self._admissible.popleft()
                taken.append((group, request))
            finished += self._first_tokens(bundle, [g for g, _ in taken], [r for _, r in taken])
        return finished

    def _first_tokens(self, bundle: Bundle, groups: list[int], requests: list[Request]) -> list[Rollout]:
        rules = [self._rules.index(r.params) for r in requests]
        start = bundle.next_position_B[groups]
        slots = self._rows.admit(requests, start, rules, self._bundles.index(bundle), groups)
        for slot, request in zip(slots.tolist(), requests, strict=True):
            if request.params.repetition_penalty != 1:
                self._seen.add(slot, request.prompt, self._started.head_weight.shape[0], self._device)
        self._layout = None
        unique, index = np.unique(groups, return_inverse=True)
        logits_UV = self._logits(bundle.last_hidden_BH[torch.from_numpy(unique).to(self._device)])
        index_M = torch.from_numpy(index).to(self._device)
        return self._sample(slots, lambda chunk: logits_UV[index_M[chunk]])

    # ---- decode ----

    def _decode(self) -> list[Rollout]:
        rows, model, graphs = self._rows, self._started, self._graphs
        if not self._fixed_shapes:
            if self._layout is None:
                self._layout = make_layout(self._bundles, rows.bundle[: rows.n], rows.group[: rows.n], self._device)
            hidden_NH = decode_step(model, rows, self._layout, self._own, self._bundles[0].kv, self.max_num_seqs)
        else:
            if not graphs.holds(rows, self._bundles, self._own, more=bool(self._waiting)):
                graphs.forget()
                for bundle in self._bundles:
                    self._shrink(bundle)
                graphs.build(model, rows, self._bundles, self._own)
            hidden_NH = graphs.step(model, rows, self._bundles)
        self.decode_steps += 1
        self.decoded_rows += rows.n
        return self._sample(np.arange(rows.n), lambda chunk: self._logits(hidden_NH[chunk]))

    def _logits(self, hidden_UH: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden_UH, self._started.head_weight).float()

    def _sample(self, slots: np.ndarray, logits_of: Callable[[Any], Tensor]) -> list[Rollout]:
        """One token for each of `slots` (`logits_of` gives the logits of a part of them); returns what ended."""
        rows = self._rows
        vocabulary = self._started.head_weight.shape[0]
        width = max(1, LOGITS_BYTES // (4 * vocabulary))
        ids_M, logps_M = np.empty(len(slots), np.int64), np.empty(len(slots), np.float32)
        for rule in np.unique(rows.rule[slots]).tolist():
            mine = np.flatnonzero(rows.rule[slots] == rule)
            for first in range(0, len(mine), width):
                chunk = mine[first : first + width]
                part = slots[chunk]
                everything = len(chunk) == len(slots)
                logits_MV = logits_of(slice(None) if everything else torch.from_numpy(chunk).to(self._device))
                seen = self._seen.of(part) if self._rules[rule].params.repetition_penalty != 1 else None
                ids, logps = sample(logits_MV, self._rules[rule], rows.seed[part], rows.length[part], seen)
                ids_M[chunk], logps_M[chunk] = ids.cpu().numpy(), logps.cpu().numpy()
        if not np.isfinite(logps_M).all():
            slot = int(slots[np.flatnonzero(~np.isfinite(logps_M))[0]])
            raise not_finite(rows.requests[slot], int(rows.length[slot]), self._version)
        rows.append(slots, ids_M, logps_M)
        self._seen.append(slots, ids_M)
        return self._retire(slots, ids_M)

    # ---- the end of a row ----

    def _retire(self, slots: np.ndarray, ids_M: np.ndarray) -> list[Rollout]:
        rows = self._rows
        stopped = np.zeros(len(slots), dtype=bool)
        for rule in np.unique(rows.rule[slots]).tolist():
            mine = rows.rule[slots] == rule
            stopped[mine] = self._rules[rule].stops_V[ids_M[mine]]
            if self._rules[rule].params.stop:
                for i in np.flatnonzero(mine & ~stopped).tolist():
                    row = rows.ids[slots[i], : rows.length[slots[i]]]
                    stopped[i] = self._detokenizer.completes(row.tolist(), self._rules[rule].params.stop)
        ended = stopped | (rows.length[slots] >= rows.limit[slots])
        if not ended.any():
            return []
        gone = slots[ended]
        bundles = rows.bundle[gone]
        finished = [
            self._rollout(int(s), "stop" if stop else "length") for s, stop in zip(gone, stopped[ended], strict=True)
        ]
        for bundle, group in zip(bundles.tolist(), rows.group[gone].tolist(), strict=True):
            self._bundles[bundle].unfinished_B[group] -= 1
        holes, movers = rows.retire(np.sort(gone))
        self._own.move(holes, movers, int(rows.length[: rows.n].max(initial=1)) - 1)
        self._seen.retire(gone, holes, movers)
        self._drop_finished_groups(bundles)
        return finished

    def _rollout(self, slot: int, reason: FinishReason) -> Rollout:
        rows = self._rows
        ids = rows.ids[slot, : rows.length[slot]].tolist()
        if reason == "stop" and self._rules[rows.rule[slot]].stops_V[ids[-1]]:
            ids = ids[:-1]
        return rows.rollout(slot, self._detokenizer.decode(ids), reason, self._version)

    def _drop_finished_groups(self, bundles: np.ndarray) -> None:
        rows = self._rows
        self._layout = None
        for index in sorted(set(bundles.tolist()), reverse=True):
            bundle = self._bundles[index]
            if not bundle.unfinished_B.any():
                del self._bundles[index]
                rows.bundle[rows.bundle > index] -= 1
                continue
            if not self._fixed_shapes:  # a graph's K/V must stay where it is
                self._shrink(bundle)
        if not self._bundles:
            self._graphs.forget()

    def _shrink(self, bundle: Bundle) -> None:
        """Free the K/V of a bundle's finished groups once that pays."""
        rows, moved = self._rows, bundle.shrink()
        if moved is not None:
            self._admissible = deque((b, int(moved[g]) if b is bundle else g, r) for b, g, r in self._admissible)
            mine = np.flatnonzero(rows.bundle[: rows.n] == self._bundles.index(bundle))
            rows.group[mine] = moved[rows.group[mine]]
