"""Rewards as objects: what each is worth, how they are called, weighted, timed and named."""

from __future__ import annotations

import asyncio
import functools
import math
import pickle
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from rollplex.data.records import Group, Prompt, Rollout, Sample
from rollplex.rewards import (
    BoxIoU,
    ExactMatch,
    FormatRegex,
    FunctionReward,
    MathVerify,
    MultipleChoice,
    Numeric,
    Reward,
    RewardRunner,
    SoftOverlongPunishment,
)
from rollplex.rewards.boxes import iou, mean_iou
from rollplex.rewards.extract import extract_answer, last_boxed
from rollplex.tasks.base import VLMTask


def responses(*texts: str) -> list[Rollout]:
    return [Rollout(0, i, torch.arange(len(t)), -torch.ones(len(t)), t, "stop", 0) for i, t in enumerate(texts)]


def worth(reward: Reward, text: str, answer=None, **columns) -> float:
    return reward.score(Sample("row", {"answer": answer, **columns}), responses(text)[0])


class Listed(VLMTask):
    def __init__(self, *rewards: Reward) -> None:
        self.rewards = rewards


def score(*rewards: Reward, texts, columns=None, workers=0, timeout=5.0, **settings):
    with RewardRunner(
        Listed(*rewards), num_generations=len(texts), workers=workers, timeout=timeout, **settings
    ) as runner:
        return runner.score(Sample("row", columns or {"answer": "4"}), responses(*texts))


def same(actual, expected) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12, equal_nan=True)


# ---- finding the answer ----


