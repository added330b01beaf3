"""From logits to tokens: pure functions, one row of logits per response.

Order of what changes the logits (vLLM's; HF applies min_p last, which differs only when it is combined with top_k or
top_p): repetition penalty over prompt and response, bans, temperature, min_p, top_k, top_p, renormalisation.

Randomness is counter-based: the uniform number that decides a token is a hash of (request seed, position in the
response), so a response does not depend on its batch mates, on their order or on how many rows run at once. The token
is found by inverting the distribution function in integers: sums are exact, so a token of weight 0 is never drawn.

Shape legend: N rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollplex.data.records import Prompt, Request, SamplingParams
from rollplex.models.vision import TYPE_IDS

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_BLOCK = 512
"""Vocabularies wider than this are searched in two levels, so no 8-byte copy of the logits is made."""

_ONE = 2.0**40
"""Integer weight of the likeliest token: tokens less likely than it by more than this factor are never drawn."""


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_request(request: Request, needed: Mapping[str, tuple[str, ...]], limit: int, exceeded: str) -> None:
    """Raises ValueError unless the prompt's media are there (`needed`: `SplitModel.media_names`) and prompt and longest
    response fit `limit` tokens; `exceeded` says what that limit is."""
    prompt, row = request.prompt, request.prompt.sample.id
    _check_media(prompt, needed)
    if not len(prompt):
        raise ValueError(f"row {row!r}: the prompt has no tokens")
    if len(prompt) + request.params.max_tokens > limit:
        raise ValueError(
            f"row {row!r}: {len(prompt)} prompt tokens + max_tokens {request.params.max_tokens} exceed {exceeded} "
            "lower max_completion_length, shorten the prompt or use smaller images"
        )


def _check_media(prompt: Prompt, needed: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ValueError where tokens of a picture or video have lost their tensors."""
    for kind, names in needed.items():
        lost = [name for name in names if name not in prompt.media]
        if lost and bool((prompt.mm_token_type_ids == TYPE_IDS[f"{kind}_embeds"]).any()):
            raise ValueError(
                f"row {prompt.sample.id!r}: the prompt has {kind} tokens but no {lost[0]}: a model would read them as "
                "text. Keep the prompt's media"
            )


def not_finite(request: Request, token: int, version: int) -> FloatingPointError:
    """The error of a row whose log-prob of response token number `token` is no finite number."""
    return FloatingPointError(
        f"row {request.prompt.sample.id!r}: the model's logits are not finite at response token {token} (weights "
        f"version {version})"
    )


def check_params(params: SamplingParams, vocabulary: int) -> None:
    """Raises ValueError for a value that has no meaning, naming the setting and what it may be."""
    p = params

    def refuse(name: str, allowed: str) -> None:
        raise ValueError(f"{name}={getattr(p, name)!r} cannot be sampled with: set it to {allowed}")

    if p.max_tokens < 1:
        refuse("max_tokens", "at least 1")
    if not (math.isfinite(p.temperature) and p.temperature >= 0):
        refuse("temperature", "0 (greedy) or a positive number")
    if not 0 < p.top_p <= 1:
        refuse("top_p", "a number in (0, 1]; 1 is off")
    if p.top_k < 0:
        refuse("top_k", "0 (off) or a positive number of tokens")
    if not 0 <= p.min_p <= 1:
        refuse("min_p", "a number in [0, 1]; 0 is off")
    if not (math.isfinite(p.repetition_penalty) and p.repetition_penalty > 0):
        refuse("repetition_penalty", "a positive number; 1 is off")
    if any(not s for s in p.stop):
        refuse("stop", "non-empty strings")
    for name in ("stop_token_ids", "banned_token_ids"):
        if any(not 0 <= i < vocabulary for i in getattr(p, name)):
            refuse(name, f"ids below the vocabulary size {vocabulary}")
    if len(set(p.banned_token_ids)) >= vocabulary:
        raise ValueError("banned_token_ids holds the whole vocabulary: leave at least one token that can be sampled")


