"""One rank of a tensor-parallel vLLM engine, started by torchrun from test_vllm_tp.py; writes what it saw as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from engine_helpers import generate, requests_for, run, trainer_logps
from families import encoded
from test_vllm_engine import changed_weights, vllm_model

from rollplex.data.records import SamplingParams
from rollplex.engines import EngineContext, VLLMEngine, WindowState
from rollplex.engines.vllm_split import SplitWeights
from rollplex.models.registry import split
from rollplex.models.tiny import build_tiny_in_memory

LENGTH = 12


def storages(tensors) -> dict[int, int]:
    """Address -> bytes of the storages behind some tensors."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def compare(actor, engine, prompts) -> dict:
    """Greedy tokens against transformers', sampled log-probs against the trainer's."""
    greedy = run(engine, requests_for(prompts, SamplingParams(max_tokens=LENGTH, temperature=0.0)))
    expected = [generate(actor.hf, p, LENGTH, banned=actor.banned_token_ids) for p in prompts]
    sampled = run(engine, requests_for(prompts, SamplingParams(max_tokens=LENGTH), g=3, seed=7))
    error = max(float((r.logps - trainer_logps(actor, prompts[r.group], r, 1.0)).abs().max()) for r in sampled.values())
    return {
        "greedy_equal": [greedy[b, 0].token_ids.tolist() == ids for b, ids in enumerate(expected)],
        "sampled": {str(key): r.token_ids.tolist() for key, r in sorted(sampled.items())},
        "logps_error": error,
    }


def abort_in_the_middle(engine, prompts) -> list[int]:
    """Steps, aborts at the same step on every rank; the lengths of what was there."""
    engine.submit(requests_for(prompts, SamplingParams(max_tokens=64), g=2, seed=3))
    for _ in range(len(prompts) + 6):
        engine.step()
    lengths = sorted(len(r) for r in engine.abort())
    assert engine.window is WindowState.IDLE
    return lengths


def main(out: str, weights: str, vision: str, family: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    hf, processor = build_tiny_in_memory(family=family, init_std=0.1, seed=1, hidden_size=256, heads=8, kv_heads=2)
    actor = split(hf.train())
    engine = VLLMEngine(
        max_model_len=512, max_num_seqs=32, block_size=32, kv_cache_memory_bytes=64 * 1024**2, vision=vision,
        tensor_parallel_size=world,
    )  # fmt: skip
    binding = SplitWeights()
    if weights == "shared":
        engine.bind(binding)
    engine.start(EngineContext(model=actor, processor=processor, device=torch.device("cpu")))
    prompts = encoded(processor, ["text", "picture", "two pictures", "video"])
    report = {"rank": rank, "before": compare(actor, engine, prompts)}
    engine_tensors = [p.data for p in vllm_model(engine).parameters()]
    trainer = storages(p.data for p in hf.parameters())
    own = {address: size for address, size in storages(engine_tensors).items() if address not in trainer}
    report["own_bytes"] = sum(own.values())
    if weights == "shared":
        report["classes"] = binding.plan.class_bytes(rank)
    pointers = [t.data_ptr() for t in engine_tensors]
    with changed_weights(actor, engine):
        report["copied_bytes"] = engine.copied_bytes
        report["after"] = compare(actor, engine, prompts)
        report["aborted"] = abort_in_the_middle(engine, prompts)
        report["again"] = compare(actor, engine, prompts)["sampled"] == report["after"]["sampled"]
    report["shared_memory"] = os.environ["VLLM_DIST_IDENT"]
    report["pointers_kept"] = pointers == [p.data_ptr() for p in vllm_model(engine).parameters()]
    Path(out, f"rank{rank}.json").write_text(json.dumps(report))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
