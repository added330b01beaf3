"""Pictures of plans and runs; without matplotlib one line that says what to install."""

from __future__ import annotations

import builtins
from itertools import pairwise

import pytest
from runs import run

from rollplex.callbacks import MemoryReport, PrefixOverlap, TimelineLogger
from rollplex.cli import main
from rollplex.planner.hardware import GPUS
from rollplex.planner.models import MODELS
from rollplex.planner.simulate import Model, Placement, Rates, Workload, lane_spans, step_time
from rollplex.timeline import ROLLOUT_LANE, TRAIN_LANE

PLAN = "plan --model Qwen2.5-VL-7B --gpu H100 --prompts 8"


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *rest, **more):
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        SystemExit, match=r"plots need matplotlib, which is not installed: pip install 'rollplex\[plots\]'"
    ):
        main([*PLAN.split(), "--plots", str(tmp_path)])


@pytest.mark.parametrize("schedule", ["serial", "overlap", "overlap + streaming"])
def test_the_planned_lanes_are_those_of_the_simulation(schedule):
    model = Model(MODELS["Qwen2.5-VL-7B"], GPUS["H100"], Rates())
    work, place = Workload(prompts=8), Placement()
    spans, time = lane_spans(model, work, place, schedule), step_time(model, work, place, schedule)
    units = [s for s in spans if s.lane == TRAIN_LANE]
    assert len(units) == 8 * 4 and max(s.end for s in units) == pytest.approx(time.total - 1.0 - 2 * 0.3)
    engine = [s for s in spans if s.lane == ROLLOUT_LANE]
    assert [s.name for s in engine] == ["prefill", "decode"] and engine[-1].end == pytest.approx(time.rollout)
    assert any(s.arguments["hidden"] for s in units) is (schedule != "serial")
    ordered = sorted(units, key=lambda s: s.start)
    assert all(a.end <= b.start + 1e-9 for a, b in pairwise(ordered))


def test_plan_and_run_are_drawn(parity_folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    root, out = tmp_path / "run", tmp_path / "plots"
    run(parity_folder, root, callbacks=[PrefixOverlap(), TimelineLogger(1), MemoryReport()])
    main([*PLAN.split(), "--calibrate", str(root), "--plots", str(out)])
    names = {"plan_memory.png", "plan_timeline.png", "run_memory.png", "run_timeline.png"}
    assert {path.name for path in out.iterdir()} == names
    for path in out.iterdir():
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    assert "run_timeline.png" in capsys.readouterr().out


def test_bars_are_the_profile(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes

    from rollplex.reports.plots import plot_memory
    from rollplex.residency import Stage

    drawn = {}
    bar = Axes.bar
    monkeypatch.setattr(
        Axes, "bar", lambda self, *a, **k: drawn.update({k["label"]: (a, k["bottom"])}) or bar(self, *a, **k)
    )
    profile = {"a": {Stage.TRAIN: 2048.0, Stage.UPDATE: 1024.0}, "b": {Stage.TRAIN: 1024.0, Stage.UPDATE: 0.0}}
    plot_memory(profile, "x", tmp_path / "x.png")
    assert drawn["a"] == ((["train", "update"], [2.0, 1.0]), [0.0, 0.0])
    assert drawn["b"] == ((["train", "update"], [1.0, 0.0]), [2.0, 1.0])
