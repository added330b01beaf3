"""A processor or tokenizer that is not the model's is one clear error, before a weight is read."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from families import NAMES, PARITY, encoded
from runs import run as train
from test_plan_run import config_of

from rollplex.cli import main
from rollplex.data.encode import BadRow
from rollplex.engines import TorchEngine, VLLMEngine
from rollplex.models import policy
from rollplex.models.byte_tokenizer import VOCAB_SIZE
from rollplex.models.registry import load_processor
from rollplex.models.tiny import build_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> a tiny model's folder; not to be changed."""
    root = tmp_path_factory.mktemp("families")
    return {name: build_tiny(root / name, family=name, **PARITY) for name in NAMES}


def with_processor(folder: Path, processor, out: Path) -> Path:
    """The model of a folder with another processor."""
    out.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (out / name).symlink_to(folder / name)
    processor.save_pretrained(out)
    return out


def changed(processor, path: str, value) -> None:
    *owners, last = path.split(".")
    for name in owners:
        processor = getattr(processor, name)
    setattr(processor, last, value)


TILED = {"image_processor.size": {"height": 28, "width": 28}}
PATCHED = {"image_processor.patch_size": 7, "image_processor.merge_size": 1, "video_processor.temporal_patch_size": 4}
WRONG = {
    "qwen2_vl": PATCHED, "qwen2_5_vl": PATCHED, "qwen3_vl": PATCHED | {"video_processor.patch_size": 14},
    "llava_onevision": TILED | {
        "num_image_tokens": 25, "image_processor.image_grid_pinpoints": [[56, 56]], "vision_aspect_ratio": "anyres_max_3",
        "vision_feature_select_strategy": "default",
    },
    "internvl": TILED | {"image_seq_length": 16},
}  # fmt: skip
CASES = [(family, path) for family, paths in WRONG.items() for path in paths]


@pytest.mark.parametrize("family", NAMES)
def test_another_familys_processor_is_refused(folders, tmp_path, family):
    assert load_processor(str(folders[family]))
    for other in NAMES:
        if other == family:
            continue
        folder = with_processor(folders[family], load_processor(str(folders[other])), tmp_path / other)
        with pytest.raises(
            ValueError, match=r"its processor is not that of its model .* the model needs a \w+Processor"
        ):
            load_processor(str(folder))


@pytest.mark.parametrize(("family", "path"), CASES, ids=[f"{family}-{path}" for family, path in CASES])
def test_a_size_that_the_model_does_not_have_is_refused(folders, tmp_path, family, path):
    processor = load_processor(str(folders[family]))
    changed(processor, path, WRONG[family][path])
    folder = with_processor(folders[family], processor, tmp_path / "out")
    with pytest.raises(ValueError, match=rf"{path}=.* of the processor, .* by the config's .*own processor") as caught:
        load_processor(str(folder))
    assert str(caught.value).count(" of the processor, ") == 1  # and nothing else is found wrong


@pytest.mark.parametrize("family", NAMES)
def test_a_tokenizer_that_is_not_the_models_is_refused(folders, tmp_path, family):
    """Without the placeholder, with it under another number, and with more tokens than the model has embeddings."""
    good = folders[family]
    token = load_processor(str(good)).image_token

    for names in (["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]):
        folder = with_processor(good, load_processor(str(good)), tmp_path / str(len(names)))
        for name in names:
            text = (folder / name).read_text().replace(f'"{token}"', '"<|nothing|>"')
            if family == "internvl":  # its tokenizer says what it calls the placeholder
                text = re.sub(r'("\w+_token": )"<.nothing.>"', rf'\1"{token}"', text)
            (folder / name).write_text(text)
        with pytest.raises(ValueError, match=r"no image placeholder '<|image placeholder: image_token_id=26[4-9] of"):
            load_processor(str(folder))
    processor = load_processor(str(good))
    processor.tokenizer.add_tokens([f"<extra {i}>" for i in range(3)])
    with pytest.raises(
        ValueError,
        match=rf"the tokenizer's last token is {VOCAB_SIZE + 2}, and the model has embeddings for {VOCAB_SIZE}",
    ):
        load_processor(str(with_processor(good, processor, tmp_path / "larger")))
    processor = load_processor(str(good))
    processor.tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token"):
        load_processor(str(with_processor(good, processor, tmp_path / "endless")))


def test_placeholders_of_another_number_are_refused(folders, tmp_path):
    for family, kind in (("qwen2_5_vl", "video"), ("internvl", "image")):
        processor = load_processor(str(folders[family]))
        folder, token = (
            with_processor(folders[family], processor, tmp_path / kind),
            getattr(processor, f"{kind}_token_id"),
        )
        config = json.loads((folder / "config.json").read_text()) | {f"{kind}_token_id": 7}
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=f"{kind} placeholder: {kind}_token_id={token} of the processor, 7 by the"):
            load_processor(str(folder))


def test_a_folder_without_a_processor_is_refused(folders, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folders["internvl"] / name, tmp_path)
    with pytest.raises(ValueError, match=r"transformers makes no processor of the files there"):
        load_processor(str(tmp_path))


@pytest.mark.parametrize(("family", "engine"), list(itertools.product(NAMES, [TorchEngine, VLLMEngine])))
def test_a_run_and_its_plan_end_before_a_weight_is_read(folders, tmp_path, monkeypatch, family, engine, capsys):
    def fail(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(policy, "load_hf", fail)
    processor = load_processor(str(folders[family]))
    path = next(iter(WRONG[family]))
    changed(processor, path, WRONG[family][path])
    folder = with_processor(folders[family], processor, tmp_path / "out")
    with pytest.raises(ValueError, match=rf"{path}=.* of the processor"):
        train(folder, tmp_path, engine=engine())
    config = config_of(folder, tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match=rf"error: .*{path}=.* of the processor"):
        main(["plan", "--config", str(tmp_path / "config.yaml")])
    config["model"]["init_args"]["model"] = str(folders[family])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    main(["plan", "--config", str(tmp_path / "config.yaml")])
    assert capsys.readouterr().out


@pytest.mark.parametrize("family", ["llava_onevision", "internvl"])
def test_frames_of_another_size_than_tiles_are_a_bad_row(folders, family):
    """Pictures may be right where videos are not."""
    processor = load_processor(str(folders[family]))
    processor.video_processor.size = {"height": 28, "width": 28}
    assert encoded(processor, ["text", "picture"])
    with pytest.raises(BadRow, match=r"are 28 x 28 pixels, and the model's tiles 56 x 56: set the size"):
        encoded(processor, ["video"])
