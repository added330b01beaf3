"""Shared by all tests: quiet offline environment, one thread, tiny models and prompts."""

from __future__ import annotations

import os

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
}.items():
    os.environ.setdefault(name, value)

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_processor():
    from rollplex.models.tiny import build_tiny_in_memory

    return build_tiny_in_memory(init_std=0.1, seed=1)[1]


@pytest.fixture
def tiny_parity_model():
    """A fresh float32 model, every matrix drawn with std 0.1, in training mode."""
    from rollplex.models.tiny import build_tiny_in_memory

    return build_tiny_in_memory(init_std=0.1, seed=1)[0].train()


@pytest.fixture(scope="session")
def parity_folder(tmp_path_factory):
    """A tiny model folder, every matrix drawn with std 0.1: what a run loads."""
    from rollplex.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("models") / "parity", init_std=0.1, seed=1)


@pytest.fixture
def patient(monkeypatch):
    """The embedded engine leaves the trainer time, so that what can be overlapped is, however busy the machine: it
    decodes nothing of a window with open units before one has run in it, and nothing while one runs."""
    import copy
    import threading
    import time

    from rollplex.engines.torch_engine import TorchEngine
    from rollplex.phases import Phase
    from rollplex.schedule import Executor

    overlapped, busy = threading.Event(), threading.Event()
    overlapped.set()
    submit, loop, run, decode = Executor._submit, Executor._overlapped, Executor._run, TorchEngine._decode

    def _submit(self, requests, state):
        if self.openers and self.machine.phase is Phase.ROLLOUT:
            overlapped.clear()
        submit(self, requests, state)

    def _overlapped(self, pending, state, collect):
        opened = copy.copy(state)
        opened.window_open = True
        if not any(self._ready(u, state) and any(opens(u, opened) for opens in self.openers) for u in pending):
            overlapped.set()
        loop(self, pending, state, collect)

    def _run(self, unit, state, *, before=False):
        if not before:
            busy.set()
        try:
            run(self, unit, state, before=before)
        finally:
            busy.clear()
            overlapped.set()

    def _decode(self):
        if not overlapped.wait(2):  # no unit was admitted: for the test to tell
            overlapped.set()
        time.sleep(0.003)
        while busy.is_set():
            time.sleep(0.001)
        return decode(self)

    monkeypatch.setattr(Executor, "_submit", _submit)
    monkeypatch.setattr(Executor, "_overlapped", _overlapped)
    monkeypatch.setattr(Executor, "_run", _run)
    monkeypatch.setattr(TorchEngine, "_decode", _decode)


@pytest.fixture(scope="session")
def engine_process(tmp_path_factory):
    """An engine server (`engine_helpers.LentProcess`) for all tests: seconds to start."""
    from engine_helpers import LentProcess

    process = LentProcess(tmp_path_factory.mktemp("engine"))
    yield process
    process.end()


@pytest.fixture(scope="session")
def vllm_engine(parity_folder, tmp_path_factory):
    """(vllm.LLM, folder): the tiny model as we export it, in one engine of this process for all tests (20 s to start).

    vLLM reseeds the global generators, sets the float32 matmul precision and replaces torch.set_num_threads: all three
    are put back.
    """
    pytest.importorskip("vllm")
    from vllm import LLM

    from rollplex.checkpoints import rng_states, set_rng_states
    from rollplex.export import export
    from rollplex.models.registry import load_hf, load_processor, split

    policy = load_hf(str(parity_folder), "float32")
    split(policy)
    folder = export(policy, load_processor(str(parity_folder)), tmp_path_factory.mktemp("vllm") / "export")
    states, precision = rng_states(), torch.get_float32_matmul_precision()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    llm = LLM(
        str(folder), dtype="float32", enforce_eager=True, block_size=32, max_model_len=512, max_num_seqs=16,
        enable_chunked_prefill=False, max_num_batched_tokens=1024, kv_cache_memory_bytes=64 * 1024**2, seed=0,
        limit_mm_per_prompt={"image": 4, "video": 0},
    )  # fmt: skip
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    set_rng_states(states)
    yield llm, folder
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def clip(tmp_path_factory):
    """2 seconds at 10 frames per second, lossless; frame i is a flat grey of level 10 * i (`helpers.levels` reads them)."""
    import av
    import numpy as np

    path = tmp_path_factory.mktemp("clip") / "clip.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "gray"
        for i in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64), 10 * i, np.uint8), format="gray")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path
