"""An engine in a process of its own: the same tokens and weights as in the trainer's, and what happens when one dies.

That it keeps the engines' contract is tested with the embedded engine's own tests (test_torch_engine.py).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from engine_helpers import requests_for, run
from fake_engine import FakeEngine
from helpers import make_prompt, picture
from runs import run as train
from runs import same_bits, weights

from rollplex.callbacks import GroupStreaming, PrefillReuse, PrefixOverlap, SharedWeights
from rollplex.data.records import SamplingParams
from rollplex.engines import EngineContext, RemoteEngine, TorchEngine, VLLMEngine, remote_link, remote_server
from rollplex.engines.remote_link import EngineProcess, EngineProcessError, call, read_key
from rollplex.engines.remote_server import accept
from rollplex.lanes import EngineError
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.phases import PhaseCallback

HERE = Path(__file__).resolve().parent
STEPS = dict(steps=3, learning_rate=2e-5, adam_beta2=0.99)
PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture
def actor(tiny_parity_model) -> Qwen2_5VL:
    return Qwen2_5VL(tiny_parity_model)


@pytest.fixture(scope="session")
def prompts(tiny_processor):
    return [
        make_prompt(tiny_processor, t, images=[picture(56, 84)], name=t) for t in ("one picture", "another picture")
    ]


def start(engine, actor, processor):
    engine.start(EngineContext(model=actor, processor=processor, device=actor.device))
    return engine


@pytest.fixture(scope="module")
def colocated(parity_folder, tmp_path_factory):
    """(tokens, weights) of three serial steps with the engine in the trainer's process."""
    module = train(parity_folder, tmp_path_factory.mktemp("colocated"), **STEPS)
    return tokens(module), weights(module)


def tokens(module):
    return [
        [(r.key, r.token_ids.tolist(), r.logps.tolist(), r.weights_version) for r in group.rollouts]
        for out in module.seen
        for group in out["groups"]
    ]


# ---- the same bits ----


@pytest.mark.parametrize(
    "callbacks", [[], [PrefixOverlap()], [PrefixOverlap(), GroupStreaming(deterministic=True)]], ids=len
)
def test_three_steps_equal_those_of_a_colocated_engine_bit_for_bit(
    engine_process, parity_folder, tmp_path, colocated, callbacks
):
    engine = engine_process.lend(bucket_bytes=300_000)
    module = train(parity_folder, tmp_path, engine=engine, callbacks=callbacks, **STEPS)
    assert tokens(module) == colocated[0] and same_bits(weights(module), colocated[1])
    hidden = sum(out["metrics"].get("time/hidden", 0.0) for out in module.seen)
    assert (hidden > 0) == bool(callbacks)


def test_weights_travel_in_buckets_and_frozen_ones_once(engine_process, actor, tiny_processor, prompts):
    actor.freeze(["vision_tower", "projector"])
    engine = start(engine_process.lend(bucket_bytes=50_000), actor, tiny_processor)
    everything = sum(t.nbytes for t in [*actor.hf.parameters(), *actor.hf.buffers()])
    largest = max(p.nbytes for p in actor.hf.parameters())
    assert engine.sent_bytes == everything and engine.peak_bytes == 50_000 < largest  # even that comes in parts
    before = run(engine, requests_for(prompts, PARAMS, g=2))
    with torch.no_grad():
        for p in actor.hf.parameters():
            p.mul_(1 + 0.5 * p.requires_grad)
    actor.version = 5
    engine.publish(5)
    assert engine.sent_bytes == sum(p.nbytes for p in actor.hf.parameters() if p.requires_grad) < everything
    here = start(TorchEngine(), actor, tiny_processor)
    after, expected = (run(e, requests_for(prompts, PARAMS, g=2)) for e in (engine, here))
    assert {r.weights_version for r in after.values()} == {5}
    for key, rollout in expected.items():
        assert torch.equal(after[key].token_ids, rollout.token_ids) and torch.equal(after[key].logps, rollout.logps)
    assert any(not torch.equal(after[key].token_ids, before[key].token_ids) for key in after)
    engine.close()


