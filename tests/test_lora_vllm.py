"""Whole runs of adapters with vLLM on the trainer's tensors: nothing but the adapters moves, whatever happens."""

from __future__ import annotations

import pytest
import torch
from families import PARITY, Rows
from runs import run as train
from runs import same_bits, weights

from rollplex.callbacks import GroupStreaming, PrefixOverlap, SharedWeights
from rollplex.engines import VLLMEngine
from rollplex.models import lora
from rollplex.models.registry import load_hf, split
from rollplex.models.tiny import build_tiny
from rollplex.phases import PhaseCallback
from rollplex.units import UnitKind

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
pytest.importorskip("vllm")

SETTINGS = {"max_model_len": 512, "max_num_seqs": 64, "block_size": 32, "kv_cache_memory_bytes": 64 * 1024**2}
RANDOM = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
"""B is random too: merged weights differ from those of the folder from the first rollout on."""


@pytest.fixture(scope="module", params=["qwen2_5_vl", "internvl"])
def folder(request, tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp(request.param) / "model", family=request.param, **PARITY)


class Look(PhaseCallback):
    """At the start and after each step: whose storage vLLM computes with, and what is in it."""

    def __init__(self, folder) -> None:
        self.base = dict(load_hf(str(folder), "float32").named_parameters())
        self.plain = split(load_hf(str(folder), "float32"))
        self.steps = 0

    def on_train_start(self, trainer, pl_module):
        self.module = pl_module
        self.check()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        self.check()
        self.check_reference(batch[1])

    def check(self) -> None:
        """After `publish`: every weight but the adapted ones is the trainer's, and those are W + (alpha / r) B A."""
        self.check_trainer()
        binding, hf = self.module.colocation.engine._weights, self.module.policy
        binding.verify()
        ours = {p.untyped_storage().data_ptr() for p in hf.parameters()}
        layers = {f"{lora.plain_name(name)}.weight": layer for name, layer in lora.adapted(hf)}
        mine = {t.untyped_storage().data_ptr(): name for name, t in binding._merged.tensors.items()}
        assert set(mine.values()) == set(layers) and not ours & set(mine)
        used = {v.untyped_storage().data_ptr() for views in binding._views.values() for v in views}
        assert used <= ours | set(mine) and set(mine) <= used
        for name, layer in layers.items():
            own = binding._merged.tensors[name]
            assert torch.equal(own, lora.merged(layer)) and not torch.equal(own, layer.base_layer.weight)

    def check_trainer(self) -> None:
        """The folder's weights, bit for bit, and adapters beside them."""
        hf = self.module.policy
        found = {lora.plain_name(n): p for n, p in hf.named_parameters() if not lora.is_adapter(n)}
        assert same_bits(found, self.base)
        assert not any(layer.merged or layer.disable_adapters for _, layer in lora.adapted(hf))

    def check_reference(self, prompt) -> None:
        ids, lengths = torch.arange(40, 46)[None], torch.tensor([6])
        found = []
        for model in (self.module.reference, self.plain, self.module.actor):
            state = model.prefix([prompt], grad=False)
            found.append(model.suffix(state, ids, lengths, temperature=1.0, grad=False).logps_NR)
        assert torch.equal(found[0], found[1]) and (found[0] - found[2]).abs().max() > 0.01


def fit(folder, root, look, *, shared: bool = True, **options):
    return train(
        folder, root, task=Rows(), batch_size=4, beta=0.1, num_generations=2, max_completion_length=4,
        prompts_per_pass=2, lora=dict(RANDOM), engine=VLLMEngine(**SETTINGS),
        callbacks=[*([SharedWeights()] if shared else []), PrefixOverlap(), GroupStreaming(), *look], **options,
    )  # fmt: skip


def test_shared_storage_holds_the_base_weights_through_a_run(folder, tmp_path):
    look = Look(folder)
    shared = fit(folder, tmp_path, [look], steps=3)
    assert look.steps == 3 and all(out["metrics"]["kl"] > 0 for out in shared.seen)
    copied = fit(folder, tmp_path, [], shared=False, steps=3)
    tokens = [
        [[r.token_ids.tolist() for g in out["groups"] for r in g.rollouts] for out in module.seen]
        for module in (shared, copied)
    ]
    assert tokens[0] == tokens[1]
    assert [x["metrics"]["kl"] for x in shared.seen] == [x["metrics"]["kl"] for x in copied.seen]
    assert same_bits(weights(shared), weights(copied))


class Breaks(PhaseCallback):
    """Fails in the middle of the second step: some gradients are there, and some responses of merged weights."""

    def on_unit_end(self, trainer, unit):
        if trainer.global_step == 1 and unit.kind is UnitKind.ACT_SUFFIX:
            raise RuntimeError("broken")


def test_a_failed_step_leaves_the_weights_as_they_were(folder, tmp_path):
    look = Look(folder)
    with pytest.raises(RuntimeError, match="broken"):
        fit(folder, tmp_path, [look, Breaks()], steps=3)
    assert look.steps == 1
    look.check_trainer()
    one = fit(folder, tmp_path, [], steps=1)
    assert same_bits(weights(one), weights(look.module))
    assert look.module.colocation.engine._engine is None
