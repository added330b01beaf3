"""Rewards to advantages; every expected number is worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rollplex.grpo import combine_rewards, group_advantages, rewards_by_group

NAN = float("nan")


def rewards(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_group_scaling_by_hand() -> None:
    # mean 0.5; squared distances 4 * 0.25 = 1; unbiased variance 1/3; std 0.57735027.
    # advantage = 0.5 / (0.57735027 + 0.0001) = 0.86587541.
    result = group_advantages(rewards([0.0, 0.0, 1.0, 1.0]), scale_rewards="group")
    expected = torch.tensor([[-0.86587541, -0.86587541, 0.86587541, 0.86587541]])
    torch.testing.assert_close(result.advantages_BG, expected, rtol=1e-6, atol=0)
    assert result.advantages_BG.dtype == torch.float32
    assert float(result.std_B[0]) == pytest.approx(0.57735027, rel=1e-7)
    assert not result.zero_variance_B.any() and result.valid_BG.all()


def test_no_scaling_by_hand() -> None:
    result = group_advantages(rewards([0.0, 1.0, 5.0]), scale_rewards="none")  # mean 2
    assert result.advantages_BG.tolist() == [[-2.0, -1.0, 3.0]]


def test_batch_scaling_by_hand() -> None:
    # All six rewards 0 2 | 4 4 | 1 7: mean 3, squares 9+1+1+1+4+16 = 32, variance 32/5, std 2.52982213.
    # Group means 1, 4, 4. 1/2.52992213 = 0.39526908; 3/2.52992213 = 1.18580725.
    result = group_advantages(rewards([0.0, 2.0], [4.0, 4.0], [1.0, 7.0]), scale_rewards="batch")
    expected = torch.tensor([[-0.39526908, 0.39526908], [0.0, 0.0], [-1.18580725, 1.18580725]])
    torch.testing.assert_close(result.advantages_BG, expected, rtol=1e-6, atol=0)
    assert result.zero_variance_B.tolist() == [False, True, False]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(
    "row", [[0.3] * 8, [0.1 + 0.2, 0.3] * 4, [0.7], [1e9] * 4, [1e9, 1e9 + 1], [0.3, NAN, NAN, 0.1 + 0.2], [NAN, 0.4]]
)
def test_lp_07_equal_rewards_give_exactly_zero(row: list[float], scale: str) -> None:
    result = group_advantages(rewards(row), scale_rewards=scale)
    assert torch.equal(result.advantages_BG, torch.zeros(1, len(row)))
    assert result.zero_variance_B.tolist() == [True]
    assert result.std_B.tolist() == [0.0]


def test_lp_07_rewards_rounded_to_float32_are_equal_too() -> None:
    row = torch.tensor([[0.3, 0.1 + 0.2, 0.3]], dtype=torch.float32).to(torch.float64)
    row[0, 1] = 0.3  # next to its own float32 rounding
    assert row.unique().numel() == 2
    assert torch.equal(group_advantages(row).advantages_BG, torch.zeros(1, 3))


@pytest.mark.parametrize(
    "row", [[0.35] * 7 + [0.95], [0.0] * 15 + [1.0], [0.0, 1e6], [0.0, 2e-6], [1.0, NAN, 0.0], [-5.0, 3.0, 8.5]]
)
def test_lp_07_advantage_is_bounded_by_sqrt_group_size(row: list[float]) -> None:
    result = group_advantages(rewards(row), scale_rewards="group")
    assert 0 < result.advantages_BG.abs().max() <= math.sqrt(len(row))
    assert abs(float(result.advantages_BG.sum())) < 1e-5


def test_lp_07_seven_against_one_by_hand() -> None:
    # mean 0.425; squares 7 * 0.075^2 + 0.525^2 = 0.315; std sqrt(0.045) = 0.21213203; + 1e-4 = 0.21223203.
    result = group_advantages(rewards([0.35] * 7 + [0.95]), scale_rewards="group")
    expected = torch.tensor([[-0.35338681] * 7 + [2.47370768]])
    torch.testing.assert_close(result.advantages_BG, expected, rtol=1e-6, atol=0)


def test_lp_08_missing_reward_leaves_the_statistics_alone() -> None:
    # First function [1, None, 0, nan], second 0.5 for all. Totals 1.5, -, 0.5, -: mean 1, std 0.70710678.
    total = combine_rewards({"a": rewards([1.0, NAN, 0.0, NAN]), "b": rewards([0.5] * 4)})
    result = group_advantages(total, scale_rewards="group")
    expected = torch.tensor([[0.70700679, 0.0, -0.70700679, 0.0]])  # 0.5 / 0.70720678
    torch.testing.assert_close(result.advantages_BG, expected, rtol=1e-6, atol=0)
    assert result.valid_BG.tolist() == [[True, False, True, False]]
    assert result.mean_B.tolist() == [1.0]
    without = group_advantages(rewards([1.5, 0.5]), scale_rewards="group")
    assert torch.equal(result.advantages_BG[:, [0, 2]], without.advantages_BG)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_lp_08_a_group_without_any_reward_is_zero_and_other_groups_do_not_notice(scale: str) -> None:
    result = group_advantages(rewards([NAN, NAN], [0.0, 1.0]), scale_rewards=scale)
    alone = group_advantages(rewards([0.0, 1.0]), scale_rewards=scale)
    assert torch.equal(result.advantages_BG, torch.cat([torch.zeros(1, 2), alone.advantages_BG]))
    assert result.zero_variance_B.tolist() == [True, False]
    for values in (result.advantages_BG, result.mean_B, result.std_B):
        assert torch.isfinite(values).all()
    assert result.mean_reward == 0.5 and result.num_missing == 2


def test_lp_08_nothing_valid_at_all() -> None:
    result = group_advantages(rewards([NAN, NAN]), scale_rewards="batch")
    assert torch.equal(result.advantages_BG, torch.zeros(1, 2))
    assert math.isnan(result.mean_reward)


def test_lp_14_grouping_is_by_id_for_any_order() -> None:
    # P1 = [0, 0, 1, 1], P2 = [5, 5, 9, 9]; without scaling -0.5, 0.5 and -2, 2.
    by_key = {(1, i): value for i, value in enumerate([0.0, 0.0, 1.0, 1.0])}
    by_key |= {(2, i): value for i, value in enumerate([5.0, 5.0, 9.0, 9.0])}
    interleaved = [(group, index) for index in (2, 0, 3, 1) for group in (2, 1)]
    two_ranks = [(1, 0), (1, 1), (2, 3), (2, 0), (2, 1), (1, 3), (1, 2), (2, 2)]  # both groups span both
    for keys in (list(by_key), interleaved, two_ranks):
        groups, rewards_BG = rewards_by_group(keys, [by_key[key] for key in keys], 4)
        assert groups == [1, 2]
        result = group_advantages(rewards_BG, scale_rewards="none")
        assert result.advantages_BG.tolist() == [[-0.5, -0.5, 0.5, 0.5], [-2.0, -2.0, 2.0, 2.0]]


def test_lp_14_absent_responses_are_missing_and_doubles_refused() -> None:
    groups, rewards_BG = rewards_by_group([(7, 2), (7, 0)], [3.0, 1.0], 3)
    assert groups == [7] and rewards_BG[0, [0, 2]].tolist() == [1.0, 3.0] and torch.isnan(rewards_BG[0, 1])
    with pytest.raises(ValueError, match="response 0 of group 7 is there twice"):
        rewards_by_group([(7, 0), (7, 0)], [1.0, 1.0], 3)
    with pytest.raises(ValueError, match="outside num_generations=3"):
        rewards_by_group([(7, 3)], [1.0], 3)


def test_combine_weights_by_hand() -> None:
    components = {"accuracy": rewards([1.0, 0.0]), "format": rewards([0.5, 1.0])}
    # 2 * 1 - 0.5 * 0.5 = 1.75; 2 * 0 - 0.5 * 1 = -0.5
    assert combine_rewards(components, {"accuracy": 2.0, "format": -0.5}).tolist() == [[1.75, -0.5]]
    assert combine_rewards(components).tolist() == [[1.5, 1.0]]


def test_combine_ignores_a_missing_component_of_weight_zero() -> None:
    total = combine_rewards({"a": rewards([1.0, 2.0]), "log_only": rewards([NAN, 3.0])}, {"a": 1.0, "log_only": 0.0})
    assert total.tolist() == [[1.0, 2.0]]


def test_combine_names_are_checked_both_ways() -> None:
    components = {"accuracy": rewards([1.0]), "format": rewards([1.0])}
    with pytest.raises(ValueError, match="names acuracy, but the task's rewards are: accuracy, format"):
        combine_rewards(components, {"acuracy": 1.0, "accuracy": 1.0, "format": 1.0})
    with pytest.raises(ValueError, match="no weight for format"):
        combine_rewards(components, {"accuracy": 1.0})
    with pytest.raises(ValueError, match=r"reward_weights\['format'\]=nan"):
        combine_rewards(components, {"accuracy": 1.0, "format": NAN})
    with pytest.raises(ValueError, match="one shape"):
        combine_rewards({"a": rewards([1.0]), "b": rewards([1.0, 2.0])})


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="'std' is unknown; set one of group, batch, none"):
        group_advantages(rewards([1.0]), scale_rewards="std")
    with pytest.raises(ValueError, match="infinite"):
        group_advantages(rewards([1.0, math.inf]))
    with pytest.raises(ValueError, match=r"got shape \(2,\)"):
        group_advantages(torch.zeros(2))
