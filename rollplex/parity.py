"""Does the engine sample from the policy that is trained? The config's engine against trainer and transformers.

Log-probabilities of sampled tokens are compared with those of the trainer's own passes; where sampling truncates or
penalises, with the same truncation of transformers' logits, because the engine reports the distribution that it
sampled. Greedy tokens are compared with `generate`. All before and after updates, on prompts of the config's data and
on made ones: text, pictures of mixed sizes, a video.

Shape legend: G responses of a prompt, R tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from PIL import Image
from rich.table import Table
from torch import Tensor

from rollplex.data.encode import BadRow, PromptEncoder
from rollplex.data.records import Prompt, Request, Rollout, Sample, SamplingParams
from rollplex.engines.sampling import RuleBook, support
from rollplex.models.split_model import SplitModel
from rollplex.tasks.base import VLMTask

TEMPERATURES = (0.6, 1.0, 1.3)
TOP_P = 0.9
TOKENS = 1000
"""Compared for each way of sampling, at least."""

MOST_TOKENS = 32
"""Of one response."""

DATA_PROMPTS = 6
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Nats, at temperature 1 and above. A lower temperature divides the logits, and so their rounding: the bar too."""

EDGE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""A token whose cumulative probability is this close to top_p (or whose ratio to the likeliest is to min_p) is in the
truncated distribution or not by rounding; both count as equal."""


@dataclass(frozen=True)
class Sampled:
    """One way of sampling: |engine - trainer| log-probability over its tokens, in nats."""

    name: str
    tokens: int
    mean: float
    max: float
    bar: float
    at_edge: int = 0
    """Tokens that agree only with the truncation's edge moved by EDGE."""


@dataclass(frozen=True)
class EngineCheck:
    """What was seen with one version of the weights."""

    when: str
    exact: bool
    """float32: the largest difference is judged, and greedy tokens are. In bfloat16 the mean alone: a rounded logit may
    exchange two tokens that are nearly as likely."""

    sampled: tuple[Sampled, ...]
    prompts: tuple[str, ...]
    greedy_equal: tuple[bool, ...]
    """Of each prompt: the engine's greedy tokens are those of `generate`."""

    def within(self, s: Sampled) -> bool:
        return (s.max if self.exact else s.mean) <= s.bar  # NaN is not

    @property
    def passed(self) -> bool:
        return all(map(self.within, self.sampled)) and (not self.exact or all(self.greedy_equal))


class EngineParity(Callback):
    """Checks the engine before the first and after the last of `steps` rollout batches, and ends the run.

    Args:
        steps: Rollout batches between the two checks.
        tolerance: Nats; None is that of the model's dtype in TOLERANCE.
    """

    def __init__(self, steps: int, tolerance: float | None = None) -> None:
        self.steps = steps
        self.tolerance = tolerance
        self.engine = ""
        self.checks: list[EngineCheck] = []
        self.left_out: list[str] = []
        """Made prompts that processor or engine cannot take, and why."""
        self._seen = 0
        self._prompts: list[Prompt] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self.engine = type(pl_module.colocation.engine).__name__
        made, self.left_out = made_prompts(pl_module, data, endless(pl_module.sampling()))
        given: Sequence[Prompt] = next(iter(data.train_dataloader()), [])
        self._prompts = [*given[:DATA_PROMPTS], *made]
        if not self._prompts:
            raise ValueError("the engine cannot be checked: neither the data's first rows nor made prompts can run")
        self._check(pl_module, "before any update")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._seen += 1
        if self._seen == self.steps:
            done = trainer.global_step
            self._check(pl_module, f"after {done} update{'s' if done != 1 else ''}")
            trainer.should_stop = True

    def _check(self, module: Any, when: str) -> None:
        tolerance = TOLERANCE[module.actor.dtype] if self.tolerance is None else self.tolerance
        self.checks.append(check_engine(module, self._prompts, endless(module.sampling()), tolerance, when))

    @property
    def passed(self) -> bool:
        return len(self.checks) == 2 and all(check.passed for check in self.checks)


def endless(params: SamplingParams) -> SamplingParams:
    """Without stops, so that the number of tokens is known; at most MOST_TOKENS of them."""
    return replace(params, max_tokens=min(params.max_tokens, MOST_TOKENS), stop=(), stop_token_ids=())


# ---- prompts ----


class _Mixed(VLMTask):
    """Random pictures and frames of mixed sizes."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def _picture(self, width: int, height: int) -> Image.Image:
        return Image.fromarray(self._random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def _image(self, width: int, height: int) -> dict[str, Any]:
        return {"type": "image", "image": self._picture(width, height)}

    def _video(self, frames: int, fps: float) -> dict[str, Any]:
        return {"type": "video", "video": [self._picture(56, 56) for _ in range(frames)], "fps": fps}

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Name -> media parts. The slow video is longer in time than in space: what follows stands elsewhere."""
        return {
            "text only": [],
            "one picture": [self._image(56, 84)],
            "two pictures": [self._image(84, 56), self._image(56, 140)],
            "a wide picture": [self._image(224, 56)],
            "a slow video": [self._video(6, 0.5)],
            "picture and video": [self._image(56, 56), self._video(3, 2.0)],
        }

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*sample["parts"], {"type": "text", "text": "what?"}]}]


