"""The metrics table: docs show it, logged names are in it, formulas by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex.admission import Admission
from rollplex.metrics import known, metrics_table, pass_at_k, time_metrics, without_gaps
from rollplex.timeline import PHASES, ROLLOUT_LANE, TRAIN_LANE, Timeline

ROOT = Path(__file__).resolve().parent.parent


def test_docs_show_the_table():
    assert metrics_table() in (ROOT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize(
    "name", ["reward", "reward/correct", "time/rollout", "val/pass@4", "test/reward", "val/reward/x"]
)
def test_known_names(name):
    assert known(name)


@pytest.mark.parametrize("name", ["rewards", "val/", "time/", "val/pass@", "nonsense"])
def test_unknown_names(name):
    assert not known(name)


@pytest.mark.parametrize(
    ("n", "c", "k", "want"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (4, 0, 4, 0.0), (4, 4, 1, 1.0)]
)
def test_pass_at_k_by_hand(n, c, k, want):
    assert pass_at_k(n, c, k) == pytest.approx(want)


def test_pass_at_k_needs_enough_samples():
    with pytest.raises(ValueError, match="pass@8 needs at least 8"):
        pass_at_k(4, 1, 8)


def test_times_by_hand():
    """Step of 10 s: rollout 0-6 (prefill 1, decode 4), one prefix as prefill (0.5 s), one hidden (3 s), one after (1 s),
    train 6-9."""
    t = Timeline()
    t.add(PHASES, "rollout", 0, 6)
    t.add(PHASES, "train", 6, 9)
    t.add(ROLLOUT_LANE, "prefill", 0, 1)
    t.add(ROLLOUT_LANE, "decode", 1, 5)
    t.add(TRAIN_LANE, "act_prefix", 0, 0.5, hidden=False, prefill=True)
    t.add(TRAIN_LANE, "act_prefix", 2, 5, hidden=True)
    t.add(TRAIN_LANE, "act_prefix", 6, 7, hidden=False)
    t.add(TRAIN_LANE, "act_suffix", 7, 9, hidden=False)
    out = time_metrics(t, 10.0, 100)
    assert out["time/rollout"] == 6 and out["time/train"] == 3 and out["time/window"] == 4
    assert out["time/hidden"] == 3 and out["overlap_efficiency"] == 0.75 and out["time/reused"] == 0.5
    assert out["time/idle/rollout"] == 5 and out["time/idle/train"] == 3.5
    assert out["time/prefix"] == 4
    assert out["tokens_per_second"] == 10 and out["rollout_tokens_per_second"] == 20
    assert time_metrics(Timeline(), 1.0, 0)["time/hidden"] == 0


def test_a_logger_is_given_every_metric_again():
    earlier = ["time/release_kv", "memory/prefix_act", "reward/form", "kl"]
    filled = without_gaps({"kl": 2.0, "loss": 1.0}, earlier)
    assert filled.pop("reward/form") != filled.get("reward/form")  # NaN: nothing to take a mean of
    assert filled == {"kl": 2.0, "loss": 1.0, "time/release_kv": 0.0, "memory/prefix_act": 0.0}
    assert [name for name, value in without_gaps({}, earlier).items() if value != value] == earlier


# ---- admission ----


def seen(alpha: float, r: float, kind: str = "act_prefix") -> Admission:
    admission = Admission()
    for _ in range(3):
        admission.measurements.add_decode(1.0, 8, False)
        admission.measurements.add_decode(1.0 + alpha, 8, True)
        admission.measurements.add_unit(kind, 1.0, 1.0, False)
        admission.measurements.add_unit(kind, 1.0 / r, 1.0, True)
    admission.start_step()
    admission.start_step()  # not a probing step
    return admission


@pytest.mark.parametrize(
    ("alpha", "r", "pays"), [(0.15, 0.75, True), (1.0, 0.4, False), (3.0, 0.9, True), (9.0, 0.8, False)]
)
def test_co_running_must_pay(alpha, r, pays):
    """r against alpha / (1 + alpha): .13, .5, .75, .9, with the margin of .05."""
    admission = seen(alpha, r)
    assert admission.measurements.alpha == pytest.approx(alpha)
    assert admission.measurements.r("act_prefix") == pytest.approx(r)
    assert admission.admits("u", "act_prefix", 1.0, 0.0, 0) is pays
    assert admission.refused["slow"] == (set() if pays else {"u"})


def test_slowdown_compares_equal_batch_sizes_only():
    admission = Admission()
    admission.measurements.add_decode(1.0, 4, False)
    admission.measurements.add_decode(9.0, 64, True)
    assert admission.measurements.alpha is None


def test_first_step_and_every_nth_measure_alone():
    admission = Admission(probe_every=3)
    verdicts = []
    for _ in range(7):
        admission.start_step()
        verdicts.append(admission.admits("u", "act_prefix", 1.0, 0.0, 0))
    assert verdicts == [False, True, True, False, True, True, False]


def test_budget_refuses_what_does_not_fit_and_names_what_is_needed():
    admission = Admission(budget_bytes=1000, measure=False)
    admission.start_step()
    admission.learn_bytes("act_prefix[0]", "act_prefix", 10.0, 2.0, 400)
    assert admission.admits("a", "act_prefix", 10.0, 2.0, 590)
    assert not admission.admits("b", "act_prefix", 10.0, 2.0, 601) and admission.refused["memory"] == {"b"}
    assert not admission.admits("c", "act_prefix", 1.0, 2.5, 1), "denser than all seen: only alone"
    assert admission.admits("c", "act_prefix", 1.0, 2.5, 0) and admission.admits("d", "act_suffix", 9.0, 2.5, None)
    too_small = r"prefix_budget_bytes=1000 is smaller than one prefix: act_prefix\[1\] needs 1001"
    late = dict(unit="act_prefix[1]", kind="act_prefix", work=10.0, density=2.0, bytes_held=1001)
    with pytest.warns(UserWarning, match=f"{too_small}.*prefixes of its size run after the rollout"):
        admission.learn_bytes(**late)  # others did fit
    assert not admission.admits("e", "act_prefix", 10.0, 2.0, 1)
    fresh = Admission(budget_bytes=1000, measure=False)
    fresh.learn_bytes(**late, early=False)  # ran after the rollout: no budget applies
    with pytest.raises(ValueError, match=too_small):
        fresh.learn_bytes(**late)
    with pytest.raises(ValueError, match="1 or more"):
        Admission(budget_bytes=0)
