"""An engine that says what the test wrote down: chosen tokens, log-probs, reasons, delays and failures."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rollplex.data.records import FinishReason, Request, Rollout
from rollplex.engines.base import EngineContext, RolloutEngine, WindowState


@dataclass(frozen=True)
class Scripted:
    """One response."""

    ids: Sequence[int]
    logps: Sequence[float] | None = None
    """None: -1.0 each."""

    text: str | None = None
    """None: the ids below 256 as bytes."""

    finish_reason: FinishReason = "stop"


class FakeEngine(RolloutEngine):
    """Scripted: a prefill step for each group, then one token for each running row per step.

    script: Scripted by request key (group, index), or a function of the request. It is read when a request is
    submitted, so a function may use the request's seed or prompt.
    prefill_delay, decode_delay: seconds a step takes, or a function of the step's number (0 is the first step ever).
    fail_at: number of the step that raises `error`.
    """

    def __init__(
        self,
        script: Mapping[tuple[int, int], Scripted] | Callable[[Request], Scripted],
        *,
        max_num_seqs: int = 10_000,
        prefill_delay: float | Callable[[int], float] = 0.0,
        decode_delay: float | Callable[[int], float] = 0.0,
        fail_at: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.script = script if callable(script) else lambda request: script[request.key]
        self.max_num_seqs = max_num_seqs
        self.prefill_delay, self.decode_delay = prefill_delay, decode_delay
        self.fail_at, self.error = fail_at, error or RuntimeError("scripted failure")
        self.calls: list[str] = []
        """Names of the protocol's methods in the order they were called (`window` left out)."""
        self.threads: set[str] = set()
        """Names of the threads that called."""
        self.requests: list[Request] = []
        """Everything ever submitted."""
        self.steps = 0
        self.version = 0
        self.context: EngineContext | None = None
        self._waiting: deque[list[Request]] = deque()
        self._running: list[tuple[Request, Scripted]] = []
        self._told: dict[int, int] = {}

    def _note(self, name: str) -> None:
        self.calls.append(name)
        self.threads.add(threading.current_thread().name)

    def start(self, context: EngineContext) -> None:
        self._note("start")
        self.context = context
        self.version = getattr(context.model, "version", 0)

    def submit(self, requests: Sequence[Request]) -> None:
        self._note("submit")
        self.requests.extend(requests)
        groups: dict[int, list[Request]] = {}
        for r in requests:
            groups.setdefault(r.group, []).append(r)
        self._waiting.extend(groups.values())

    def step(self) -> list[Rollout]:
        self._note("step")
        number, self.steps = self.steps, self.steps + 1
        if number == self.fail_at:
            raise self.error
        fits = self._waiting and len(self._running) + len(self._waiting[0]) <= self.max_num_seqs
        delay = self.prefill_delay if fits else self.decode_delay
        time.sleep(delay(number) if callable(delay) else delay)
        if fits:
            self._running += [(r, self.script(r)) for r in self._waiting.popleft()]
            return self._retire()
        for r, _ in self._running:
            self._told[id(r)] = self._told.get(id(r), 0) + 1
        return self._retire()

    def _retire(self) -> list[Rollout]:
        ended = [(r, s) for r, s in self._running if self._told.get(id(r), 0) >= len(s.ids)]
        self._running = [(r, s) for r, s in self._running if self._told.get(id(r), 0) < len(s.ids)]
        return [self._rollout(r, s, len(s.ids), s.finish_reason) for r, s in ended]

    def _rollout(self, request: Request, scripted: Scripted, n: int, reason: FinishReason) -> Rollout:
        self._told.pop(id(request), None)
        ids = list(scripted.ids)[:n]
        logps = [-1.0] * n if scripted.logps is None else list(scripted.logps)[:n]
        text = scripted.text
        if text is None:
            text = bytes(i for i in ids if i < 256).decode(errors="replace")
        return Rollout(
            group=request.group,
            index=request.index,
            token_ids=torch.tensor(ids, dtype=torch.int64),
            logps=torch.tensor(logps, dtype=torch.float32),
            text=text,
            finish_reason=reason,
            weights_version=self.version,
        )

    @property
    def window(self) -> WindowState:
        if self._waiting:
            return WindowState.PREFILL
        return WindowState.DECODE if self._running else WindowState.IDLE

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def progress(self) -> int:
        return self.steps

    def abort(self) -> list[Rollout]:
        self._note("abort")
        out = [self._rollout(r, s, self._told.get(id(r), 0), "abort") for r, s in self._running]
        out += [self._rollout(r, Scripted(()), 0, "abort") for group in self._waiting for r in group]
        self._running, self._waiting = [], deque()
        return out

    def publish(self, version: int) -> None:
        self._note("publish")
        assert self.window is WindowState.IDLE
        self.version = version

    def release_kv(self) -> int:
        self._note("release_kv")
        return 0

    def restore_kv(self) -> int:
        self._note("restore_kv")
        return 0

    def close(self) -> None:
        self._note("close")
        self._running, self._waiting = [], deque()