@pytest.mark.slow
def test_of_a_model_with_adapters_only_these_travel(engine_process, parity_folder, tmp_path):
    pytest.importorskip("peft")
    engine = engine_process.lend()
    settings = STEPS | {"lora": {"r": 2}, "learning_rate": 1e-3}
    here = train(parity_folder, tmp_path / "here", **settings)
    there = train(parity_folder, tmp_path / "there", engine=engine, **settings)
    assert tokens(here) == tokens(there) and same_bits(weights(here), weights(there))
    trained = sum(p.nbytes for p in there.policy.parameters() if p.requires_grad)
    assert engine.sent_bytes == trained < sum(p.nbytes for p in there.policy.parameters()) / 10


# ---- errors ----


def test_an_error_of_the_engine_is_raised_as_its_own_and_it_goes_on(engine_process, actor, tiny_processor, prompts):
    engine = start(engine_process.lend(), actor, tiny_processor)
    with torch.no_grad():
        kept = actor.hf.lm_head.weight[5].clone()
        actor.hf.lm_head.weight[5] = float("nan")
    engine.publish(1)
    engine.submit(requests_for(prompts, PARAMS))
    with pytest.raises(FloatingPointError, match="one picture") as caught:
        for _ in range(1000):
            engine.step()
    assert "in the rollout, raised by RemoteEngine(TorchEngine on 127.0.0.1:" in caught.value.__notes__[0]
    with torch.no_grad():
        actor.hf.lm_head.weight[5] = kept
    engine.abort()
    engine.publish(2)
    assert len(run(engine, requests_for(prompts, PARAMS, g=2))) == 4
    engine.close()


class KillEngine(PhaseCallback):
    """Ends the engine's process in the middle of a rollout."""

    def on_window_open(self, trainer):
        os.kill(trainer.strategy.colocation.engine.pid, signal.SIGKILL)


def test_a_dead_engine_process_is_named_with_its_phase(parity_folder, tmp_path):
    engine = RemoteEngine(threads=1)
    begin = time.monotonic()
    with pytest.raises(EngineError) as caught:
        train(parity_folder, tmp_path, engine=engine, callbacks=[KillEngine()], max_completion_length=400)
    text = str(caught.value)
    for part in (
        "during the rollout phase",
        "RemoteEngine(TorchEngine on cpu)",
        "was ended by SIGKILL",
        "--ckpt_path last",
    ):
        assert part in text
    assert time.monotonic() - begin < 60 and engine._place is None


class Stuck(FakeEngine):
    """Never comes back: from `publish`, or from a step."""

    def __init__(self, where: str) -> None:
        super().__init__({})
        self.where, self.script = where, None

    def publish(self, version):
        if self.where == "publish":
            time.sleep(1000)

    def submit(self, requests):
        self._waiting.append(list(requests))

    def step(self):
        time.sleep(1000)


