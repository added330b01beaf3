"""Data in files: every source gives the same rows, fields are found by their usual names, bad rows are named."""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import re
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from helpers import picture
from PIL import Image

from rollplex.data import sources
from rollplex.data.datamodule import VLMDataModule
from rollplex.data.encode import BadRow, PromptEncoder
from rollplex.data.images import open_image
from rollplex.data.sources import open_rows
from rollplex.models.tiny import TOKEN_IDS
from rollplex.rewards import ExactMatch, FormatRegex
from rollplex.tasks.base import VLMTask
from rollplex.tasks.files import FileTask

IMAGE_PAD, VIDEO_PAD = TOKEN_IDS["<|image_pad|>"], TOKEN_IDS["<|video_pad|>"]


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    """Six pictures of different sizes, images/0.png ... 5.png."""
    (tmp_path / "images").mkdir()
    for i in range(6):
        picture(56 + 28 * (i % 3), 56, seed=i).save(tmp_path / "images" / f"{i}.png")
    return tmp_path


def geometry(n=6, **more):
    """Rows as those of Geometry3K."""
    return [
        {"problem": f"<image>Find x in {i}.", "images": [f"images/{i}.png"], "answer": str(i), **more} for i in range(n)
    ]


def task_of(folder, rows=None, **settings):
    path = write_jsonl(folder / "train.jsonl", rows if rows is not None else geometry())
    return FileTask(**({"path": str(path), "rewards": [ExactMatch()]} | settings))


def prompts(task, processor, split="train", **settings):
    encoder = PromptEncoder(processor, **settings)
    return [encoder.encode(task, sample) for sample in task.samples(split)]


# ---- sources ----


def as_parquet(folder, rows):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=2)
    return folder / "rows.parquet"


def as_saved(folder, rows):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    (folder / "saved" / "images").symlink_to(folder / "images")
    return folder / "saved"


def as_json(folder, rows):
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


WRITERS = {
    "jsonl": lambda f, rows: write_jsonl(f / "rows.jsonl", rows),
    "json": as_json,
    "parquet": as_parquet,
    "hf": as_saved,
}


@pytest.mark.parametrize("kind", list(WRITERS))
def test_every_source_gives_the_same_prompts(kind, folder, tiny_processor):
    plain = prompts(task_of(folder), tiny_processor)
    path = WRITERS[kind](folder, geometry())
    task = FileTask(path=str(path), rewards=[ExactMatch()], media_roots=[str(folder)])
    found = prompts(task, tiny_processor)
    assert [p.sample.id for p in found] == [f"{path}[{i}]" for i in range(6)]
    assert [p.sample["answer"] for p in found] == [str(i) for i in range(6)]
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.media["pixel_values"], other.media["pixel_values"])


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_pictures_stored_in_the_rows(kind, folder, tiny_processor):
    rows = [
        {
            "problem": "<image>?",
            "images": [{"bytes": (folder / f"images/{i}.png").read_bytes(), "path": None}],
            "answer": i,
        }
        for i in range(4)
    ]
    found = prompts(FileTask(path=str(WRITERS[kind](folder, rows)), rewards=[ExactMatch()]), tiny_processor)
    for i, prompt in enumerate(found):
        assert np.array_equal(prompt.images[0], Image.open(folder / f"images/{i}.png"))
        assert prompt.sample["answer"] == i


def test_the_image_feature_of_datasets_is_not_decoded_by_it(folder, tiny_processor):
    datasets = pytest.importorskip("datasets")
    rows = {"problem": ["?"] * 2, "image": [str(folder / f"images/{i}.png") for i in range(2)], "answer": [1, 2]}
    features = datasets.Features(
        problem=datasets.Value("string"), image=datasets.Image(), answer=datasets.Value("int64")
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder / "saved"))
    found = prompts(FileTask(path=str(folder / "saved"), rewards=[ExactMatch()]), tiny_processor)
    assert np.array_equal(found[1].images[0], Image.open(folder / "images/1.png"))


