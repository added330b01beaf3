"""Predicted seconds of a step under each schedule: a discrete-event simulation of the two lanes.

Each training replica decodes its groups on its engines and runs its units on its train lane. Beside each other the
decode is 1 + alpha times slower and units run at r times their speed (both measured by the run's admission test). A
step ends when the slowest replica has trained, and the update is done.

Shape legend (formulas): N language and V vision parameters, H hidden size, L layers, t tensor-parallel degree, n rows
that decode, c tokens of context per row, kappa bytes of K/V per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollplex.planner.hardware import Gpu
from rollplex.planner.models import ModelShape
from rollplex.timeline import ROLLOUT_LANE, TRAIN_LANE, Span


@dataclass(frozen=True)
class Workload:
    """What a step has to do."""

    prompts: int = 64
    """Of a rollout batch, over all replicas."""
    num_generations: int = 8
    prompt_tokens: int = 1800
    visual_share: float = 1.0
    """Part of the prompt's tokens that are visual, of four patches each."""
    response_tokens: float = 280.0
    """Mean of a lognormal distribution."""
    sigma: float = 0.5
    """Of the logarithm of the response length; 0 makes all alike."""
    beta: float = 0.04
    """0: no reference model."""
    share_prefix: bool = True
    """False: trainer and reference compute the prefix once per response."""
    recompute: bool = True
    """Activation checkpointing: backward runs the forward again."""
    shared_vision: bool = False
    """One vision pass per prompt, before the rollout; engine and actor read it, the reference too if it is frozen."""
    frozen_vision: bool = False
    """Nothing between pixels and language model is trained."""
    seed: int = 0


@dataclass(frozen=True)
class Rates:
    """What share of the peak is reached, and what is lost between the lanes.

    The defaults put Qwen2.5-VL-32B on 32 H800 (train TP 8, rollout TP 4) at the paper's ratios: 1.24 over serial
    colocation, 2.15 over disaggregation, both with the prefix once per response.
    """

    gemm: float = 0.5
    decode_gemm: float = 0.6
    bandwidth: float = 0.55
    """Of the memory bandwidth, while decoding."""
    link: float = 0.95
    """Of one direction of the link, in an all-reduce."""
    exposed: float = 0.9
    """Part of the training all-reduces that no computation hides."""
    launch: float = 15e-6
    """Seconds of a small all-reduce."""
    host: float = 2e-3
    """Seconds of an engine step outside the GPU."""
    per_row: float = 20e-6
    """Seconds per row and step on the host: sampling, scheduling."""
    switch: float = 0.3
    """Seconds of a phase switch with offload."""
    update: float = 1.0
    """Seconds of the optimizer step and of the publishing of weights."""
    alpha: float = 0.15
    r: float = 0.75


@dataclass(frozen=True)
class Placement:
    gpus: int = 1
    train_tp: int = 1
    rollout_tp: int = 1

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus={self.gpus} must be at least 1")
        for name in ("train_tp", "rollout_tp"):
            degree = getattr(self, name)
            if degree < 1 or self.gpus % degree:
                raise ValueError(f"gpus={self.gpus} is no multiple of {name}={degree}; change one of them")

    @property
    def replicas(self) -> int:
        return self.gpus // self.train_tp

    @property
    def engines(self) -> int:
        return self.gpus // self.rollout_tp


@dataclass(frozen=True)
class Unit:
    """Train-lane work of one group; seconds alone."""

    seconds: float
    group: int
    needs_responses: bool


SCHEDULES = ("serial", "overlap", "overlap + streaming")