@pytest.mark.parametrize(
    ("text", "how", "wanted"),
    [
        ("  4 ", None, "4"),
        (r"so \boxed{3} no \boxed{ \frac{1}{2} } end", "boxed", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2", "boxed", "1"),
        (r"{ \boxed{5}", "boxed", "5"),
        (r"\boxed{a \boxed{b} c}", "boxed", "b"),
        ("nothing", "boxed", None),
        ("<answer> a </answer><answer>b\nc</answer>", "tag", "b\nc"),
        ("<answer>a", "tag", None),
        ("x=1; x=22", r"x=(\d+)", "22"),
        ("x=1; x=22", r"\d+", "22"),
        ("none", r"\d+", None),
    ],
)
def test_extract_answer(text, how, wanted):
    assert extract_answer(text, how) == wanted


def test_boxed_is_linear():
    start = time.monotonic()
    assert last_boxed("\\boxed{" * 200_000) is None
    assert time.monotonic() - start < 5


# ---- what each is worth ----


@pytest.mark.parametrize(
    ("text", "answer", "settings", "wanted"),
    [
        ("4", "4", {}, 1), (" 4\n", 4, {}, 1), ("4.", "4", {}, 0), ("a  b", "a b", {}, 1), ("Cat", "cat", {}, 0),
        ("Cat", "cat", {"ignore_case": True}, 1), ("b", ["a", "b"], {}, 1), ("c", ["a", "b"], {}, 0),
        (r"is \boxed{4}", "4", {"extract": "boxed"}, 1), ("4", "4", {"extract": "boxed"}, 0), ("", "4", {}, 0),
    ],
)  # fmt: skip
def test_exact_match(text, answer, settings, wanted):
    assert worth(ExactMatch(**settings), text, answer) == wanted


@pytest.mark.parametrize(
    ("text", "answer", "settings", "wanted"),
    [
        ("4.0", "4", {}, 1), ("1,234", 1234, {}, 1), ("$5", "5", {}, 1), ("12%", "12", {}, 1), ("4", "4.1", {}, 0),
        ("4", "4.1", {"relative_tolerance": 0.05}, 1), ("four", "4", {}, 0), ("nan", "4", {}, 0), ("inf", "4", {}, 0),
        ("-3e2", "-300", {}, 1), ("9" * 10_000, "4", {}, 0), ("x is 7", "7", {"extract": r"-?\d+"}, 1),
        ("\u22125", "-5", {}, 1), ("-5", "\u22125", {}, 1), ("\u22125", "5", {}, 0), ("1_000", "1000", {}, 0),
    ],
)  # fmt: skip
def test_numeric(text, answer, settings, wanted):
    assert worth(Numeric(**settings), text, answer) == wanted


@pytest.mark.parametrize("number", [0.1, 123.45, -7.3, 0.5, 1e-7, 3.0])
@pytest.mark.parametrize("stored", [float, lambda number: float(np.float32(number))], ids=["float64", "float32"])
def test_a_number_is_right_as_it_was_written(number, stored):
    """Many data sets have float32 columns, and tables hold whole numbers as 3.0 where a row has none."""
    for reward in (Numeric(), ExactMatch()):
        assert worth(reward, str(number), stored(number)) == 1.0
    assert worth(ExactMatch(), "3", stored(3)) == 1.0
    assert worth(ExactMatch(), "3", stored(3.5)) == worth(Numeric(), "16777216", 16777217.0) == 0.0


def test_numeric_says_that_an_answer_is_no_number():
    with pytest.raises(ValueError, match="'blue' is no number"):
        worth(Numeric(), "4", "blue")
    with pytest.raises(ValueError, match="'1_000' is no number"):
        worth(Numeric(), "1000", "1_000")


@pytest.mark.parametrize("reward", [ExactMatch(), Numeric(), MathVerify()], ids=lambda reward: reward.name)
def test_an_empty_list_of_answers_is_an_error(reward):
    with pytest.raises(ValueError, match="the answer is an empty list"):
        worth(reward, "4", [])


@pytest.mark.parametrize(
    ("text", "answer", "wanted"),
    [
        ("B", "B", 1), ("b", "B", 1), ("(B)", "B", 1), ("B.", "B", 1), ("B. the red one", "B", 1), ("C", "B", 0),
        ("The answer is B", "B", 1), ("The answer is (B).", "B", 1), ("Answer: B", "B", 1), ("**Answer:** B", "B", 1),
        ("Option A is wrong. The answer is B", "B", 1), ("A is wrong, so the answer is B.", "B", 1), ("so it is (b)", "B", 1),
        (r"A or \boxed{B}", "B", 1), ("red", "B", 1), ("B", "red", 1), ("B", 1, 1), ("A", 1, 0), ("", "B", 0),
        (r"\boxed{\text{B}}", "B", 1), (r"\boxed{\mathrm{(B)}}", "B", 1), (r"\boxed{\text{red}}", "B", 1),
        (r"\boxed{\text{A}}", "B", 0), ("I think nothing of it", "I", 0), ("the answer is a bee", "A", 0), ("A cat", "A", 0),
    ],
)  # fmt: skip
def test_multiple_choice(text, answer, wanted):
    assert worth(MultipleChoice(), text, answer, options=["blue", "red", "green"]) == wanted


def test_multiple_choice_reads_what_was_extracted_alike():
    assert worth(MultipleChoice(extract="boxed"), r"so \boxed{\text{B}}", "B", options=["blue", "red"]) == 1.0
    assert worth(MultipleChoice(), r"\boxed{\text{cm}}", r"\text{cm}", options=["m", r"\text{cm}"]) == 1.0


@pytest.mark.parametrize(("answer", "wanted"), [("2", "C"), (2, "C"), (2.0, "C"), ("0", "A"), ("c", "C")])
def test_multiple_choice_takes_numbers_as_files_have_them(answer, wanted):
    assert worth(MultipleChoice(), wanted, answer, options=["blue", "red", "green"]) == 1


@pytest.mark.parametrize("answer", ["?", "3", 3, -1, 1.5, True])
def test_multiple_choice_refuses_what_names_no_option(answer):
    with pytest.raises(ValueError, match="neither a letter nor the text or number"):
        worth(MultipleChoice(), "A", answer, options=["blue", "red", "green"])


def test_multiple_choice_without_options_and_with_a_bad_answer():
    assert worth(MultipleChoice(), "(D)", "D") == 1
    with pytest.raises(ValueError, match="neither a letter nor the text or number"):
        worth(MultipleChoice(), "A", "violet", options=["blue"])


@pytest.mark.parametrize("options", ["red,green", {"A": "red"}, 3])
def test_multiple_choice_refuses_options_that_are_no_list(options):
    with pytest.raises(ValueError, match=f"options is {type(options).__name__}.* it must be a list of choices"):
        worth(MultipleChoice(), "A", "A", options=options)


def test_iou_is_that_of_counted_pixels():
    rng = np.random.default_rng(0)
    for _ in range(50):
        boxes = np.sort(rng.integers(0, 12, (2, 2, 2)), axis=1).transpose(0, 2, 1)  # (box, axis, low/high)
        corners = np.array([[b[0, 0], b[1, 0], b[0, 1], b[1, 1]] for b in boxes], dtype=float)
        masks = np.zeros((2, 12, 12), bool)
        for mask, (x1, y1, x2, y2) in zip(masks, corners.astype(int), strict=True):
            mask[x1:x2, y1:y2] = True
        union = (masks[0] | masks[1]).sum()
        wanted = (masks[0] & masks[1]).sum() / union if union else 0.0
        assert iou(corners[:1], corners[1:])[0, 0] == pytest.approx(wanted)


def test_several_boxes_are_paired_at_their_best():
    a, b = [0.0, 0, 10, 10], [20.0, 20, 30, 30]
    assert mean_iou(np.array([b, a]), np.array([a, b])) == 1.0
    assert mean_iou(np.array([a]), np.array([a, b])) == 0.5
    assert mean_iou(np.array([a, a, a, a]), np.array([a])) == 0.25


@pytest.mark.parametrize(
    ("text", "answer", "settings", "wanted"),
    [
        ("[0, 0, 10, 10]", [0, 0, 10, 10], {}, 1), ("box (0,0,5,10) here", "[0, 0, 10, 10]", {}, 0.5),
        ("((0, 0), (10, 5))", [[0, 0, 10, 10]], {}, 0.5), ('{"bbox_2d": [0, 0, 10, 5]}', [0, 0, 10, 10], {}, 0.5),
        ("[0, 0, 10, 5]", [0, 0, 10, 10], {"threshold": 0.5}, 1), ("[0, 0, 10, 4]", [0, 0, 10, 10], {"threshold": 0.5}, 0),
        ("[5, 5, 10, 10]", [5, 5, 10, 10], {"box_format": "xywh"}, 1), ("nothing", [0, 0, 1, 1], {}, 0),
        ("[10, 10, 0, 0]", [0, 0, 10, 10], {}, 0), ("[0, 0, 10, 10]" * 65, [0, 0, 10, 10], {}, 0),
        (f"[0, 0, {'9' * 400}, 10]", [0, 0, 10, 10], {}, 0), ("[0, 0, 1e999, 10]", [0, 0, 10, 10], {}, 0),
        ("[.0, 0., 1e1, +5.0E0]", [0, 0, 10, 10], {}, 0.5), ("[.5, .5, 1.5, 1]", [0.5, 0.5, 1.5, 1.5], {}, 0.5),
        ("[0, 0, 10, 5]", [[0, 0], [10, 10]], {}, 0.5), ("[[0, 0], [10, 5]]", "[[0, 0], [10, 10]]", {}, 0.5),
        ("[0, 0, 1, 1] [2, 2, 3, 3]", [[[0, 0], [1, 1]], [2, 2, 3, 3]], {}, 1),
    ],
)  # fmt: skip
def test_box_iou(text, answer, settings, wanted):
    assert worth(BoxIoU(**settings), text, answer) == pytest.approx(wanted)


@pytest.mark.parametrize(
    "answer",
    [[], "none", [1, 2, 3], [0, 0, 0, 0], [5, 5, 1, 1], ["a", 0, 1, 1], {"x": 1},
     [[0, 0], [1]], [[0, 0], [1, "a"]], [[0, 0], [1, 1], [2, 2]], [[0, 0, 1, 1], 5], [[[0, 0], [1, 1], [2, 2]]]],
)  # fmt: skip
def test_box_iou_says_that_an_answer_holds_no_box(answer):
    with pytest.raises(ValueError, match="holds no boxes"):
        worth(BoxIoU(), "[0, 0, 1, 1]", answer)


def test_format_regex_and_its_time_limit():
    reward = FormatRegex()
    assert worth(reward, "<think>a\nb</think>\n<answer>4</answer>\n") == 1
    assert worth(reward, "<think>a</think> 4") == 0
    slow = FormatRegex(pattern=r"(a+a+)+b", seconds=0.2)
    start = time.monotonic()
    result = score(slow, texts=["a" * 4000 + "c", "aab"], timeout=30.0)
    assert time.monotonic() - start < 10
    same(result.rewards, [math.nan, 1.0])
    assert [(f.index, f.reason) for f in result.failures] == [(0, "timeout")]


@pytest.mark.parametrize(("length", "wanted"), [(0, 0), (12, 0), (13, -0.25), (16, -1), (20, -1)])
def test_soft_overlong_punishment_is_the_papers(length, wanted):
    assert worth(SoftOverlongPunishment(max_completion_length=16, soft_punish_cache=4), "x" * length) == wanted


@pytest.mark.parametrize(
    ("text", "answer", "wanted"),
    [
        (r"so $x = \boxed{\frac{1}{2}}$", "0.5", 1), ("1/2", r"\frac{1}{2}", 1), (r"$\sqrt{8}$", r"2\sqrt{2}", 1), ("3", "4", 0),
        ("no idea", "4", 0), (r"first 7, then \boxed{4}", "4", 1), (r"\boxed{x+1}", "1+x", 1),
    ],
)  # fmt: skip
def test_math_verify(text, answer, wanted):
    pytest.importorskip("math_verify", reason="math_verify is not installed (the math extra)")
    assert worth(MathVerify(), text, answer) == wanted


def test_math_verify_in_workers_and_its_warning_inline():
    pytest.importorskip("math_verify", reason="math_verify is not installed (the math extra)")
    with pytest.warns(UserWarning, match="math_verify may spin .* set reward_workers"):
        RewardRunner(Listed(MathVerify()), num_generations=1, timeout=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = score(MathVerify(), texts=[r"\boxed{4}", "5"], workers=1, timeout=60.0)
    same(result.rewards, [1.0, 0.0])


def test_math_verify_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(
        "rollplex.data.sources.importlib.import_module", lambda n: (_ for _ in ()).throw(ImportError("gone"))
    )
    with pytest.raises(ValueError, match=r"MathVerify needs math-verify: pip install 'rollplex\[math\]'"):
        MathVerify()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ExactMatch(weight=math.nan), "weight=nan"),
        (lambda: ExactMatch(extract="(a"), r"extract='\(a' is not a regular expression"),
        (lambda: Numeric(relative_tolerance=-1), "relative_tolerance=-1"),
        (lambda: BoxIoU(threshold=0), "threshold=0"),
        (lambda: BoxIoU(box_format="yx"), "box_format='yx'"),
        (lambda: FormatRegex(pattern="["), "pattern="),
        (lambda: FormatRegex(seconds=0), "seconds=0"),
        (lambda: SoftOverlongPunishment(10, 11), "soft_punish_cache=11"),
        (lambda: FunctionReward("nowhere.at_all"), "cannot be imported"),
        (lambda: FunctionReward("math.pi"), "not something to call"),
        (lambda: FunctionReward("plain"), "cannot be imported"),
        (lambda: FunctionReward(time.time, completion_format="x"), "completion_format='x'"),
        (
            lambda: RewardRunner(Listed(ExactMatch(), ExactMatch()), num_generations=1),
            "two rewards are called exact_match",
        ),
        (
            lambda: RewardRunner(Listed(ExactMatch(weight=2)), num_generations=1, reward_weights={"exact_match": 1}),
            "in one place",
        ),
    ],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- functions ----


