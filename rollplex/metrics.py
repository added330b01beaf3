"""The metrics table: every scalar that Rollplex logs, with its unit and meaning, and how a step's are computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch

from rollplex.admission import Admission
from rollplex.rewards.outcome import Reason
from rollplex.timeline import PHASES, RELEASE_KV, RESTORE_KV, ROLLOUT_LANE, TRAIN_LANE, Timeline

if TYPE_CHECKING:
    from rollplex.step import GRPOStep

METRICS: dict[str, tuple[str, str]] = {
    "loss": ("", "objective per its own normaliser, summed over the step's updates' mini-batches"),
    "reward": ("", "mean total reward over responses that have one"),
    "reward_std": ("", "mean over groups of the reward's standard deviation within the group"),
    "reward/{name}": ("", "mean of one named reward over responses that have it"),
    "rewards_missing": ("responses", "responses without a reward (None, NaN, raised, late)"),
    "rewards_missing/{reason}": ("responses", "those of one reason: none, nan, raised, timeout, bad_type, incomplete"),
    "groups_without_spread": ("fraction", "groups whose rewards are all equal: they give no policy gradient"),
    "groups_kept": ("groups", "dynamic_sample: groups that the update learns from, of all rounds"),
    "groups_dropped": ("groups", "dynamic_sample: groups without spread in their rewards, left out"),
    "groups_resampled": ("groups", "dynamic_sample: groups drawn in the place of others"),
    "resample_rounds": ("rollouts", "dynamic_sample: rollouts added to the step"),
    "updates_skipped": ("updates", "dynamic_sample: 1 when no group was kept and no weight moved"),
    "advantage_abs": ("", "mean absolute advantage over kept responses"),
    "completion_length": ("tokens", "mean response length"),
    "completion_length_max": ("tokens", "longest response"),
    "completions_truncated": ("fraction", "responses cut at max_completion_length"),
    "prompt_length": ("tokens", "mean prompt length, vision tokens included"),
    "kl": ("nats", "mean per-token estimate of KL(policy || reference); 0 without a reference"),
    "entropy": ("nats", "mean per-token entropy of the policy"),
    "clip_low": ("fraction", "tokens whose ratio is below 1 - epsilon at a negative advantage"),
    "clip_high": ("fraction", "tokens whose ratio is above 1 + epsilon_high at a positive advantage"),
    "ratio_max": ("", "largest ratio of current to rollout probability"),
    "ratio_min": ("", "smallest ratio of current to rollout probability"),
    "mismatch_abs": ("nats", "mean |trainer - engine| log-probability at the rollout's weights"),
    "mismatch_max": ("nats", "largest |trainer - engine| log-probability"),
    "mismatch_kl": ("nats", "mean per-token estimate of KL(engine || trainer)"),
    "importance_weight": ("", "mean importance-sampling weight over kept tokens"),
    "importance_capped": ("fraction", "tokens whose importance weight was truncated or masked"),
    "grad_norm": ("", "gradient norm before clipping, last update of the step"),
    "lr": ("", "learning rate of the last update"),
    "prefix_bytes": ("bytes", "most prefix state held at once on the device: vision features, K/V, saved activations"),
    "prefix_host_bytes": ("bytes", "most saved activations of prefixes held at once in host memory (prefix_on_host)"),
    "memory/{stage}": ("bytes", "most bytes of the ledger's states at once in a stage: rollout, prefix_ref, ..."),
    "memory/unaccounted": ("bytes", "most that the CUDA allocator had given out beyond the ledger's states"),
    "prefixes_recomputed": (
        "prompts",
        "computed again by the actor after the step's first update, at newer weights",
    ),
    "vision_passes": (
        "passes",
        "vision tower passes per prompt with pictures or videos: engine, actor, reference; without those of "
        "checkpointing in backward",
    ),
    "rows_skipped": ("rows", "bad rows left out so far, by any rank"),
    "updates": ("steps", "optimizer steps so far"),
    "time/step": ("s", "wall-clock of the step, without data loading"),
    "time/{phase}": ("s", "time in one phase: rollout, score, train, update, publish"),
    "time/hidden": ("s", "train-lane unit time that ran inside the rollout phase"),
    "time/prefix": ("s", "prefix unit time, without passes that served as the engine's prefill"),
    "time/window": ("s", "time of decode steps: where units may be hidden"),
    "time/reused": ("s", "time of prefix units whose K/V the engine took instead of prefilling"),
    "time/release_kv": ("s", "time of giving the engine's K/V memory back after the rollout"),
    "time/restore_kv": ("s", "time of taking it again before the next one"),
    "kv_bytes_released": ("bytes", "K/V memory that the engine gave back after the rollout"),
    "kv_bytes_restored": ("bytes", "K/V memory that it took again before the rollout"),
    "time/vision": ("s", "time of vision passes before the rollout, whose features engine, actor and reference share"),
    "time/idle/{lane}": ("s", "time of the step in which a lane (rollout, train) did nothing"),
    "overlap_efficiency": (
        "fraction",
        "prefix unit time beside the engine's work; passes that served as its prefill are left out",
    ),
    "decode_slowdown": ("fraction", "alpha: how much longer a decode step takes beside a unit, running mean"),
    "units_admitted": ("units", "units that were let into the decode window"),
    "units_refused/{reason}": (
        "units",
        "units kept out: memory (budget), slow (does not pay), probe (measuring)",
    ),
    "tokens_per_second": ("tokens/s", "sampled response tokens per second of the step"),
    "rollout_tokens_per_second": ("tokens/s", "sampled response tokens per second of the rollout phase"),
    "val/reward": ("", "mean total reward on the validation split"),
    "val/reward/{name}": ("", "mean of one named reward on the validation split"),
    "val/accuracy": ("fraction", "responses that the task calls correct"),
    "val/pass@{k}": ("fraction", "unbiased chance that one of k responses is correct (arXiv 2107.03374)"),
    "val/completion_length": ("tokens", "mean response length"),
    "val/completions_truncated": ("fraction", "responses cut at their limit"),
}
"""name -> (unit, meaning). `{...}` stands for what differs by run. test/ has the same names as val/."""


@dataclass(frozen=True)
class Tally:
    """A metric in a form that adds up over ranks: a mean as its sum and its count."""

    total: float
    count: float = 1.0
    how: Literal["mean", "sum", "max", "min"] = "mean"

    def __add__(self, other: Tally) -> Tally:
        assert self.how == other.how, f"{self.how} and {other.how} do not add up"
        if self.how in ("max", "min"):
            extreme = max if self.how == "max" else min
            return Tally(extreme(self.total, other.total), 1, self.how)
        return Tally(self.total + other.total, self.count + other.count, self.how)

    @property
    def value(self) -> float:
        return self.total / self.count if self.how == "mean" and self.count else self.total


def merge(parts: Sequence[Mapping[str, Tally]]) -> dict[str, Tally]:
    """Of all ranks; a rank may lack a metric."""
    out: dict[str, Tally] = {}
    for part in parts:
        for name, tally in part.items():
            out[name] = out[name] + tally if name in out else tally
    return out


def values(parts: Mapping[str, Tally]) -> dict[str, float]:
    return {name: tally.value for name, tally in parts.items()}


def tallies(metrics: Mapping[str, float], how: Literal["mean", "sum"] | None = None) -> dict[str, Tally]:
    """Of plain numbers: those in SUMMED add up over ranks, the others are averaged."""
    return {
        name: Tally(value, 1.0, how or ("sum" if name.split("/")[0] in SUMMED else "mean"))
        for name, value in metrics.items()
    }


SUMMED = frozenset(
    {"tokens_per_second", "rollout_tokens_per_second", "units_admitted", "units_refused"}
    | {"groups_kept", "groups_dropped", "groups_resampled"}
)


def step_metrics(step: GRPOStep) -> dict[str, float]:
    """What a finished step of one rank says about itself; NaN-free (a mean over nothing is left out)."""
    return values(step_tallies(step))


def step_tallies(step: GRPOStep) -> dict[str, Tally]:
    """As `step_metrics`, to be merged over ranks. The means' denominators are counts of this rank."""
    out: dict[str, Tally] = {}
    groups = [step.groups[g] for g in sorted(step.groups)]
    rollouts = [r for group in groups for r in group.rollouts]
    rewards = torch.cat([g.rewards for g in groups]) if groups else torch.zeros(0)
    out["reward"] = _nanmean(rewards)
    advantages = [step.advantages(g) for g in range(len(groups))]
    rows = [(a, step._row(g)) for g, a in enumerate(advantages)]
    out["reward_std"] = _mean(float(a.std_B[r]) for a, r in rows)
    out["groups_without_spread"] = _mean(float(a.zero_variance_B[r]) for a, r in rows)
    out["advantage_abs"] = _mean(float(x) for a, r in rows for x in a.advantages_BG[r][a.valid_BG[r]].abs())
    for name in sorted({name for g in groups for name in g.components}):
        out[f"reward/{name}"] = _nanmean(torch.cat([g.components[name] for g in groups if name in g.components]))
    out["rewards_missing"] = Tally(float(torch.isnan(rewards).sum()), how="sum")
    for reason in get_args(Reason):  # zeros too: a logger keeps showing the last value it was given
        out[f"rewards_missing/{reason}"] = Tally(float(sum(f.reason == reason for f in step.failures)), how="sum")
    lengths = [float(len(r)) for r in rollouts]
    out["completion_length"] = _mean(lengths)
    out["completion_length_max"] = Tally(max(lengths, default=math.nan), how="max")
    out["completions_truncated"] = _mean(float(r.finish_reason == "length") for r in rollouts)
    out["prefix_bytes"] = Tally(float(step.prefix_bytes_peak), how="max")
    out["prefix_host_bytes"] = Tally(float(step.prefix_host_bytes_peak), how="max")
    out["prefixes_recomputed"] = Tally(float(step.prefixes_recomputed), how="sum")
    out["vision_passes"] = Tally(float(step.vision.passes), max(step.vision.seen(range(len(step.prompts))), 1e-12))
    out["prompt_length"] = _mean(float(len(p)) for p in step.prompts)
    out.update(_loss_tallies(step))
    return {k: v for k, v in out.items() if math.isfinite(v.total) and v.count}


