"""The built-in tasks with generated pictures: what is seen in the pictures is the answer, and no row comes twice."""

from __future__ import annotations

import csv
import re
import string
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import ndimage

from rollplex.cli import main
from rollplex.data.records import Rollout, Sample
from rollplex.planner.names import settings_of_class
from rollplex.tasks.charts import LETTERS, Charts
from rollplex.tasks.counting import Counting
from rollplex.tasks.generated import ChoiceTask, GeneratedTask
from rollplex.tasks.grounding import Grounding
from rollplex.tasks.motion import DIRECTIONS, Motion
from rollplex.tasks.scenes import COLOURS, KINDS, Shape
from rollplex.tasks.spatial import Spatial, relation

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SMALL = {"train_size": 70, "validation_size": 30}
ALL = tuple(COLOURS)

TASKS = {
    "counting": Counting(**SMALL),
    "counting kinds": Counting(ask="kind", min_count=0, max_count=5, image_size=84, **SMALL),
    "counting both": Counting(ask="both", colours=ALL, max_others=5, image_size=112, question="how many {what}s?", **SMALL),
    "counting all": Counting(ask="all", max_count=9, image_size=112, **SMALL),
    "spatial": Spatial(background="grey", **SMALL),
    "spatial others": Spatial(
        colours=ALL, others=3, image_size=112, question="where is the {first} {first_kind}, seen from {second}?", **SMALL
    ),
    "motion": Motion(**SMALL),
    "motion inside": Motion(wrap=False, speed=[3, 5], shape_size=[12, 16], **SMALL),
    "motion of two": Motion(directions=["up", "down"], num_frames=6, question="{colour} {kind}?", **SMALL),
    "tallest": Charts(**SMALL),
    "shortest": Charts(ask="shortest", num_bars=9, max_height=5, labels=False, grid_lines=False, **SMALL),
    "height": Charts(ask="height", background="black", **SMALL),
    "grounding": Grounding(**SMALL),
    "grounding pixels": Grounding(grid=16, answer_form="brackets", colours=ALL, max_others=4, image_size=224, **SMALL),
}  # fmt: skip
CHOICES = [name for name, task in TASKS.items() if isinstance(task, ChoiceTask)]


def pictures(task: GeneratedTask, sample: Sample) -> list[np.ndarray]:
    """Its picture, or the frames of its video: (H, W, 3) uint8."""
    (message,) = task.messages(sample)
    media, text = message["content"]
    assert text == {"type": "text", "text": sample["question"]}
    return [np.asarray(picture) for picture in ([media["image"]] if media["type"] == "image" else media["video"])]


def colour_at(pixels: np.ndarray, name: str) -> np.ndarray:
    return (pixels == COLOURS[name]).all(-1)


def blobs(mask: np.ndarray) -> list[tuple[float, float, float]]:
    """(x, y, share of its box that is filled) of each connected part; x and y of the middle of its box."""
    labelled, _ = ndimage.label(mask, structure=np.ones((3, 3)))
    found = []
    for number, (rows, columns) in enumerate(ndimage.find_objects(labelled), 1):
        filled = float((labelled[rows, columns] == number).mean())
        found.append(((columns.start + columns.stop) / 2, (rows.start + rows.stop) / 2, filled))
    return found


def kind_of(filled: float) -> str:
    return "square" if filled > 0.98 else "circle" if filled > 0.68 else "triangle"


def count_seen(sample: Sample, pixels: np.ndarray) -> str:
    words = sample["question"].removeprefix("how many ").rstrip("s?").split()
    colours = [word for word in words if word in COLOURS] or ALL
    kinds = [word for word in words if word in KINDS] or KINDS
    found = [blob for colour in colours for blob in blobs(colour_at(pixels, colour))]
    return str(sum(kind_of(filled) in kinds for _, _, filled in found))


def relation_seen(sample: Sample, pixels: np.ndarray) -> str:
    asked = [word for word in sample["question"].replace("?", "").replace(",", "").split() if word in COLOURS]
    rest = [c for c in COLOURS if c != asked[0] and colour_at(pixels, c).any()]
    second = asked[1] if len(asked) == 2 else rest[0]
    ((x, y, _),), ((from_x, from_y, _),) = (blobs(colour_at(pixels, colour)) for colour in (asked[0], second))
    dx, dy = x - from_x, y - from_y
    return ("l" if dx < 0 else "r") if abs(dx) > abs(dy) else ("a" if dy < 0 else "b")