@dataclass(frozen=True)
class Rule:
    """SamplingParams made ready for a vocabulary and a device; rows with equal settings share one."""

    params: SamplingParams
    banned_V: Tensor | None
    """(V,) bool on the logits' device."""

    stops_V: np.ndarray
    """(V,) bool on the host."""


class RuleBook:
    """The rules of one rollout, by index. Settings that differ only in max_tokens share one."""

    def __init__(self, always_banned: Iterable[int], vocabulary: int, device: torch.device) -> None:
        """`always_banned`: tokens outside the policy's support (vision placeholders), whatever a request says."""
        self._always_banned = tuple(always_banned)
        self._vocabulary = vocabulary
        self._device = device
        self._index: dict[SamplingParams, int] = {}
        self._rules: list[Rule] = []

    def __getitem__(self, index: int) -> Rule:
        return self._rules[index]

    def index(self, params: SamplingParams) -> int:
        """The index of the rule of `params` (checked already), made when it is new."""
        known = self._index.get(params)
        if known is None:
            shared = replace(params, max_tokens=1)
            if shared not in self._index:
                self._index[shared] = len(self._rules)
                self._rules.append(self._make(shared))
            known = self._index[params] = self._index[shared]
        return known

    def _make(self, params: SamplingParams) -> Rule:
        banned_V = torch.zeros(self._vocabulary, dtype=torch.bool)
        banned_V[[*params.banned_token_ids, *self._always_banned]] = True
        stops_V = np.zeros(self._vocabulary, dtype=bool)
        stops_V[list(params.stop_token_ids)] = True
        return Rule(params, banned_V.to(self._device) if banned_V.any() else None, stops_V)


# ---- random numbers --------------------------------------------------------------------------------------------------


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_A
    x = (x ^ (x >> np.uint64(27))) * _MIX_B
    return x ^ (x >> np.uint64(31))


def seed_array(seeds: Sequence[int]) -> np.ndarray:
    """Any Python integers as uint64 (modulo 2**64)."""
    return np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)


def uniforms(seeds_N: np.ndarray, positions_N: np.ndarray, draw: int = 0) -> np.ndarray:
    """float64 in [0, 1), a function of (seed, position, draw in {0, 1}) alone; 53 random bits.

    The output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied to the seed first so that
    neighbouring seeds start far apart, then along the positions.
    """
    counter_N = positions_N.astype(np.uint64) * np.uint64(2) + np.uint64(draw + 1)
    with np.errstate(over="ignore"):
        bits_N = _mix(_mix(seeds_N + _GAMMA) + counter_N * _GAMMA)
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


# ---- what changes the logits -----------------------------------------------------------------------------------------


def penalise(logits_NV: Tensor, seen_NV: Tensor, penalty: float) -> Tensor:
    """Repetition penalty (arXiv 1909.05858): logits of seen tokens divided by it, negative ones multiplied."""
    changed_NV = torch.where(logits_NV < 0, logits_NV * penalty, logits_NV / penalty)
    return torch.where(seen_NV, changed_NV, logits_NV)


def keep_min_p(logits_NV: Tensor, min_p: float) -> Tensor:
    """Drop tokens less likely than min_p times the likeliest (arXiv 2407.01082)."""
    floor_N1 = logits_NV.amax(dim=1, keepdim=True) + math.log(min_p)
    return logits_NV.masked_fill(logits_NV < floor_N1, -math.inf)


