"""Lanes on CUDA, as far as a recorder of calls can tell; cores and thread counts on the CPU for real."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fake_engine import FakeEngine, Scripted
from runs import run, same_bits, weights

from rollplex import RollplexStrategy
from rollplex.callbacks import GroupStreaming, PrefillReuse, PrefixOverlap
from rollplex.cores import LaneThreads
from rollplex.data.records import PrefixPass, Prompt, Request, Sample, SamplingParams
from rollplex.engines.base import EngineContext
from rollplex.lanes import RolloutLane
from rollplex.streams import LaneStreams
from rollplex.timeline import ROLLOUT_LANE, TRAIN_LANE, Timeline

GPU = torch.device("cuda", 0)


class FakeCuda:
    """Streams as names, current per thread; `log` has what was called, in order."""

    def __init__(self) -> None:
        self.log: list[tuple] = []
        self.local = threading.local()
        cuda = self

        class Stream:
            def __init__(self, device=None, priority=0, name="rollout") -> None:
                self.name, self.priority = name, priority

            @staticmethod
            def priority_range():
                return (0, -5)

            def record_event(self):
                cuda.log.append(("record", self.name))
                return f"event of {self.name}"

            def wait_event(self, event):
                cuda.log.append(("wait", self.name, event))

            def wait_stream(self, other):
                cuda.log.append(("wait", self.name, other.name))

            def synchronize(self):
                cuda.log.append(("synchronize", self.name))

        self.Stream = Stream
        self.default = Stream(name="train")

    def current_stream(self, device=None):
        return getattr(self.local, "stream", self.default)

    @contextmanager
    def stream(self, stream):
        before = self.current_stream()
        self.local.stream = stream
        yield
        self.local.stream = before

    @contextmanager
    def device(self, device):
        yield


class FakeTensor:
    def __init__(self) -> None:
        self.read_by: list[str] = []

    def record_stream(self, stream) -> None:
        self.read_by.append(stream.name)


def test_what_crosses_lanes_waits_for_an_event_and_tells_the_allocator():
    cuda = FakeCuda()
    streams = LaneStreams(cuda=cuda)
    streams.start(GPU)
    assert streams._rollout.priority == -5  # the greatest priority is the smallest number
    lane = RolloutLane(FakeEngine(lambda r: Scripted([65])), Timeline(), streams=streams)
    lane.start(EngineContext(model=None, processor=None, device=GPU))
    keys = [FakeTensor() for _ in range(3)]
    prompt = Prompt(Sample("row"), torch.tensor([1]), torch.tensor([0]))
    given = PrefixPass(0, (0,), SimpleNamespace(leaves=keys))
    lane.publish(1)
    lane.submit([Request(0, i, prompt, SamplingParams(max_tokens=1), i, given) for i in range(2)])
    lane.close()
    assert cuda.log == [("record", "train"), ("wait", "rollout", "event of train")] * 2
    assert [k.read_by for k in keys] == [["rollout"]] * 3


def test_a_unit_is_over_on_the_device_when_it_ends():
    cuda = FakeCuda()
    streams = LaneStreams(cuda=cuda)
    streams.start(GPU)
    with streams.unit(hidden=True):
        cuda.log.append(("unit on", cuda.current_stream().name))
    assert cuda.log == [("unit on", "train"), ("synchronize", "train")]


def test_a_quota_holds_for_hidden_units_only_and_both_streams_wait_for_each_other():
    cuda = FakeCuda()
    streams = LaneStreams(train_sms=40, cuda=cuda)
    streams._green_stream = lambda device: cuda.Stream(name="quota")
    streams.start(GPU)
    for hidden in (True, False):
        with streams.unit(hidden=hidden):
            cuda.log.append(("unit on", cuda.current_stream().name))
    assert cuda.log == [
        ("wait", "quota", "train"), ("unit on", "quota"), ("synchronize", "quota"), ("wait", "train", "quota"),
        ("unit on", "train"), ("synchronize", "train"),
    ]  # fmt: skip


def test_settings_that_the_device_cannot_give_are_named():
    with pytest.raises(ValueError, match="train_sms=0 must be at least 1"):
        LaneStreams(train_sms=0)
    with pytest.raises(ValueError, match="train_sms=8 needs a CUDA device, but device is cpu"):
        LaneStreams(train_sms=8).start(torch.device("cpu"))
    cuda = FakeCuda()
    cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    with pytest.raises(ValueError, match="train_sms=132 leaves nothing to limit: cuda:0 has 132"):
        LaneStreams(train_sms=132, cuda=cuda).start(GPU)


# ---- CPU ----


def on_a_thread(function):
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join()
    return out[0]


def test_cores_are_shared_while_both_lanes_work_and_given_back():
    mine = os.sched_getaffinity(0)
    if len(mine) < 2:
        pytest.skip("needs two cores")
    threads = LaneThreads(2, 1, 1, pin_cores=True)
    threads.settle()

    def state(lane):
        threads.apply(lane)
        return os.sched_getaffinity(0), torch.get_num_threads()

    def both():
        threads.co_running = True
        beside = state(ROLLOUT_LANE)
        threads.co_running = False
        return beside, state(ROLLOUT_LANE)

    try:
        threads.co_running = True
        train = state(TRAIN_LANE)
        rollout, alone = on_a_thread(both)
        threads.co_running = False
        assert train[0].isdisjoint(rollout[0]) and train[0] | rollout[0] == mine and (train[1], rollout[1]) == (1, 1)
        assert alone == (mine, 2) == state(TRAIN_LANE)
        threads.co_running = True
        state(TRAIN_LANE)
    finally:
        threads.restore()
    assert os.sched_getaffinity(0) == mine


def test_more_threads_than_cores_cannot_be_pinned():
    cores = len(os.sched_getaffinity(0))
    threads = LaneThreads(2 * cores, cores, cores, pin_cores=True)
    with pytest.raises(
        ValueError, match=rf"pin_cores=true .* needs {2 * cores} cores, but this process may use {cores}"
    ):
        threads.settle()


def test_pinned_lanes_train_the_same_weights(parity_folder, tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    before = os.sched_getaffinity(0)
    # One thread alone too: which units run beside the engine is a matter of time, and threads change rounding.
    options = dict(threads=1, rollout_threads=1, train_threads=1, admission="always")
    a, b = (
        run(parity_folder, tmp_path, callbacks=[PrefillReuse(), PrefixOverlap(), GroupStreaming(deterministic=True)],
            beta=0.04, max_completion_length=16,
            trainer={"strategy": RollplexStrategy(pin_cores=pin, **options)}, prompts_per_pass=4)
        for pin in (False, True)
    )  # fmt: skip
    assert same_bits(weights(a), weights(b))
    assert os.sched_getaffinity(0) == before