def test_a_dataset_of_several_splits_names_them(folder):
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(geometry(2))
    datasets.DatasetDict(train=one, test=one).save_to_disk(str(folder / "both"))
    with pytest.raises(ValueError, match=r"several splits; name one: .*both/train, .*both/test"):
        open_rows(folder / "both")
    assert len(open_rows(folder / "both" / "train")[0]) == 2


def test_a_row_group_is_read_once_while_it_fits(folder, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    path = as_parquet(folder, geometry())
    (rows,) = open_rows(path)
    read, count = pq.ParquetFile.read_row_group, []
    monkeypatch.setattr(pq.ParquetFile, "read_row_group", lambda self, g, **k: count.append(g) or read(self, g, **k))
    assert [rows[i]["answer"] for i in (0, 5, 1, 4, 2, 3)] == ["0", "5", "1", "4", "2", "3"]
    assert count == [0, 2, 1]
    again = pickle.loads(pickle.dumps(rows))
    assert again[3] == rows[3] and count == [0, 2, 1, 1], "tables do not travel"
    monkeypatch.setattr(sources, "CACHE_BYTES", 0)
    count.clear()
    assert [again[i]["answer"] for i in (0, 1, 5, 0)] == ["0", "1", "5", "0"]
    assert count == [0, 2, 0], "memory is bounded: only the last stays"
    monkeypatch.setattr(sources, "MAX_GROUP_BYTES", 10)
    with pytest.raises(ValueError, match=r"row group 0 .* smaller row_group_size"):
        open_rows(path)


def test_jsonl_holds_only_places_and_skips_blank_lines(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n   \n{"a": 2}\r\n[3]\n{"a": \n{"a": "' + b"x" * 100 + b'"}\n{"a": 5}')
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 60)
    (rows,) = open_rows(path)
    assert len(rows) == 6 and rows[0] == {"a": 1} and rows[1] == {"a": 2} and rows[5] == {"a": 5}
    for i, message in ((2, "not list"), (3, "Expecting value"), (4, "its line has 110 bytes; at most 60")):
        with pytest.raises(ValueError, match=message):
            rows[i]
    with pytest.raises(ValueError, match=r"^no valid JSON at column 8: Expecting value$"):
        rows[3]
    assert [rows.place(i) for i in range(6)] == ["line 1", "line 4", "line 5", "line 6", "line 7", "line 8"]


def test_folders_of_pictures_and_videos(tmp_path, tiny_processor):
    for name in ("cat/1.png", "cat/0.png", "dog/2.PNG", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(56, 56, seed=len(name)).save(tmp_path / name, "PNG")
    (tmp_path / "loop").symlink_to(tmp_path)
    task = FileTask(path=str(tmp_path), question="which?", rewards=[ExactMatch()])
    found = prompts(task, tiny_processor)
    assert [p.sample["answer"] for p in found] == ["cat", "cat", "dog"]
    assert [p.sample["image"] for p in found] == ["cat/0.png", "cat/1.png", "dog/2.PNG"]
    assert "which?" in found[0].text and (found[0].input_ids == IMAGE_PAD).sum() == 4


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_folder_with_metadata(kind, folder, tiny_processor):
    rows = [{"file_name": f"images/{i}.png", "problem": f"in {i}?", "answer": f"a{i}"} for i in range(3)]
    if kind == "jsonl":
        write_jsonl(folder / "metadata.jsonl", rows)
    else:
        lines = ["file_name,problem,answer", *(",".join(row.values()) for row in rows)]
        (folder / "metadata.csv").write_text("\n".join(lines))
    found = prompts(FileTask(path=str(folder), rewards=[ExactMatch()]), tiny_processor)
    assert [p.sample["answer"] for p in found] == ["a0", "a1", "a2"]
    assert np.array_equal(found[2].images[0], Image.open(folder / "images/2.png"))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "walk" / "clip.mkv"
    path.parent.mkdir()
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = 56, 56, "gray"
        for i in range(20):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((56, 56), 10 * i, np.uint8), format="gray")))
        container.mux(stream.encode(None))
    return path


