"""One rank of a trainer of two, each with an engine in a process of its own; started by torchrun from
test_plan_remote.py. Writes what it saw as JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

import torch
from engine_helpers import generate, requests_for
from helpers import make_prompt, picture
from runs import run

from rollplex import RollplexDeepSpeedStrategy
from rollplex.callbacks import PrefixOverlap
from rollplex.data.records import SamplingParams
from rollplex.engines import RemoteEngine
from rollplex.phases import PhaseCallback

LENGTH = 8


class Watch(PhaseCallback):
    def __init__(self) -> None:
        self.greedy: list[list[bool]] = []
        self.tokens: list[list[list[int]]] = []

    def on_train_start(self, trainer, pl_module):
        self.prompts = [
            make_prompt(pl_module.processor, "plain question", name="text"),
            make_prompt(pl_module.processor, "one", name="one", images=[picture(56, 84)]),
        ]
        self._compare(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._compare(trainer, pl_module)

    def on_train_end(self, trainer, pl_module):
        watch = trainer.strategy.colocation.watch
        self.largest, self.mismatches = watch.ledger.run.largest, watch.mismatches
        self.there = trainer.strategy.colocation.lane.call(lambda engine: engine.memory())

    def _compare(self, trainer, pl_module):
        done = {}

        def collect(rollout):
            done[rollout.key] = rollout.token_ids.tolist()

        requests = requests_for(self.prompts, SamplingParams(max_tokens=LENGTH, temperature=0.0))
        pl_module.colocation.generate(requests, collect)
        whole = trainer.strategy.whole_model()
        self.greedy.append([done[b, 0] == generate(whole.hf, p, LENGTH) for b, p in enumerate(self.prompts)])
        self.tokens.append([done[b, 0] for b in range(len(self.prompts))])


def main(folder: str, model: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(300, exit=True)
    engine = RemoteEngine(threads=1, bucket_bytes=100_000)
    strategy = RollplexDeepSpeedStrategy(2, train_tp=2, engine=engine, collective_timeout=200, admission="always")
    watch = Watch()
    run(
        model, Path(folder), steps=2, learning_rate=1e-2, trainer={"strategy": strategy, "devices": 2},
        callbacks=[PrefixOverlap(), watch],
    )  # fmt: skip
    content = {name: getattr(watch, name) for name in ("greedy", "tokens", "largest", "mismatches", "there")}
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
