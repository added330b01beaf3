"""LoRA: passes, engines, reference, checkpoints and exports of a policy whose adapters alone are trained."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from engine_helpers import drain, requests_for, started, trainer_logps
from families import PARITY, Rows, encoded
from helpers import ordered, relative_error
from lightning.pytorch.callbacks import ModelCheckpoint
from lora_cases import RANDOM, WIDE
from rich.console import Console
from runs import run as train
from runs import same_bits, weights
from safetensors.torch import load_file
from test_plan_run import config_of, planned_and_run
from test_split import BAR, reference, responses_for
from test_split import split as split_pass
from transformers import AutoModelForImageTextToText

from rollplex.callbacks import GroupStreaming, PhaseOffload, PrefillReuse, PrefixOverlap
from rollplex.data.records import SamplingParams
from rollplex.engines import TorchEngine
from rollplex.engines.remote_weights import ModelSpec
from rollplex.export import export, export_checkpoint
from rollplex.models import lora
from rollplex.models.policy import make_models, place_reference
from rollplex.models.registry import load_hf, split
from rollplex.models.replica import Replica
from rollplex.models.tiny import build_tiny, build_tiny_in_memory
from rollplex.models.twin import merged_model
from rollplex.planner.adapters import adapter_sizes
from rollplex.residency import ACTIVATIONS, ACTOR_KV, GRADIENTS, KV_POOL, MOMENTS, PARAMETERS, REFERENCE, REFERENCE_KV
from rollplex.verify import verify


def adapted(family: str, settings=WIDE, **options):
    """(actor with adapters, the same before them, processor)."""
    model, processor = build_tiny_in_memory(family=family, **PARITY)
    plain = copy.deepcopy(model)
    lora.add_adapters(model, lora.lora_config(settings), seed=3)
    actor = split(model, **options)
    actor.freeze([])
    return actor, plain, processor


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def policy(request):
    actor, plain, processor = adapted(request.param)
    return SimpleNamespace(actor=actor, plain=plain, processor=processor, prompts=encoded(processor))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("lora") / "model", **PARITY)


# ---- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_checkpointing": True, "suffix_checkpointing": True}, {"cut": True}],
    ids=["plain", "checkpointing", "vision cut"],
)
def test_split_equals_full_sequences_with_adapters(policy, options):
    """Log-probs, and the gradient of every adapter weight; nothing else gets one."""
    cut = options.pop("cut", False) if "cut" in options else False
    bundles = [[p] for p in policy.prompts]
    responses = [responses_for(1, 3, longest=6, seed=i) for i in range(len(bundles))]
    generator = torch.Generator().manual_seed(5)
    at = [torch.randn(ids.shape, generator=generator) for ids, _ in responses]
    actor = split(copy.deepcopy(policy.actor.hf), **options)
    whole = copy.deepcopy(policy.actor.hf)
    want_logps, want = reference(whole, bundles, responses, at, 1.0, actor.banned_token_ids)
    logps, grads = split_pass(actor, bundles, responses, at, 1.0, cut=cut)
    assert all((a - b).abs().max() <= BAR for a, b in zip(logps, want_logps, strict=True) if len(b))
    names = {name for name in grads if lora.is_adapter(name)}
    assert names and names == {name for name, grad in grads.items() if grad is not None}
    assert any("visual" in name for name in names) and any("language_model" in name for name in names)
    for name in names:
        assert want[name].abs().max() > 1e-5, name
        assert relative_error(grads[name], want[name]) <= BAR, (name, relative_error(grads[name], want[name]))


def test_adapters_in_part_of_the_layers_train_alone():
    """A prefix whose first layers have no gradient at all."""
    actor, _, processor = adapted(
        "qwen2_5_vl", RANDOM | {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}
    )
    bundles = [[p] for p in encoded(processor, ["picture"])]
    responses, at = [responses_for(1, 2, 4)], [torch.ones(2, 4)]
    _, want = reference(copy.deepcopy(actor.hf), bundles, responses, at, 1.0, actor.banned_token_ids)
    _, grads = split_pass(actor, bundles, responses, at, 1.0)
    trained = {name for name, grad in grads.items() if grad is not None}
    assert trained and all(".layers.1." in name for name in trained)
    assert all(relative_error(grads[name], want[name]) <= BAR for name in trained)


@pytest.mark.parametrize("frozen", [["vision_tower"], ["language_model"]], ids=str)
def test_freeze_is_of_adapters(frozen):
    actor, _, _ = adapted("qwen2_5_vl")
    actor.freeze(frozen)
    off = {id(p) for p in actor.part_parameters(frozen[0])}
    for name, p in actor.hf.named_parameters():
        assert p.requires_grad == (lora.is_adapter(name) and id(p) not in off), name


# ---- engine and reference --------------------------------------------------------------------------------------------


def test_engine_runs_the_adapters_on_the_trainers_tensors(policy):
    """Merged weights, by transformers' generate of a plain model, give the same greedy tokens."""
    actor = policy.actor
    engine = started(actor, policy.processor)
    assert engine._model.shares_storage_with(actor)
    merged = ordered(merged_model(actor.hf))
    plain = split(copy.deepcopy(merged))
    for t in (0.0, 1.0):
        engine.submit(requests_for(policy.prompts, SamplingParams(max_tokens=8, temperature=t), g=2))
        for r in drain(engine):
            prompt = policy.prompts[r.group]
            for by in (actor, plain):
                assert (r.logps - trainer_logps(by, prompt, r, t or 1.0)).abs().max() <= BAR or t == 0
            if t == 0:
                ids = torch.cat([prompt.input_ids, r.token_ids])[None]
                types = torch.cat([prompt.mm_token_type_ids, torch.zeros(8, dtype=torch.long)])[None]
                merged.set_attn_implementation("sdpa")
                logits = merged(input_ids=ids, mm_token_type_ids=types, **prompt.media).logits[0, len(prompt) - 1 : -1]
                logits[:, list(actor.banned_token_ids)] = -torch.inf
                assert logits.argmax(-1).tolist() == r.token_ids.tolist()