def test_a_folder_of_videos(clip, tiny_processor):
    task = FileTask(path=str(clip.parent.parent), question="what?", rewards=[ExactMatch()])
    (prompt,) = prompts(task, tiny_processor, video_fps=2.0)
    assert prompt.sample["answer"] == "walk"
    assert prompt.media["video_grid_thw"].tolist() == [[2, 4, 4]]


@pytest.mark.parametrize(("total", "side"), [(None, 4), (4 * 56 * 56, 4), (4 * 28 * 56, 2)])
def test_video_total_pixels_shrinks_the_frames(total, side, clip, tiny_processor):
    task = FileTask(path=str(clip.parent.parent), question="what?", rewards=[ExactMatch()])
    (prompt,) = prompts(task, tiny_processor, video_total_pixels=total, min_pixels=28 * 28)
    assert prompt.media["video_grid_thw"].tolist() == [[2, side, side]]
    with pytest.raises(
        BadRow, match=r"video_total_pixels=100 is 25 for each of 4 frames, but a frame has at least 784"
    ):
        prompts(task, tiny_processor, video_total_pixels=100, min_pixels=28 * 28)


def test_video_total_pixels_where_the_processor_counts_all_frames_itself(tiny_processor, monkeypatch):
    """Qwen3-VL's sizes are those of a whole video, so the budget is not shared among its frames."""
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    for part, wanted in ((copy.copy(tiny_processor.video_processor), 250_000), (Qwen3VLVideoProcessor(), 1_000_000)):
        part.size = {"shortest_edge": 4096, "longest_edge": 10**9}
        monkeypatch.setattr(tiny_processor, "video_processor", part)
        encoder = PromptEncoder(tiny_processor, video_total_pixels=1_000_000)
        assert encoder.sizes.video([4]) == {"shortest_edge": 4096, "longest_edge": wanted}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: f / "nothing.jsonl", "does not exist"),
        (lambda f: f / "*.parquet", "no file matches"),
        (lambda f: write_jsonl(f / "a.jsonl", []), "has no rows"),
        (lambda f: write_jsonl(f / "rows.txt", [{}]), "cannot tell what .txt is; set format"),
        (lambda f: [write_jsonl(f / "a.jsonl", [{}]), f / "a.*"], "twice"),
        (lambda f: as_json(f, {"a": 1}), "must hold an array"),
        (lambda f: f, "has no rows"),
    ],
)
def test_paths_that_are_no_source(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        open_rows(make(tmp_path))


def test_a_hub_snapshot_is_told_to_name_its_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train-00000-of-00001.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"name files, e\.g\. .*train-00000"):
        open_rows(tmp_path)


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("gone")))
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"reading a\.parquet needs pyarrow: pip install 'rollplex\[data\]'"):
        open_rows(tmp_path / "a.parquet")


def test_a_broken_parquet_file_is_an_error_before_the_run(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"not a table at all")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet"):
        open_rows(tmp_path / "a.parquet")


def test_patterns_and_lists_are_one_sequence(folder, tiny_processor):
    for i in range(3):
        write_jsonl(folder / f"part-{i}.jsonl", geometry()[2 * i : 2 * i + 2])
    task = FileTask(path=[str(folder / "part-[01].jsonl"), str(folder / "part-2.jsonl")], rewards=[ExactMatch()])
    assert [s["answer"] for s in task.samples("train")] == [str(i) for i in range(6)]
    assert task.samples("train")[3].id == f"{folder}/part-1.jsonl[1]"


# ---- where pictures stand ----