def motion_seen(sample: Sample, *frames: np.ndarray) -> str:
    ways = set()
    for before, after in pairwise(frames):
        most = len(before) // 3
        ways.add(tuple(
            name[0] for name, (dx, dy) in DIRECTIONS.items()
            if any((np.roll(before, (dy * n, dx * n), (0, 1)) == after).all() for n in range(1, most + 1))
        ))  # fmt: skip
    ((way,),) = ways
    return way


def chart_seen(task: Charts, sample: Sample, pixels: np.ndarray) -> str:
    pitch = pixels.shape[1] // task.num_bars
    coloured = np.any([colour_at(pixels, name) for name in task.colours], axis=0)
    heights = [int(coloured[:, i * pitch + pitch // 2].sum()) for i in range(task.num_bars)]
    asked = sample["question"].rstrip("?")
    if asked not in LETTERS:
        best = max(heights) if asked == "tallest" else min(heights)
        assert heights.count(best) == 1
        return LETTERS[heights.index(best)]
    grey = (pixels[:, 0] == 170).all(-1).nonzero()[0]  # the grid lines, from the top down
    bar = heights[LETTERS.index(asked)]
    return str(round((bar - 1) / (grey[1] - grey[0])))


def box_seen(task: Grounding, sample: Sample, pixels: np.ndarray) -> list[int]:
    rows, columns = colour_at(pixels, sample["question"].rstrip("?")).nonzero()
    corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert len(rows) == (corners[2] - corners[0]) * (corners[3] - corners[1])  # nothing lies over it
    cell = task.image_size // task.grid if task.answer_form == "digits" else 1
    return [int(v) // cell for v in corners]


@pytest.mark.parametrize("name", TASKS)
def test_the_answer_is_what_the_picture_shows(name):
    task = TASKS[name]
    for sample in (*task.samples("train"), *task.samples("validation")):
        shown = pictures(task, sample)
        if isinstance(task, Counting):
            seen = count_seen(sample, *shown)
        elif isinstance(task, Spatial):
            seen = relation_seen(sample, *shown)
        elif isinstance(task, Motion):
            seen = motion_seen(sample, *shown)
        elif isinstance(task, Charts):
            seen = chart_seen(task, sample, *shown)
        else:
            seen = box_seen(task, sample, *shown)
        assert seen == sample["answer"], sample


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_the_same_again_and_none_comes_twice(name):
    task = TASKS[name]
    again = type(task)(**settings_of(task))
    seen = Counter()
    for split in ("train", "validation"):
        assert again.samples(split) == task.samples(split)
        for sample in task.samples(split):
            shown = [picture.tobytes() for picture in pictures(task, sample)]
            assert shown == [picture.tobytes() for picture in pictures(again, sample)]
            seen[sample["question"], *shown] += 1
    assert len(seen) == SMALL["train_size"] + SMALL["validation_size"], seen.most_common(1)[0][0][0]
    assert len({s.id for split in ("train", "validation") for s in task.samples(split)}) == len(seen)
    assert task.samples("test") == task.samples("validation")


def settings_of(task: GeneratedTask) -> dict:
    """The settings that the tasks of this file are made with."""
    names = settings_of_class(type(task)) or []
    renamed = {"min_count": lambda: int(task.choices[0]), "max_count": lambda: int(task.choices[-1]),
               "shape_size": lambda: task.sizes}  # fmt: skip
    found = {name: renamed[name]() if name in renamed else getattr(task, name) for name in names}
    return {k: v for k, v in found.items() if not (k == "targets" and getattr(task, "ask", None) == "all")}


@pytest.mark.parametrize("cls", [Counting, Spatial, Motion, Charts, Grounding])
def test_validation_depends_on_the_seed_and_not_on_train_size(cls):
    rows = cls(train_size=30, validation_size=20).samples("validation")
    assert cls(train_size=90, validation_size=20).samples("validation") == rows
    other = cls(train_size=30, validation_size=20, seed=1).samples("validation")
    assert not {s["scene"] for s in other} & {s["scene"] for s in rows}


@pytest.mark.parametrize("name", CHOICES)
def test_every_answer_has_its_share(name):
    task = TASKS[name]
    for split in ("train", "validation"):
        counts = Counter(sample["answer"] for sample in task.samples(split))
        assert set(counts) == set(task.choices) and max(counts.values()) - min(counts.values()) <= 1


def test_asking_is_spread_too():
    """No colour, kind or bar is asked for much more often than another."""
    for name in ("counting", "counting kinds", "spatial", "grounding", "height"):
        task = type(TASKS[name])(**settings_of(TASKS[name]) | {"train_size": 900})
        questions = Counter(sample["question"] for sample in task.samples("train"))
        assert min(questions.values()) > 0.7 * max(questions.values()), (name, questions)


def test_no_single_frame_of_a_motion_tells_the_direction():
    """Over all starts the set of frames is the same whichever way the shape moves: of each number, at each speed."""
    task = Motion(image_size=16, shape_size=[5, 5], speed=[3, 3], train_size=4, validation_size=4)
    (first, *_) = task.samples("train")
    starts = [replace(first["scene"].shape, x=x, y=y) for x in range(16) for y in range(16)]
    for number in range(task.num_frames):
        frames = [
            {task.frame(replace(first["scene"], shape=start, step=(3 * dx, 3 * dy)), number).tobytes() for start in starts}
            for dx, dy in DIRECTIONS.values()
        ]  # fmt: skip
        assert len(frames[0]) == 256 and all(found == frames[0] for found in frames)


def test_the_first_frame_of_a_motion_inside_tells_nothing():
    """The places where a shape of some size and speed may start are the same whichever way it will move."""
    task = Motion(wrap=False, speed=[4, 4], shape_size=[12, 12], train_size=800, validation_size=4)
    starts: dict[str, set[tuple[int, int]]] = {}
    for sample in task.samples("train"):
        shape = sample["scene"].shape
        starts.setdefault(sample["answer"], set()).update([(shape.x, 0), (0, shape.y)])
    # 56 pixels less 12 of the shape and 12 of the way on both sides
    expected = {(x, 0) for x in range(12, 33)} | {(0, y) for y in range(12, 33)}
    assert set(starts) == set("lrud") and all(found == expected for found in starts.values())


def test_a_relation_in_doubt_is_none():
    def at(x: int, y: int) -> Shape:
        return Shape("square", "red", x, y, 10)

    centre = at(30, 30)
    places = {(10, 30): "l", (50, 40): "r", (30, 5): "a", (35, 50): "b", (50, 45): None, (30, 30): None, (45, 45): None}
    assert {place: relation(at(*place), centre) for place in places} == places


def test_a_motion_is_a_video_with_its_rate():
    task = TASKS["motion"]
    (message,) = task.messages(task.samples("train")[0])
    video = message["content"][0]
    assert (video["type"], video["fps"], len(video["video"])) == ("video", 2.0, 4)
    assert all(frame.size == (56, 56) and frame.mode == "RGB" for frame in video["video"])


def response(text: str, *, end: bool = True) -> Rollout:
    ids = [*text.encode(), *([258] if end else [])]
    return Rollout(
        group=0, index=0, token_ids=torch.tensor(ids), logps=torch.zeros(len(ids)), text=text,
        finish_reason="stop" if end else "length", weights_version=0,
    )  # fmt: skip


def worth(task: GeneratedTask, sample: Sample, text: str, **how: bool) -> float:
    return sum(task.reward(sample, response(text, **how)).values())


@pytest.mark.parametrize("name", CHOICES)
def test_nothing_beats_looking_at_the_picture(name):
    task = TASKS[name]
    rows = task.samples("validation")
    for constant in (*string.ascii_lowercase, *string.digits, "", *string.punctuation):
        mean = np.mean([worth(task, sample, constant) for sample in rows])
        right = constant in task.choices
        assert mean <= 0.2 + 1 / len(task.choices) + 1 / len(rows) if right else mean <= 0.1 + 1e-9
    for sample in rows[:9]:
        assert worth(task, sample, sample["answer"]) == pytest.approx(1.2)
        assert task.correct(sample, response(sample["answer"])) is True
        for listing in ("".join(task.choices), sample["answer"] * 2, f"{sample['answer']} "):
            assert worth(task, sample, listing) == pytest.approx(0.1) and not task.correct(sample, response(listing))
        assert worth(task, sample, sample["answer"], end=False) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "end", "iou", "form"),
    [
        ("1357", True, 1.0, 1.0),
        ("1358", True, 8 / 10, 1.0),  # 2 x 4 of 2 x 5
        ("5713", True, 0.0, 1.0),
        ("1357", False, 1.0, 1.0),  # the end token is not asked for,
        ("13579", True, 1.0, 1.0),  # and what comes after four digits is not looked at
        ("135", True, 0.0, 0.75),
        ("135x7", True, 0.0, 0.75),
        ("x357", False, 0.0, 0.75),
        ("", True, 0.0, 0.0),
        ("[1,3,5,7]", True, 0.0, 0.5),
    ],
)
def test_reward_of_a_box_in_digits(text, end, iou, form):
    sample = Sample("s", {"answer": [1, 3, 5, 7] if text != "1358" else [1, 3, 3, 7]})
    text = "1338" if text == "1358" else text
    found = TASKS["grounding"].reward(sample, response(text, end=end))
    assert found == {"iou": pytest.approx(iou), "format": pytest.approx(0.2 * form)}
    assert TASKS["grounding"].correct(sample, response(text, end=end)) is (iou >= 0.5)


@pytest.mark.parametrize(
    ("text", "iou", "form"),
    [
        ("[14, 28, 70, 98]", 1.0, 1.0),
        (" [14,28,70,98]\n", 1.0, 1.0),
        ("[14, 28, 70, 63]", 0.5, 1.0),
        ("It is at [14, 28, 70, 98].", 1.0, 0.0),
        ("[14, 28, 70]", 0.0, 0.0),
        ("1447", 0.0, 0.0),
    ],
)
def test_reward_of_a_box_in_brackets(text, iou, form):
    sample = Sample("s", {"answer": [14, 28, 70, 98]})
    found = TASKS["grounding pixels"].reward(sample, response(text))
    assert found == {"iou": pytest.approx(iou), "format": pytest.approx(0.2 * form)}


BAD = [
    *((cls, {"train_size": 0}) for cls in (Counting, Spatial, Motion, Charts, Grounding)),
    (Counting, {"validation_size": 3}),
    (Counting, {"validation_size": 320.5}),
    (Counting, {"seed": -1}),
    (Counting, {"format_reward": 1.0}),
    (Counting, {"image_size": 8}),
    (Counting, {"background": "pink"}),
    (Counting, {"question": "how many {colour}?"}),
    (Counting, {"question": "{"}),
    (Counting, {"question": "{0}?"}),
    (Counting, {"question": "{what.x}"}),
    (Counting, {"question": "{what[0]}"}),
    (Counting, {"question": 3}),
    (Counting, {"image_size": "56"}),
    (Counting, {"image_size": 56.5}),
    (Counting, {"format_reward": "x"}),
    (Counting, {"format_reward": float("nan")}),
    (Counting, {"background": ["white"]}),
    (Counting, {"min_count": "1"}),
    (Counting, {"max_count": 4.5}),
    (Counting, {"max_others": None}),
    (Counting, {"shape_size": [9.5, 12]}),
    (Counting, {"shape_size": 9}),
    (Counting, {"ask": ["all"]}),
    (Counting, {"kinds": None}),
    (Counting, {"colours": [1]}),
    (Counting, {"min_count": 4}),
    (Counting, {"max_count": 10}),
    (Counting, {"ask": "size"}),
    (Counting, {"colours": ["red", "pink"]}),
    (Counting, {"colours": "red"}),
    (Counting, {"colours": []}),
    (Counting, {"kinds": ["circle", "circle"]}),
    (Counting, {"targets": ["green"]}),
    (Counting, {"targets": ["red"], "ask": "all"}),
    (Counting, {"max_others": -1}),
    (Counting, {"max_others": 2, "colours": ["red"]}),
    (Counting, {"shape_size": [9, 30]}),
    (Counting, {"shape_size": [12, 9]}),
    (Counting, {"shape_size": [9]}),
    (Spatial, {"relations": ["left"]}),
    (Spatial, {"relations": ["left", "behind"]}),
    (Spatial, {"colours": ["red"]}),
    (Spatial, {"others": 1}),
    (Spatial, {"others": "0"}),
    (Spatial, {"question": None, "others": 1, "colours": ALL}),
    (Spatial, {"image_size": "56"}),
    (Spatial, {"question": "{first}?", "others": 1, "colours": ALL}),
    (Motion, {"directions": ["up"]}),
    (Motion, {"num_frames": 1}),
    (Motion, {"speed": [6, 30]}),
    (Motion, {"speed": [0, 6]}),
    (Motion, {"fps": 0}),
    (Motion, {"fps": float("inf")}),
    (Motion, {"fps": "2"}),
    (Motion, {"num_frames": 2.5}),
    (Motion, {"speed": [6.5, 10]}),
    (Motion, {"speed": "6"}),
    (Motion, {"shape_size": [16.0, 24]}),
    (Motion, {"image_size": "56"}),
    (Motion, {"wrap": "no"}),
    (Motion, {"wrap": False}),
    (Motion, {"shape_size": [16, 40]}),
    (Charts, {"num_bars": 1}),
    (Charts, {"max_height": 10}),
    (Charts, {"num_bars": 2.5}),
    (Charts, {"max_height": "9"}),
    (Charts, {"labels": "no"}),
    (Charts, {"image_size": 84.5}),
    (Charts, {"ask": "mean"}),
    (Charts, {"image_size": 40}),
    (Charts, {"grid_lines": False, "ask": "height"}),
    (Grounding, {"answer_form": "words"}),
    (Grounding, {"grid": 10, "image_size": 60}),
    (Grounding, {"grid": 2}),
    (Grounding, {"grid": 8.0}),
    (Grounding, {"image_size": "56"}),
    (Grounding, {"min_cells": 2.5}),
    (Grounding, {"right_iou": "x"}),
    (Grounding, {"max_others": 0.5}),
    (Grounding, {"image_size": 57}),
    (Grounding, {"min_cells": 6}),
    (Grounding, {"max_cells": 8}),
    (Grounding, {"right_iou": 0}),
    (Grounding, {"max_others": 2}),
]


@pytest.mark.parametrize(("cls", "settings"), BAD)
def test_bad_settings_are_refused_by_name(cls, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        cls(**settings)


def test_too_few_scenes_for_the_rows_is_said():
    task = Charts(num_bars=2, max_height=2, colours=["red"], train_size=20, validation_size=2)
    with pytest.raises(
        ValueError, match=r"too few different scenes for train_size=20 and validation_size=2 \(2 found\)"
    ):
        task.samples("train")


BUILT_IN = {"digits": 0.9, "counting": 0.75, "spatial": 0.75, "motion": 0.75, "charts": 0.85, "grounding": 0.5}
"""Config -> validation accuracy that its run reaches at least."""


def fit(name: str, folder: Path, *overrides: str) -> list[dict[str, str]]:
    """Runs a config in `folder`; rows of its metrics."""
    from rollplex.models.tiny import build_tiny

    model = build_tiny(folder / "models" / "tiny-digits")
    main(["fit", "--config", str(CONFIGS / f"{name}_cpu.yaml"), "--model.init_args.model", str(model), *overrides])
    (table,) = (folder / "runs" / name).rglob("metrics.csv")
    return list(csv.DictReader(table.open()))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_config_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"data.init_args.batch_size": 4, "model.init_args.num_generations": 2, "trainer.max_steps": 2}
    rows = fit(name, tmp_path, *(f"--{setting}={value}" for setting, value in small.items()))
    assert len([row for row in rows if row.get("reward")]) == 2


def test_the_readmes_table_is_of_these_configs():
    text = (CONFIGS.parent / "README.md").read_text()
    rows = re.findall(
        r"^\| `configs/(\w+)_cpu\.yaml` \|[^|]*\| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|", text, re.M
    )
    assert {name for name, *_ in rows} == set(BUILT_IN)
    for name, chance, before, after, updates in rows:
        assert float(before) <= float(chance) < BUILT_IN[name] <= float(after)
        assert int(updates) == yaml.safe_load((CONFIGS / f"{name}_cpu.yaml").read_text())["trainer"]["max_steps"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_config_learns(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accuracies = [float(row["val/accuracy"]) for row in fit(name, tmp_path) if row.get("val/accuracy")]
    assert accuracies[-1] >= BUILT_IN[name], accuracies