@pytest.mark.slow  # the lent process is stuck afterwards, so it takes one of its own
@pytest.mark.parametrize("where", ["publish", "step"])
def test_an_engine_that_hangs_is_an_error_and_its_process_is_ended(actor, tiny_processor, prompts, where, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    engine = start(RemoteEngine(Stuck(where), threads=1, timeout=2.0), actor, tiny_processor)
    pid = engine.pid
    if where == "step":
        engine.submit(requests_for(prompts, PARAMS))
        progress = engine.progress
        assert engine.step() == [] and engine.progress == progress  # no sign of life: rollout_timeout sees that
        with pytest.raises(EngineProcessError, match=r"Stuck on cpu\) did not answer within 2 s in an abort"):
            engine.abort()
    else:
        with pytest.raises(EngineProcessError, match="did not answer within 2 s in the publication of weights"):
            engine.publish(1)
    engine.close()
    assert not alive(pid)


# ---- nobody is left behind, nobody gets in ----

ORPHAN = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from rollplex.engines.remote_link import EngineProcess
place = EngineProcess(device="cpu", cores=None, threads=1)
line = place.connect(100.0)
if {stuck}:
    import conftest
    from test_remote_engine import Stuck
    from rollplex.data.records import SamplingParams
    from rollplex.engines import EngineContext, RemoteEngine
    from rollplex.models.qwen2_5_vl import Qwen2_5VL
    from rollplex.models.tiny import build_tiny_in_memory
    engine = RemoteEngine(Stuck("step"), threads=1)
    engine._launch = lambda: (place, line)
    hf, processor = build_tiny_in_memory(seed=1)
    engine.start(EngineContext(model=Qwen2_5VL(hf), processor=processor, device="cpu"))
    engine.submit([])
print(place.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("by", ["line", "parent"])
def test_an_engine_process_watches_its_line_and_its_parent(monkeypatch, tmp_path, by):
    """Three processes: this one, a trainer that is killed, its engine. A forked data loader may keep the line open."""
    monkeypatch.setattr(remote_server, "GRACE", 0.1)
    folder = tmp_path / f"{remote_link.FOLDER}x"
    folder.mkdir()
    trainers, engines = socket.socketpair()
    read, write = os.pipe()
    trainer = os.fork()
    if not trainer:
        parent = os.getpid()
        if not os.fork():
            trainers.close()
            remote_server.end_with_trainer(Connection(engines.detach()), None if by == "line" else parent, folder)
            os.write(write, str(os.getpid()).encode())
            time.sleep(1000)
        engines.close()
        time.sleep(1000)
    engines.close()
    if by == "line":
        trainers.close()
    pid = int(os.read(read, 100))
    time.sleep(0.7)
    assert alive(pid) and folder.exists()
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    end = time.monotonic() + 10
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid) and not folder.exists()
    trainers.close()


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [False, True])
def test_an_engine_process_ends_with_a_trainer_that_is_killed(stuck):
    code = ORPHAN.format(tests=str(HERE), stuck=stuck)
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, end = int(done.stdout), time.monotonic() + 20
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


def answer(listener: socket.socket, key: bytes, **settings) -> tuple[threading.Thread, list[Connection | None]]:
    got: list[Connection | None] = []
    thread = threading.Thread(target=lambda: got.append(accept(listener, key, **settings)), daemon=True)
    thread.start()
    return thread, got


def test_a_caller_without_the_key_is_turned_away_before_a_message_is_read(tmp_path, capsys):
    address, key = str(tmp_path / "line"), b"k" * 32
    with remote_server.listen(address) as listener:
        thread, got = answer(listener, key)
        with pytest.raises(AuthenticationError):
            call(address, b"x" * 32, 20.0)
        with call(address, key, 20.0) as line:
            thread.join(timeout=20)
            line.send_bytes(b"hello")
            assert got[0].recv_bytes() == b"hello"
        got[0].close()
    assert "a caller was turned away" in capsys.readouterr().err