def layout_of(prompt):
    """The prompt's text with <image> for a run of picture tokens."""
    ids, out = prompt.input_ids.tolist(), []
    for i, token in enumerate(ids):
        if token in (IMAGE_PAD, VIDEO_PAD):
            if i == 0 or ids[i - 1] != token:
                out.append(ord("@") if token == IMAGE_PAD else ord("%"))
        elif token < 256:
            out.append(token)
    return bytes(out).decode().removeprefix("user\n").removesuffix("\nassistant\n")


ONE, TWO = "images/0.png", "images/1.png"


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"problem": "<image>a"}, "<image>a"),
        ({"problem": "a", "image": ONE}, "@a"),
        ({"prompt": "a<image>b", "images": [ONE]}, "a@b"),
        ({"question": "a<image>b<image>c", "images": [ONE, TWO]}, "a@b@c"),
        ({"problem": "a", "images": [ONE, TWO]}, "@@a"),
        ({"prompt": [{"role": "user", "content": "a<image>"}], "images": [ONE]}, "a@"),
        ({"messages": json.dumps([{"role": "user", "content": "a<image>"}]), "image": ONE}, "a@"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "<image>?"}, {"type": "image"}]}], "image": ONE},
         "<image>?@"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": ONE}, {"type": "text", "text": "b"}]}]}, "@b"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": ONE}, {"type": "image"}]}], "image": TWO}, "@@"),
        ({"problem": "a", "images": [], "videos": None}, "a"),
        ({"problem": "a", "videos": [[ONE, ONE]], "image": TWO}, "@%a"),
        ({"problem": "<video>a<image>", "videos": [[ONE, ONE]], "image": TWO}, "%a@"),
        ({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a", "image": None, "image_url": None},
            {"type": "image_url", "text": None, "image_url": {"url": "data:image/png;base64,"
             + base64.b64encode(encoded(picture(56, 56))).decode()}}]}]}, "a@"),
    ],
)  # fmt: skip
def test_where_pictures_stand(row, wanted, folder, tiny_processor):
    (prompt,) = prompts(task_of(folder, [{"answer": "1", **row}]), tiny_processor)
    assert layout_of(prompt).replace("\u200b", "") == wanted


def test_pictures_come_in_their_order(folder, tiny_processor):
    rows = [{"problem": "<image>and<image>", "images": ["images/2.png", "images/0.png"], "answer": "1"}]
    (prompt,) = prompts(task_of(folder, rows), tiny_processor)
    assert [image.size for image in prompt.images] == [(112, 56), (56, 56)]


def test_turns_and_added_prompts(folder, tiny_processor):
    turns = [
        {"role": "user", "content": "<image>a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    rows = [{"prompt": turns, "image": ONE, "answer": "1"}]
    task = task_of(folder, rows, system_prompt="be brief", prompt_suffix=" Answer:")
    messages = task.messages(task.samples("train")[0])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert [part.get("text") for part in messages[-1]["content"]] == ["c", " Answer:"]
    own = [{"prompt": [{"role": "system", "content": "own"}, *turns], "image": ONE, "answer": "1"}]
    task = task_of(folder, own, system_prompt="be brief")
    assert task.messages(task.samples("train")[0])[0]["content"] == [{"type": "text", "text": "own"}]


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "human", "value": "<image>\nhow many?"}, {"from": "gpt", "value": "4"}],  # LLaVA
        [{"role": "user", "content": "<image>\nhow many?"}, {"role": "assistant", "content": "4"}],
    ],
)  # fmt: skip
def test_the_assistants_last_message_is_the_answer_and_no_part_of_the_prompt(turns, folder):
    name = "conversations" if "from" in turns[0] else "messages"
    task = task_of(folder, [{name: turns, "image": ONE}, {name: turns, "image": ONE, "solution": "5"}])
    rows = task.samples("train")
    assert [row["answer"] for row in rows] == ["4", "5"]
    for row in rows:
        (message,) = task.messages(row)
        assert [part["type"] for part in message["content"]] == ["image", "text"]
        assert message["role"] == "user" and message["content"][1]["text"] == "\nhow many?"


