"""Every family in vLLM, in this process: its weights by copy and shared, its pixels or the trainer's features."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from engine_helpers import requests_for, run, started, trainer_logps
from families import NAMES, PARITY, encoded, fresh

from rollplex.data.records import SamplingParams
from rollplex.engines import EngineContext, VLLMEngine
from rollplex.engines.vllm_sharing import SharedWeights
from rollplex.models import lora
from rollplex.models.registry import split
from rollplex.models.tiny import build_tiny_in_memory

pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # a start takes 10 to 20 s; Qwen2.5-VL's is in test_vllm_engine.py
pytest.importorskip("vllm")

CPU = torch.device("cpu")
SETTINGS = {"max_model_len": 512, "max_num_seqs": 64, "block_size": 32, "kv_cache_memory_bytes": 64 * 1024**2}
WAYS = {
    "copied": {}, "shared weights": {"shared": True}, "shared vision": {"shared": True, "vision": "shared"},
    "copied, shared vision": {"vision": "shared"},
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    model, processor = build_tiny_in_memory(family=request.param, **PARITY)
    return fresh(model), processor, encoded(processor)


@pytest.mark.parametrize("way", WAYS)
def test_vllm_equals_the_embedded_engine_and_the_trainer(family, way):
    """Greedy tokens, and log-probabilities of sampled ones before and after an update."""
    actor, processor, prompts = family
    options = dict(WAYS[way])
    engine = VLLMEngine(**SETTINGS, vision=options.get("vision", "engine"))
    if options.get("shared"):
        engine.bind(SharedWeights())
    engine.start(EngineContext(model=actor, processor=processor, device=CPU))
    try:
        held = engine.state_bytes()["engine_weights"]
        vision = sum(p.nbytes for p in actor.vision_parameters)
        if options.get("shared"):
            assert held == 0
        else:  # padded, and without what is not read
            everything = sum(p.nbytes for p in actor.hf.parameters())
            blind = engine.takes_vision and actor.support.towerless
            assert everything - vision <= held < everything * 1.2 - vision * blind
        if options.get("vision") == "shared":
            own = engine._engine.model_executor.driver_worker.worker.model_runner.model
            tower = any(n.startswith(("visual.", "vision_tower.")) for n, _ in own.named_parameters())
            assert tower != actor.support.towerless
        check(actor, processor, engine, prompts)
        before = [p.detach().clone() for p in actor.hf.parameters()]
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for p in actor.hf.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.02)
        try:
            engine.publish(1)
            assert (engine.copied_bytes == 0) == bool(options.get("shared"))
            check(actor, processor, engine, prompts)
        finally:
            with torch.no_grad():
                for p, value in zip(actor.hf.parameters(), before, strict=True):
                    p.copy_(value)
    finally:
        engine.abort()
        engine.close()


@pytest.mark.parametrize(
    ("family", "change"),
    [("llava_onevision", {"vision_aspect_ratio": "anyres_max_3"}), ("internvl", {"vision_feature_layer": -2})],
)
def test_configs_that_vllm_reads_otherwise_are_refused(family, change):
    model, processor = build_tiny_in_memory(family=family, **PARITY)
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"does not compute what the config.*{next(iter(change))}.*use TorchEngine"):
        VLLMEngine(**SETTINGS).start(EngineContext(model=fresh(model), processor=processor, device=CPU))


def test_vllm_with_adapters(family):
    """LoRA: merged for vLLM, copied or in place, before and after an update; storage of its own for adapted layers alone."""
    plain, processor, prompts = family
    model = copy.deepcopy(plain.hf)
    lora.add_adapters(model, lora.lora_config({"r": 4, "lora_alpha": 2, "init_lora_weights": False}), seed=3)
    actor = split(model)
    adapted = sum(layer.base_layer.weight.nbytes for _, layer in lora.adapted(model))
    for shared in (False, True):
        engine = VLLMEngine(**SETTINGS)
        if shared:
            engine.bind(SharedWeights())
        engine.start(EngineContext(model=actor, processor=processor, device=CPU))
        try:
            if shared:
                assert engine.copied_bytes == adapted == engine.state_bytes()["engine_weights"]
            check(actor, processor, engine, prompts)
            with torch.no_grad():
                for name, p in actor.hf.named_parameters():
                    if lora.is_adapter(name):
                        p.mul_(1.2)
            engine.publish(1)
            check(actor, processor, engine, prompts)
        finally:
            engine.abort()
            engine.close()


def check(actor, processor, engine, prompts) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        greedy = requests_for(prompts, SamplingParams(max_tokens=8, temperature=0))
        embedded = run(started(actor, processor), greedy)
        for key, rollout in run(engine, greedy).items():
            assert rollout.token_ids.tolist() == embedded[key].token_ids.tolist(), prompts[key[0]].sample.id
        for t in (0.7, 1.0):
            for r in run(engine, requests_for(prompts, SamplingParams(max_tokens=8, temperature=t), g=3)).values():
                assert not set(r.token_ids.tolist()) & set(actor.banned_token_ids)
                worst = (r.logps - trainer_logps(actor, prompts[r.group], r, t)).abs().max()
                assert worst <= 1e-5 / min(t, 1.0), (prompts[r.group].sample.id, t, float(worst))
