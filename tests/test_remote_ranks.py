"""An engine of several processes behind one server: weights that come tensor by tensor, ranks that go in step, and what
happens when one of them fails."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import generate, requests_for, run
from fake_engine import FakeEngine
from helpers import make_prompt, picture
from test_remote_engine import alive, start
from torch import Tensor

from rollplex.data.records import SamplingParams
from rollplex.engines import RemoteEngine, VLLMEngine, remote_ranks, remote_server
from rollplex.engines.remote_commands import Server
from rollplex.engines.remote_link import EngineProcess, EngineProcessError, receive, send
from rollplex.engines.remote_messages import EngineState, Refused, Reply, versions
from rollplex.engines.remote_ranks import Follower, LedEngine
from rollplex.engines.remote_weights import ENGINE, TRAINER, TensorSpec, WeightChannel
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.tiny import build_tiny_in_memory

# ---- weights ----


class Wire:
    """A process group's broadcast, for two channels in one process: the trainer's calls first."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.trainer = SimpleNamespace(broadcast=lambda flat, _: self._take(self.sent.append(flat[0].clone())))
        self.engine = SimpleNamespace(broadcast=lambda flat, _: self._take(flat[0].copy_(self.sent.pop(0))))

    def _take(self, _):
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("seed", range(8))
def test_tensors_arrive_whole_one_by_one_whatever_the_buckets(seed):
    draw = random.Random(seed)
    shapes = [
        tuple(draw.choice([0, 1, 3, 7, 40]) for _ in range(draw.choice([1, 2]))) for _ in range(draw.randrange(9))
    ]
    tensors = [torch.randn(shape).to(draw.choice([torch.float32, torch.bfloat16])) for shape in shapes]
    bucket = draw.choice([4, 10, 64, 1000, 10**6])
    wire, cpu = Wire(), torch.device("cpu")
    sender = WeightChannel(wire.trainer, TRAINER, cpu, bucket)
    total = sum(t.nbytes for t in tensors)
    asked = []
    assert sender.push((asked.append(i) or t for i, t in enumerate(tensors)), [t.nbytes for t in tensors]) == total
    assert len(asked) == len(tensors) or not any(t.numel() for t in tensors[len(asked) :])
    assert sender.peak_bytes <= bucket and all(flat.nbytes <= bucket for flat in wire.sent)
    again = list(wire.sent)
    receiver = WeightChannel(wire.engine, ENGINE + 1, cpu, bucket)
    specs = [TensorSpec(str(i), str(i), tuple(t.shape), t.dtype, True, 0) for i, t in enumerate(tensors)]
    came = list(receiver.arrive(specs))
    wanted = [t for t in tensors if t.numel()]
    assert len(came) == len(wanted) and all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(came, wanted, strict=True)
    )
    assert not wire.sent
    wire.sent = again
    filled = [torch.empty_like(t) for t in tensors]
    assert receiver.pull(filled) == total and all(torch.equal(a, b) for a, b in zip(filled, tensors, strict=True))


# ---- ranks in step ----


class Told:
    """A further rank that answers as told."""

    def __init__(self, rank: int, *answers) -> None:
        self.rank, self.answers, self.told = rank, list(answers), []

    def tell(self, name, *arguments):
        self.told.append(name)

    def answer(self, limit=None):
        return self.answers.pop(0) if self.answers else None


FINE = Reply(None, EngineState())
REFUSED = Refused(None, "Traceback: no memory left", EngineState())


def led(*followers) -> LedEngine:
    engine = FakeEngine({})
    engine.publish = lambda version: None
    engine.submit = lambda requests: (_ for _ in ()).throw(ValueError("row 'a' is too long"))
    return LedEngine(engine, followers)


def test_all_ranks_are_told_in_one_order_and_waited_for():
    followers = [Told(1, FINE, FINE), Told(2, FINE, FINE)]
    engine = led(*followers)
    engine.publish(1)
    engine.publish(2)
    assert [f.told for f in followers] == [["publish"] * 2] * 2 and not any(f.answers for f in followers)


def test_what_all_ranks_refuse_is_the_first_ranks_own_error_and_the_engine_goes_on():
    engine = led(Told(1, REFUSED, FINE))
    with pytest.raises(ValueError, match="row 'a' is too long"):
        engine.submit([])
    engine.publish(1)


