"""K/V memory is given back after a training rollout and taken again before the next: when, by whom, measured."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from fake_engine import FakeEngine
from runs import run, same_bits, weights
from test_schedule import Bench

from rollplex.engines import TorchEngine
from rollplex.engines.vllm_kv import KVMemory
from rollplex.metrics import time_metrics
from rollplex.phases import Phase, PhaseCallback
from rollplex.residency import KV_POOL
from rollplex.schedule import UnitError
from rollplex.timeline import RELEASE_KV, RESTORE_KV, ROLLOUT_LANE, Timeline


class Pool(FakeEngine):
    """A scripted engine with a pool of 1000 bytes."""

    releases_kv = True

    def __init__(self, *arguments, **settings) -> None:
        super().__init__(*arguments, **settings)
        self.held = True

    def release_kv(self) -> int:
        super().release_kv()
        freed, self.held = 1000 * self.held, False
        return freed

    def restore_kv(self) -> int:
        super().restore_kv()
        taken, self.held = 1000 * (not self.held), True
        return taken

    def step(self):
        assert self.held, "a step without K/V memory"
        return super().step()


def test_given_back_when_the_rollout_has_drained_and_taken_again_before_the_next():
    with Bench(kind=Pool) as bench:
        held: list[tuple[Phase, bool]] = []
        bench.executor.machine._notify = lambda *e: e[0] == "on_phase_start" and held.append((e[1], bench.engine.held))
        for _ in range(2):
            bench.run(bench.chain(0) + bench.chain(1))
            bench.executor.enter_update()
            bench.executor.machine.reset()
        assert held == [
            (Phase.ROLLOUT, True), (Phase.SCORE, False), (Phase.TRAIN, False), (Phase.UPDATE, False),
            (Phase.ROLLOUT, False), (Phase.SCORE, False), (Phase.TRAIN, False), (Phase.UPDATE, False),
        ]  # fmt: skip
        calls = [c for c in bench.engine.calls if c != "step"]
        assert calls[1:] == ["restore_kv", "submit", "release_kv"] * 2
        assert bench.engine.threads == {"rollplex-rollout"}
        moves = [(s.name, s.arguments["bytes"]) for s in bench.timeline.spans() if s.name in (RELEASE_KV, RESTORE_KV)]
        assert moves == [(RELEASE_KV, 1000), (RESTORE_KV, 1000), (RELEASE_KV, 1000)]


def test_evaluation_keeps_it_and_takes_what_it_needs():
    with Bench(kind=Pool) as bench:
        bench.run(bench.chain(0) + bench.chain(1))
        bench.executor.machine.reset()
        for _ in range(2):
            bench.finished.clear()
            bench.executor.generate([r for r in bench.engine.requests[:4]], bench.collect)
        assert bench.engine.held and bench.engine.calls.count("release_kv") == 1


def test_an_engine_that_does_not_want_it_is_left_alone():
    with Bench(kind=Pool) as bench:
        bench.engine.releases_kv = False
        bench.run(bench.chain(0) + bench.chain(1))
        assert bench.engine.held and "release_kv" not in bench.engine.calls


def test_a_step_that_failed_while_it_was_away_can_be_followed_by_another():
    def fails():
        raise RuntimeError("boom")

    with Bench(kind=Pool) as bench:
        with pytest.raises(UnitError, match="boom"):
            bench.run(bench.chain(0, body=fails) + bench.chain(1))
        assert not bench.engine.held
        bench.run(bench.chain(0) + bench.chain(1))
        assert not bench.engine.held and bench.engine.calls.count("release_kv") == 2


def test_metrics_by_hand():
    t = Timeline()
    t.add(ROLLOUT_LANE, RESTORE_KV, 0, 0.5, bytes=300)
    t.add(ROLLOUT_LANE, "prefill", 1, 2)
    t.add(ROLLOUT_LANE, "decode", 2, 5)
    t.add(ROLLOUT_LANE, RELEASE_KV, 5, 6, bytes=400)
    out = time_metrics(t, 10.0, 100)
    assert out["time/restore_kv"] == 0.5 and out["time/release_kv"] == 1.0
    assert out["kv_bytes_restored"] == 300 and out["kv_bytes_released"] == 400
    assert out["rollout_tokens_per_second"] == 25  # sampling only
    assert out["time/idle/rollout"] == 4.5
    assert "kv_bytes_released" not in time_metrics(Timeline(), 1.0, 1)


class Held(PhaseCallback):
    """Bytes of own K/V that the embedded engine holds when phases begin."""

    def __init__(self) -> None:
        self.bytes: dict[str, list[int]] = {}

    def on_phase_start(self, trainer, phase):
        engine = trainer.strategy.colocation.engine
        self.bytes.setdefault(phase.value, []).append(engine._own.nbytes)


@pytest.mark.parametrize("cuda_graphs", [False, "eager"])
def test_the_embedded_engine_trains_the_same_weights_without_it(parity_folder, tmp_path, cuda_graphs):
    results = {}
    for release in (False, True):
        held = Held()
        engine = TorchEngine(release_kv_cache=release, cuda_graphs=cuda_graphs)
        module = run(parity_folder, tmp_path, steps=3, engine=engine, callbacks=[held])
        results[release] = weights(module)
        metrics = [out["metrics"] for out in module.seen]
        for phase in ("score", "train", "update"):
            assert (sum(held.bytes[phase]) == 0) == release
        if release:
            freed = [m["kv_bytes_released"] for m in metrics]
            assert min(freed) > 0 and [m["kv_bytes_restored"] for m in metrics] == [0, *freed[:-1]]
            assert all(m["time/release_kv"] > 0 for m in metrics) and metrics[1]["time/restore_kv"] > 0
        else:
            assert not any("kv_bytes_released" in m for m in metrics)
    assert same_bits(results[False], results[True])


# ---- vLLM's on CUDA, as far as a recorder of calls can tell ----


class Recorder:
    """vLLM's engine and its core: what is called, and a device on which the KV cache is 700 bytes of 1000."""

    def __init__(self, monkeypatch) -> None:
        self.calls: list[str] = []
        self.used = 700
        self.engine_core = SimpleNamespace(engine_core=self)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - self.used, 1000))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.calls.append("empty_cache"))

    def step(self) -> None:
        self.calls.append("step")

    def pause_scheduler(self, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    def release_kv_cache_memory(self) -> None:
        self.calls.append("release")
        self.used -= 690

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")
        self.used += 690

    def resume_scheduler(self) -> None:
        self.calls.append("resume")


def test_sync_03_on_cuda_only_kv_memory_sleeps_and_wakes(monkeypatch):
    """Never a full sleep, which would take the weights along; the trainer's cached blocks go first."""
    engine = Recorder(monkeypatch)
    memory = KVMemory(engine, [torch.zeros(4)], on_cpu=False)
    assert memory.release() == 690 and memory.release() == 0
    assert engine.calls == ["step", "pause abort", "release"]
    engine.calls.clear()
    assert memory.restore() == 690 and memory.restore() == 0
    assert engine.calls == ["empty_cache", "wake ['kv_cache']", "resume"]


def test_the_ledger_knows_of_it_when_the_release_returns():
    """However slowly the engine counts: the ledger's check comes right after."""

    class SlowCount(Pool):
        def state_bytes(self) -> dict[str, int]:
            time.sleep(0.1)
            return {KV_POOL: 1000 * self.held}

    with Bench(kind=SlowCount) as bench:
        bench.lane.call(lambda engine: None)
        assert bench.lane.memory == {KV_POOL: 1000}
        assert bench.lane.release_kv() == 1000
        assert bench.lane.memory == {KV_POOL: 0}
