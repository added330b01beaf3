"""The built-in digits task: its split, its pictures, and a reward that cannot be gamed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from rollplex.data.records import Rollout, Sample
from rollplex.tasks.digits import Digits

END = 258


def response(text: str, *, end: bool = True, extra: tuple[int, ...] = ()) -> Rollout:
    ids = [*extra, *text.encode(), *([END] if end else [])]
    return Rollout(
        group=0,
        index=0,
        token_ids=torch.tensor(ids, dtype=torch.long),
        logps=torch.zeros(len(ids)),
        text=text,
        finish_reason="stop" if end else "length",
        weights_version=0,
    )


@pytest.fixture(scope="module")
def task():
    return Digits()


SEVEN = Sample("s", {"answer": "7"})


def test_split_is_complete_disjoint_and_stratified(task):
    train, validation = task.samples("train"), task.samples("validation")
    assert (len(train), len(validation)) == (1500, 297)
    assert len({s.id for s in (*train, *validation)}) == 1797
    assert task.samples("test") == validation
    whole = Counter(s["answer"] for s in (*train, *validation))
    held = Counter(s["answer"] for s in validation)
    assert all(abs(held[d] - whole[d] * 297 / 1797) <= 1 for d in "0123456789")


def test_split_depends_on_the_seed_only(task):
    ids = [s.id for s in task.samples("validation")]
    assert [s.id for s in Digits(image_size=28).samples("validation")] == ids
    assert [s.id for s in Digits(seed=1).samples("validation")] != ids


def test_train_size_takes_a_balanced_part(task):
    some = Digits(train_size=100).samples("train")
    assert [s.id for s in some] == [s.id for s in task.samples("train")[:100]]
    assert all(9 <= count <= 11 for count in Counter(s["answer"] for s in some).values())


def test_pictures_are_the_real_scans(task):
    from sklearn.datasets import load_digits

    data = load_digits()
    for sample in task.samples("train")[:20]:
        number = int(sample.id.removeprefix("digits-"))
        assert sample["answer"] == str(data.target[number])
        image = sample["image"]
        assert image.mode == "RGB" and image.size == (56, 56)
        small = np.asarray(image.resize((8, 8))).mean(-1) / 255 * 16
        assert np.abs(small - data.images[number]).mean() < 1.2


def test_messages_hold_one_image_and_the_question(task):
    sample = task.samples("train")[0]
    (message,) = task.messages(sample)
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][0]["image"] is sample["image"]


@pytest.mark.parametrize(
    ("given", "correct", "form"),
    [
        (response("7"), 1.0, 0.2),
        (response("3"), 0.0, 0.2),
        (response("7", end=False), 0.0, 0.1),
        (response("77"), 0.0, 0.1),
        (response("7x", end=False), 0.0, 0.1),
        (response("x7"), 0.0, 0.0),
        (response("x"), 0.0, 0.1),
        (response(""), 0.0, 0.0),
        (response("0123456789"), 0.0, 0.1),
        (response("7", extra=(257,)), 0.0, 0.1),
        (response("\u0667"), 0.0, 0.0),
        (response(" 7"), 0.0, 0.0),
    ],
)
def test_reward(task, given, correct, form):
    assert task.reward(SEVEN, given) == {"correct": correct, "format": pytest.approx(form)}
    assert task.correct(SEVEN, given) is (correct == 1.0)


def test_nothing_beats_reading_the_picture(task):
    """Over all digits, a constant answer earns a tenth of what is left above the format reward."""
    rows = [Sample(d, {"answer": d}) for d in "0123456789"]

    def mean(answer):
        return np.mean([sum(task.reward(row, response(answer or row["answer"])).values()) for row in rows])

    assert mean("7") == pytest.approx(0.1 + 0.2)
    assert mean(None) == pytest.approx(1.2)


@pytest.mark.parametrize(
    "settings",
    [
        {"validation_size": 5},
        {"validation_size": 1797},
        {"train_size": 0},
        {"train_size": 1501},
        {"image_size": 4},
        {"format_reward": 1.0},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Digits(**settings)