@pytest.mark.parametrize(
    ("command", "answer", "message"),
    [
        ("publish", REFUSED, r"rank 1 of the engine failed in publish:\nTraceback: no memory left"),
        ("submit", FINE, "row 'a' is too long"),
        ("submit", None, "row 'a' is too long"),  # it is still in the command
    ],
)
def test_after_an_error_that_only_some_ranks_have_the_engine_does_nothing_more(command, answer, message):
    engine = led(Told(1, *([answer] if answer else [])))
    with pytest.raises((ValueError, EngineProcessError), match=message):
        getattr(engine, command)([])
    with pytest.raises(EngineProcessError, match="out of step after an error: publish is not possible"):
        engine.publish(1)


def follower(monkeypatch, lost) -> tuple[Follower, Connection]:
    """One whose process is a socket of this one."""
    ours, theirs = (Connection(s.detach()) for s in socket.socketpair())
    process = SimpleNamespace(
        connect=lambda limit: ours, fate=lambda: "the engine process (pid 7) was ended by SIGKILL"
    )
    process.end = lambda: None
    monkeypatch.setattr(remote_ranks, "EngineProcess", lambda **settings: process)
    found = Follower(1, torch.device("cpu"), 1, lost.append)
    found.connect()
    return found, theirs


def within(seconds: float, condition) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_rank_whose_process_is_gone_is_told_of_at_once(monkeypatch):
    lost: list[str] = []
    one, line = follower(monkeypatch, lost)
    line.close()
    assert within(5, lambda: lost) and lost == [
        "rank 1 of the engine is gone: the engine process (pid 7) was ended by SIGKILL"
    ]
    one.end()


def test_a_rank_that_fails_while_the_first_one_waits_for_it_elsewhere_is_told_of(monkeypatch):
    monkeypatch.setattr(remote_ranks, "GRACE", 0.2)
    lost: list[str] = []
    one, line = follower(monkeypatch, lost)
    one.tell("step")
    assert receive(line, 5.0) == ("step", ())
    send(line, REFUSED)
    assert one.answer() == REFUSED  # in time: the caller says what it makes of it
    time.sleep(0.4)
    assert lost == []
    send(line, REFUSED)
    assert within(5, lambda: lost) and lost == ["rank 1 of the engine failed:\nTraceback: no memory left"]
    one.end()
    line.close()


def test_a_lost_rank_ends_the_first_one_which_says_so_to_the_trainer():
    """Whatever that one waits in."""
    ours, theirs = (Connection(s.detach()) for s in socket.socketpair())
    pid = os.fork()
    if not pid:
        ours.close()
        server = Server(theirs, torch.device("cpu"))
        threading.Thread(target=server._lost, args=["rank 1 of the engine is gone"]).start()
        time.sleep(1000)
    theirs.close()
    message = receive(ours, 20.0)
    assert isinstance(message, Refused) and str(message.error) == "rank 1 of the engine is gone"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    ours.close()


def test_a_message_that_cannot_be_read_there_is_refused_and_the_server_goes_on():
    """A class of the trainer's that the server's machine does not have."""
    ours, theirs = (Connection(s.detach()) for s in socket.socketpair())
    thread = threading.Thread(target=Server(theirs, torch.device("cpu")).serve, daemon=True)
    thread.start()
    ours.send_bytes(b"cno_such_module\nEngine\n.")
    refused = receive(ours, 10.0)
    assert isinstance(refused, Refused) and "No module named 'no_such_module'" in str(refused.error)
    here = versions()
    send(ours, ("hello", (here | {"transformers": "4.0"},)))
    assert "has transformers 5" in str((answer := receive(ours, 10.0)).error) and "the trainer 4.0" in str(answer.error)
    send(ours, ("hello", (here,)))
    assert isinstance(receive(ours, 10.0), Reply)
    send(ours, ("goodbye", ()))
    thread.join(timeout=10)
    assert not thread.is_alive()
    ours.close()


# ---- processes ----


