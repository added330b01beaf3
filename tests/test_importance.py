"""Importance weights and mismatch statistics; log-ratios are logs of round numbers, so weights are round."""

from __future__ import annotations

import math

import pytest
import torch

from rollplex.grpo import importance_weights, mismatch_stats

# pi / mu per token: row 0 is 4, 0.5, 1 (product 2); row 1 is 8 and padding; row 2 has no token.
RATIO_BT = torch.tensor([[4.0, 0.5, 1.0], [8.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
MASK_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
ENGINE_BT = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, math.nan, -math.inf], [math.nan, 0.0, -math.inf]])
TRAINER_BT = torch.where(MASK_BT.bool(), ENGINE_BT + RATIO_BT.log(), torch.nan)


@pytest.mark.parametrize(
    ("mode", "expected", "capped"),
    [
        (None, [[1, 1, 1], [1, 0, 0], [0, 0, 0]], 0),
        ("token_truncate", [[3, 0.5, 1], [3, 0, 0], [0, 0, 0]], 2),
        ("token_mask", [[0, 0.5, 1], [0, 0, 0], [0, 0, 0]], 2),
        ("sequence_truncate", [[2, 2, 2], [3, 0, 0], [0, 0, 0]], 1),
        ("sequence_mask", [[2, 2, 2], [0, 0, 0], [0, 0, 0]], 1),
    ],
)
def test_weights_by_hand(mode: str | None, expected: list[list[float]], capped: int) -> None:
    weights_BT, stats = importance_weights(TRAINER_BT.requires_grad_(), ENGINE_BT, MASK_BT, mode, 3.0)
    torch.testing.assert_close(weights_BT, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0)
    assert not weights_BT.requires_grad
    assert (float(stats.capped), float(stats.tokens)) == (capped, 4)
    kept = [w for row, on in zip(expected, MASK_BT.tolist(), strict=True) for w, m in zip(row, on, strict=True) if m]
    assert float(stats.weight) == pytest.approx(sum(kept), rel=1e-6)
    assert (float(stats.weight_min), float(stats.weight_max)) == pytest.approx((min(kept), max(kept)), rel=1e-6)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_equal_distributions_weigh_exactly_one(mode: str) -> None:
    logps_BT = -torch.rand(3, 5)
    weights_BT, stats = importance_weights(logps_BT, logps_BT.clone(), torch.ones(3, 5), mode, 1.0)
    assert torch.equal(weights_BT, torch.ones(3, 5)) and float(stats.capped) == 0


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_extreme_differences_stay_finite(mode: str) -> None:
    engine_BT = torch.tensor([[-500.0] * 4, [-0.01] * 4])
    weights_BT, _ = importance_weights(engine_BT.flip(0), engine_BT, torch.ones(2, 4), mode, 2.0)
    # Ratio inf: truncated to 2, or masked. Ratio exp(-500) = 0 in float32.
    assert weights_BT.tolist() == [[2.0 if mode == "token_truncate" else 0.0] * 4, [0.0] * 4]


def test_mismatch_by_hand() -> None:
    stats = mismatch_stats(TRAINER_BT, ENGINE_BT, MASK_BT)
    # |log ratio|: ln 4 + ln 2 + 0 + ln 8 = 6 ln 2, largest 3 ln 2.
    assert float(stats.abs_diff) == pytest.approx(6 * math.log(2), rel=1e-6)
    assert float(stats.abs_diff_max) == pytest.approx(3 * math.log(2), rel=1e-6)
    # k3 = ratio - 1 - ln ratio: (4-1-2 ln2) + (0.5-1+ln2) + 0 + (8-1-3 ln2) = 9.5 - 4 ln 2.
    assert float(stats.kl) == pytest.approx(9.5 - 4 * math.log(2), rel=1e-6)
    assert float(stats.tokens) == 4


def test_statistics_add_up_over_micro_batches() -> None:
    for whole, parts in (
        (
            mismatch_stats(TRAINER_BT, ENGINE_BT, MASK_BT),
            [mismatch_stats(TRAINER_BT[i : i + 1], ENGINE_BT[i : i + 1], MASK_BT[i : i + 1]) for i in range(3)],
        ),
        (
            importance_weights(TRAINER_BT, ENGINE_BT, MASK_BT, "token_truncate", 3.0)[1],
            [
                importance_weights(
                    TRAINER_BT[i : i + 1], ENGINE_BT[i : i + 1], MASK_BT[i : i + 1], "token_truncate", 3.0
                )[1]
                for i in range(3)
            ],
        ),
    ):
        total = parts[0] + parts[1] + parts[2]
        for name, value in vars(whole).items():
            assert float(getattr(total, name)) == pytest.approx(float(value), rel=1e-12), name


def test_an_empty_batch_gives_zero_sums() -> None:
    empty = torch.zeros(0, 4)
    stats = mismatch_stats(empty, empty, empty)
    assert [float(v) for v in vars(stats).values()] == [0.0] * 4
    weights_BT, weight_stats = importance_weights(empty, empty, empty, "token_mask", 2.0)
    assert weights_BT.shape == (0, 4)
    assert (float(weight_stats.weight_min), float(weight_stats.weight_max)) == (math.inf, -math.inf)


def test_bad_settings_are_named() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="'token' is unknown; set None or one of token_truncate"):
        importance_weights(one, one, one, "token", 2.0)
    for cap in (0.5, math.inf, math.nan):
        with pytest.raises(ValueError, match="cap="):
            importance_weights(one, one, one, "token_mask", cap)
