"""The simulated step: the paper's base point, hand-made schedules, and what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.planner.hardware import GPUS
from rollplex.planner.models import MODELS
from rollplex.planner.simulate import (
    SCHEDULES,
    Model,
    Placement,
    Rates,
    Unit,
    Workload,
    compare,
    response_lengths,
    run_lanes,
    step_time,
)

LARGE = Model(MODELS["Qwen2.5-VL-32B"], GPUS["H800"], Rates())
PLACE = Placement(gpus=32, train_tp=8, rollout_tp=4)
EVEN = Rates(alpha=0.25, r=0.5)


def test_the_papers_base_point():
    times = compare(LARGE, Workload(), PLACE)
    serial, overlap = times["serial, unshared"].total, times["overlap, unshared"].total
    assert serial == pytest.approx(57.4, rel=0.03) and overlap == pytest.approx(46.3, rel=0.03)
    assert serial / overlap == pytest.approx(1.24, abs=0.02)
    assert times["disaggregated, unshared"].total / overlap == pytest.approx(2.15, abs=0.1)


def test_against_a_baseline_that_shares_streaming_is_what_pays():
    times = {name: t.total for name, t in compare(LARGE, Workload(), PLACE).items()}
    assert 1.03 < times["serial, shared"] / times["overlap, shared"] < 1.16
    assert times["serial, shared"] / times["overlap + streaming, shared"] > 1.25
    assert times["serial, unshared"] > 2 * times["serial, shared"]


@pytest.mark.parametrize(
    ("schedule", "end", "beside"),
    [
        ("serial", 10 + 2 + 4 + 2 + 4, 0.0),
        # The window opens at 2; two prefixes of 2 s take 4 s each at half speed. The decode slows by 1.25 meanwhile:
        # of its 8 s, 8 / 1.25 = 6.4 are done at 10, the others at 11.6. Then the suffixes.
        ("overlap", 11.6 + 4 + 4, 8.0),
    ],
)
def test_lanes_by_hand(schedule, end, beside):
    """Two groups complete at 6 and 10; prefix 2 s, suffix 4 s each."""
    units = [Unit(2, 0, False), Unit(4, 0, True), Unit(2, 1, False), Unit(4, 1, True)]
    found = run_lanes(units, [6.0, 10.0], 2.0, schedule, EVEN)
    assert found[0] == pytest.approx(end) and found[2] == pytest.approx(beside)


def test_streaming_by_hand():
    """Group 0 is complete at 6: its suffix starts beside the decode of group 1, which ends at 30."""
    units = [Unit(2, 0, False), Unit(4, 0, True), Unit(2, 1, False), Unit(4, 1, True)]
    end, decoded, beside = run_lanes(units, [6.0, 30.0], 2.0, "overlap + streaming", EVEN)
    # 2..6: prefix 0 (progress 5.2); 6..10: prefix 1 (8.4); 10..18: suffix 0 (14.8); the decode ends 15.2 s later.
    assert beside == pytest.approx(4 + 4 + 8)
    assert decoded == pytest.approx(18 + 15.2)
    assert end == pytest.approx(18 + 15.2 + 4)


work = st.builds(
    Workload,
    prompts=st.integers(8, 24), num_generations=st.integers(2, 8), prompt_tokens=st.integers(50, 4000),
    response_tokens=st.floats(5, 800), sigma=st.floats(0, 1.2), beta=st.sampled_from([0.0, 0.04]),
    share_prefix=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(work, st.floats(0, 1), st.floats(0.05, 1))
def test_no_time_is_lost_or_made(w, alpha, r):
    model = Model(MODELS["Qwen2.5-VL-7B"], GPUS["H100"], Rates(alpha=alpha, r=r))
    place = Placement(8, 2, 1)
    times = [step_time(model, w, place, s) for s in SCHEDULES]
    assert times[0].hidden == 0
    for time in times[1:]:
        assert time.total >= times[0].rollout  # no schedule is faster than the decode alone
        assert time.hidden <= time.rollout + 1e-9
        # Beside the decode, a second of window is worth r - alpha / (1 + alpha) of serial time.
        if r > alpha / (1 + alpha) + 0.02:
            assert time.total <= times[0].total * 1.0001


def test_lengths_have_the_mean_and_the_seed():
    w = Workload(prompts=4000, num_generations=8, response_tokens=280, sigma=0.5)
    assert response_lengths(w).mean() == pytest.approx(280, rel=0.02)
    assert (response_lengths(w) == response_lengths(w)).all()
    assert set(response_lengths(Workload(sigma=0)).ravel().tolist()) == {280}


def test_a_placement_that_does_not_divide_says_so():
    with pytest.raises(ValueError, match="gpus=12 is no multiple of train_tp=8"):
        Placement(12, 8, 4)


def test_a_shared_vision_pass_runs_once_and_before():
    """By hand: what leaves the engine's prefill and the actor's prefix comes before the rollout."""
    model, place = Model(MODELS["Qwen2.5-VL-7B"], GPUS["H100"], EVEN), Placement()
    apart, w = Workload(prompts=8, sigma=0, beta=0.1), Workload(prompts=8, sigma=0, beta=0.1, shared_vision=True)
    frozen, both = Workload(prompts=8, sigma=0, beta=0.1, frozen_vision=True), replace(w, frozen_vision=True)
    tower = 8 * model.tower(w.prompt_tokens, 1)
    assert model.before(8, w, 1) == tower and model.before(8, apart, 1) == 0
    serial = {x: step_time(model, x, place, "serial").total for x in (apart, w, frozen, both)}
    assert serial[apart] - serial[w] == pytest.approx(tower)  # three passes forward become two: the reference's stays
    assert serial[frozen] - serial[both] == pytest.approx(2 * tower)  # and one, where its tower is the same
    assert serial[apart] - serial[frozen] == pytest.approx(3 * tower)  # backward and the forward it runs again
