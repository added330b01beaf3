"""Budget and ablation settings in real runs."""

from __future__ import annotations

import pytest
import torch
from runs import run, same_bits, weights

from rollplex import RollplexStrategy
from rollplex.callbacks import PrefixOverlap
from rollplex.models.registry import load_hf, split
from rollplex.schedule import UnitError


def with_budget(budget: int | None):
    return {"strategy": RollplexStrategy(prefix_budget_bytes=budget, admission="always")}


def prefix_bytes(folder) -> int:
    """Of the largest of the test task's prompts, measured directly."""
    from helpers import make_prompt, picture

    from rollplex.models.registry import load_processor

    actor = split(load_hf(str(folder), "float32"))
    prompt = make_prompt(load_processor(str(folder)), "what?", images=[picture(140, 28, 3), picture(140, 28, 4)])
    state = actor.prefix([prompt], grad=True)
    assert state.saved_bytes > state.nbytes > 0
    return state.nbytes + state.saved_bytes


def test_budget_holds_and_what_is_refused_runs_later(parity_folder, tmp_path):
    one = prefix_bytes(parity_folder)
    peak = []

    class Watch(PrefixOverlap):
        def on_unit_end(self, trainer, unit):
            executor = trainer.strategy.colocation.executor
            if executor.machine.phase.value == "rollout":
                peak.append(executor.held_bytes())

    settings = dict(steps=2, callbacks=[Watch()], max_completion_length=24)
    free = run(parity_folder, tmp_path, **settings)
    assert max(peak) > 2 * one
    peak.clear()
    tight = run(parity_folder, tmp_path, trainer=with_budget(int(1.2 * one)), **settings)
    assert 0 < max(peak) <= 1.2 * one
    assert tight.seen[1]["metrics"]["units_refused/memory"] >= 1
    assert same_bits(weights(free), weights(tight))


def test_a_budget_below_one_prefix_is_an_error_that_names_the_size(parity_folder, tmp_path):
    with pytest.raises((ValueError, UnitError), match=r"prefix_budget_bytes=1000 .* needs \d+ bytes"):
        run(parity_folder, tmp_path, callbacks=[PrefixOverlap()], trainer=with_budget(1000))


@pytest.mark.parametrize("case", [dict(), dict(beta=0.04, responses_per_pass=2, prompts_per_pass=2)])
def test_unshared_prefix_is_the_same_update(parity_folder, tmp_path, case):
    shared, unshared = (run(parity_folder, tmp_path, steps=1, share_prefix=s, **case) for s in (True, False))
    a, b = weights(shared), weights(unshared)
    moved = max(
        float((a[k] - x).abs().max()) for k, x in load_hf(str(parity_folder), "float32").state_dict().items() if k in a
    )
    assert moved > 1e-3
    norms = [m.seen[0]["metrics"]["grad_norm"] for m in (shared, unshared)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert all(torch.isfinite(w).all() for w in b.values())


def test_activation_bytes_shrink_with_checkpointing(parity_folder, tiny_processor):
    from helpers import make_prompt, picture

    prompt = make_prompt(tiny_processor, "what?", images=[picture(112, 112)])
    plain, checkpointed = (
        split(load_hf(str(parity_folder), "float32"), prefix_checkpointing=c).prefix([prompt], grad=True).saved_bytes
        for c in (False, True)
    )
    assert checkpointed < 0.5 * plain
