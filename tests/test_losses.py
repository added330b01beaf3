"""Losses against numbers worked out by hand: probabilities are chosen so that ratios are round."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollplex.grpo import LossSettings, LossSums, kept_responses, loss_normalizer, policy_loss_sums
from rollplex.grpo.losses import kl_terms

LN2 = math.log(2.0)
LOSS_TYPES = ["grpo", "dr_grpo", "dapo", "bnpo"]
LEVELS = ["token", "sequence"]


def settings(**changes: Any) -> LossSettings:
    return LossSettings(**({"max_completion_length": 32} | changes))


def sums_for_ratios(
    ratios: list[list[float]], advantages: list[float], config: LossSettings, **inputs: Any
) -> tuple[LossSums, torch.Tensor]:
    """Sums at given ratios, and d loss / d logp. Old log-probs are -3; rows are padded with NaN."""
    width = max(len(row) for row in ratios)
    mask_BT = torch.tensor([[i < len(row) for i in range(width)] for row in ratios])
    logps_BT = torch.tensor([[-3 + math.log(r) for r in row] + [math.nan] * (width - len(row)) for row in ratios])
    logps_BT.requires_grad_()
    old_BT = torch.where(mask_BT, torch.full_like(logps_BT, -3.0), -math.inf)
    sums = policy_loss_sums(logps_BT, old_BT, torch.tensor(advantages), mask_BT, config, **inputs)
    sums.loss.backward()
    assert logps_BT.grad is not None
    return sums, logps_BT.grad


def close(actual: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- the clipped objective


def test_ppo_clip_by_hand() -> None:
    # epsilon 0.2. A = 2:  r 0.5 -> min(1, 1.6) = 1;      r 1.1 -> 2.2;   r 1.5 -> min(3, 2.4) = 2.4 (clipped, grad 0)
    #              A = -1: r 0.5 -> min(-0.5, -0.8) = -0.8 (clipped);   r 1.1 -> -1.1;   r 1.5 -> -1.5
    # loss = -(1 + 2.2 + 2.4) + (0.8 + 1.1 + 1.5) = -2.2. d/dlogp of an unclipped token is -A r.
    sums, grad = sums_for_ratios([[0.5, 1.1, 1.5], [0.5, 1.1, 1.5]], [2.0, -1.0], settings(loss_type="dapo"))
    close(sums.loss, -2.2)
    close(grad, [[-1.0, -2.2, 0.0], [0.0, 1.1, 1.5]])
    assert (float(sums.clip_high), float(sums.clip_low)) == (1, 1)
    assert (float(sums.tokens), float(sums.sequences)) == (6, 2)
    assert float(sums.ratio_min) == pytest.approx(0.5) and float(sums.ratio_max) == pytest.approx(1.5)


def test_epsilon_high_by_hand() -> None:
    # DAPO's clip-higher 0.6: r 1.5 is inside, r 2 is clipped at 1.6. A = 1: loss -(1.5 + 1.6).
    sums, grad = sums_for_ratios([[1.5, 2.0]], [1.0], settings(epsilon_high=0.6))
    close(sums.loss, -3.1)
    close(grad, [[-1.5, 0.0]])
    assert float(sums.clip_high) == 1


def test_delta_bounds_a_large_ratio_at_negative_advantage() -> None:
    # PPO: -min(10 * -1, 1.2 * -1) = 10. With delta 4: -min(4 * -1, -1.2) = 4, and no gradient. r 3 is below delta.
    sums, grad = sums_for_ratios([[10.0, 3.0]], [-1.0], settings())
    close(sums.loss, 13.0)
    close(grad, [[10.0, 3.0]])
    sums, grad = sums_for_ratios([[10.0, 3.0]], [-1.0], settings(delta=4.0))
    close(sums.loss, 7.0)
    close(grad, [[0.0, 3.0]])
    # A positive advantage is clipped at 1.2 long before delta.
    sums, grad = sums_for_ratios([[10.0]], [1.0], settings(delta=4.0))
    close(sums.loss, -1.2)


def test_gspo_ratio_is_the_geometric_mean() -> None:
    # Row 0: r = (4 * 0.25 * 1)^(1/3) = 1. Row 1: (2 * 0.5 * 1.1 * 1.1)^(1/4) = 1.21^(1/4) = 1.04880885.
    # A = 1 and 2, nothing clipped. dapo sums over tokens: -(3 * 1 + 4 * 2 * 1.04880885) = -11.3904708.
    # d/dlogp_t = -A * len * r / len = -A r.
    config = settings(importance_sampling_level="sequence", loss_type="dapo")
    ratios = [[4.0, 0.25, 1.0], [2.0, 0.5, 1.1, 1.1]]
    sums, grad = sums_for_ratios(ratios, [1.0, 2.0], config)
    close(sums.loss, -11.3904708)
    close(grad, [[-1.0] * 3 + [0.0], [-2.0976177] * 4])
    # GSPO's own average: one term per response, -(1 + 2.0976177); each token gets 1 / len of the gradient.
    sums, grad = sums_for_ratios(ratios, [1.0, 2.0], settings(importance_sampling_level="sequence", loss_type="grpo"))
    close(sums.loss, -3.0976177)
    close(grad, [[-1 / 3] * 3 + [0.0], [-0.52440443] * 4])


def test_gspo_clips_whole_responses() -> None:
    # Geometric mean (8 * 0.5)^(1/2) = 2 > 1.2: both tokens clipped, though one token's own ratio is low.
    config = settings(importance_sampling_level="sequence")
    sums, grad = sums_for_ratios([[8.0, 0.5], [1.0]], [1.0, 1.0], config)
    close(sums.loss, -(2 * 1.2 + 1.0))
    close(grad, [[0.0, 0.0], [-1.0, 0.0]])
    assert float(sums.clip_high) == 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_at_ratio_one_is_reinforce(loss_type: str, level: str) -> None:
    logps_BT = (-torch.rand(3, 4)).requires_grad_()
    mask_BT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    advantages_B = torch.tensor([0.7, -1.3, 2.0])
    config = settings(loss_type=loss_type, importance_sampling_level=level)
    sums = policy_loss_sums(logps_BT, logps_BT, advantages_B, mask_BT, config)
    sums.loss.backward()
    expected_BT = -advantages_B[:, None] * mask_BT
    if loss_type == "grpo":
        expected_BT = expected_BT / torch.tensor([[4.0], [2.0], [1.0]])
    torch.testing.assert_close(logps_BT.grad, expected_BT, rtol=1e-6, atol=0)
    assert float(sums.ratio_min) == 1.0 and float(sums.ratio_max) == 1.0
    assert float(sums.clip_low) == 0 and float(sums.clip_high) == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_lp_07_zero_advantages_give_exactly_zero_gradient(loss_type: str, level: str) -> None:
    config = settings(loss_type=loss_type, importance_sampling_level=level, delta=3.0)
    sums, grad = sums_for_ratios([[0.5, 1.0, 9.0], [1.0]], [0.0, 0.0], config)
    assert float(sums.loss.detach()) == 0.0 and torch.equal(grad, torch.zeros(2, 3))


# ---------------------------------------------------------------- KL, entropy, weights


def test_kl_estimators_by_hand() -> None:
    # d = ref - logp = ln 2 and -ln 2.  k1 = -d;  k2 = d^2 / 2;  k3 = 2 - ln 2 - 1 and 0.5 + ln 2 - 1.
    logps, ref = torch.tensor([-2.0, -2.0]), torch.tensor([-2.0 + LN2, -2.0 - LN2])
    close(kl_terms(logps, ref, "k1"), [-LN2, LN2])
    close(kl_terms(logps, ref, "k2"), [LN2**2 / 2, LN2**2 / 2])
    close(kl_terms(logps, ref, "k3"), [1 - LN2, LN2 - 0.5])


@pytest.mark.parametrize(("estimator", "slope"), [("k1", [1.0, 1.0]), ("k2", [-LN2, LN2]), ("k3", [-1.0, 0.5])])
def test_kl_gradient_by_hand(estimator: str, slope: list[float]) -> None:
    # d k1 / dlogp = 1;  d k2 / dlogp = -(ref - logp);  d k3 / dlogp = 1 - exp(ref - logp) = 1 - 2 and 1 - 0.5.
    # A = 0, so only beta = 0.1 times the KL is left.
    ref_BT = torch.tensor([[-3.0 + LN2, -3.0 - LN2]])
    config = settings(beta=0.1, kl_estimator=estimator)
    sums, grad = sums_for_ratios([[1.0, 1.0]], [0.0], config, ref_logps_BT=ref_BT)
    close(grad, [[0.1 * s for s in slope]])
    kl = {"k1": 0.0, "k2": LN2**2, "k3": 0.5}[estimator]
    assert float(sums.kl) == pytest.approx(kl, abs=1e-6)
    close(sums.loss, 0.1 * kl)


def test_reference_is_only_measured_at_beta_zero() -> None:
    ref_BT = torch.tensor([[-3.0 + LN2]])
    sums, grad = sums_for_ratios([[1.0]], [1.0], settings(), ref_logps_BT=ref_BT)
    close(sums.loss, -1.0)
    close(grad, [[-1.0]])
    assert float(sums.kl) == pytest.approx(1 - LN2, rel=1e-6)


def test_kl_of_equal_models_is_exactly_zero() -> None:
    logps_BT = -torch.rand(2, 5)
    for estimator in ("k1", "k2", "k3"):
        config = settings(beta=0.04, kl_estimator=estimator)
        sums = policy_loss_sums(
            logps_BT, logps_BT, torch.zeros(2), torch.ones(2, 5), config, ref_logps_BT=logps_BT.clone()
        )
        assert float(sums.kl) == 0.0 and float(sums.loss) == 0.0


def test_entropy_bonus_by_hand() -> None:
    # A = 1, r = 1: -(1 + 1) - 0.1 * (0.5 + 2) = -2.25; padding NaN is ignored; dloss/dH = -0.1.
    entropy_BT = torch.tensor([[0.5, 2.0], [math.nan, math.nan]], requires_grad=True)
    sums, _ = sums_for_ratios([[1.0, 1.0], []], [1.0, 1.0], settings(entropy_coef=0.1), entropy_BT=entropy_BT)
    close(sums.loss, -2.25)
    assert float(sums.entropy) == 2.5
    assert entropy_BT.grad is not None
    close(entropy_BT.grad, [[-0.1, -0.1], [0.0, 0.0]])


def test_importance_weights_scale_the_policy_term_only() -> None:
    # A = 1, r = 1, w = 3 and 0.5; k3 at d = ln 2 is 1 - ln 2 each, beta 1: -(3 + 0.5) + 2 (1 - ln 2).
    ref_BT = torch.full((1, 2), -3.0 + LN2)
    weights_BT = torch.tensor([[3.0, 0.5]])
    sums, grad = sums_for_ratios([[1.0, 1.0]], [1.0], settings(beta=1.0), ref_logps_BT=ref_BT, is_weights_BT=weights_BT)
    close(sums.loss, -3.5 + 2 * (1 - LN2))
    close(grad, [[-3.0 - 1.0, -0.5 - 1.0]])


# ---------------------------------------------------------------- normalisation


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        # A = 1 and -2, r = 1, lengths 1 and 3: token sum -1 + 6 = 5; sum of token means -1 + 2 = 1.
        ("grpo", 1 / 2),
        ("bnpo", 5 / 4),
        ("dapo", 5 / 4),
        ("dr_grpo", 5 / (2 * 10)),
    ],
)
def test_loss_types_by_hand(loss_type: str, expected: float) -> None:
    config = settings(loss_type=loss_type, max_completion_length=10)
    sums, _ = sums_for_ratios([[1.0], [1.0, 1.0, 1.0]], [1.0, -2.0], config)
    close(sums.loss / loss_normalizer(loss_type, [1, 3], max_completion_length=10), expected)


def test_normalizers_of_mini_batches_by_hand() -> None:
    # Rollout batch of 12 kept tokens in 3 mini-batches; this one has responses of 1 and 3.
    assert loss_normalizer("dapo", [1, 3], batch_tokens=12, num_mini_batches=3) == 4.0
    assert loss_normalizer("dapo", [1, 2], batch_tokens=12, num_mini_batches=3) == 4.0
    assert loss_normalizer("bnpo", [1, 2], batch_tokens=12, num_mini_batches=3) == 3.0
    assert loss_normalizer("grpo", torch.tensor([1, 0, 2])) == 2.0
    assert loss_normalizer("dr_grpo", [1, 0, 2], max_completion_length=7) == 14.0
    assert loss_normalizer("dapo", [5, 6]) == loss_normalizer("bnpo", [5, 6]) == 11.0


def test_grpo_length_norm_may_be_given() -> None:
    config = settings(loss_type="grpo")
    sums, _ = sums_for_ratios([[1.0, 1.0]], [1.0], config, length_norm_B=torch.tensor([8]))
    close(sums.loss, -0.25)


def test_lp_12_truncated_responses_leave_numerator_and_denominator() -> None:
    # G = 4, lengths 2 5 3 5, the 5s truncated; A = 1 1 -2 -2, r = 1. Kept: -1 * 2 + 2 * 3 = 4 over 5 tokens.
    lengths_B = torch.tensor([2, 5, 3, 5])
    truncated_B = torch.tensor([False, True, False, True])
    kept_B = kept_responses(lengths_B, torch.ones(4), truncated_B, mask_truncated_completions=True)
    assert kept_B.tolist() == [True, False, True, False]
    mask_BT = (torch.arange(5) < lengths_B[:, None]) & kept_B[:, None]
    logps_BT = (-torch.rand(4, 5)).requires_grad_()
    advantages_B = torch.tensor([1.0, 1.0, -2.0, -2.0])
    for loss_type, expected in (("dapo", 4 / 5), ("bnpo", 4 / 5), ("grpo", (-1 + 2) / 2), ("dr_grpo", 4 / 10)):
        config = settings(loss_type=loss_type, max_completion_length=5)
        sums = policy_loss_sums(logps_BT, logps_BT, advantages_B, mask_BT, config)
        close(sums.loss.detach() / loss_normalizer(loss_type, lengths_B[kept_B], max_completion_length=5), expected)
        assert (float(sums.tokens), float(sums.sequences)) == (5, 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_lp_12_all_truncated_is_zero_without_nan(loss_type: str, level: str) -> None:
    config = settings(
        loss_type=loss_type, importance_sampling_level=level, beta=0.1, entropy_coef=0.1, delta=5.0, kl_estimator="k3"
    )
    logps_BT = torch.tensor([[-1.0, -math.inf, math.nan], [math.inf, -2.0, -3.0]], requires_grad=True)
    wild_BT = torch.tensor([[math.nan, -math.inf, math.inf]] * 2)
    sums = policy_loss_sums(
        logps_BT,
        wild_BT,
        torch.tensor([math.nan, 1.0]),
        torch.zeros(2, 3),
        config,
        ref_logps_BT=wild_BT,
        entropy_BT=wild_BT,
        is_weights_BT=wild_BT,
    )
    sums.loss.backward()
    assert float(sums.loss.detach()) == 0.0
    assert logps_BT.grad is not None and torch.equal(logps_BT.grad, torch.zeros(2, 3))
    assert loss_normalizer(loss_type, [], max_completion_length=3, batch_tokens=0) == 1.0
    for name in ("kl", "entropy", "clip_low", "clip_high", "tokens", "sequences"):
        assert float(getattr(sums, name)) == 0.0, name


def test_kept_needs_a_reward_and_a_token() -> None:
    lengths_B, valid_B = torch.tensor([3, 0, 3, 3]), torch.tensor([True, True, False, True])
    truncated_B = torch.tensor([False, False, False, True])
    assert kept_responses(lengths_B, valid_B, truncated_B, mask_truncated_completions=False).tolist() == [1, 0, 0, 1]
    assert kept_responses(lengths_B, valid_B, truncated_B, mask_truncated_completions=True).tolist() == [1, 0, 0, 0]


def test_extreme_log_ratios_give_no_nan() -> None:
    # exp(300) overflows: the clipped branch is taken, and its gradient must be 0, not 0 * inf.
    logps_BT = torch.tensor([[-0.1, -400.0]], requires_grad=True)
    old_BT = torch.tensor([[-300.0, -0.1]])
    sums = policy_loss_sums(
        logps_BT, old_BT, torch.tensor([1.0]), torch.ones(1, 2), settings(beta=0.1), ref_logps_BT=old_BT
    )
    sums.loss.backward()
    assert torch.isfinite(sums.loss) and logps_BT.grad is not None and torch.isfinite(logps_BT.grad).all()


# ---------------------------------------------------------------- micro-batches

LENGTHS = [1, 3, 7, 20]


def gradient(parts: list[list[int]], config: LossSettings, *, mean_of_means: bool = False) -> torch.Tensor:
    """Gradient of a small language model for four responses, cut into micro-batches (or ranks) in some way."""
    generator = torch.Generator().manual_seed(3)
    features = [torch.randn(length, 8, generator=generator) for length in LENGTHS]
    targets = [torch.randint(0, 11, (length,), generator=generator) for length in LENGTHS]
    shifts = [0.3 * torch.randn(length, generator=generator) for length in LENGTHS]
    refs = [0.5 * torch.randn(length, generator=generator) for length in LENGTHS]
    advantages = torch.tensor([1.5, -0.5, 0.8, -1.2])
    weight = (torch.randn(11, 8, generator=generator) * 0.3).requires_grad_()
    total: LossSums | None = None
    for rows in parts:
        width = max(LENGTHS[i] for i in rows)
        mask_BT = torch.stack([torch.arange(width) < LENGTHS[i] for i in rows])
        logps, old, ref, entropy = [], [], [], []
        for i in rows:
            log_probs = torch.log_softmax(features[i] @ weight.T, dim=-1)
            picked = log_probs.gather(1, targets[i][:, None])[:, 0]
            pad = torch.full((width - LENGTHS[i],), math.nan)
            logps.append(torch.cat([picked, pad]))
            old.append(torch.cat([picked.detach() + shifts[i], pad]))
            ref.append(torch.cat([picked.detach() + refs[i], pad]))
            entropy.append(torch.cat([-(log_probs.exp() * log_probs).sum(-1), pad]))
        sums = policy_loss_sums(
            torch.stack(logps),
            torch.stack(old),
            advantages[rows],
            mask_BT,
            config,
            ref_logps_BT=torch.stack(ref),
            entropy_BT=torch.stack(entropy),
        )
        loss = sums.loss
        if mean_of_means:
            lengths = [LENGTHS[i] for i in rows]
            normalizer = loss_normalizer(config.loss_type, lengths, max_completion_length=20)
            loss = loss / (normalizer * len(parts))
        loss.backward()
        total = sums if total is None else total + sums
    assert total is not None and weight.grad is not None
    assert (float(total.tokens), float(total.sequences)) == (31, 4)
    return (
        weight.grad
        if mean_of_means
        else weight.grad / loss_normalizer(config.loss_type, LENGTHS, max_completion_length=20)
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_lp_13_gradient_does_not_depend_on_micro_batches_or_ranks(loss_type: str, level: str) -> None:
    config = settings(loss_type=loss_type, importance_sampling_level=level, beta=0.1, entropy_coef=0.01)
    whole = gradient([[0, 1, 2, 3]], config)
    assert whole.norm() > 1e-2
    for parts in ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[3, 0], [2, 1]], [[3], [1, 2, 0]]):
        other = gradient(parts, config)
        assert (other - whole).norm() / whole.norm() < 1e-5, parts


def test_lp_13_the_check_sees_a_mean_of_means() -> None:
    config = settings(loss_type="bnpo")
    whole = gradient([[0, 1, 2, 3]], config)
    wrong = gradient([[0, 1], [2, 3]], config, mean_of_means=True)
    assert (wrong - whole).norm() / whole.norm() > 1e-2


def test_sums_of_micro_batches_merge() -> None:
    config = settings()
    one, _ = sums_for_ratios([[0.5, 1.5]], [1.0], config)
    two, _ = sums_for_ratios([[3.0]], [1.0], config)
    both = one + two
    close(both.loss, -(0.5 + 1.2 + 1.2))
    assert float(both.clip_high) == 2 and float(both.tokens) == 3 and float(both.sequences) == 2
    assert float(both.ratio_min) == pytest.approx(0.5) and float(both.ratio_max) == pytest.approx(3.0)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": -0.1}, "beta=-0.1 must be"),
        ({"beta": math.nan}, "beta=nan must be"),
        ({"entropy_coef": -1.0}, "entropy_coef=-1.0 must be"),
        ({"epsilon": 1.0}, r"epsilon=1.0 must be in \[0, 1\)"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1 must be"),
        ({"delta": 1.1}, r"delta=1.1 must exceed 1 \+ epsilon_high = 1.2"),
        ({"delta": 1.25, "epsilon_high": 0.28}, r"epsilon_high = 1.28"),
        ({"loss_type": "ppo"}, "loss_type='ppo' is unknown; set one of grpo, dr_grpo, dapo, bnpo"),
        ({"kl_estimator": "k4"}, "kl_estimator='k4' is unknown"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level='word' is unknown"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "divides by max_completion_length"),
        ({"max_completion_length": 0}, "max_completion_length=0 must be"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes)


def test_missing_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"beta=0.1 needs .* reference"):
        sums_for_ratios([[1.0]], [1.0], settings(beta=0.1))
    with pytest.raises(ValueError, match=r"entropy_coef=0.1 needs the entropy"):
        sums_for_ratios([[1.0]], [1.0], settings(entropy_coef=0.1))
    with pytest.raises(ValueError, match="2 mini-batches needs batch_tokens"):
        loss_normalizer("dapo", [1], num_mini_batches=2)
    with pytest.raises(ValueError, match="divides by max_completion_length"):
        loss_normalizer("dr_grpo", [1])
    with pytest.raises(ValueError, match="is unknown"):
        loss_normalizer("mean", [1])