BAD = {
    "no prompt": ({"images": [ONE]}, "has none of messages, prompt, problem, question, conversations; its fields are"),
    "prompt type": ({"problem": 7}, "problem must be text or a list of messages, not int"),
    "empty messages": ({"messages": []}, "messages must be text or a list"),
    "message type": ({"messages": ["a"]}, "a message must be an object"),
    "role": ({"messages": [{"role": "tool", "content": "a"}]}, "role 'tool'; it must be one of"),
    "role type": ({"messages": [{"role": ["user"], "content": "a"}]}, "it must be one of"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, "content must be text or a list of parts, not int"),
    "part": ({"messages": [{"role": "user", "content": ["a"]}]}, "a part of a message must be an object"),
    "part type": ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "'audio' is none of text"),
    "answered": (
        {"messages": [{"role": "assistant", "content": "a"}]},
        "the last message before the answer is no more",
    ),
    "too few": ({"problem": "<image><image>", "images": [ONE]}, "the text has 2 <image> for 1 images"),
    "too many": ({"problem": "<image>", "images": [ONE, TWO]}, "the text has 1 <image> for 2 images"),
    "elsewhere": (
        {"problem": "a", "image_path": ONE},
        "has its image in image_path, .*: set image_field to image_path",
    ),
    "video elsewhere": ({"problem": "a", "video_url": "a.mp4"}, "set video_field to video_url"),
    "to fill": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "1 image parts to fill, the row has 0",
    ),
    "missing file": ({"problem": "a", "images": [ONE, "gone.png"]}, r"images\[1\] no file 'gone.png'"),
    "out": ({"problem": "a", "image": "../../x.png"}, r"image\[0\] .*(no file|leads outside)"),
    "passwd": ({"problem": "a", "image": "/etc/passwd"}, r"image\[0\] '/etc/passwd' leads outside"),
    "url": ({"problem": "a", "image": "http://example.org/a.png"}, r"nothing is fetched from http://example\.org"),
    "picture type": ({"problem": "a", "images": [3]}, r"images\[0\] must be a path, bytes"),
    "no picture": ({"problem": "a", "image": "train.jsonl"}, "cannot identify"),
    "no answer": ({"problem": "a", "answer": None}, "has no answer, which ExactMatch needs"),
    "empty answer": ({"problem": "a", "answer": []}, "has an empty list as answer, which ExactMatch needs"),
    "many": ({"problem": "a", "images": [ONE] * 5000}, "images has 5000 entries; at most 4096"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_row_is_named_with_its_reason(name, folder, tiny_processor):
    row, message = BAD[name]
    rows = [*geometry(1), {"answer": "1", **row}]
    for on_bad_row in ("skip", "error"):
        task = task_of(folder, rows)
        data = VLMDataModule(task, batch_size=2, shuffle=False, on_bad_row=on_bad_row).attach(tiny_processor)
        if on_bad_row == "error":
            with pytest.raises(BadRow, match=message) as caught:
                data.setup("fit")
            assert caught.value.row_id == f"{folder}/train.jsonl[1]"
            continue
        data.setup("fit")
        with pytest.warns(UserWarning, match=message):
            (batch,) = list(data.train_dataloader())
        assert len(batch) == 1 and [row_id for row_id, _ in data.bad_rows] == [f"{folder}/train.jsonl[1]"]


def test_a_reason_does_not_quote_a_whole_row(folder, tiny_processor):
    rows = [{"answer": "1", "messages": [{"role": "user", "content": [{"type": "x" * 10**6}]}]}, *geometry(1)]
    rows.append({"answer": "1", "problem": "a", "image": "y" * 10**6})
    data = VLMDataModule(task_of(folder, rows), batch_size=3, shuffle=False).attach(tiny_processor)
    data.setup("fit")
    with pytest.warns(UserWarning):
        list(data.train_dataloader())
    assert len(data.bad_rows) == 2 and all(len(reason) < 600 for _, reason in data.bad_rows)


def test_img_10_length_counts_picture_tokens_of_file_rows(folder, tiny_processor):
    picture(560, 560).save(folder / "images" / "0.png")
    data = VLMDataModule(task_of(folder), batch_size=6, shuffle=False, max_prompt_length=60).attach(tiny_processor)
    data.setup("fit")
    with pytest.warns(
        UserWarning,
        match=r"needs 4\d\d tokens \(400 of them vision tokens\); max_prompt_length allows 60; set at least 4\d\d",
    ):
        (batch,) = list(data.train_dataloader())
    assert len(batch) == 5


def test_a_text_that_cannot_fit_is_not_tokenized(folder, tiny_processor, monkeypatch):
    encoder = PromptEncoder(tiny_processor, max_prompt_length=64)
    task = task_of(folder, [{"problem": "x" * 10**6, "answer": "1"}])
    monkeypatch.setattr(type(tiny_processor), "__call__", lambda *a, **k: pytest.fail("tokenized"))
    with pytest.raises(
        BadRow, match=r"1000\d\d\d? letters cannot fit into max_prompt_length=64 tokens|letters cannot fit"
    ):
        encoder.encode(task, task.samples("train")[0])


def test_all_pictures_of_a_row_have_one_budget(folder, tiny_processor):
    task = task_of(folder, [{"problem": "a", "images": [ONE] * 5, "answer": "1"}])
    assert len(prompts(task, tiny_processor, max_image_pixels=56 * 56 * 5)[0].images) == 5
    with pytest.raises(BadRow, match="56x56 = 3136 pixels; 0 are allowed"):
        prompts(task, tiny_processor, max_image_pixels=56 * 56)
    with pytest.raises(BadRow, match="more than 4 pictures and videos, and each needs a token"):
        prompts(task, tiny_processor, max_prompt_length=4)


# ---- splits, settings, columns ----


def test_a_part_of_the_rows_is_held_out(folder):
    task = task_of(folder, validation_size=2, seed=3)
    train, validation = ({s.id for s in task.samples(split)} for split in ("train", "validation"))
    assert len(train) == 4 and len(validation) == 2 and not train & validation
    assert {s.id for s in task_of(folder, validation_size=2, seed=3).samples("validation")} == validation
    assert any(
        {s.id for s in task_of(folder, validation_size=2, seed=i).samples("validation")} != validation for i in range(9)
    )
    assert task.samples("test") == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rewards": None}, "FileTask has no rewards"),
        ({"validation_size": -1}, "validation_size=-1"),
        ({"validation_size": 6}, "leaves nothing"),
        ({"validation_size": 1, "validation_path": "x"}, "both set"),
        ({"media_roots": ["nowhere"]}, "media_roots names 'nowhere'"),
        ({"format": "csv"}, "format='csv' is unknown"),
        *(({"path": path}, f"path={path!r} must name a file or a folder") for path in (5, None, "", [], [""], [5], {})),
        ({"validation_path": []}, r"validation_path=\[\] must name"),
        ({"test_path": ""}, "test_path='' must name"),
        ({"media_roots": "pictures"}, r"media_roots='pictures' must be a list, e.g. \[pictures\]"),
        ({"allowed_url_hosts": "example.org"}, "allowed_url_hosts='example.org' must be a list"),
        ({"seed": -1}, "seed=-1 must be a whole number, 0 or more"),
        ({"seed": 1.5}, "seed=1.5 must be a whole number"),
    ],
)
def test_settings_that_cannot_work(settings, message, folder):
    with pytest.raises(ValueError, match=message if "\\" in message else re.escape(message)):
        task_of(folder, **settings).samples("train")


