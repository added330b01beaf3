"""Rows of every kind of wrong: none crashes, hangs or grows the process, and each is counted with a reason."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import struct
import time
import warnings
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers import picture
from PIL import Image

from rollplex.data.datamodule import VLMDataModule
from rollplex.rewards import ExactMatch
from rollplex.tasks.files import FileTask


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size that its few bytes of data cannot fill."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


GOOD_FILES = ("rgb.png", "grey.png", "rgba.png", "palette.png", "wide.png", "cmyk.jpg", "turned.jpg", "moving.gif")
BAD_FILES = (
    "cut.png", "empty.png", "junk.png", "huge.png", "large.png", "narrow.png", "eps.png", "list.mp4", "junk.mp4", "pipe.png",
    "out.png", "folder.png", "gone.png",
)  # fmt: skip


def write_files(folder: Path) -> None:
    colour = picture(56, 84, seed=1)
    colour.save(folder / "rgb.png")
    colour.convert("L").save(folder / "grey.png")
    colour.convert("RGBA").save(folder / "rgba.png")
    colour.convert("P").save(folder / "palette.png")
    Image.fromarray(np.asarray(colour.convert("L")).astype(np.uint16) * 257).save(folder / "wide.png")
    colour.convert("CMYK").save(folder / "cmyk.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    colour.save(folder / "turned.jpg", exif=exif)
    colour.save(folder / "moving.gif", save_all=True, append_images=[picture(56, 84, seed=2)])
    whole = encoded(colour)
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "junk.png").write_bytes(random.Random(0).randbytes(5000))
    (folder / "huge.png").write_bytes(claiming(60_000, 60_000))
    (folder / "large.png").write_bytes(claiming(3000, 3000))
    Image.new("L", (5000, 1)).save(folder / "narrow.png")
    (folder / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    (folder / "list.mp4").write_text("#EXTM3U\n#EXTINF:2,\n/etc/passwd\n#EXT-X-ENDLIST\n")
    (folder / "junk.mp4").write_bytes(random.Random(1).randbytes(5000))
    os.mkfifo(folder / "pipe.png")
    (folder / "out.png").symlink_to("/etc/passwd")
    (folder / "folder.png").mkdir()


def good(rng: random.Random) -> dict:
    name = rng.choice(GOOD_FILES)
    return rng.choice([
        {"problem": "<image>what?", "images": [name]},
        {"prompt": "what?", "image": name, "extra": [1, None, {"a": "b"}]},
        {"question": "no picture"},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": name}, {"type": "text", "text": "?"}]}]},
        {"problem": "?", "image": base64.b64encode(encoded(picture(30, 30, seed=rng.randrange(9)))).decode()},
        {"problem": "?", "video": [name, name]},
    ]) | {"answer": str(rng.randrange(10))}  # fmt: skip


def bad(rng: random.Random) -> dict | str:
    name = rng.choice(BAD_FILES)
    return rng.choice([
        {"problem": "?", "image": name, "answer": "1"},
        {"problem": "?", "images": ["rgb.png", name], "answer": "1"},
        {"problem": "?", "video": name, "answer": "1"},
        {"problem": "?", "video": ["rgb.png", name], "answer": "1"},
        {"problem": "?", "image": "../" * rng.randrange(1, 40) + "etc/passwd", "answer": "1"},
        {"problem": "?", "image": rng.choice(["/dev/zero", "/proc/self/mem", "file:///etc/passwd"]), "answer": "1"},
        {"problem": "?", "image": rng.choice(["http://10.0.0.1/a.png", "https://example.org/", "gopher://x"]), "answer": "1"},
        {"problem": "?", "image": "data:image/png;base64," + "A" * 4000, "answer": "1"},
        {"problem": "?", "image": {"bytes": [1, 2, 3]}, "answer": "1"},
        {"problem": "<image><image>", "images": ["rgb.png"], "answer": "1"},
        {"problem": "?", "images": ["rgb.png"] * 300, "answer": "1"},
        {"problem": "?", "images": ["gone.png"] * 10_000, "answer": "1"},
        {"problem": "?" * 300_000, "answer": "1"},
        {"problem": "word " * 400, "answer": "1"},
        {"problem": "?"},
        {"answer": "1"},
        {},
        {"messages": [{"role": "user\u0000", "content": "a"}], "answer": "1"},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"},
        {"messages": {"role": "user"}, "answer": "1"},
        "not json",
        '{"problem": "cut',
        "[" * 50_000 + "]" * 50_000,
        '["problem"]',
        '{"problem": ' + "9" * 5000 + "}",
        '{"problem": "\\ud800", "answer": "1", "image": "\\ud800.png"}',
        "null",
    ])  # fmt: skip


JUNK = (
    None,
    True,
    -1,
    10**30,
    1e308,
    float("nan"),
    "",
    "x" * 3000,
    "<|image_pad|>",
    [],
    {},
    [[[]]],
    {"bytes": None},
    "\x00",
)


def mutated(rng: random.Random) -> dict:
    """A good row with one value somewhere in it replaced."""
    row = json.loads(json.dumps(good(rng)))
    places: list[tuple] = []

    def walk(node) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(row)
    node, key = rng.choice(places)
    node[key] = rng.choice(JUNK)
    return row


def peak_mib() -> float:
    """Most memory the process has had since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def feed(folder: Path, processor, rows: int, seed: int) -> Counter[str]:
    """Run rows through the data module; returns how many of each kind became prompts or were skipped."""
    rng = random.Random(seed)
    kinds = [rng.choices(("good", "bad", "mutated"), (3, 5, 4))[0] for _ in range(rows)]
    makers = {"good": good, "bad": bad, "mutated": mutated}
    with open(folder / "rows.jsonl", "w") as file:
        for kind in kinds:
            row = makers[kind](rng)
            file.write((row if isinstance(row, str) else json.dumps(row)) + "\n")
    task = FileTask(path=str(folder / "rows.jsonl"), rewards=[ExactMatch()])
    data = VLMDataModule(
        task, batch_size=10, shuffle=False, drop_last=False, max_prompt_length=256, max_pixels=64 * 28 * 28,
        max_image_pixels=1_000_000,
    ).attach(processor)  # fmt: skip
    data.setup("fit")
    assert len(data._data["train"]) == rows
    found: Counter[str] = Counter()
    slowest = 0.0
    start = time.monotonic()
    for batch in data.train_dataloader():
        slowest, start = max(slowest, time.monotonic() - start), time.monotonic()
        for prompt in batch:
            number = int(prompt.sample.id.rpartition("[")[2][:-1])
            found[f"{kinds[number]} prompt"] += 1
            assert len(prompt) <= 256
    for row_id, reason in data.bad_rows:
        found[f"{kinds[int(row_id.rpartition('[')[2][:-1])]} skipped"] += 1
        assert reason.strip() and len(reason) < 600
    assert sum(found.values()) == rows, "each row is a prompt, or skipped with a reason"
    assert slowest < 30, f"a batch of 10 took {slowest:.1f} s"
    return found


@pytest.mark.filterwarnings("ignore")
def test_ten_thousand_fuzzed_rows(tmp_path, tiny_processor):
    rows = 10_000
    write_files(tmp_path)
    feed_first = tmp_path / "first"
    feed_first.mkdir()
    write_files(feed_first)
    feed(feed_first, tiny_processor, 60, seed=1)  # what is loaded once is not growth
    reset_peak()
    before = peak_mib()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = feed(tmp_path, tiny_processor, rows, seed=0)
    grown = peak_mib() - before
    print(f"{rows} rows: {dict(found)}, {grown:.0f} MiB grown")
    assert found["good skipped"] == 0 and found["bad prompt"] == 0
    assert found["good prompt"] > 0.15 * rows and found["bad skipped"] > 0.3 * rows
    assert found["mutated prompt"] > 0 and found["mutated skipped"] > 0
    assert grown < 300