def test_the_reference_is_the_model_with_adapters_off_and_has_no_weights(policy):
    off = policy.actor.without_adapters()
    assert off.shares_storage_with(policy.actor)
    before, with_adapters = split(policy.plain), policy.actor
    prompt = policy.prompts[1]
    ids, lengths = responses_for(1, 2, 5)
    found = []
    for model in (off, before, with_adapters):
        state = model.prefix([prompt], grad=False)
        found.append(model.suffix(state, ids, lengths, temperature=1.0, grad=False).logps_NR)
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 0.01
    split(policy.plain).hf.set_attn_implementation("sdpa")


def test_beside_shards_only_adapters_are_taken_over_and_the_reference_reads_the_copy():
    """As under ZeRO-3, with parameters that are whole."""
    actor, plain, _ = adapted("qwen2_5_vl")
    asked: list[torch.nn.Parameter] = []

    def gather(parameters):
        asked.extend(parameters)
        return nullcontext()

    replica, reference = Replica(actor, 2**20), actor.without_adapters()
    replica.refresh(gather)
    place_reference(reference, actor, torch.device("cpu"), replica.model)
    assert reference.shares_storage_with(replica.model)
    assert all(torch.equal(p, q) for p, q in zip(reference.hf.parameters(), plain.parameters(), strict=True))
    assert len(asked) == len(list(actor.hf.parameters()))
    asked.clear()
    with torch.no_grad():
        for p in actor.hf.parameters():
            p.add_(1.0)  # what is not trained would stay
    replica.refresh(gather)
    adapters = [p for n, p in actor.hf.named_parameters() if lora.is_adapter(n)]
    assert {id(p) for p in asked} == {id(p) for p in adapters}
    assert replica.peak_bytes <= sum(p.nbytes for p in adapters)
    sent = {spec.name for spec in ModelSpec.of(replica.model).parameters if spec.trained}
    assert sent == {n for n, _ in actor.hf.named_parameters() if lora.is_adapter(n)}
    pairs = zip(replica.model.hf.named_parameters(), actor.hf.parameters(), strict=True)
    assert {name for (name, mine), theirs in pairs if torch.equal(mine, theirs)} == sent


def fit(folder, root, settings=RANDOM, **options):
    """Two steps with a KL term; returns the module."""
    defaults = dict(
        task=Rows(), batch_size=4, beta=0.1, num_generations=2, max_completion_length=4, prompts_per_pass=2,
        lora=dict(settings),
    )  # fmt: skip
    return train(folder, root, **(defaults | options))


def test_only_adapters_move_and_schedules_give_the_same_bits(folder, tmp_path):
    serial = fit(folder, tmp_path)
    ours = weights(serial)
    base = dict(load_hf(str(folder), "float32").named_parameters())
    moved = {
        name
        for name, p in ours.items()
        if not lora.is_adapter(name) and not torch.equal(p, base[lora.plain_name(name)])
    }
    assert not moved
    assert serial.seen[0]["metrics"]["kl"] > 0
    own = {p.untyped_storage().data_ptr() for p in serial.policy.parameters()}
    assert all(p.untyped_storage().data_ptr() in own for p in serial.reference.hf.parameters())  # no second model
    assert not any(REFERENCE in name for name in serial.seen[-1]["metrics"])
    for callbacks, vision in (
        ([PrefixOverlap(), GroupStreaming()], "engine"), ([PrefillReuse(), PrefixOverlap(), PhaseOffload()], "shared")
    ):  # fmt: skip
        other = fit(folder, tmp_path, callbacks=callbacks, engine=TorchEngine(vision=vision))
        assert same_bits(ours, weights(other))
        assert [x["metrics"]["loss"] for x in serial.seen] == [x["metrics"]["loss"] for x in other.seen]