def test_a_silent_caller_keeps_no_trainer_out_and_is_turned_away(capsys, monkeypatch):
    monkeypatch.setattr(remote_server, "CALLERS", 2)
    monkeypatch.setattr(remote_server, "PATIENCE", 0.5)
    key = b"k" * 32
    with remote_server.listen(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        silent = [socket.create_connection(address) for _ in range(3)]
        for caller in silent[:1]:
            caller.sendall(b"\0")  # part of a message is silence too
        thread, got = answer(listener, key)
        with call(address, key, 20.0) as line:
            thread.join(timeout=20)
            line.send_bytes(b"hello")
            assert got[0].recv_bytes() == b"hello"
            got[0].close()
    for caller in silent:
        caller.close()
    assert "a caller was turned away: silent for 0.5 s" in capsys.readouterr().err


def test_a_server_whose_trainer_was_killed_before_it_called_ends(tmp_path):
    with remote_server.listen(str(tmp_path / "line")) as listener:
        thread, got = answer(listener, b"k" * 32, parent=os.getpid())  # which is not our parent
        thread.join(timeout=20)
        assert got == [None]


def elsewhere(address: tuple[str, int], key_file: Path, **settings) -> RemoteEngine:
    return RemoteEngine(address=f"{address[0]}:{address[1]}", key_file=str(key_file), **settings)


@pytest.mark.parametrize(
    ("banner", "why"),
    [(b"", "silent for"), (b"SSH-2.0-OpenSSH_9.6\r\n", "bad message length"), (b"\0\0\0\1x", "protocol")],
)
def test_a_port_that_answers_and_is_no_engine_is_an_error_at_start_timeout(tmp_path, banner, why):
    (tmp_path / "key").write_text("k" * 32)
    lines = []

    def greet(listener: socket.socket) -> None:
        while True:
            try:
                lines.append(listener.accept()[0])
                lines[-1].sendall(banner)
            except OSError:  # it is closed
                return

    with remote_server.listen(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, args=[listener], daemon=True).start()
        address = listener.getsockname()
        engine, begin = elsewhere(address, tmp_path / "key", start_timeout=0.7), time.monotonic()
        with pytest.raises(EngineProcessError, match=rf"no engine server answers at 127.0.0.1:{address[1]} \(.*{why}"):
            engine._launch()
        assert 0.4 < time.monotonic() - begin < 5
        listener.shutdown(socket.SHUT_RDWR)


def test_another_key_is_an_error_that_names_it_and_the_address(tmp_path):
    (tmp_path / "key").write_text("k" * 32)
    with remote_server.listen(("127.0.0.1", 0)) as listener:
        thread, _ = answer(listener, b"x" * 32, parent=os.getppid())
        address = listener.getsockname()
        with pytest.raises(
            EngineProcessError, match=rf"at 127.0.0.1:{address[1]} has another key than key_file='.*key'"
        ):
            elsewhere(address, tmp_path / "key")._launch()
        call(address, b"x" * 32, 20.0).close()
        thread.join(timeout=20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cores", "abc"], "argument --cores: 'abc' must name cores of"),
        (["--cores", "0,"], "must name cores of"),
        (["--cores", "4096"], "must name cores of"),
        (["--threads", "0"], "must be a whole number, 1 or more"),
        (["--device", "tpux"], "must be"),
        (["--address", "here"], "must be HOST:PORT"),
        ([], "cannot listen at 127.0.0.1:"),
    ],
)
def test_a_server_that_cannot_start_says_so_in_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    (tmp_path / "key").write_text("k" * 32)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        try:
            code = remote_server.main(["--address", address, "--key-file", str(tmp_path / "key"), *arguments])
        except SystemExit as end:  # argparse
            code = end.code
    err = capsys.readouterr().err
    assert code == 2 and message in err.splitlines()[-1] and "Traceback" not in err


def test_a_childs_folder_goes_with_a_killed_trainer_and_no_other_does(tmp_path):
    for name, left in ((f"{remote_link.FOLDER}x", False), ("home", True)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "line").touch()
        remote_server.remove(tmp_path / name)
        assert (tmp_path / name).exists() == left


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("ROLLPLEX_ENGINE_KEY", raising=False)
    with pytest.raises(ValueError, match="set key_file, or the environment variable ROLLPLEX_ENGINE_KEY"):
        read_key(None)
    with pytest.raises(ValueError, match="is no file: write a random key there"):
        read_key(str(tmp_path / "none"))
    (tmp_path / "key").write_text("0123456789abcdef0123\n")
    assert read_key(str(tmp_path / "key")) == b"0123456789abcdef0123"
    monkeypatch.setenv("ROLLPLEX_ENGINE_KEY", "short")
    with pytest.raises(ValueError, match="at least 16 bytes"):
        read_key(None)