def test_columns_reach_the_rewards_and_the_task_travels(folder):
    task = task_of(folder, geometry(source="made up", difficulty=3), rewards=[FormatRegex("a")])
    sample = task.samples("train")[2]
    assert sample["difficulty"] == 3 and sample["source"] == "made up" and sample["answer"] == "2"
    again = pickle.loads(pickle.dumps(task))
    assert again.messages(sample) == task.messages(sample)
    assert len(again.samples("train")) == 6


@pytest.mark.parametrize(
    ("row", "settings", "wanted"),
    [
        ({"solution": 4}, {}, 4),
        ({"ground_truth": "x"}, {}, "x"),
        ({"reward_model": {"style": "rule", "ground_truth": "12"}}, {}, "12"),
        ({"gold": [1, 2]}, {"answer_field": "gold"}, [1, 2]),
    ],
)
def test_the_answer_is_found(row, settings, wanted, folder):
    task = task_of(folder, [{"problem": "a", **row}], **settings)
    assert task.samples("train")[0]["answer"] == wanted


def test_a_subclass_with_its_own_reward_needs_no_reward_objects(folder):
    class Own(FileTask):
        def reward(self, sample, response):
            return 1.0

    assert len(Own(path=str(write_jsonl(folder / "a.jsonl", geometry()))).samples("train")) == 6