# ---- checkpoints and exports -----------------------------------------------------------------------------------------


def test_resume_is_exact_and_the_checkpoint_holds_adapters_alone(folder, tmp_path):
    whole = fit(folder, tmp_path)
    keep = ModelCheckpoint(tmp_path / "kept", filename="one", every_n_train_steps=1, save_top_k=-1)
    first = fit(folder, tmp_path, steps=1, callbacks=[keep], trainer={"enable_checkpointing": True})
    path = tmp_path / "kept" / "one.ckpt"
    names = torch.load(path, weights_only=True)["state_dict"]
    assert names and all(lora.is_adapter(name) for name in names)
    second = fit(folder, tmp_path, ckpt_path=str(path))
    assert same_bits(weights(whole), weights(second))
    with pytest.raises(ValueError, match="lora="):
        fit(folder, tmp_path, RANDOM | {"lora_alpha": 16}, ckpt_path=str(path))

    other = build_tiny(tmp_path / "other", **(PARITY | {"seed": 2}))
    with pytest.raises(ValueError, match=r"the base model in model=.*its weights have changed"):
        fit(other, tmp_path, beta=0.0, ckpt_path=str(path))
    with pytest.raises(ValueError, match="other weights than those that the adapters were trained on"):
        export_checkpoint(path, tmp_path / "out", model=str(other))
    out = export_checkpoint(path, tmp_path / "out")
    merged = dict(lora.whole_weights(first.policy))
    loaded = AutoModelForImageTextToText.from_pretrained(out)
    assert same_bits(dict(loaded.named_parameters()), merged)
    check_adapter_folder(out, folder, loaded)


def check_adapter_folder(out, folder, merged) -> None:
    """peft loads it onto the base model, and gives what the merged one gives."""
    from peft import PeftModel

    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["r"] == 4
    base = AutoModelForImageTextToText.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # missing or unexpected keys are warnings
        model = PeftModel.from_pretrained(base, out / "adapter")
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        a, b = (m.eval()(input_ids=ids).logits for m in (model, merged))
        assert (a - b).abs().max() <= BAR * a.abs().max()
        with model.disable_adapter():
            assert (model(input_ids=ids).logits - b).abs().max() > 0.01