def _loss_tallies(step: GRPOStep) -> dict[str, Tally]:
    updates = sorted(step.totals)
    totals = [step.totals[u] for u in updates]
    # The normaliser is that of all ranks, so the ranks' shares of the loss add up.
    loss = sum(t.loss / step.normalizer(u) for u, t in zip(updates, totals, strict=True)) / max(1, step.num_updates)
    out = {"loss": Tally(loss, how="sum")}
    sums = [t.sums for t in totals if t.sums is not None]
    tokens = sum(float(s.tokens) for s in sums)

    def per_token(total: float) -> Tally:
        return Tally(total, max(tokens, 1e-12))  # without tokens it is 0, and weighs nothing beside other ranks'

    for name in ("kl", "entropy", "clip_low", "clip_high"):
        out[name] = per_token(sum(float(getattr(s, name)) for s in sums))
    out["ratio_max"] = Tally(max((float(s.ratio_max) for s in sums), default=math.nan), how="max")
    out["ratio_min"] = Tally(min((float(s.ratio_min) for s in sums), default=math.nan), how="min")
    mismatch = [t.mismatch for t in totals if t.mismatch is not None]
    out["mismatch_abs"] = per_token(sum(float(m.abs_diff) for m in mismatch))
    out["mismatch_kl"] = per_token(sum(float(m.kl) for m in mismatch))
    out["mismatch_max"] = Tally(max((float(m.abs_diff_max) for m in mismatch), default=math.nan), how="max")
    weights = [t.weights for t in totals if t.weights is not None]
    if step.settings.importance_sampling_mode is not None:
        out["importance_weight"] = per_token(sum(float(w.weight) for w in weights))
        out["importance_capped"] = per_token(sum(float(w.capped) for w in weights))
    return out