def right(completion: str, answer: str) -> float:
    return float(completion == answer)


def trl_style(prompts, completions, answer, **kwargs):
    """As TRL's documentation writes them."""
    assert len(prompts) == len(completions) == len(answer) and set(kwargs) <= {"extra", "completion_ids"}
    return [float(text == a) for text, a in zip(completions, answer, strict=True)]


def chat_style(completions, completion_ids):
    return [float(c[0]["content"] == "4" and len(ids) == 1) for c, ids in zip(completions, completion_ids, strict=True)]


async def waits(completion: str) -> float | None:
    if completion == "raise":
        raise KeyError("no judge")
    await asyncio.sleep({"late": 60.0, "4": 0.5, "5": 0.5}.get(completion, 0.0))
    return None if completion == "none" else float(len(completion))


async def waits_for_all(completions) -> list[float]:
    await asyncio.sleep(0.1)
    return [float(len(text)) for text in completions]


def too_few(completions):
    return [1.0]


def no_list(completions):
    return 1.0


def never(completions):
    while True:
        pass


def not_for_these_rows(completions):
    return [None] * len(completions)


def wants_more(completion, colour):
    return 1.0


class Judge:
    def __call__(self, completion, answer):
        return 0.5 * (completion == answer)


class Longest(Reward):
    """A class that scores groups."""

    def score_group(self, sample, group):
        longest = max(len(r) for r in group)
        return [float(len(r) == longest) for r in group]