def test_a_child_listens_in_a_folder_of_its_user_only_and_leaves_nothing():
    process = EngineProcess(device="cpu", cores=None, threads=1)
    folder = Path(process.address).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    process.process.kill()
    with pytest.raises(EngineProcessError, match=r"was ended by SIGKILL .* while it started"):
        process.connect(60.0)
    process.end()
    assert not folder.exists()


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": RemoteEngine()}, "one process too many"),
        (
            {"engine": TorchEngine(vision="shared")},
            "vision=shared of TorchEngine inside a RemoteEngine: the trainer's features are not sent to another "
            "process; set vision to engine",
        ),
        ({"bucket_bytes": 0}, "bucket_bytes=0 must be above 0"),
        ({"timeout": -1}, "timeout=-1 must be above 0"),
        ({"device": "tpu"}, "device='tpu' must be"),
        ({"address": "here"}, "address='here' must be HOST:PORT"),
        ({"address": "here:1", "cores": [0]}, "given to the server at an address when it is started"),
        ({"cores": [4096]}, "must leave the trainer at least one of the cores"),
        ({"cores": sorted(os.sched_getaffinity(0))}, "must leave the trainer at least one of the cores"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RemoteEngine(**settings)


def test_errors_name_the_rank_among_several_and_each_has_a_server_of_its_own(monkeypatch, tmp_path):
    (tmp_path / "key").write_text("k" * 32)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)  # a vLLM of another test leaves its group
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    settings = {"key_file": str(tmp_path / "key"), "start_timeout": 0.2}
    with pytest.raises(ValueError, match=r"address='127.0.0.1:1' is one server, .* the trainer has 2: give a list"):
        RemoteEngine(address="127.0.0.1:1", **settings)._launch()
    with pytest.raises(ValueError, match="has no entry for rank 1"):
        RemoteEngine(address=["127.0.0.1:1"], **settings)._launch()
    engine = RemoteEngine(address=["127.0.0.1:1", "127.0.0.1:2"], **settings)
    with pytest.raises(EngineProcessError, match=r"no engine server answers at 127.0.0.1:2 .* A server serves one run"):
        engine._launch()
    error = str(engine._failed(f"weights did not reach {engine._name}"))
    assert "RemoteEngine(TorchEngine on 127.0.0.1:2) of rank 1" in error


@pytest.mark.parametrize("callback", [PrefillReuse, SharedWeights])
def test_callbacks_that_need_the_trainers_tensors_are_refused(parity_folder, tmp_path, callback):
    with pytest.raises(ValueError, match="RemoteEngine"):
        train(parity_folder, tmp_path, engine=RemoteEngine(), callbacks=[callback()])


# ---- more ----


class KeepCores(PhaseCallback):
    def on_window_open(self, trainer):
        pid = trainer.strategy.colocation.engine.pid
        self.engine, self.trainer = os.sched_getaffinity(pid), os.sched_getaffinity(0)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_engine_and_trainer_keep_to_their_cores(parity_folder, tmp_path, colocated):
    cores, kept = os.sched_getaffinity(0), KeepCores()
    first = min(cores)
    engine = RemoteEngine(TorchEngine(max_num_seqs=8), cores=[first])
    module = train(parity_folder, tmp_path, engine=engine, callbacks=[kept], **STEPS)
    assert kept.engine == {first} and kept.trainer == cores - {first} and os.sched_getaffinity(0) == cores
    assert same_bits(weights(module), colocated[1])


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_in_another_process_is_vllm_in_this_one(parity_folder, tmp_path):
    pytest.importorskip("vllm")
    settings = dict(max_model_len=512, max_num_seqs=16, block_size=32, kv_cache_memory_bytes=64 * 1024**2)
    runs = [
        train(parity_folder, tmp_path, engine=engine, **STEPS)
        for engine in (VLLMEngine(**settings), RemoteEngine(VLLMEngine(**settings), threads=1))
    ]
    assert tokens(runs[0]) == tokens(runs[1]) and same_bits(weights(runs[0]), weights(runs[1]))