def time_metrics(timeline: Timeline, seconds: float, tokens: int) -> dict[str, float]:
    """From the step's spans: seconds per phase, hidden work, throughput."""
    out = {"time/step": seconds, "tokens_per_second": tokens / seconds if seconds > 0 else 0.0, "time/hidden": 0.0}
    for span in timeline.spans():
        if span.lane == PHASES:
            out[f"time/{span.name}"] = out.get(f"time/{span.name}", 0.0) + span.seconds
        elif span.lane == TRAIN_LANE and span.arguments.get("hidden"):
            out["time/hidden"] += span.seconds
    out |= _kv_metrics(timeline)
    rollout = timeline.seconds(ROLLOUT_LANE) - out.get("time/release_kv", 0.0) - out.get("time/restore_kv", 0.0)
    if rollout > 0:
        out["rollout_tokens_per_second"] = tokens / rollout
    out["time/window"] = timeline.seconds(ROLLOUT_LANE, "decode")
    for lane in (ROLLOUT_LANE, TRAIN_LANE):
        out[f"time/idle/{lane}"] = max(0.0, seconds - timeline.seconds(lane))
    out["time/vision"] = timeline.seconds(TRAIN_LANE, "vision")
    prefixes = [s for s in timeline.spans() if s.lane == TRAIN_LANE and s.name.endswith("_prefix")]
    out["time/reused"] = sum(s.seconds for s in prefixes if s.arguments.get("prefill"))
    prefixes = [s for s in prefixes if not s.arguments.get("prefill")]
    out["time/prefix"] = sum(s.seconds for s in prefixes)
    if prefixes:
        hidden = sum(s.seconds for s in prefixes if s.arguments["hidden"])
        out["overlap_efficiency"] = hidden / out["time/prefix"]
    return out


