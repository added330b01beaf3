"""The executor: no unit before its needs, each exactly once, no deadlock, clean lanes after failures."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from fake_engine import FakeEngine, Scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex.bundles import make_bundles, split_mini_batches
from rollplex.data.records import Prompt, Request, Sample, SamplingParams
from rollplex.engines.base import EngineContext
from rollplex.lanes import EngineError, RolloutLane
from rollplex.phases import TRANSITIONS, Phase, PhaseMachine
from rollplex.schedule import Executor, StopRequested, UnitError
from rollplex.timeline import PHASES, ROLLOUT_LANE, TRAIN_LANE, Timeline
from rollplex.units import Unit, UnitKind

PROMPT = Prompt(sample=Sample(id="row"), input_ids=torch.tensor([1, 2]), mm_token_type_ids=torch.tensor([0, 0]))


def requests(groups: int, g: int) -> list[Request]:
    return [Request(j, i, PROMPT, SamplingParams(max_tokens=99), seed=0) for j in range(groups) for i in range(g)]


class Bench:
    """An executor over a scripted engine, with a log of everything that happened."""

    def __init__(
        self, groups: int = 2, g: int = 2, *, lengths=None, timeout=None, kind: type[FakeEngine] = FakeEngine, **engine
    ) -> None:
        self.groups, self.g = groups, g
        lengths = lengths or {}
        self.engine = kind(lambda r: Scripted([65] * lengths.get(r.key, 1 + r.group + r.index)), **engine)
        self.timeline = Timeline()
        self.lane = RolloutLane(self.engine, self.timeline)
        self.log: list[tuple] = []
        self.executor = Executor(self.lane, self.timeline, lambda *event: self.log.append(event), timeout=timeout)
        self.lane.start(EngineContext(model=None, processor=None, device=None))
        self.finished: dict[int, int] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc) -> None:
        self.lane.close()
        assert not any(t.name == "rollplex-rollout" for t in threading.enumerate())

    def collect(self, rollout) -> int | None:
        self.finished[rollout.group] = self.finished.get(rollout.group, 0) + 1
        return rollout.group if self.finished[rollout.group] == self.g else None

    def run(self, units) -> None:
        self.finished.clear()
        self.executor.rollout(lambda: requests(self.groups, self.g), units, self.collect)

    def unit(self, kind: UnitKind, index: int, *, needs=(), groups=None, responses=True, body=None) -> Unit:
        body = body or (lambda: None)
        return Unit(kind, index, body, tuple(groups if groups is not None else (index,)), tuple(needs), responses)

    def chain(self, index: int, body=None) -> list[Unit]:
        k = UnitKind
        return [
            self.unit(k.REWARD, index, body=body),
            self.unit(k.ACT_PREFIX, index, responses=False, body=body),
            self.unit(k.ACT_SUFFIX, index, needs=[(k.ACT_PREFIX, index), (k.REWARD, index)], body=body),
            self.unit(k.ACT_BACKWARD, index, needs=[(k.ACT_SUFFIX, index)], body=body),
        ]

    def order(self) -> list[str]:
        return [str(e[1]) for e in self.log if e[0] == "on_unit_start"]


def test_serial_runs_nothing_before_the_rollout_has_drained():
    with Bench() as bench:
        bench.run([u for j in range(2) for u in bench.chain(j)])
        names = [e[0] if e[0] != "on_phase_start" else e[1].value for e in bench.log]
        assert names.index("on_unit_start") > names.index("score") > names.index("rollout")
        assert bench.order() == [
            "reward[0]", "reward[1]", "act_prefix[0]", "act_suffix[0]", "act_backward[0]",
            "act_prefix[1]", "act_suffix[1]", "act_backward[1]",
        ]  # fmt: skip
        assert [e[1] for e in bench.log if e[0] == "on_group_finished"] == [0, 1]


def test_an_opener_admits_units_into_the_window_and_only_there():
    with Bench(groups=3, g=2, decode_delay=0.03) as bench:
        seen = []
        bench.executor.openers.append(lambda unit, state: state.window_open and not unit.needs_responses)
        units = [u for j in range(3) for u in bench.chain(j)]
        bench.executor._notify = lambda *e: (bench.log.append(e), seen.append((e, bench.executor.machine.phase)))
        bench.run(units)
        hidden = [str(e[1]) for e, phase in seen if e[0] == "on_unit_start" and phase is Phase.ROLLOUT]
        assert hidden == ["act_prefix[0]", "act_prefix[1]", "act_prefix[2]"]
        names = [e[0] for e in bench.log]
        assert names.index("on_window_open") < names.index("on_unit_start")


def test_streaming_starts_a_group_while_others_decode():
    with Bench(groups=2, g=1, lengths={(0, 0): 1, (1, 0): 12}, decode_delay=0.03) as bench:
        bench.executor.openers.append(lambda unit, state: state.window_open)
        bench.run([u for j in range(2) for u in bench.chain(j)])
        first = next(i for i, e in enumerate(bench.log) if e[0] == "on_unit_start" and str(e[1]) == "act_backward[0]")
        second = next(i for i, e in enumerate(bench.log) if e == ("on_group_finished", 1))
        assert first < second


@pytest.mark.parametrize("deterministic", [True, False])
def test_order_of_gradient_sums(deterministic):
    """Group 1 finishes first; the serial order of accumulation is kept only if asked for."""
    with Bench(groups=2, g=1, lengths={(0, 0): 12, (1, 0): 1}, decode_delay=0.03) as bench:
        bench.executor.openers.append(
            lambda unit, state: state.window_open and (not deterministic or state.is_next_in_order(unit))
        )
        bench.run([u for j in range(2) for u in bench.chain(j)])
        order = [name for name in bench.order() if name.startswith(("act_suffix", "act_backward"))]
        serial = ["act_suffix[0]", "act_backward[0]", "act_suffix[1]", "act_backward[1]"]
        assert (order == serial) == deterministic


def test_only_the_rollout_lane_calls_the_engine():
    with Bench() as bench:
        bench.run(bench.chain(0) + bench.chain(1))
        bench.lane.call(lambda engine: engine.publish(3))
    assert bench.engine.threads == {"rollplex-rollout"}
    assert bench.engine.calls[0] == "start" and bench.engine.calls[-1] == "close"


def test_engine_failure_names_progress_and_leaves_no_thread():
    with Bench(fail_at=3, error=RuntimeError("boom")) as bench:
        with pytest.raises(EngineError, match="boom"):
            bench.run(bench.chain(0) + bench.chain(1))
        assert bench.executor.machine.phase is Phase.IDLE
        with pytest.raises(EngineError, match="failed before"):
            bench.lane.call(lambda engine: None)


def test_unit_failure_names_unit_and_groups_and_aborts_the_engine():
    def boom() -> None:
        raise ValueError("bad numbers")

    with Bench(groups=2, g=1, lengths={(0, 0): 1, (1, 0): 500}, decode_delay=0.01) as bench:
        bench.executor.openers.append(lambda unit, state: state.window_open)
        units = [bench.unit(UnitKind.REWARD, 0, body=boom), *bench.chain(1)]
        with pytest.raises(UnitError, match=r"reward\[0\] \(groups 0\) failed: ValueError: bad numbers"):
            bench.run(units)
        assert "abort" in bench.engine.calls
        bench.run([])  # both lanes are usable again
        assert bench.finished == {0: 1, 1: 1}


def test_stop_is_honoured_between_units_before_any_update():
    with Bench(groups=1, g=1, lengths={(0, 0): 10_000}, decode_delay=0.001) as bench:
        timer = threading.Timer(0.1, lambda: setattr(bench.executor, "stop_requested", "SIGTERM"))
        timer.start()
        start = time.monotonic()
        with pytest.raises(StopRequested, match="SIGTERM"):
            bench.run(bench.chain(0))
        assert time.monotonic() - start < 5 and "abort" in bench.engine.calls
        with pytest.raises(StopRequested):
            bench.run([])


def test_a_step_whose_updates_have_begun_is_finished_before_stopping():
    with Bench(groups=1, g=1) as bench:
        bench.run(bench.chain(0))
        bench.executor.enter_update()
        bench.executor.stop_requested = "SIGINT"
        later = [u for u in bench.chain(0) if u.kind is not UnitKind.REWARD]
        later[1] = bench.unit(UnitKind.ACT_SUFFIX, 0, needs=[later[0].id])
        bench.executor.train(later)
        assert bench.order().count("act_backward[0]") == 2
        bench.executor.machine.reset()
        with pytest.raises(StopRequested):
            bench.run([])


def test_a_stalled_engine_ends_the_rollout():
    with Bench(groups=1, g=1, decode_delay=lambda step: 1.5 if step == 1 else 0.0, timeout=0.3) as bench:
        with pytest.raises(EngineError, match=r"no sign of life for 0\.3 s"):
            bench.run(bench.chain(0))


def test_the_refusal_of_a_request_is_raised_where_it_was_submitted():
    with Bench() as bench:

        def refuse(requests):
            raise ValueError("row 7 is too long")

        bench.engine.submit = refuse
        with pytest.raises(ValueError, match="row 7"):
            bench.run([])
        assert bench.executor.machine.phase is Phase.IDLE


def test_timeline_has_both_lanes_and_exports_a_trace(tmp_path):
    with Bench() as bench:
        bench.run(bench.chain(0) + bench.chain(1))
        bench.executor.enter(Phase.UPDATE)
        lanes = {s.lane for s in bench.timeline.spans()}
        assert lanes == {ROLLOUT_LANE, TRAIN_LANE, PHASES}
        trace = bench.timeline.to_trace()["traceEvents"]
        assert {e["name"] for e in trace if e["ph"] == "X"} >= {"prefill", "decode", "act_prefix", "rollout", "score"}
        assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in trace if e["ph"] == "X")
        bench.timeline.save(tmp_path / "a" / "trace.json")
        assert (tmp_path / "a" / "trace.json").stat().st_size > 100


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_random_graphs_run_each_unit_once_after_its_needs(seed, groups, g, fail):
    rng = random.Random(seed)
    lengths = {(j, i): rng.randint(0, 6) for j in range(groups) for i in range(g)}
    with Bench(groups, g, lengths=lengths, max_num_seqs=max(g, rng.randint(1, groups * g))) as bench:
        kinds = list(UnitKind)
        units: list[Unit] = []
        done: list = []
        broken = rng.randrange(groups * len(kinds)) if fail else -1
        for index in range(groups):
            for k, kind in enumerate(kinds):
                # Needs point to units that come earlier in the serial order, as the step builder's do.
                earlier = [u.id for u in units if kinds.index(u.kind) <= k and u.index <= index]
                needs = rng.sample(earlier, min(len(earlier), rng.randint(0, 3)))
                prefix = kind.value.endswith("prefix")
                number = len(units)

                def body(number=number, me=(kind, index), needs=needs, prefix=prefix, index=index) -> None:
                    assert all(need in done for need in needs)
                    assert prefix or bench.finished.get(index, 0) == g
                    time.sleep(rng.random() * 1e-4)
                    if number == broken:
                        raise RuntimeError("planned")
                    done.append(me)

                units.append(bench.unit(kind, index, needs=needs, responses=not prefix, body=body))
        admit = rng.random()
        bench.executor.openers.append(lambda unit, state: state.window_open and rng.random() < admit)
        if fail:
            with pytest.raises(UnitError, match="planned"):
                bench.run(units)
        else:
            bench.run(units)
            assert sorted(done) == sorted(u.id for u in units)
            assert len(set(done)) == len(done)


def test_phase_table_is_closed_and_refuses_the_rest():
    assert set(TRANSITIONS) == set(Phase)
    events = []
    machine = PhaseMachine(lambda *e: events.append(e))
    for phase in (
        Phase.ROLLOUT,
        Phase.SCORE,
        Phase.TRAIN,
        Phase.UPDATE,
        Phase.TRAIN,
        Phase.UPDATE,
        Phase.PUBLISH,
        Phase.IDLE,
    ):
        machine.to(phase)
    assert events[:3] == [
        ("on_phase_start", Phase.ROLLOUT),
        ("on_phase_end", Phase.ROLLOUT),
        ("on_phase_start", Phase.SCORE),
    ]
    with pytest.raises(AssertionError, match="idle -> train"):
        machine.to(Phase.TRAIN)


def test_bundles_hold_equal_lengths_and_cover_every_group_once():
    lengths = [5, 7, 5, 5, 9, 7]
    bundles = make_bundles(lengths, prompts_per_pass=2)
    assert [b.groups for b in bundles] == [(0, 2), (1, 5), (3,), (4,)]
    assert [b.index for b in bundles] == [0, 1, 2, 3]
    two = make_bundles(lengths, prompts_per_pass=4, num_mini_batches=2)
    assert [(b.groups, b.mini_batch) for b in two] == [((0, 2), 0), ((1,), 0), ((3,), 1), ((4,), 1), ((5,), 1)]
    assert [list(r) for r in split_mini_batches(2, 5)] == [[0], [1]]