def test_a_child_sees_as_many_gpus_as_its_engine_has_ranks(monkeypatch):
    from rollplex.engines.remote_link import _environment

    def seen(device, gpus, visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return _environment(device, gpus).get("CUDA_VISIBLE_DEVICES")

    assert seen("cuda:1", 1, "") == "1" and seen("cuda:2", 2, "") == "2,3"
    assert seen("cuda:1", 2, "4,5,6") == "5,6" and seen("cuda:1", None, "5,6") == "5,6"
    assert seen("cpu", 2, "4,5") == seen("cuda", 2, "4,5") == "4,5"
    with pytest.raises(
        ValueError, match=r"device='cuda:2' of an engine on 2 GPU\(s\) needs cuda:3, and this process sees 3"
    ):
        seen("cuda:2", 2, "4,5,6")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux alone has the system call")
def test_a_stopped_process_goes_on_when_its_parent_is_killed():
    """It could not see that itself, and would hold its memory for good."""
    read, write = os.pipe()
    parent = os.fork()
    if not parent:
        child = os.fork()
        if not child:
            remote_server.wake_with_parent()
            os.write(write, str(os.getpid()).encode())
            time.sleep(1000)
        time.sleep(1000)
    pid = int(os.read(read, 100))
    os.kill(pid, signal.SIGSTOP)
    assert within(5, lambda: state(pid) == "T")
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert within(5, lambda: state(pid) != "T")
    os.kill(pid, signal.SIGKILL)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def test_adapters_do_not_go_to_an_engine_of_several_ranks(tiny_parity_model, tiny_processor):
    from rollplex.models.lora import add_adapters, lora_config

    pytest.importorskip("peft")
    add_adapters(tiny_parity_model, lora_config({"r": 2}), seed=0)
    engine = RemoteEngine(VLLMEngine(tensor_parallel_size=2))
    with pytest.raises(ValueError, match="lora with tensor_parallel_size=2 of an engine inside a RemoteEngine"):
        start(engine, Qwen2_5VL(tiny_parity_model), tiny_processor)


# ---- vLLM over two processes ----

LENGTH = 8


@pytest.fixture(scope="module")
def split():
    """A model that two ranks can share, and prompts."""
    hf, processor = build_tiny_in_memory(init_std=0.1, seed=1, hidden_size=256, heads=8, kv_heads=2)
    prompts = [
        make_prompt(processor, "plain question", name="text"),
        make_prompt(processor, "two", name="two", images=[picture(56, 84, 1), picture(140, 56, 2)]),
    ]
    return Qwen2_5VL(hf.train()), processor, prompts


def vllm_of_two(**settings) -> RemoteEngine:
    pytest.importorskip("vllm")
    inner = VLLMEngine(
        max_model_len=512, max_num_seqs=16, block_size=32, kv_cache_memory_bytes=2**24, tensor_parallel_size=2
    )
    return RemoteEngine(inner, threads=1, bucket_bytes=200_000, **settings)


def greedy_is_transformers(engine, actor, prompts) -> list[list[int]]:
    found = run(engine, requests_for(prompts, SamplingParams(max_tokens=LENGTH, temperature=0.0)))
    tokens = [found[b, 0].token_ids.tolist() for b in range(len(prompts))]
    assert tokens == [generate(actor.hf, p, LENGTH) for p in prompts]
    return tokens


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.distributed
def test_a_split_engine_elsewhere_samples_with_the_trainers_weights_and_holds_shards_alone(split):
    actor, processor, prompts = split
    engine = start(vllm_of_two(), actor, processor)
    try:
        before = greedy_is_transformers(engine, actor, prompts)
        held = engine.memory()
        whole = sum(p.nbytes for p in actor.hf.parameters())
        assert held["engine_weights"] < 0.6 * whole and held["kv_pool"] == 2**24
        kept = [p.detach().clone() for p in actor.hf.parameters()]
        with torch.no_grad():
            for p in actor.hf.parameters():
                p.mul_(1.05).add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        engine.publish(1)
        assert engine.sent_bytes == whole and engine.peak_bytes <= 200_000
        assert greedy_is_transformers(engine, actor, prompts) != before and engine.memory() == held
        with pytest.raises(ValueError, match="max_model_len"):
            engine.submit(requests_for(prompts, SamplingParams(max_tokens=1000)))
        assert len(run(engine, requests_for(prompts, SamplingParams(max_tokens=LENGTH), g=3))) == 6
    finally:
        engine.close()
    with torch.no_grad():
        for p, value in zip(actor.hf.parameters(), kept, strict=True):
            p.copy_(value)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.distributed
def test_a_rank_that_is_killed_is_named_and_no_process_is_left(split):
    actor, processor, prompts = split
    engine = start(vllm_of_two(), actor, processor)
    leader = engine.pid
    (second,) = children(leader)
    engine.submit(requests_for(prompts, SamplingParams(max_tokens=400)))
    for _ in range(5):
        engine.step()
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineProcessError, match=r"rank 1 of the engine is gone: .* was ended by SIGKILL"):
        for _ in range(1000):
            engine.step()
    engine.close()
    assert not alive(leader) and not alive(second)


def children(pid: int) -> list[int]:
    """Its engine processes."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(p) for path in found for p in path.read_text().split()]
    return [p for p in pids if b"remote_server" in Path(f"/proc/{p}/cmdline").read_bytes()]


def test_a_child_is_forgotten_by_the_disk_once_both_sides_have_met():
    process = EngineProcess(device="cpu", cores=None, threads=1)
    folder = Path(process.address).parent
    process.settled()
    assert not folder.exists()
    process.process.kill()
    process.end()