def _kv_metrics(timeline: Timeline) -> dict[str, float]:
    """What moved of the engine's K/V memory, and how long it took; empty when nothing did."""
    out: dict[str, float] = {}
    spans = [s for s in timeline.spans() if s.lane == ROLLOUT_LANE]
    for move, what in ((RELEASE_KV, "released"), (RESTORE_KV, "restored")):
        mine = [s for s in spans if s.name == move]
        out[f"time/{move}"] = sum(s.seconds for s in mine)
        out[f"kv_bytes_{what}"] = float(sum(s.arguments["bytes"] for s in mine))
    return out if any(out.values()) else {}


def admission_metrics(admission: Admission) -> dict[str, float]:
    """What the last rollout let into its window, and the measured decode slow-down."""
    out = {"units_admitted": float(admission.admitted)}
    out |= {f"units_refused/{reason}": float(len(units)) for reason, units in admission.refused.items()}
    alpha = admission.measurements.alpha
    return out if alpha is None else out | {"decode_slowdown": alpha}


def without_gaps(metrics: Mapping[str, float], earlier: Iterable[str]) -> dict[str, float]:
    """With every metric that was logged at an earlier step and is not there now: a logger would go on showing its last
    value. Seconds and bytes of what did not happen are 0; a mean over nothing is NaN, and so is all of a batch without
    a usable row."""
    gone = [name for name in earlier if name not in metrics]
    amounts = ("time/", "memory/", "kv_bytes_") if metrics else ()
    return {**metrics, **{name: 0.0 if name.startswith(amounts) else math.nan for name in gone}}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): chance that k of n samples hold a correct one (Chen et al., arXiv 2107.03374)."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, got {samples}")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def metrics_table() -> str:
    """The table as Markdown, for the docs."""
    rows = [f"| `{name}` | {unit or '-'} | {meaning} |" for name, (unit, meaning) in METRICS.items()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows])


def known(name: str) -> bool:
    """Whether the table has this name."""
    name = name.replace("test/", "val/", 1) if name.startswith("test/") else name
    return name in METRICS or any(_matches(pattern, name) for pattern in METRICS if "{" in pattern)


def _matches(pattern: str, name: str) -> bool:
    head, _, tail = pattern.partition("{")
    tail = tail.partition("}")[2]
    return name.startswith(head) and name.endswith(tail) and len(name) > len(head) + len(tail)


def _mean(values: Iterable[float]) -> Tally:
    values = list(values)
    return Tally(sum(values), len(values))


def _nanmean(values: torch.Tensor) -> Tally:
    values = values[~torch.isnan(values)]
    return Tally(float(values.sum()), values.numel())


def check_names(values: Mapping[str, float]) -> None:
    unknown = [name for name in values if not known(name)]
    assert not unknown, f"metrics without an entry in METRICS: {unknown}"