@pytest.fixture(scope="module")
def everything():
    """One runner in processes for the tests below: starting them takes seconds."""
    rewards = [
        FunctionReward(right), FunctionReward(trl_style, weight=2.0), FunctionReward(waits, weight=0.0),
        FunctionReward(chat_style, completion_format="messages"), Longest(weight=-1.0), FunctionReward(too_few, weight=0.0),
    ]  # fmt: skip
    with RewardRunner(Listed(*rewards), num_generations=4, timeout=1.0, workers=2) as runner:
        yield runner


WANTED = {
    "right": [1.0, 0.0, 0.0, 0.0],
    "trl_style": [1.0, 0.0, 0.0, 0.0],
    "waits": [1.0, 1.0, math.nan, math.nan],
    "chat_style": [1.0, 0.0, 0.0, 0.0],
    "longest": [0.0, 0.0, 1.0, 0.0],
    "too_few": [math.nan] * 4,
}


@pytest.mark.parametrize("workers", [0, 2])
def test_functions_classes_async_and_groups_together(workers, everything):
    given = responses("4", "5", "raise", "late")
    sample = Sample("row", {"answer": "4", "prompt": "2+2", "extra": 1})
    if workers:
        result = everything.score(sample, given)
    else:
        with RewardRunner(everything.task, num_generations=4, timeout=1.0) as inline:
            result = inline.score(sample, given)
    assert set(result.components) == set(WANTED)
    for name, wanted in WANTED.items():
        same(result.components[name], wanted)
    same(result.rewards, [4.0, 0.0, -1.0, 0.0])
    assert {f.index for f in result.failures} == {0, 1, 2, 3}
    assert all("too_few" in f.message for f in result.failures if f.index < 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_async_responses_wait_together_and_each_has_its_own_limit(workers):
    texts = ["4", "5", "4", "5", "4", "late", "raise", "none", *["4"] * 8]
    with RewardRunner(Listed(FunctionReward(waits)), num_generations=16, timeout=2.0, workers=workers) as runner:
        runner.score(Sample("row", {}), responses("x"))
        start = time.monotonic()
        result = runner.score(Sample("row", {}), responses(*texts))
    assert time.monotonic() - start < 8, "thirteen times 0.5 s and a time limit of 2 s, together"
    same(result.rewards, [1.0] * 5 + [math.nan] * 3 + [1.0] * 8)
    assert {f.index: f.reason for f in result.failures} == {5: "timeout", 6: "raised", 7: "none"}


def test_an_async_reward_of_a_task():
    class Async(VLMTask):
        async def reward(self, sample, response):
            await asyncio.sleep(0.0)
            return {"a": float(response.text), "b": 1.0}

    result = RewardRunner(Async(), num_generations=2, timeout=5.0).score(Sample("row"), responses("1", "x"))
    same(result.components["a"], [1.0, math.nan])
    same(result.rewards, [2.0, math.nan])


class Client(Reward):
    """Keeps something of the event loop it was first used on, as clients keep connections; "stuck" blocks the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def score(self, sample, response):
        if response.text == "cancelled":
            raise asyncio.CancelledError
        if response.text == "stuck":
            time.sleep(10)
        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.get_running_loop()
        return float(asyncio.get_running_loop() is self.loop)


def test_async_rewards_keep_their_event_loop():
    """Training and validation have a runner each, of one task."""
    task = Listed(Client())
    runners = [RewardRunner(task, num_generations=2, timeout=0.5) for _ in range(2)]
    for text in ("a", "cancelled", "b", "stuck", "c"):
        for runner in runners:
            wanted = [math.nan, math.nan] if text == "stuck" else [1.0, math.nan if text == "cancelled" else 1.0]
            same(runner.score(Sample("row"), responses("x", text)).rewards, wanted)
    for runner in runners:
        runner.close()


def test_an_async_reward_in_a_running_loop_says_what_to_do():
    async def body():
        return score(FunctionReward(waits), texts=["4"])

    result = asyncio.run(body())
    assert result.counts == {"raised": 1} and "set reward_workers to 1" in result.failures[0].message


@pytest.mark.parametrize(
    ("function", "reason", "message", "workers"),
    [
        (too_few, "raised", "expected 2 scores, got 1", 0),
        (no_list, "raised", "expected a list of 2 scores in the responses' order, got float", 0),
        (lambda completions: {0: 1.0, 1: 2.0}, "raised", "in the responses' order, got dict", 0),
        (lambda completions: {1.0, 2.0}, "raised", "in the responses' order, got set", 0),
        (never, "timeout", "", 0),
        (never, "timeout", "", 1),
    ],
)
def test_a_group_reward_that_fails_costs_its_whole_group_and_no_other(function, reason, message, workers):
    result = score(FunctionReward(function), FunctionReward(right), texts=["4", "5"], workers=workers, timeout=0.7)
    same(result.components["right"], [1.0, 0.0])
    same(result.rewards, [math.nan, math.nan])
    assert [f.reason for f in result.failures] == [reason] * 2 and message in result.failures[0].message


def test_a_reward_that_does_not_apply_to_a_row_is_left_out():
    result = score(FunctionReward(not_for_these_rows), FunctionReward(right), texts=["4", "5"])
    same(result.rewards, [1.0, 0.0])
    assert result.failures == () and list(result.components) == ["right"]
    alone = score(FunctionReward(not_for_these_rows), texts=["4", "5"])
    same(alone.rewards, [math.nan, math.nan])
    assert alone.counts == {"none": 2}


def soft_overlong(completion_ids: list[list[int]], **kwargs) -> list[float]:
    """As TRL's own: of TRL's arguments it names the ids alone."""
    return [float(len(ids)) for ids in completion_ids]


def all_in_kwargs(**kwargs) -> list[float]:
    together = zip(kwargs["completions"], kwargs["completion_ids"], kwargs["prompts"], kwargs["answer"], strict=True)
    return [float(text == answer and len(ids) == 1 and prompt == "2+2") for text, ids, prompt, answer in together]


def ids_of_one(completion_ids: list[int]) -> float:
    return float(sum(completion_ids) > 0)


def test_functions_of_trl_need_not_name_the_completions():
    task = Listed(*map(FunctionReward, (soft_overlong, all_in_kwargs, ids_of_one)))
    with RewardRunner(task, num_generations=2, timeout=5.0) as runner:
        found = runner.score(Sample("row", {"answer": "4", "prompt": "2+2"}), responses("4", "55"))
    assert not found.failures
    same(found.components["soft_overlong"], [1.0, 2.0])
    same(found.components["all_in_kwargs"], [1.0, 0.0])


def test_a_missing_column_is_named():
    result = score(FunctionReward(wants_more), texts=["4"])
    assert "wants colour; the row has answer" in result.failures[0].message


def test_other_callables_and_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_own_rewards.py").write_text("def near(completion, answer):\n    return 0.25\n")
    rewards = [
        FunctionReward("my_own_rewards.near"),
        FunctionReward(Judge(), name="judge"),
        FunctionReward(lambda completion: 1.0),
        FunctionReward(functools.partial(waits), name="bound"),
    ]
    result = score(*rewards, texts=["4"])
    assert list(result.components) == ["near", "judge", "<lambda>", "bound"]
    same(result.rewards, [2.75])
    assert pickle.loads(pickle.dumps(rewards[0])).name == "near"


def test_weights_come_from_the_rewards_or_from_the_module():
    texts = ["4", "5"]
    same(score(ExactMatch(weight=0.5), Longest(weight=2.0), texts=texts).rewards, [2.5, 2.0])
    weights = {"exact_match": 0.0, "longest": 1.0}
    same(score(ExactMatch(), Longest(), texts=texts, reward_weights=weights).rewards, [1.0, 1.0])


# ---- accuracy ----


def test_accuracy_is_that_of_the_first_reward_that_judges():
    from rollplex.evaluation import evaluation_metrics  # not above: the reward processes import this file

    def group(values):
        prompt = Prompt(Sample("row", {"answer": "4"}), torch.zeros(1).long(), torch.zeros(1).long())
        components = {"format_regex": torch.ones(2).double(), "exact_match": torch.tensor(values).double()}
        return Group(0, prompt, tuple(responses("4", "5")), torch.zeros(2).double(), components)

    task = Listed(FormatRegex("a"), ExactMatch())
    out = evaluation_metrics([group([1.0, 0.0]), group([1.0, math.nan])], task)
    assert out["accuracy"] == (pytest.approx(2 / 3), 3)
    assert out["pass@1"][0] == pytest.approx(0.75)
    task.rewards = (FormatRegex("a"),)
    assert "accuracy" not in evaluation_metrics([group([1.0, 0.0])], task)


def test_the_functions_of_the_documentation_work(tmp_path, monkeypatch):
    text = (Path(__file__).resolve().parent.parent / "docs" / "tasks.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if b.startswith("# my_rewards.py")]
    (tmp_path / "my_rewards.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rewards

    async def ask_a_server(completion, answer):
        return 0.5

    monkeypatch.setattr(my_rewards, "ask_a_server", ask_a_server, raising=False)
    result = score(
        *(FunctionReward(f"my_rewards.{name}") for name in ("close", "shares", "judged")), texts=["4", "4", "55"]
    )
    same(result.components["close"], [1.0, 1.0, 0.9])
    same(result.components["shares"], [1.0, 1.0, 0.0])
    same(result.components["judged"], [0.5, 0.5, 0.5])
