"""The simulation fitted to recorded runs: a trace made by hand, and a real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Scripted
from lightning.pytorch.loggers import CSVLogger
from runs import run

from rollplex.callbacks import PrefixOverlap, TimelineLogger
from rollplex.cli import main
from rollplex.planner.calibrate import calibrate, read_trace
from rollplex.planner.simulate import SCHEDULES
from rollplex.timeline import GROUPS, PHASES, ROLLOUT_LANE, TRAIN_LANE, Timeline

PREFIX, SUFFIX, DECODE, PREFILL, UPDATE = 0.4, 0.2, 0.1, 0.3, 0.05


def by_hand(folder: Path, name: str, *, hidden: int) -> float:
    """Two bundles of one group, 20 decode steps alone. Beside a unit a decode step takes 1.25 times as long, and the
    unit twice. `hidden` prefixes run in the window. Returns the step's seconds."""
    t = Timeline()
    now = PREFILL
    t.add(ROLLOUT_LANE, "prefill", 0.0, now, rows=0, co=False)
    busy_until = now + hidden * 2 * PREFIX
    for i in range(hidden):
        t.add(TRAIN_LANE, "act_prefix", now + i * 2 * PREFIX, now + (i + 1) * 2 * PREFIX, index=i, hidden=True)
    for step in range(20):
        beside = now < busy_until - 1e-9
        length = DECODE * (1.25 if beside else 1.0)
        t.add(ROLLOUT_LANE, "decode", now, now + length, rows=4, co=beside)
        now += length
        if step == 9:
            t.add(GROUPS, "0", now, now)
    t.add(GROUPS, "1", now, now)
    t.add(PHASES, "rollout", 0.0, now)
    start = now
    t.add(PHASES, "score", start, start)
    for i in range(2):
        if i >= hidden:
            t.add(TRAIN_LANE, "act_prefix", now, now + PREFIX, index=i, hidden=False)
            now += PREFIX
        t.add(TRAIN_LANE, "act_suffix", now, now + SUFFIX, index=i, hidden=False)
        now += SUFFIX
    t.add(PHASES, "train", start, now)
    t.add(PHASES, "update", now, now + UPDATE)
    t.save(folder / "timeline" / f"{name}.json")
    return now + UPDATE


def test_what_went_into_a_trace_comes_out(tmp_path):
    by_hand(tmp_path, "step_000001", hidden=2)  # left out: warm-up
    serial = by_hand(tmp_path, "step_000002", hidden=0)
    overlap = by_hand(tmp_path, "step_000003", hidden=2)
    found = calibrate(tmp_path)
    assert found.alpha == pytest.approx(0.25) and found.r == pytest.approx(0.5)
    assert found.measured["act_prefix"].alone == pytest.approx(PREFIX)
    assert found.measured["act_prefix"].beside == pytest.approx(2 * PREFIX)
    assert found.measured["decode, 4 to 7 rows"].alone == pytest.approx(DECODE)
    assert found.measured["decode, 4 to 7 rows"].beside == pytest.approx(1.25 * DECODE)
    assert found.update == pytest.approx(UPDATE)
    steps = {s.name: s for s in found.steps}
    assert steps.keys() == {"step_000002", "step_000003"}
    assert (steps["step_000002"].schedule, steps["step_000003"].schedule) == ("serial", "overlap")
    assert steps["step_000002"].recorded == pytest.approx(serial)
    assert steps["step_000002"].predicted == pytest.approx(serial)
    assert steps["step_000003"].recorded == pytest.approx(overlap)
    assert steps["step_000003"].predicted == pytest.approx(overlap, rel=0.02)
    assert steps["step_000003"].rollout_predicted == pytest.approx(steps["step_000003"].rollout_recorded, rel=0.02)
    # Group 0 is complete at half of the decode: streaming hides its suffix too.
    a, b, c = (found.schedules[name] for name in SCHEDULES)
    assert a == pytest.approx(serial) and b == pytest.approx(overlap, rel=0.02) and c < b < a
    assert found.rates == {"alpha": found.alpha, "r": found.r} and found.logged is None


def test_without_overlap_alpha_and_r_stay_unknown(tmp_path):
    seconds = by_hand(tmp_path, "step_000002", hidden=0)
    found = calibrate(tmp_path)
    assert found.alpha is None and found.r is None and found.rates == {}
    assert found.shown("alpha") == "not measured, 0.15 assumed"
    assert found.schedules["serial"] == pytest.approx(seconds)


def test_a_folder_without_traces_says_what_to_add(tmp_path):
    with pytest.raises(SystemExit, match=r"has no timeline/step_\*\.json: record a run with .*TimelineLogger"):
        main(["plan", "--calibrate", str(tmp_path)])


@pytest.fixture(scope="module")
def recorded(parity_folder, tmp_path_factory):
    """A real run whose engine sleeps: 20 ms a prefill, 10 ms a decode step."""
    root = tmp_path_factory.mktemp("recorded")
    engine = FakeEngine(lambda r: Scripted([65] * (10 + 3 * r.group)), prefill_delay=0.02, decode_delay=0.01)
    logger = CSVLogger(root, name="csv")
    run(
        parity_folder, root, steps=6, engine=engine, callbacks=[PrefixOverlap(), TimelineLogger(every_n_steps=1)],
        max_completion_length=32, trainer={"logger": logger, "log_every_n_steps": 1},
    )  # fmt: skip
    return root


def test_a_real_run_is_predicted(recorded, capsys):
    found = calibrate(recorded)
    assert len(found.steps) == 5
    assert found.measured["decode, 4 to 7 rows"].count > 0 and "act_suffix" in found.measured
    assert {s.schedule for s in found.steps} == {"overlap"}
    mean = sum(s.predicted for s in found.steps) / sum(s.recorded for s in found.steps)
    assert mean == pytest.approx(1.0, abs=0.35)
    assert found.logged == pytest.approx(sum(s.recorded for s in found.steps) / 5, rel=0.5)
    marks = [s for s in read_trace(sorted((recorded / "timeline").iterdir())[-1]) if s.lane == GROUPS]
    assert sorted(s.name for s in marks) == ["0", "1", "2", "3"]
    main(["plan", "--calibrate", str(recorded)])
    out = capsys.readouterr().out
    assert "predicted" in out and "step_000002" in out and "alpha" in out


def test_a_plan_takes_over_what_was_measured(recorded, capsys):
    base = "plan --model Qwen2.5-VL-7B --gpu H100 --json".split()
    main(base)
    plain = json.loads(capsys.readouterr().out)
    main([*base, "--calibrate", str(recorded)])
    fitted = json.loads(capsys.readouterr().out)
    assert fitted["calibration"]["steps"] and fitted["seconds"].keys() == plain["seconds"].keys()
    assert fitted["seconds"]["serial, shared"] == plain["seconds"]["serial, shared"]
    assert fitted["seconds"]["overlap, shared"] != plain["seconds"]["overlap, shared"]