def made_prompts(module: Any, data: Any, params: SamplingParams) -> tuple[list[Prompt], list[str]]:
    """Prompts of mixed media, and (name: reason) of those that the processor or the engine cannot take."""
    encoder = PromptEncoder(module.processor, **getattr(data, "encoder_settings", {}))
    task, found, left_out = _Mixed(), [], []
    for name, parts in task.rows().items():
        try:
            prompt = encoder.encode(task, Sample(name, {"parts": parts}))
            _rollouts(module, [Request(0, 0, prompt, params, seed=0)])
        except BadRow as bad:
            left_out.append(f"{name}: {bad.reason}")
        except ValueError as refused:  # too long for the engine
            left_out.append(f"{name}: {refused}")
        else:
            found.append(prompt)
    return found, left_out


# ---- the check ----


def ways(own: SamplingParams) -> dict[str, SamplingParams]:
    """Name -> how to sample: temperatures, nucleus sampling, and what the config does if that is another way."""
    plain = replace(own, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    out = {f"T={t:g}": replace(plain, temperature=t) for t in sorted({*TEMPERATURES, own.temperature})}
    out[f"T={own.temperature:g}, top_p={TOP_P:g}"] = replace(plain, temperature=own.temperature, top_p=TOP_P)
    return out if own in out.values() else out | {"as the config samples": own}


def check_engine(
    module: Any, prompts: Sequence[Prompt], own: SamplingParams, tolerance: float, when: str
) -> EngineCheck:
    """Engine against trainer at the present weights. own: as the config samples, without stops."""
    actor: SplitModel = module.actor
    whole: SplitModel = module.trainer.strategy.whole_model()  # the actor, unless its tensors are shards
    plain = whole.alias().hf  # transformers' modules on the same tensors
    plain.set_attn_implementation("sdpa")
    g = -(-TOKENS // (own.max_tokens * len(prompts)))
    sampled = []
    for number, (name, params) in enumerate(ways(own).items()):
        requests = [
            Request(b, i, prompt, params, seed=(number * len(prompts) + b) * g + i)
            for b, prompt in enumerate(prompts)
            for i in range(g)
        ]
        got = _rollouts(module, requests)
        pairs = [_differences(actor, plain, p, [got[b, i] for i in range(g)], params) for b, p in enumerate(prompts)]
        d, edge = (torch.cat(x) for x in zip(*pairs, strict=True))
        bar = tolerance / min(1.0, params.temperature)
        sampled.append(Sampled(name, d.numel(), float(d.mean()), float(d.max()), bar, int(edge.sum())))
    greedy = _rollouts(module, [Request(b, 0, p, _greedy(own), seed=0) for b, p in enumerate(prompts)])
    equal = tuple(
        greedy[b, 0].token_ids.tolist() == greedy_tokens(plain, p, own.max_tokens, own.banned_token_ids)
        for b, p in enumerate(prompts)
    )
    names = tuple(p.sample.id for p in prompts)
    return EngineCheck(when, actor.dtype == torch.float32, tuple(sampled), names, equal)


def _greedy(own: SamplingParams) -> SamplingParams:
    return replace(own, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


def _rollouts(module: Any, requests: Sequence[Request]) -> dict[tuple[int, int], Rollout]:
    done: dict[tuple[int, int], Rollout] = {}

    def collect(rollout: Rollout) -> None:
        version = module.actor.version
        assert rollout.weights_version == version, f"sampled with weights {rollout.weights_version}, not {version}"
        done[rollout.key] = rollout

    module.colocation.generate(requests, collect)
    return done


def _differences(
    actor: SplitModel, plain: Any, prompt: Prompt, rollouts: Sequence[Rollout], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """|engine - trainer| (G*R,) float32 on the CPU, and which of them needed the edge moved (bool)."""
    engine = torch.cat([r.logps for r in rollouts])
    if params.top_p == 1 and not params.top_k and not params.min_p and params.repetition_penalty == 1:
        expected = trainer_logps(actor, prompt, rollouts, params.temperature)
        return (engine - expected).abs(), torch.zeros(len(engine), dtype=torch.bool)
    parts = [_truncated(actor, plain, prompt, r, params) for r in rollouts]
    both = (engine - torch.cat(parts, dim=1)).abs()  # (edges, G*R)
    return both.amin(dim=0), both.argmin(dim=0) > 0


def trainer_logps(actor: SplitModel, prompt: Prompt, rollouts: Sequence[Rollout], temperature: float) -> Tensor:
    """(G*R,) float32 on the CPU: log-probabilities by the passes that train."""
    lengths_N = torch.tensor([len(r) for r in rollouts])
    ids_NR = torch.nn.utils.rnn.pad_sequence([r.token_ids for r in rollouts], batch_first=True)
    prefix = actor.prefix([prompt], grad=False)
    out = actor.suffix(prefix, ids_NR, lengths_N, temperature=temperature, grad=False)
    prefix.free()
    valid_NR = torch.arange(ids_NR.shape[1]) < lengths_N[:, None]
    return out.logps_NR.float().cpu()[valid_NR]


@torch.no_grad()
def _truncated(actor: SplitModel, plain: Any, prompt: Prompt, rollout: Rollout, params: SamplingParams) -> Tensor:
    """(edges, R): log-probabilities under transformers' logits with the same truncation; row 0 at the exact edge."""
    device, r = actor.device, len(rollout)
    ids_1T = torch.cat([prompt.input_ids, rollout.token_ids])[None].to(device)
    types_1T = torch.cat([prompt.mm_token_type_ids, torch.zeros(r, dtype=torch.int64)])[None].to(device)
    media = {name: tensor.to(device) for name, tensor in prompt.media.items()}
    media |= _token_types(plain, types_1T)
    logits_RV = plain(input_ids=ids_1T, use_cache=False, **media).logits[0, -r - 1 : -1]
    seen_RV = torch.zeros(logits_RV.shape, dtype=torch.bool, device=device)
    for t in range(r):
        seen_RV[t, ids_1T[0, : len(prompt) + t]] = True
    rows = []
    for edge in _edges(params, EDGE[actor.dtype]):
        book = RuleBook(actor.banned_token_ids, logits_RV.shape[1], device)
        logps_RV = torch.log_softmax(support(logits_RV, book[book.index(edge)], seen_RV), dim=1)
        rows.append(logps_RV.gather(1, rollout.token_ids[:, None].to(device)).squeeze(1).cpu())
    return torch.stack(rows)


def _edges(params: SamplingParams, width: float) -> Iterator[SamplingParams]:
    """The truncation itself, and with its edge moved to either side."""
    yield params
    for sign in (-1, 1):
        if params.top_p < 1:
            yield replace(params, top_p=min(1.0, params.top_p + sign * width))
        if params.min_p > 0:
            yield replace(params, min_p=min(1.0, params.min_p * (1 + sign * width)))


def _token_types(plain: Any, types_1T: Tensor) -> dict[str, Tensor]:
    """mm_token_type_ids, for the families whose positions depend on them."""
    return {"mm_token_type_ids": types_1T} if "mm_token_type_ids" in signature(plain.forward).parameters else {}


@torch.no_grad()
def greedy_tokens(plain: Any, prompt: Prompt, tokens: int, banned: Sequence[int]) -> list[int]:
    """Transformers' greedy tokens."""
    plain.generation_config = type(plain.generation_config)(pad_token_id=0, eos_token_id=None)
    ids_1P = prompt.input_ids[None].to(plain.device)
    out = plain.generate(
        input_ids=ids_1P, attention_mask=torch.ones_like(ids_1P), do_sample=False, max_new_tokens=tokens,
        suppress_tokens=list(banned), **_token_types(plain, prompt.mm_token_type_ids[None].to(plain.device)),
        **{name: tensor.to(plain.device) for name, tensor in prompt.media.items()},
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


# ---- what is shown ----


def parity_table(parity: EngineParity) -> Table:
    """A row per way of sampling and per greedy comparison."""
    table = Table(title=f"{parity.engine} against the trainer: log-probabilities of sampled tokens, in nats")
    for name in ("weights", "sampling", "tokens", "mean", "largest", "bar", "verdict"):
        table.add_column(name)
    for check in parity.checks:
        for s in check.sampled:
            edge = f", {s.at_edge} at the edge" if s.at_edge else ""
            verdict = ("within" if check.within(s) else "DIFFERS") + edge
            table.add_row(check.when, s.name, str(s.tokens), f"{s.mean:.1e}", f"{s.max:.1e}", f"{s.bar:.1e}", verdict)
        equal = f"{sum(check.greedy_equal)} of {len(check.greedy_equal)} prompts as generate"
        judged = "" if check.exact else " (not judged)"
        verdict = "equal" if all(check.greedy_equal) else f"DIFFERS{judged}"
        table.add_row(check.when, f"greedy: {equal}", "", "", "", "", verdict)
    what = "largest" if all(c.exact for c in parity.checks) else "mean"
    table.caption = (
        f"The bar is on the {what}. A temperature below 1 divides logits and their rounding, so it divides the bar.\n"
        "Truncated sampling is compared with the same truncation of transformers' logits."
    )
    return table


def parity_lines(parity: EngineParity) -> list[str]:
    """What was compared, what was left out, and each prompt whose greedy tokens differ."""
    first = parity.checks[0]
    lines = [f"Prompts: {', '.join(first.prompts)}.", *(f"Left out: {reason}" for reason in parity.left_out)]
    for check in parity.checks:
        wrong = [name for name, equal in zip(check.prompts, check.greedy_equal, strict=True) if not equal]
        if wrong:
            lines.append(f"{check.when}, greedy tokens differ from generate's: {', '.join(wrong)}")
    return lines