@dataclass(frozen=True)
class Model:
    """Seconds of single operations."""

    shape: ModelShape
    gpu: Gpu
    rates: Rates

    def forward(self, tokens: float, context: float, tp: int, *, visual: float = 0.0) -> float:
        """One training-style forward of `tokens` tokens that attend to `context` tokens on average; `visual` of them
        go through the vision tower first, whose pictures are spread over the tensor-parallel ranks."""
        s, peak = self.shape, self.gpu.tflops * 1e12 * self.rates.gemm
        gemm = 2 * (s.language_params - (not s.tied) * s.vocab * s.hidden) * tokens
        attention = 4 * s.layers * s.heads * s.head_dim * context * tokens
        reduce = 2 * s.layers * self.all_reduce(2 * s.hidden * tokens, tp) * self.rates.exposed
        return (gemm + attention) / (tp * peak) + reduce + self.tower(visual, tp)

    def tower(self, visual: float, tp: int) -> float:
        """The vision tower over the patches of `visual` tokens, four of each."""
        return 2 * 4 * self.shape.vision_params * visual / (tp * self.rates.gemm * self.gpu.tflops * 1e12)

    def all_reduce(self, size: float, tp: int) -> float:
        """Ring: 2 (t-1)/t of the bytes over one direction of the link."""
        if tp == 1:
            return 0.0
        return self.rates.launch + 2 * (tp - 1) / tp * size / (self.gpu.link_gb / 2 * 1e9 * self.rates.link)

    def decode_step(self, rows: int, context: float, tp: int) -> float:
        """One token for each row: weights and K/V are read, or the products bind."""
        s = self.shape
        read = (2 * s.language_params + rows * context * s.kv_bytes_per_token) / tp
        memory = read / (self.rates.bandwidth * self.gpu.bandwidth_tb * 1e12)
        products = 2 * s.language_params * rows / (tp * self.rates.decode_gemm * self.gpu.tflops * 1e12)
        reduce = 2 * s.layers * self.all_reduce(2 * s.hidden * rows, tp)
        return max(memory, products) + reduce + self.rates.host + rows * self.rates.per_row

    def units(self, group: int, lengths: Sequence[int], w: Workload, tp: int) -> list[Unit]:
        """Of one group, in the serial order of the train lane."""
        copies = 1 if w.share_prefix else w.num_generations
        shared = w.shared_vision and w.share_prefix
        p = w.prompt_tokens
        text, tower = copies * self.forward(p, p / 2, tp), copies * self.tower(w.visual_share * p, tp)
        tokens = float(sum(lengths))
        suffix = self.forward(tokens, p + tokens / len(lengths) / 2, tp)
        back = 3 if w.recompute else 2
        seen = 0.0 if shared and w.frozen_vision else tower
        reference = [Unit(text + seen, group, False), Unit(suffix, group, True)] if w.beta > 0 else []
        backward = back * text + (0.0 if w.frozen_vision else back * tower)
        prefix = Unit(text if shared else text + tower, group, False)
        return [*reference, prefix, Unit((1 + back) * suffix + backward, group, True)]

    def before(self, prompts: int, w: Workload, tp: int) -> float:
        """Seconds before the engine starts: the shared vision passes of a replica's prompts."""
        return prompts * self.tower(w.visual_share * w.prompt_tokens, tp) if w.shared_vision and w.share_prefix else 0.0

    def rollout(self, lengths: Sequence[Sequence[int]], w: Workload, tp: int) -> tuple[float, list[float]]:
        """One engine: seconds until the window opens, and when each of its groups is complete, without co-runner."""
        visual = 0.0 if w.shared_vision else w.visual_share * w.prompt_tokens
        prompt = self.forward(w.prompt_tokens, w.prompt_tokens / 2, tp, visual=visual)
        opens = prompt * len(lengths)
        left = sorted((n for group in lengths for n in group), reverse=True)
        now, done, finish = opens, 0, {0: opens}
        while left:
            shortest = left[-1]
            context = w.prompt_tokens + (done + shortest) / 2
            now += (shortest - done) * self.decode_step(len(left), context, tp)
            done = shortest
            finish[done] = now
            while left and left[-1] == shortest:
                left.pop()
        return opens, [finish[max(group)] for group in lengths]


