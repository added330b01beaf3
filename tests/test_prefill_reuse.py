"""One pass over the prompt for engine and actor: the same bits, and half the prompt work."""

from __future__ import annotations

import pytest
import torch
from fake_engine import FakeEngine, Scripted
from helpers import make_prompt, picture
from runs import run, same_bits, weights
from test_admission_run import prefix_bytes, with_budget

from rollplex.callbacks import GroupStreaming, PrefillReuse, PrefixOverlap
from rollplex.data.records import PrefixPass, Request, SamplingParams
from rollplex.engines.base import EngineContext
from rollplex.engines.torch_engine import TorchEngine
from rollplex.models.registry import load_hf, load_processor, split

CASES = {
    "plain": {},
    "pictures share a pass": dict(prompts_per_pass=4),
    "reference": dict(beta=0.04, responses_per_pass=2),
    "mini-batches, twice": dict(num_mini_batches=2, num_iterations=2, loss_type="dapo"),
    "checkpointing": dict(prefix_checkpointing=True),
    "frozen vision": dict(freeze=["vision_tower"]),
    "greedy tails cut": dict(top_k=5, repetition_penalty=1.2, importance_sampling_mode="token_truncate"),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("slots", [256, 3], ids=["all rows at once", "three slots"])
def test_reuse_equals_serial_bit_for_bit_and_computes_no_prompt_twice(parity_folder, tmp_path, case, slots):
    settings = dict(steps=2, **CASES[case])
    serial_engine = TorchEngine(max_num_seqs=slots)
    serial = run(parity_folder, tmp_path, engine=serial_engine, **settings)
    engine = TorchEngine(max_num_seqs=slots)
    callbacks = [PrefillReuse(), PrefixOverlap(), GroupStreaming(deterministic=True)]
    reused = run(parity_folder, tmp_path, engine=engine, callbacks=callbacks, **settings)
    assert same_bits(weights(serial), weights(reused))
    assert (serial_engine.prefilled_groups, serial_engine.taken_groups) == (8, 0)
    assert (engine.prefilled_groups, engine.taken_groups) == (0, 8)
    for a, b in zip(serial.seen, reused.seen, strict=True):
        tokens = [[r.token_ids.tolist() for g in out["groups"] for r in g.rollouts] for out in (a, b)]
        assert tokens[0] == tokens[1]
    assert reused.seen[0]["metrics"]["time/reused"] > 0 == serial.seen[0]["metrics"]["time/reused"]


def test_what_the_budget_has_no_room_for_is_prefilled_by_the_engine(parity_folder, tmp_path):
    one = prefix_bytes(parity_folder)
    engine = TorchEngine()
    tight = with_budget(int(1.2 * one))
    tight["strategy"].colocation.engine = tight["strategy"].colocation.lane.engine = engine
    reused = run(parity_folder, tmp_path, callbacks=[PrefillReuse()], trainer=tight)
    assert engine.prefilled_groups >= 2
    assert engine.taken_groups >= 1
    assert reused.seen[1]["metrics"]["units_refused/memory"] >= 1
    assert same_bits(weights(run(parity_folder, tmp_path)), weights(reused))


def test_without_shared_prefixes_the_engine_prefills(parity_folder, tmp_path):
    engine = TorchEngine()
    run(parity_folder, tmp_path, engine=engine, callbacks=[PrefillReuse()], share_prefix=False)
    assert (engine.prefilled_groups, engine.taken_groups) == (8, 0)


def test_validation_needs_no_prefix(parity_folder, tmp_path):
    trainer = dict(limit_val_batches=1, val_check_interval=1)
    module = run(parity_folder, tmp_path, callbacks=[PrefillReuse()], trainer=trainer)
    assert "val/reward" in module.trainer.callback_metrics


def test_an_engine_with_a_cache_of_its_own_is_refused(parity_folder, tmp_path):
    with pytest.raises(ValueError, match=r"PrefillReuse cannot work with engine=FakeEngine"):
        run(parity_folder, tmp_path, engine=FakeEngine(lambda r: Scripted([65])), callbacks=[PrefillReuse()])


def test_a_prefix_of_older_weights_is_refused(parity_folder):
    processor = load_processor(str(parity_folder))
    model = split(load_hf(str(parity_folder), "float32"))
    prompt = make_prompt(processor, "what?", images=[picture(56, 56)])
    state = model.prefix([prompt], grad=True)
    engine = TorchEngine()
    engine.start(EngineContext(model=model, processor=processor, device=torch.device("cpu")))
    model.version = 1
    engine.publish(1)
    engine.submit([Request(0, 0, prompt, SamplingParams(max_tokens=2), 1, PrefixPass(0, (0,), state))])
    with pytest.raises(AssertionError, match="other weights"):
        engine.step()