def test_each_row_looks_in_its_own_folder_first(tmp_path, tiny_processor):
    for i, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        picture(56, 56, seed=i).save(tmp_path / name / "same.png")
        write_jsonl(tmp_path / name / "rows.jsonl", [{"problem": "?", "image": "same.png", "answer": name}])
    task = FileTask(path=[str(tmp_path / n / "rows.jsonl") for n in "ab"], rewards=[ExactMatch()])
    found = prompts(task, tiny_processor)
    assert np.array_equal(found[0].images[0], picture(56, 56, seed=0))
    assert np.array_equal(found[1].images[0], picture(56, 56, seed=1))


def test_ids_are_checked_without_reading_rows(folder, tiny_processor, monkeypatch):
    task = task_of(folder)
    data = VLMDataModule(task, batch_size=2).attach(tiny_processor)
    monkeypatch.setattr(sources.JsonLines, "read", lambda self, number: pytest.fail("read"))
    data.setup("fit")


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_decode_and_each_picture_is_decoded_once_a_step(workers, folder, tiny_processor, monkeypatch):
    rows = [*geometry(), {"problem": "a", "image": "gone.png", "answer": "1"}, *geometry(1)]
    task = task_of(folder, rows)
    count = []
    monkeypatch.setattr("rollplex.data.encode.open_image", lambda *a, **k: count.append(1) or open_image(*a, **k))
    data = VLMDataModule(task, batch_size=4, shuffle=False, num_workers=workers).attach(tiny_processor)
    data.setup("fit")
    with pytest.warns(UserWarning, match=r"train\.jsonl\[6\]' \(line 7\).*gone\.png"):
        batches = [[prompt.sample["answer"] for prompt in batch] for batch in data.train_dataloader()]
    assert batches == [["0", "1", "2", "3"], ["4", "5", "0"]]
    assert len(count) == (7 if workers == 0 else 0), "the training process decodes nothing when workers do"


def test_no_dataset_code_runs(tmp_path):
    """A loading script beside the data, and a pickle where rows should be, are never run."""
    (tmp_path / "train.py").write_text("raise SystemExit('ran')")
    (tmp_path / "a.jsonl").write_bytes(pickle.dumps({"a": 1}))
    (rows,) = open_rows(tmp_path / "a.jsonl")
    with pytest.raises(ValueError):
        rows[0]
    with pytest.raises(ValueError, match=r"cannot tell what \.py is"):
        open_rows(tmp_path / "train.py")
    assert issubclass(FileTask, VLMTask)
