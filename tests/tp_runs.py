"""A training run with tensor-parallel trainers and vLLM engines, started by torchrun from test_tp_strategy.py.

Each rank writes what it saw as JSON: greedy responses before and after updates against transformers' on the gathered
weights, the layout plan's bytes and the storage that the engine really has.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from engine_helpers import generate, requests_for
from families import encoded
from lora_cases import SETTINGS
from resample_cases import scenario
from runs import run
from test_vllm_engine import vllm_model

from rollplex import RollplexDDPStrategy, RollplexDeepSpeedStrategy
from rollplex.callbacks import GroupStreaming, PrefixOverlap, SharedWeights
from rollplex.data.records import SamplingParams
from rollplex.engines import VLLMEngine
from rollplex.phases import PhaseCallback

LENGTH = 8
LIMIT = 500
"""Seconds; a hang is a failure."""


def storages(tensors: Any) -> dict[int, int]:
    """Address -> bytes of the storages behind some tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


class Watch(PhaseCallback):
    def __init__(self, binding: Any = None) -> None:
        self.report: dict[str, Any] = {"greedy": [], "hidden": 0, "steps": [], "copied": []}

    def on_train_start(self, trainer, pl_module):
        self.prompts = encoded(pl_module.processor, ["text", "picture", "two pictures"])
        self._account(trainer, pl_module)
        self._compare(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.report["steps"].append(outputs["metrics"])
        self._compare(trainer, pl_module)
        self.report["copied"].append(pl_module.colocation.engine.copied_bytes)

    def on_train_end(self, trainer, pl_module):
        whole = trainer.strategy.whole_model()
        self.weights = {n: p.detach().clone() for n, p in whole.hf.named_parameters()}
        self.report["mismatches"] = trainer.strategy.colocation.watch.mismatches

    def on_unit_start(self, trainer, unit):
        self.report["hidden"] += trainer.strategy.colocation.executor.machine.phase.value == "rollout"

    def _compare(self, trainer, pl_module):
        done = {}

        def collect(rollout):
            done[rollout.key] = rollout.token_ids.tolist()

        # Every trainer asks for other prompts, so that numbers that are mixed up show.
        shift = pl_module.ranks.rank % len(self.prompts)
        prompts = [*self.prompts[shift:], *self.prompts[:shift]]
        pl_module.colocation.generate(
            requests_for(prompts, SamplingParams(max_tokens=LENGTH, temperature=0.0)), collect
        )
        whole = trainer.strategy.whole_model()
        expected = [generate(whole.hf, p, LENGTH, banned=whole.banned_token_ids) for p in prompts]
        self.report["greedy"].append([done.get((b, 0)) == ids for b, ids in enumerate(expected)])
        self.report.setdefault("tokens", []).append([done.get((b, 0)) for b in range(len(prompts))])

    def _account(self, trainer, pl_module):
        engine = pl_module.colocation.engine
        binding = engine._weights
        trained = storages(p.data for p in pl_module.policy.parameters())
        held = storages([*vllm_model(engine).parameters(), *getattr(binding, "buffers", ())])
        self.report["own_bytes"] = sum(size for address, size in held.items() if address not in trained)
        self.report["trainer_bytes"] = sum(p.numel() * p.element_size() for p in pl_module.policy.parameters())
        plan = getattr(binding, "plan", None)
        if plan is not None:
            gpu = binding.rank
            self.report["classes"] = plan.class_bytes(gpu)
            self.report["gathered_bytes"] = plan.gathered_bytes(gpu)
            self._by_class(plan.on(gpu), vllm_model(engine), binding, trained)
            self.report["engine_bytes"] = sum(self.report["seen"].values())
            self.report["ranks"] = [plan.train_rank(gpu), plan.rollout_rank(gpu)]

    def _by_class(self, entries: Any, model: Any, binding: Any, trained: dict[int, int]) -> None:
        """Bytes that the engine really reads for the entries of each class, and names of those that lie elsewhere than
        their class says."""
        seen, parameters = dict.fromkeys(self.report["classes"], 0), dict(model.named_parameters())
        self.report["seen"], self.report["misplaced"] = seen, []
        for entry in entries:
            own = parameters[entry.name].data
            parts = [own] if own.numel() else list(binding._views[entry.name])
            seen[entry.layout] += sum(part.nbytes for part in parts)
            inside = [part.untyped_storage().data_ptr() in trained for part in parts]
            if entry.gathered:  # some of it is the trainer's, some is fetched
                right = any(inside) and not all(inside)
            elif entry.layout == "rebuild":
                right = not any(inside)
            else:
                shape = (len(parts) > 1, all(part.is_contiguous() for part in parts))
                right = all(inside) and shape == (entry.layout == "blocks", entry.layout != "strided")
            if not right:
                self.report["misplaced"].append(entry.name)


def main(folder: str, model: str, train_tp: str, rollout_tp: str, stage: str, weights: str) -> None:
    """weights: "shared" or "copied"; "dynamic" is shared, with dynamic_sample, and "vision" copied, with one vision
    pass for engine and trainer."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    engine = VLLMEngine(
        max_model_len=512, max_num_seqs=32, block_size=32, kv_cache_memory_bytes=64 * 1024**2,
        tensor_parallel_size=int(rollout_tp), vision="shared" if weights == "vision" else "engine",
    )  # fmt: skip
    settings: dict[str, Any] = {"admission": "always", "collective_timeout": LIMIT, "engine": engine}
    if int(stage) == 0:
        strategy: Any = RollplexDDPStrategy(**settings)
    else:
        strategy = RollplexDeepSpeedStrategy(int(stage), train_tp=int(train_tp), **settings)
    watch = Watch()
    shared = [] if weights in ("copied", "lora", "vision") else [SharedWeights()]
    task: Any = None
    more = {"beta": 0.04} | (SETTINGS if weights.startswith("lora") else {})
    if weights == "dynamic":
        task, more = scenario("rounds")
    run(
        model, Path(folder), steps=2, learning_rate=1e-2, batch_size=4, task=task, **more,
        trainer={"strategy": strategy, "devices": int(os.environ["WORLD_SIZE"])},
        callbacks=[*shared, PrefixOverlap(), GroupStreaming(), watch],
    )  # fmt: skip
    rank = int(os.environ["RANK"])
    Path(folder, f"rank{rank}.json").write_text(json.dumps(watch.report))
    torch.save(watch.weights, Path(folder, f"weights{rank}.pt"))


if __name__ == "__main__":
    main(*sys.argv[1:])
