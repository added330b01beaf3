"""The tiny local models: real classes, loadable by plain transformers, the same every time."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollplex.models import tiny
from rollplex.models.byte_tokenizer import VOCAB_SIZE, byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.build_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_folder_loads_with_plain_transformers_and_holds_the_same_weights(folder):
    state = torch.get_rng_state()
    built, _ = tiny.build_tiny_in_memory()
    assert torch.equal(state, torch.get_rng_state())
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    assert type(loaded).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert loaded.dtype == torch.float32
    assert 1_000_000 <= sum(p.numel() for p in loaded.parameters()) <= 2_000_000
    wanted = dict(built.named_parameters())
    assert {name for name, _ in loaded.named_parameters()} == set(wanted)
    assert all(torch.equal(p, wanted[name]) for name, p in loaded.named_parameters())
    assert loaded.generation_config.eos_token_id == tiny.TOKEN_IDS["<|im_end|>"]


def test_processor_loads_with_plain_transformers(folder):
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert processor.image_token_id == tiny.TOKEN_IDS["<|image_pad|>"]
    assert processor.video_token_id == tiny.TOKEN_IDS["<|video_pad|>"]
    assert processor.image_processor.merge_size == processor.video_processor.temporal_patch_size == 2
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a?"}, {"type": "video"}]},
    ]
    assert processor.apply_chat_template(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nbe short<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>a?"
        "<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tokenizer_gives_one_token_per_byte_and_round_trips(tokenizer):
    text = "".join(map(chr, range(0x800))) + " 漢字 🙂  \r\n\t x "
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == VOCAB_SIZE


def test_tokenizer_knows_the_special_tokens(tokenizer):
    text = "".join(tiny.SPECIAL_TOKENS)
    assert tokenizer(text)["input_ids"] == list(tiny.TOKEN_IDS.values()) == list(range(256, 264))
    assert tokenizer.decode([55, *range(256, 264)], skip_special_tokens=True) == "7"
    assert tokenizer.eos_token_id == tiny.TOKEN_IDS["<|im_end|>"] != tokenizer.pad_token_id


def test_parity_init_leaves_no_gradient_at_zero():
    model, processor = tiny.build_tiny_in_memory(
        init_std=0.1, hidden_size=64, heads=2, kv_heads=1, intermediate_size=64, vision_hidden=32, vision_heads=2
    )
    from PIL import Image

    picture = Image.effect_noise((84, 56), 60).convert("RGB")
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    torch.manual_seed(0)
    logits = model(**inputs).logits
    (logits * torch.randn_like(logits)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-4, name
        if parameter.ndim >= 2:
            assert 0.09 < parameter.std() < 0.11, name


@pytest.mark.parametrize("tied", [True, False])
def test_fresh_learning_model_samples_nearly_uniformly(tied):
    model, _ = tiny.build_tiny_in_memory(tie_word_embeddings=tied)
    tied_now = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied_now is tied
    with torch.no_grad():
        probabilities = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    assert probabilities.max() < 4 / VOCAB_SIZE
    assert probabilities.min() > 0.25 / VOCAB_SIZE


def test_seed_and_settings_decide_the_weights():
    weights = [tiny.build_tiny_in_memory(seed=seed)[0].lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_same_settings_are_kept_and_others_replace_the_folder(tmp_path):
    out = tmp_path / "deep" / "model"
    tiny.main(["--out", str(out), "--layers", "1"])
    before = (out / "model.safetensors").stat()
    tiny.main(["--out", str(out), "--layers", "1"])
    assert (out / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    tiny.main(["--out", str(out), "--layers", "1", "--no-tie-word-embeddings"])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_foreign_folder_is_never_replaced(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="choose another folder"):
        tiny.build_tiny(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_interrupted_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "_digest_of", lambda folder: None)
    monkeypatch.setattr(tiny.TinySettings, "digest", fail)
    with pytest.raises(KeyboardInterrupt):
        tiny.build_tiny(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "none"}, "known: internvl, llava_onevision, qwen2_5_vl"),
        ({"hidden_size": 64}, "hidden_size = heads"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"vision_heads": 3}, "divisible by 4"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny.tiny_config(**settings)


@pytest.mark.parametrize(("wrong", "words"), [(["--family", "nope"], "unknown tiny family 'nope'")])
def test_a_wrong_option_is_one_line(tmp_path, capsys, wrong, words):
    with pytest.raises(SystemExit) as end:
        tiny.main(["--out", str(tmp_path / "model"), *wrong])
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith(f"error: {words}") and err.count("\n") == 1
