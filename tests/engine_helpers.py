"""What every engine is tested with: requests, a run to the end, and transformers and the trainer to compare with."""

from __future__ import annotations

import copy
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from rollplex.data.records import Request, Rollout
from rollplex.engines import EngineContext, RemoteEngine, RolloutEngine, TorchEngine, WindowState
from rollplex.engines.remote_link import Elsewhere
from rollplex.models.split_model import SplitModel

END = 258  # <|im_end|>
VISION = (259, 260, 262, 263)


def started(actor, processor, **settings) -> TorchEngine:
    engine = TorchEngine(**settings)
    engine.start(EngineContext(model=actor, processor=processor, device=actor.device))
    return engine


def requests_for(prompts, params, g: int = 1, seed: int = 0) -> list[Request]:
    return [Request(b, i, p, params, seed=seed + 1000 * b + i) for b, p in enumerate(prompts) for i in range(g)]


def drain(engine: RolloutEngine) -> list[Rollout]:
    """Step until nothing is left; an engine that counts its prompts' K/V then holds none."""
    out: list[Rollout] = []
    for _ in range(10_000):
        if engine.window is WindowState.IDLE:
            break
        out += engine.step()
    assert engine.window is WindowState.IDLE and engine.num_running == 0
    assert not isinstance(engine, TorchEngine) or engine.prompt_kv_bytes == 0
    return out


def run(engine: RolloutEngine, requests) -> dict[tuple[int, int], Rollout]:
    engine.submit(requests)
    out = drain(engine)
    assert len(out) == len(requests)
    return {r.key: r for r in out}


def generate(hf, prompt, n: int, eos=None, banned=VISION) -> list[int]:
    """Transformers' greedy tokens on a copy of the model with its own attention."""
    hf = copy.deepcopy(hf).eval()
    hf.set_attn_implementation("sdpa")
    hf.generation_config = type(hf.generation_config)(pad_token_id=256, eos_token_id=eos)
    ids = prompt.input_ids[None]
    types = {"mm_token_type_ids": prompt.mm_token_type_ids[None]} if hf.config.model_type.startswith("qwen") else {}
    out = hf.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n,
        suppress_tokens=list(banned), **types, **prompt.media,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def trainer_logps(actor, prompt, rollout: Rollout, temperature: float) -> torch.Tensor:
    prefix = actor.prefix([prompt], grad=False)
    ids = rollout.token_ids[None]
    out = actor.suffix(prefix, ids, torch.tensor([ids.shape[1]]), temperature=temperature, grad=False)
    return out.logps_NR[0]


class Borrowed(RolloutEngine):
    """A running engine for one training run after another, where a start takes long.

    It computes with the weights of `source`, into which the run's are copied at each publish; `close` puts those back
    that it was lent with.
    """

    def __init__(self, engine: RolloutEngine, source: SplitModel) -> None:
        self.engine, self.source = engine, source
        self.takes_prefix, self.takes_vision = engine.takes_prefix, engine.takes_vision
        self._lent = [p.detach().clone() for p in source.hf.parameters()]

    def start(self, context: EngineContext) -> None:
        assert self.engine.window is WindowState.IDLE
        self._model = context.model
        self.publish(context.model.version)

    def publish(self, version: int) -> None:
        self._fill(self._model.hf.parameters(), version)

    def _fill(self, weights, version: int) -> None:
        with torch.no_grad():
            for p, value in zip(self.source.hf.parameters(), weights, strict=True):
                p.copy_(value)
        self.engine.publish(version)

    def close(self) -> None:
        self.engine.abort()
        self._fill(self._lent, 0)

    def submit(self, requests) -> None:
        self.engine.submit(requests)

    def step(self) -> list[Rollout]:
        return self.engine.step()

    def abort(self) -> list[Rollout]:
        return self.engine.abort()

    @property
    def window(self) -> WindowState:
        return self.engine.window

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def progress(self) -> int:
        return self.engine.progress


class LentProcess:
    """An engine server at an address that many tests use one after another: it takes seconds to start."""

    def __init__(self, folder: Path) -> None:
        key = folder / "engine.key"
        key.write_text(secrets.token_hex(32))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        self.key_file = str(key)
        command = [sys.executable, "-m", "rollplex.engines.remote_server", "--address", self.address, "--threads", "1"]
        command += ["--key-file", self.key_file, "--device", "cpu"]
        here = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": here}, stdout=subprocess.DEVNULL)
        self.place = Elsewhere(self.address, key.read_bytes(), str(key))
        self.line: Any = None

    def lend(self, engine: RolloutEngine | None = None, **settings: Any) -> RemoteEngine:
        if self.line is None:
            self.line = self.place.connect(120.0)
        return _Lent(self, engine, address=self.address, key_file=self.key_file, **settings)

    def end(self) -> None:
        if self.line is not None:
            self.line.close()
        self.process.kill()
        self.process.wait()


class _Lent(RemoteEngine):
    """Starts an engine of its own in the lent process, and leaves that running."""

    def __init__(self, process: LentProcess, engine, **settings) -> None:
        super().__init__(engine, **settings)
        self._lent = process

    def _launch(self):
        return self._lent.place, self._lent.line

    def close(self) -> None:
        if self._line is not None:
            self._call("close", phase="the end of a test")
        self._line = self._place = None
        super().close()
