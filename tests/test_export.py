"""The exported folder is a plain transformers model: it loads anywhere and is the trained policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import make_prompt, picture
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import run
from stops import StopAt
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollplex.callbacks import ExportModel, GracefulStop
from rollplex.cli import main
from rollplex.export import export, export_checkpoint
from rollplex.models.registry import load_hf, load_processor, split
from rollplex.models.tiny import build_tiny

QUICK = {"num_generations": 2, "max_completion_length": 3, "batch_size": 2, "steps": 2}


def logits(model, prompt):
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return model.eval()(
            input_ids=prompt.input_ids[None], mm_token_type_ids=prompt.mm_token_type_ids[None], **prompt.media
        ).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ckpt_06_export_loads_with_plain_from_pretrained(tmp_path, tied, dtype):
    source = build_tiny(tmp_path / "source", init_std=0.1, seed=2, tie_word_embeddings=tied)
    policy = load_hf(str(source), dtype)
    split(policy)  # the trainer's attention is set on the model that is exported
    with torch.no_grad():
        for parameter in policy.parameters():  # trained
            parameter.add_(torch.randn_like(parameter) * 0.01)
    processor = load_processor(str(source))
    out = export(policy, processor, tmp_path / "out")

    loaded, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == policy.dtype
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) is tied
    ours, theirs = policy.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = AutoProcessor.from_pretrained(out)
    prompt = make_prompt(again, "what?", images=[picture(56, 84), picture(56, 56, seed=1)])
    same = make_prompt(processor, "what?", images=[picture(56, 84), picture(56, 56, seed=1)])
    assert torch.equal(prompt.input_ids, same.input_ids) and prompt.text == same.text
    assert torch.equal(prompt.media["pixel_values"], same.media["pixel_values"])
    assert torch.equal(logits(loaded, prompt), logits(policy, prompt))
    assert loaded.generation_config.eos_token_id == policy.generation_config.eos_token_id


def test_ckpt_06_folder_is_complete_and_names_nothing_of_ours(tmp_path):
    source = build_tiny(tmp_path / "source", seed=2)
    policy = load_hf(str(source), "float32")
    split(policy)
    out = export(policy, load_processor(str(source)), tmp_path / "out")
    names = {p.name for p in out.iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "processor_config.json", "chat_template.jinja",
    }  # fmt: skip
    for name in names:
        if name.endswith((".json", ".jinja")):
            assert "rollplex" not in (out / name).read_text(), name
    assert json.loads((out / "config.json").read_text())["model_type"] == "qwen2_5_vl"
    assert oct(out.stat().st_mode)[-3:] == "755"
    assert policy.config.text_config._attn_implementation.startswith("rollplex")  # training goes on with ours


def test_export_is_all_or_nothing(tmp_path, monkeypatch):
    source = build_tiny(tmp_path / "source", seed=2)
    policy, processor = load_hf(str(source), "float32"), load_processor(str(source))
    out = export(policy, processor, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    monkeypatch.setattr(type(processor), "save_pretrained", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    for target in ("out", "new"):
        with pytest.raises(OSError, match="disk full"):
            export(policy, processor, tmp_path / target, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_export_replaces_only_exports_and_only_when_told(tmp_path):
    source = build_tiny(tmp_path / "source", seed=2)
    policy, processor = load_hf(str(source), "float32"), load_processor(str(source))
    out = export(policy, processor, tmp_path / "out")
    with pytest.raises(FileExistsError, match="set overwrite"):
        export(policy, processor, out)
    with torch.no_grad():
        policy.get_input_embeddings().weight.zero_()
    export(policy, processor, out, overwrite=True)
    assert not AutoModelForImageTextToText.from_pretrained(out).get_input_embeddings().weight.any()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="no exported model"):
        export(policy, processor, tmp_path / "thesis", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source", "thesis"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_export_of_a_run_of_its_checkpoint_and_of_the_command_are_one(parity_folder, tmp_path, capsys):
    callbacks = [ExportModel(), ModelCheckpoint(dirpath=tmp_path / "ck", every_n_train_steps=2, save_last=True)]
    module = run(parity_folder, tmp_path, callbacks=callbacks, trainer={"enable_checkpointing": True}, **QUICK)
    assert f"exported model: {tmp_path / 'export'}" in capsys.readouterr().out
    trained = module.policy.state_dict()
    assert not same(trained, weights_of(parity_folder))
    assert same(trained, weights_of(tmp_path / "export"))
    checkpoint = tmp_path / "ck" / "last.ckpt"
    assert same(trained, weights_of(export_checkpoint(checkpoint, tmp_path / "second")))
    main(["export", "--ckpt_path", str(checkpoint), "--out", str(tmp_path / "third")])
    assert same(trained, weights_of(tmp_path / "third"))


def test_export_finds_a_model_folder_that_moved(parity_folder, tmp_path):
    moved = tmp_path / "moved"
    build_tiny(moved, init_std=0.1, seed=1)
    saver = ModelCheckpoint(dirpath=tmp_path / "ck", every_n_train_steps=2, save_last=True)
    module = run(moved, tmp_path, callbacks=[saver], trainer={"enable_checkpointing": True}, **QUICK)
    moved.rename(tmp_path / "elsewhere")
    checkpoint = str(tmp_path / "ck" / "last.ckpt")
    with pytest.raises(ValueError, match="moved"):
        export_checkpoint(checkpoint, tmp_path / "out")
    config = tmp_path / "config.yaml"
    config.write_text(f"model: {{class_path: rollplex.GRPOModule, init_args: {{model: {tmp_path / 'elsewhere'}}}}}")
    main(["export", "--ckpt_path", checkpoint, "--out", str(tmp_path / "out"), "--config", str(config)])
    assert same(module.policy.state_dict(), weights_of(tmp_path / "out"))


def test_a_second_run_keeps_the_first_runs_export(parity_folder, tmp_path):
    first = run(parity_folder, tmp_path, callbacks=[ExportModel()], **QUICK)
    second = run(parity_folder, tmp_path, callbacks=[ExportModel()], **(QUICK | {"steps": 1}))
    assert same(weights_of(tmp_path / "export"), first.policy.state_dict())
    assert same(weights_of(tmp_path / "export-v1"), second.policy.state_dict())


def test_a_stopped_run_exports_what_it_has(parity_folder, tmp_path):
    callbacks = [GracefulStop(), ExportModel(str(tmp_path / "out")), StopAt("on_phase_start", 1, "rollout")]
    with pytest.raises(SystemExit):
        run(parity_folder, tmp_path, callbacks=callbacks, **QUICK)
    one = run(parity_folder, tmp_path / "one", **(QUICK | {"steps": 1}))
    assert same(weights_of(tmp_path / "out"), one.policy.state_dict())


def test_export_command_says_what_is_wrong(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["export", "--ckpt_path", str(tmp_path / "no.ckpt"), "--out", str(tmp_path / "out")])
    assert end.value.code == 2 and "is not a checkpoint file" in capsys.readouterr().err
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(SystemExit):
        main(["export", "--ckpt_path", str(tmp_path / "other.ckpt"), "--out", str(tmp_path / "out")])
    assert "was not written by Rollplex" in capsys.readouterr().err


@pytest.mark.vllm
def test_vllm_loads_the_export_and_samples_the_same_tokens(vllm_engine):
    llm, folder = vllm_engine
    from vllm import SamplingParams

    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    params = SamplingParams(temperature=0.0, max_tokens=12, top_p=1.0, top_k=0, repetition_penalty=1.0, ignore_eos=True)
    for images in ([], [picture(56, 84)], [picture(84, 56, seed=1), picture(56, 56, seed=2)]):
        prompt = make_prompt(processor, "what is it?", images=images)
        with torch.no_grad():
            expected = model.generate(
                input_ids=prompt.input_ids[None], mm_token_type_ids=prompt.mm_token_type_ids[None],
                attention_mask=torch.ones_like(prompt.input_ids)[None], **prompt.media, do_sample=False,
                max_new_tokens=12, min_new_tokens=12, eos_token_id=-1,
            )[0, len(prompt) :].tolist()  # fmt: skip
        given = {"prompt": prompt.text} | ({"multi_modal_data": {"image": images}} if images else {})
        (out,) = llm.generate(given, params, use_tqdm=False)
        assert list(out.prompt_token_ids) == prompt.input_ids.tolist()
        assert list(out.outputs[0].token_ids) == expected
