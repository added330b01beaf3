"""The pure sampling functions: their order, their support, and their random numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import generation

from rollplex.data.records import SamplingParams
from rollplex.engines.sampling import (
    RuleBook,
    check_params,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise,
    pick,
    sample,
    seed_array,
    support,
    uniforms,
)
from rollplex.models.logprobs import linear_logps

NEUTRAL = SamplingParams(max_tokens=4)
TOP_U = 1 - 2.0**-53


def rule_of(params: SamplingParams, vocabulary: int, always_banned=()):
    book = RuleBook(always_banned, vocabulary, torch.device("cpu"))
    return book[book.index(params)]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which the statistic exceeds its mean (normal approximation)."""
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_uniforms_are_splitmix64():
    """First outputs of SplitMix64 from the mixed seed, in plain Python integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    gamma = 0x9E3779B97F4A7C15
    seeds, positions = [0, 1, 2**63 + 5, -1, 2**70 + 3], np.array([0, 7, 4095, 1, 2])
    for which in (0, 1):
        got = uniforms(seed_array(seeds), positions, which)
        for s, p, u in zip(seeds, positions.tolist(), got.tolist(), strict=True):
            start = mix(((s & mask) + gamma) & mask)
            assert u == (mix((start + gamma * (2 * p + which + 1)) & mask) >> 11) * 2.0**-53


@pytest.mark.parametrize("which", [0, 1])
def test_uniforms_are_uniform_over_neighbouring_seeds_and_positions(which):
    seeds, positions = np.meshgrid(np.arange(4000, dtype=np.uint64), np.arange(50))
    u = uniforms(seeds.ravel(), positions.ravel(), which)
    assert 0 <= u.min() and u.max() < 1
    counts = np.histogram(u, bins=1000, range=(0, 1))[0]
    assert abs(chi_square(counts, np.full(1000, len(u) / 1000))) < 5


def test_uniforms_of_neighbours_are_independent():
    seeds, positions = np.meshgrid(np.arange(2001, dtype=np.uint64), np.arange(101), indexing="ij")
    u = uniforms(seeds, positions)
    other = uniforms(seeds, positions, 1)
    pairs = {
        "seeds": (u[:-1], u[1:]),
        "positions": (u[:, :-1], u[:, 1:]),
        "draws": (u, other),
        "seed against position": (u[1:, :-1], u[:-1, 1:]),
    }
    for name, (a, b) in pairs.items():
        n = a.size
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(n), name
        counts = np.histogram2d(a.ravel(), b.ravel(), bins=16, range=[[0, 1], [0, 1]])[0].ravel()
        assert abs(chi_square(counts, np.full(256, n / 256))) < 5, name


# ---- drawing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [7, 512, 513, 1500])
def test_draws_follow_the_distribution(vocabulary):
    torch.manual_seed(0)
    z_V = torch.randn(vocabulary) * 1.5
    n = 60_000
    u, within = (torch.from_numpy(uniforms(np.arange(n, dtype=np.uint64), np.zeros(n, np.int64), d)) for d in (0, 1))
    ids = torch.cat([draw(z_V.expand(6000, -1), u[i : i + 6000], within[i : i + 6000]) for i in range(0, n, 6000)])
    expected = z_V.double().softmax(0).numpy() * n
    counts = np.bincount(ids.numpy(), minlength=vocabulary)
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    assert abs(chi_square(counts, expected)) < 5


@pytest.mark.parametrize("vocabulary", [8, 2000])
@pytest.mark.parametrize("u", [0.0, 1e-300, 0.5, TOP_U])
def test_zero_probability_is_never_drawn(vocabulary, u):
    """At the extremes of u too, with zeros at both ends, one token left, and tokens that underflow."""
    z_V = torch.full((vocabulary,), -math.inf)
    last = vocabulary - 3
    z_V[[2, 3, last]] = torch.tensor([0.0, -3.0, -1.0])
    lonely_V = torch.full((vocabulary,), -math.inf)
    lonely_V[last] = -123.0
    faint_V = torch.full((vocabulary,), -200.0)
    faint_V[3] = 0.0
    us = torch.full((3,), u, dtype=torch.float64)
    for within in (0.0, TOP_U):
        ids = draw(torch.stack([z_V, lonely_V, faint_V]), us, torch.full((3,), within, dtype=torch.float64))
        assert ids[0] in (2, 3, last) and ids[1] == last and ids[2] == 3


def test_pick_is_exact_at_the_edges():
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0, 2.0, 0.0]]).expand(5, -1)
    u = torch.tensor([0.0, 0.25 - 1e-9, 0.25, 0.5, TOP_U], dtype=torch.float64)
    assert pick(weights, u).tolist() == [1, 1, 3, 4, 4]


# ---- logits processors against transformers' -------------------------------------------------------------------------


@pytest.fixture
def logits_NV() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(16, 300) * 3


@pytest.mark.parametrize("k", [1, 5, 299])
def test_top_k_equals_transformers(logits_NV, k):
    assert torch.equal(keep_top_k(logits_NV, k), generation.TopKLogitsWarper(k)(None, logits_NV))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.9, 0.999])
def test_top_p_equals_transformers(logits_NV, top_p):
    got = keep_top_p(logits_NV, top_p)
    assert torch.equal(got, generation.TopPLogitsWarper(top_p)(None, logits_NV))
    kept = torch.where(got.isinf(), 0.0, logits_NV.softmax(1)).sum(1)
    assert (kept >= top_p - 1e-6).all()


@pytest.mark.parametrize("min_p", [0.01, 0.5, 1.0])
def test_min_p_equals_transformers(logits_NV, min_p):
    assert torch.equal(keep_min_p(logits_NV, min_p), generation.MinPLogitsWarper(min_p)(None, logits_NV))


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_equals_transformers(logits_NV, penalty):
    ids = torch.randint(0, 300, (16, 40), generator=torch.Generator().manual_seed(0))
    seen = torch.zeros(16, 300, dtype=torch.bool).scatter_(1, ids, True)
    expected = generation.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits_NV.clone())
    torch.testing.assert_close(penalise(logits_NV, seen, penalty), expected)


def test_order_is_penalty_bans_temperature_min_p_top_k_top_p():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]]))
    params = replace(
        NEUTRAL, temperature=2.0, min_p=0.5, top_k=3, top_p=0.8, repetition_penalty=2.0, banned_token_ids=(0,)
    )
    seen = torch.tensor([[False, True, False, False, False]])
    got = support(logits, rule_of(params, 5), seen)
    # Penalty squares 0.3 -> 0.09; the ban takes 0 away; T=2 takes roots of [.09, .15, .1, .05]; min_p 0.5 keeps all
    # four (without T it would drop 0.05); top_k 3 drops 0.05; the renormalised masses .300/.387/.316 sum to 1.003,
    # and the two largest reach 0.70 < 0.8, so all three stay.
    expected = torch.log(torch.tensor([0.09, 0.15, 0.1])) / 2
    torch.testing.assert_close(got[0, 1:4], expected)
    assert got[0, [0, 4]].isinf().all()
    # With top_p 0.6 two stay (0.70); without top_k's renormalisation they would reach only 0.57, and three would.
    tighter = support(logits, rule_of(replace(params, top_p=0.6), 5), seen)
    assert (~tighter.isinf()).nonzero()[:, 1].tolist() == [2, 3]


# ---- sample ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logps_equal_the_trainers_without_truncation(temperature):
    torch.manual_seed(0)
    hidden, head = torch.randn(64, 32), torch.randn(300, 32) * 0.3
    banned = (5, 17, 200)
    rule = rule_of(replace(NEUTRAL, temperature=temperature, banned_token_ids=(5,)), 300, always_banned=(17, 200))
    ids, logps = sample(hidden @ head.T, rule, np.arange(64, dtype=np.uint64), np.zeros(64, np.int64))
    mask = torch.zeros(300, dtype=torch.bool)
    mask[list(banned)] = True
    expected, _ = linear_logps(hidden, head, ids, temperature=temperature, banned_V=mask)
    assert (logps - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))
    assert logps.dtype == torch.float32 and not mask[ids].any()


def test_logps_are_those_of_the_truncated_distribution(logits_NV):
    rule = rule_of(replace(NEUTRAL, temperature=0.8, top_k=5, top_p=0.9), 300)
    ids, logps = sample(logits_NV, rule, np.arange(16, dtype=np.uint64), np.zeros(16, np.int64))
    z = keep_top_p(keep_top_k(logits_NV / 0.8, 5), 0.9)
    expected = z.log_softmax(1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(logps, expected)
    assert (logps > (logits_NV / 0.8).log_softmax(1).gather(1, ids[:, None]).squeeze(1)).all()


def test_greedy_is_argmax_with_logps_at_temperature_one(logits_NV):
    rule = rule_of(replace(NEUTRAL, temperature=0.0, top_k=1, banned_token_ids=(3,)), 300)
    logits_NV[0, 3] = 1e4
    ids, logps = sample(logits_NV, rule, np.arange(16, dtype=np.uint64), np.zeros(16, np.int64))
    masked = logits_NV.index_fill(1, torch.tensor([3]), -math.inf)
    assert torch.equal(ids, masked.argmax(1))
    torch.testing.assert_close(logps, masked.log_softmax(1).amax(1))


def test_tok_05a_banned_tokens_are_never_sampled_however_likely():
    logits = torch.zeros(2000, 300)
    logits[:, 7] = 1e6
    rule = rule_of(NEUTRAL, 300, always_banned=(7,))
    ids, logps = sample(logits, rule, np.arange(2000, dtype=np.uint64), np.zeros(2000, np.int64))
    assert not (ids == 7).any()
    torch.testing.assert_close(logps, torch.full((2000,), -math.log(299)))


def test_a_row_does_not_depend_on_its_batch_mates(logits_NV):
    rule = rule_of(replace(NEUTRAL, top_p=0.9), 300)
    seeds, positions = np.arange(16, dtype=np.uint64), np.arange(16)
    ids, logps = sample(logits_NV, rule, seeds, positions)
    order = np.random.default_rng(0).permutation(16)
    ids_p, logps_p = sample(logits_NV[order], rule, seeds[order], positions[order])
    assert torch.equal(ids[order], ids_p) and torch.equal(logps[order], logps_p)
    for i in range(16):
        one, logp = sample(logits_NV[i : i + 1], rule, seeds[i : i + 1], positions[i : i + 1])
        assert one[0] == ids[i] and logp[0] == logps[i]


def test_rules_are_shared_between_requests_that_differ_in_length_only():
    book = RuleBook((), 300, torch.device("cpu"))
    same = [book.index(replace(NEUTRAL, max_tokens=n)) for n in (1, 5, 9)]
    assert same == [same[0]] * 3 and book.index(replace(NEUTRAL, temperature=0.5)) != same[0]


# ---- checks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("stop", ("",)),
        ("stop_token_ids", (300,)),
        ("stop_token_ids", (-1,)),
        ("banned_token_ids", (300,)),
        ("banned_token_ids", tuple(range(300))),
    ],
)
def test_values_without_meaning_are_refused(name, value):
    check_params(NEUTRAL, 300)
    with pytest.raises(ValueError, match=name):
        check_params(replace(NEUTRAL, **{name: value}), 300)