def response_lengths(w: Workload) -> np.ndarray:
    """(prompts, G) int64."""
    if w.sigma == 0:
        return np.full((w.prompts, w.num_generations), round(w.response_tokens))
    mu = math.log(w.response_tokens) - w.sigma**2 / 2
    drawn = np.random.default_rng(w.seed).lognormal(mu, w.sigma, (w.prompts, w.num_generations))
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step."""

    total: float
    rollout: float
    """Until the last response, of the slowest replica."""
    hidden: float
    """Train-lane seconds beside the decode, mean over replicas."""


def step_time(model: Model, w: Workload, place: Placement, schedule: str) -> StepTime:
    """Colocated: every GPU decodes and trains."""
    lengths = response_lengths(w)
    ends, rollouts, hidden = [], [], []
    for replica in np.array_split(lengths, place.replicas):
        per_engine = np.array_split(replica, max(1, place.engines // place.replicas))
        opens, finishes = zip(*(model.rollout(part.tolist(), w, place.rollout_tp) for part in per_engine), strict=True)
        finish = [t for part in finishes for t in part]
        units = [u for g, row in enumerate(replica.tolist()) for u in model.units(g, row, w, place.train_tp)]
        end, decoded, beside = run_lanes(units, finish, max(opens), schedule, model.rates)
        first = model.before(len(replica), w, place.train_tp)
        ends.append(first + end)
        rollouts.append(first + decoded)
        hidden.append(beside)
    fixed = model.rates.update + 2 * model.rates.switch
    return StepTime(max(ends) + fixed, max(rollouts), sum(hidden) / len(hidden))


def run_lanes(
    units: Sequence[Unit], finish: Sequence[float], opens: float, schedule: str, rates: Rates,
    note: Callable[[Unit, float, float], None] = lambda unit, start, end: None,
) -> tuple[float, float, float]:  # fmt: skip
    """(end, end of the decode, train seconds beside it) of one replica.

    finish: when each group is complete, in decode seconds without co-runner. The decode stands at `progress` of them.
    note: hears of each unit when it started and ended.
    """
    decode_end = max(finish)
    waiting, now, progress, beside = list(units), 0.0, 0.0, 0.0
    decoded = decode_end
    while waiting or progress < decode_end:
        decoding = progress < decode_end
        unit = next((u for u in waiting if _may_start(u, finish, progress, opens, schedule, decoding)), None)
        if unit is None:  # wait for the window, or the next group
            coming = min(t for t in (opens, *finish) if t > progress)
            now, progress = now + coming - progress, coming
        else:
            waiting.remove(unit)
            start = now
            now, progress, during = _advance(unit.seconds, start, progress, decode_end, rates)
            beside += during
            note(unit, start, now)
        if decoding:  # it ended where the lane stopped waiting, or part way through the unit
            decoded = now if unit is None else start + during
    return now, decoded, beside


def _may_start(
    u: Unit, finish: Sequence[float], progress: float, opens: float, schedule: str, decoding: bool
) -> bool:  # fmt: skip
    if not decoding:
        return True
    if schedule == "serial" or progress < opens:
        return False
    return not u.needs_responses or (schedule == "overlap + streaming" and finish[u.group] <= progress)


def _advance(work: float, now: float, progress: float, decode_end: float, rates: Rates) -> tuple[float, float, float]:
    """Run one unit from `now` on; returns (end, decode progress then, seconds beside the decode)."""
    slow = 1.0 + rates.alpha
    left = max(0.0, decode_end - progress) * slow  # of the decode, beside a unit
    if work / rates.r <= left:
        seconds = work / rates.r
        return now + seconds, progress + seconds / slow, seconds
    return now + left + (work - left * rates.r), max(progress, decode_end), left


def lane_spans(model: Model, w: Workload, place: Placement, schedule: str) -> list[Span]:
    """Both lanes of the first replica: the engine's prefill and decode, and every unit."""
    lengths = np.array_split(response_lengths(w), place.replicas)[0]
    per_engine = np.array_split(lengths, max(1, place.engines // place.replicas))
    opens, finishes = zip(*(model.rollout(part.tolist(), w, place.rollout_tp) for part in per_engine), strict=True)
    finish = [t for part in finishes for t in part]
    units = [u for g, row in enumerate(lengths.tolist()) for u in model.units(g, row, w, place.train_tp)]
    first = model.before(len(lengths), w, place.train_tp)
    spans = [Span(TRAIN_LANE, "vision", 0.0, first)] if first else []

    def note(unit: Unit, start: float, end: float) -> None:
        name = "suffix" if unit.needs_responses else "prefix"
        spans.append(Span(TRAIN_LANE, name, first + start, first + end, {"group": unit.group}))

    decoded = first + run_lanes(units, finish, max(opens), schedule, model.rates, note)[1]
    opened = first + max(opens)
    engine = [Span(ROLLOUT_LANE, "prefill", first, opened), Span(ROLLOUT_LANE, "decode", opened, decoded)]
    return engine + [replace(s, arguments=s.arguments | {"hidden": opened <= s.start < decoded}) for s in spans]


def disaggregated_time(model: Model, w: Workload, place: Placement) -> StepTime:
    """Half of the GPUs decode, the other half trains afterwards: the two wait for each other in synchronous GRPO."""
    half = place.gpus // 2
    engines, replicas = half // place.rollout_tp, half // place.train_tp
    if not engines or not replicas:
        raise ValueError(f"gpus={place.gpus} is too few to be split between rollout and training")
    lengths = response_lengths(w)
    decode = max(max(model.rollout(part.tolist(), w, place.rollout_tp)[1]) for part in np.array_split(lengths, engines))
    train = max(
        sum(u.seconds for row in part.tolist() for u in model.units(0, row, w, place.train_tp))
        for part in np.array_split(lengths, replicas)
    )
    push = 2 * model.shape.params / (model.gpu.link_gb / 2 * 1e9)
    return StepTime(decode + train + model.rates.update + push, decode, 0.0)


def compare(model: Model, w: Workload, place: Placement) -> dict[str, StepTime]:
    """All schedules, with and without one prefix per group. ValueError where a replica would have no prompt."""
    out = {}
    parts = max(place.replicas, place.engines)
    if w.prompts < parts:
        raise ValueError(
            f"prompts={w.prompts} leaves some of {parts} GPU groups without work: set at least {parts}, or fewer GPUs"
        )
    for shared in (False, True):
        work = replace(w, share_prefix=shared)
        for schedule in SCHEDULES:
            out[f"{schedule}, {'shared' if shared else 'unshared'}"] = step_time(model, work, place, schedule)
        if place.gpus >= 2 * max(place.train_tp, place.rollout_tp):
            name = f"disaggregated, {'shared' if shared else 'unshared'}"
            out[name] = disaggregated_time(model, work, place)
    return out