@pytest.mark.parametrize("family", ["llava_onevision", "internvl"])
def test_other_families_train_and_export_adapters(family, tmp_path):
    base = build_tiny(tmp_path / "base", family=family, **PARITY)
    module = fit(base, tmp_path, WIDE, steps=1)
    out = export(module.policy, module.processor, tmp_path / "out")
    loaded = AutoModelForImageTextToText.from_pretrained(out)
    assert same_bits(dict(loaded.named_parameters()), dict(lora.whole_weights(module.policy)))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout, which cannot be set"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save, which cannot be set"),
        ({"r": 0}, "r=0 must be a whole number"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported.*W must stay"),
        ({"target_modules": ["nothing"]}, "do not fit this model"),
        ({"target_modules": ["q_proj", "nothing"]}, "target_modules has nothing, which matches nothing"),
        ({"target_modules": "(("}, r"target_modules has '\(\(', which is no regular expression"),
        ({"target_modules": []}, r"target_modules=\[\] must be a list"),
        ({"target_modules": 3}, "target_modules=3 must be a list"),
        ({"exclude_modules": ["nothing"]}, "exclude_modules has nothing, which matches nothing in this model"),
        ({"rank_pattern": 3}, "rank_pattern=3 must be a mapping"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern: q_proj='x' must be a whole number"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj=0 must be a whole number"),
        ({"rank_pattern": {"nothing": 2}}, "rank_pattern has nothing, which matches nothing"),
        ({"alpha_pattern": {"((": 2}}, r"alpha_pattern has '\(\(', which is no regular expression"),
        ({"alpha_pattern": {"q_proj": 2, "qkv": 2}}, "alpha_pattern has qkv, which matches nothing"),
        ({"layers_to_transform": [0]}, "goes with target_modules as a list of names"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 99]}, "layers_to_transform has 99, which matches"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [99]}, "do not fit this model.*'layers_to_transform'"),
        ({"target_modules": ["q_proj"], "layers_to_transform": ["0"]}, "layers_to_transform=.* must be a layer's"),
        ({"layers_pattern": "layers"}, "layers_pattern has no effect without"),
        ({"use_rslora": "perhaps"}, "use_rslora='perhaps' must be true or false"),
        ({"r": 100_000}, "r=100000 is more than"),
        (3, "lora=3 must be null or a mapping"),
        ({"target_modules": ["lm_head"]}, "takes in lm_head: only linear layers other than the output head"),
        ({"target_modules": ["embed_tokens"]}, "takes in .*embed_tokens: only linear"),
    ],
)  # fmt: skip
def test_lora_settings_that_cannot_work_are_refused(folder, settings, message):
    h = dict(
        model=str(folder), dtype="float32", lora=settings, seed=0, freeze=None, beta=0.0, prefix_checkpointing=False,
        suffix_checkpointing=False, prefix_on_host=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        make_models(h)
    if "cannot be set" not in message:
        return
    with pytest.raises(ValueError, match=r"frozen parts \(freeze=\['language_model'\]\)"):
        make_models(h | {"lora": {"r": 2}, "freeze": ["language_model"]})


@pytest.mark.filterwarnings("error")
def test_lora_settings_of_a_part_of_the_layers_are_taken():
    settings = RANDOM | {
        "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "layers_pattern": "layers",
        "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 2}, "exclude_modules": None, "use_rslora": True,
    }  # fmt: skip
    actor, _, _ = adapted("qwen2_5_vl", settings)
    found = {name.rpartition(".")[2]: layer.r["default"] for name, layer in lora.adapted(actor.hf)}
    assert found == {"q_proj": 2, "v_proj": 4}


def test_the_plan_refuses_what_fit_refuses(folder, tmp_path):
    for settings, message in (
        ({"target_modules": ["q_proj", "nothing"]}, "matches nothing"),
        ({"target_modules": "(("}, "no regular"),
    ):
        with pytest.raises(ValueError, match=message):
            adapter_sizes(str(folder), settings, ())


def test_the_plan_counts_adapters(folder, tmp_path):
    config = config_of(folder, tmp_path, model={"lora": RANDOM, "beta": 0.1})
    planned, ran, module = planned_and_run(config, tmp_path)
    most = {name: max(row.values()) for name, row in planned.planned().items()}
    for name in (PARAMETERS, GRADIENTS, MOMENTS, REFERENCE_KV, ACTOR_KV, KV_POOL):
        assert most[name] == pytest.approx(ran.run.largest[name], rel=0.05), name
    assert most[ACTIVATIONS] >= ran.run.largest[ACTIVATIONS]  # planned as if all weights were trained
    assert most[MOMENTS] == 8 * sum(p.numel() for p in module.policy.parameters() if p.requires_grad)
    assert REFERENCE not in most and not ran.run.largest.get(REFERENCE)


def verify_arguments(folder, tmp_path) -> list[str]:
    config = Path(__file__).parent.parent / "configs" / "family_cpu.yaml"
    arguments = ["--config", str(config), "--model.init_args.model", str(folder), "--steps", "2"]
    return [*arguments, "--model.init_args.lora", json.dumps(WIDE), f"--trainer.default_root_dir={tmp_path}"]


@pytest.mark.slow
def test_verify_passes_with_adapters(folder, tmp_path):
    printed = io.StringIO()
    arguments = verify_arguments(folder, tmp_path)
    assert verify(arguments, Console(file=printed, width=200)) == 0, printed.getvalue()


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_verify_passes_with_adapters_under_zero(folder, tmp_path, stage):
    pytest.importorskip("deepspeed")
    strategy = ["--trainer.strategy", "rollplex.RollplexDeepSpeedStrategy", "--trainer.strategy.stage", str(stage)]
    arguments = [*verify_arguments(folder, tmp_path), *strategy]
    here = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "rollplex", "verify", *arguments], env=here, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0 and "PASSED" in done.stdout, (done.stdout + done.stderr)[-4000:]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_train_the_same_adapters_as_one(folder, tmp_path):
    """rollplex_ddp: adapters begin equal on every rank, and only they are reduced."""
    found = []
    for devices, strategy in ((1, "rollplex"), (2, "rollplex_ddp")):
        config = config_of(folder, tmp_path / str(devices), model={"lora": RANDOM, "beta": 0.1})
        config["data"]["init_args"]["task"] = {"class_path": "families.Rows"}
        config["trainer"] |= {"devices": devices, "strategy": strategy}
        out = tmp_path / f"out{devices}"
        config["trainer"]["callbacks"] = [
            {"class_path": "rollplex.callbacks.PrefixOverlap"},
            {"class_path": "rollplex.callbacks.ExportModel", "init_args": {"dirpath": str(out)}},
        ]
        path = tmp_path / f"{devices}.yaml"
        path.write_text(yaml.safe_dump(config))
        here = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "rollplex", "fit", "--config", str(path)], env=here, capture_output=True, text=True,
            timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(load_file(out / "adapter" / "adapter_model.safetensors"))
    one, two = found
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) <= 1e-5