def keep_top_k(logits_NV: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens; ties with the last one stay."""
    kth_N1 = logits_NV.topk(k, dim=1).values[:, -1:]
    return logits_NV.masked_fill(logits_NV < kth_N1, -math.inf)


def keep_top_p(logits_NV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches top_p (arXiv 1904.09751); never empty."""
    ascending_NV, order_NV = logits_NV.sort(dim=1)
    mass_NV = ascending_NV.softmax(dim=1).cumsum(dim=1)
    drop_NV = mass_NV <= 1 - top_p
    drop_NV[:, -1] = False
    return logits_NV.masked_fill(drop_NV.scatter(1, order_NV, drop_NV), -math.inf)


def support(logits_NV: Tensor, rule: Rule, seen_NV: Tensor | None = None) -> Tensor:
    """Logits (float32) of the distribution that is sampled: penalised, banned, divided by temperature, truncated.

    With temperature 0 (greedy) only penalty and bans apply: the token is their argmax and its log-probability is the
    one at temperature 1, so that it says something about the model.
    """
    p = rule.params
    z_NV = logits_NV.float()
    if seen_NV is not None and p.repetition_penalty != 1:
        z_NV = penalise(z_NV, seen_NV, p.repetition_penalty)
    if rule.banned_V is not None:
        z_NV = z_NV.masked_fill(rule.banned_V, -math.inf)
    if p.temperature == 0:
        return z_NV
    if p.temperature != 1:
        z_NV = z_NV / p.temperature
    if p.min_p > 0:
        z_NV = keep_min_p(z_NV, p.min_p)
    if 0 < p.top_k < z_NV.shape[1]:
        z_NV = keep_top_k(z_NV, p.top_k)
    if p.top_p < 1:
        z_NV = keep_top_p(z_NV, p.top_p)
    return z_NV


# ---- drawing ---------------------------------------------------------------------------------------------------------


def pick(weights_NK: Tensor, u_N: Tensor) -> Tensor:
    """Index drawn with probability weight / sum, by uniforms u in [0, 1] (float64). Weight 0 is never drawn.

    Weights (float, >= 0, one at least > 0) become integers relative to the row's largest, so their running sum is
    exact: the first index whose sum exceeds a target below the total has a positive weight.
    """
    scaled_NK = weights_NK / weights_NK.amax(dim=1, keepdim=True) * _ONE
    sums_NK = scaled_NK.long().cumsum(dim=1)
    total_N1 = sums_NK[:, -1:]
    target_N1 = torch.minimum((u_N.unsqueeze(1) * total_N1.double()).long(), total_N1 - 1)
    return torch.searchsorted(sums_NK, target_N1, right=True).squeeze(1)


def draw(z_NV: Tensor, u_N: Tensor, within_N: Tensor) -> Tensor:
    """Tokens drawn from softmax(z); `within_N` is a second uniform, used for wide vocabularies."""
    n, v = z_NV.shape
    weights_NV = torch.exp(z_NV - z_NV.amax(dim=1, keepdim=True))
    if v <= _BLOCK:
        return pick(weights_NV, u_N)
    if v % _BLOCK:
        weights_NV = torch.nn.functional.pad(weights_NV, (0, _BLOCK - v % _BLOCK))
    blocks = weights_NV.view(n, -1, _BLOCK)
    block_N = pick(blocks.sum(dim=2), u_N)
    inside_NK = blocks[torch.arange(n, device=z_NV.device), block_N]
    return block_N * _BLOCK + pick(inside_NK, within_N)


def sample(
    logits_NV: Tensor, rule: Rule, seeds_N: np.ndarray, positions_N: np.ndarray, seen_NV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability under the distribution that sampled it.

    seeds_N uint64 and positions_N (index of the token in its response) on the host; `seen_NV` bool marks the tokens of
    prompt and response, needed with a repetition penalty. Returns ids int64 and logps float32 (nats), both (N,).
    A row whose logits are not finite gets a log-probability that is not finite either.
    """
    z_NV = support(logits_NV, rule, seen_NV)
    if rule.params.temperature == 0:
        ids_N = z_NV.argmax(dim=1)
    else:
        u_N, within_N = (
            torch.from_numpy(uniforms(seeds_N, positions_N, d)).to(z_NV.device, non_blocking=True) for d in (0, 1)
        )
        ids_N = draw(z_NV, u_N, within_N).clamp_(max=z_NV.shape[1] - 1)
    logps_N = z_NV.gather(1, ids_N.unsqueeze(1)).squeeze(1) - torch.logsumexp(z_NV, dim=1)
    return ids_N, logps_N
