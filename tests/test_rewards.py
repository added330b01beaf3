"""The reward runner against rewards that hang, raise, die or return nonsense; inline and in worker processes."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from rollplex.data.records import Rollout, Sample
from rollplex.rewards import RewardResult, RewardRunner
from rollplex.tasks.base import VLMTask

SAMPLE = Sample("row-7", {"scale": 2.0})


def rollouts(*texts: str, group: int = 0) -> list[Rollout]:
    """One response per text, of as many tokens as the text has letters, as views into one large tensor."""
    ids = torch.arange(100_000)
    return [
        Rollout(group, i, ids[: len(text)], -torch.ones(len(text)), text, "stop", 0) for i, text in enumerate(texts)
    ]


class ScriptTask(VLMTask):
    """The response's text says what its reward does. At module level, so that workers can import it."""

    def reward(self, sample: Sample, response: Rollout) -> Any:
        text = response.text
        assert len(response) == len(text)
        if text in SPECIAL:
            return SPECIAL[text]
        if text == "raise":
            raise KeyError("no answer")
        if text == "sleep":
            time.sleep(3600)
        if text == "spin":
            while True:
                pass
        if text == "swallow":
            while True:
                try:
                    time.sleep(3600)
                except Exception:
                    pass
        if text == "stubborn":
            swallowed = 0
            while True:
                try:
                    time.sleep(3600)
                except:  # noqa: E722
                    swallowed += 1
                    if swallowed == 2:
                        raise
        if text == "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        if text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "sigterm":
            raise SIGTERMException
        if text == "exit":
            sys.exit(3)
        if text == "interrupt":
            raise KeyboardInterrupt
        if text == "pid":
            time.sleep(0.05)
            return float(os.getpid())
        return float(text) * sample["scale"]


SPECIAL: dict[str, Any] = {
    "none": None,
    "nan": math.nan,
    "inf": -math.inf,
    "str": "0.5",
    "list": [1.0],
    "empty": {},
    "true": True,
    "numpy": np.float32(0.5),
    "tensor": torch.tensor(0.25),
    "big": torch.zeros(3),
    "a": {"accuracy": 1.0},
    "a+f": {"accuracy": 1.0, "format": 0.5},
    "a+none": {"accuracy": 1.0, "format": None},
    "a+nan": {"accuracy": math.nan, "format": 0.5},
    "badname": {1: 1.0},
}


def reasons(result: RewardResult) -> dict[int, str]:
    return {failure.index: failure.reason for failure in result.failures}


def same(actual: torch.Tensor, expected: list[float]) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def workers() -> Iterator[RewardRunner]:
    """Two processes shared by the tests below: they must survive whatever a test does to them."""
    with RewardRunner(ScriptTask(), num_generations=8, timeout=2.0, workers=2) as runner:
        yield runner
    assert not [child for child in multiprocessing.active_children() if child.name == "rollplex-reward"]


# ---------------------------------------------------------------- values


def test_numbers_of_every_kind() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=5)
    result = runner.score(SAMPLE, rollouts("1.5", "true", "numpy", "tensor", "-2"))
    same(result.rewards, [3.0, 1.0, 0.5, 0.25, -4.0])
    assert list(result.components) == ["reward"] and result.failures == () and result.counts == {}


def test_lp_08_bad_values_cost_only_their_own_response() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=9)
    result = runner.score(SAMPLE, rollouts("1", "none", "0", "nan", "inf", "str", "list", "raise", "big"))
    same(result.rewards, [2.0, math.nan, 0.0] + [math.nan] * 6)
    bad = dict.fromkeys((5, 6, 8), "bad_type")
    assert reasons(result) == {1: "none", 3: "nan", 4: "nan", 7: "raised"} | bad
    assert result.counts == {"none": 1, "nan": 2, "raised": 1, "bad_type": 3}
    assert {failure.sample_id for failure in result.failures} == {"row-7"}
    raised = next(failure for failure in result.failures if failure.reason == "raised")
    assert "KeyError" in raised.message and "no answer" in raised.message and "test_rewards.py" in raised.message


def test_named_rewards_are_weighted() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=2, reward_weights={"accuracy": 1.0, "format": 0.2})
    result = runner.score(SAMPLE, rollouts("a+f", "a+f"))
    same(result.rewards, [1.1, 1.1])
    same(result.components["format"], [0.5, 0.5])


def test_lp_08_missing_components() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=6)
    result = runner.score(SAMPLE, rollouts("a+f", "a", "a+none", "a+nan", "raise", "badname"))
    same(result.components["accuracy"], [1.0, 1.0, 1.0, math.nan, math.nan, math.nan])
    same(result.components["format"], [0.5, math.nan, math.nan, 0.5, math.nan, math.nan])
    same(result.rewards, [1.5] + [math.nan] * 5)
    assert reasons(result) == {1: "incomplete", 2: "none", 3: "nan", 4: "raised", 5: "bad_type"}
    assert "'format' was not returned" in result.failures[0].message


def test_a_component_that_a_whole_group_lacks_does_not_apply() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=2, reward_weights={"accuracy": 1.0, "format": 0.2})
    with pytest.warns(UserWarning, match="reward_weights names format, but the first row's rewards are: accuracy"):
        result = runner.score(SAMPLE, rollouts("a", "a"))
    same(result.rewards, [1.0, 1.0])
    assert result.failures == ()
    same(runner.score(SAMPLE, rollouts("a+f", "a+f")).rewards, [1.1, 1.1])


def test_a_component_of_weight_zero_may_be_missing() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=2, reward_weights={"accuracy": 1.0, "format": 0.0})
    result = runner.score(SAMPLE, rollouts("a+f", "a"))
    same(result.rewards, [1.0, 1.0])
    assert result.failures == ()


def test_wrong_weight_names_are_an_error() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=1, reward_weights={"acuracy": 1.0, "format": 1.0})
    with pytest.raises(ValueError, match="names acuracy, but the task's rewards are: accuracy, format"):
        runner.score(SAMPLE, rollouts("a+f"))


def test_rewards_are_placed_by_index_and_absent_responses_stay_missing() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=4)
    given = rollouts("1", "2", "3", "4")
    result = runner.score(SAMPLE, [given[3], given[0], given[2]])
    same(result.rewards, [2.0, math.nan, 6.0, 8.0])
    assert result.failures == ()


def test_responses_that_do_not_belong_together_are_refused() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=2)
    with pytest.raises(ValueError, match="row-7: responses of several groups"):
        runner.score(SAMPLE, [rollouts("1", group=0)[0], rollouts("1", "2", group=1)[1]])
    with pytest.raises(ValueError, match=r"row-7: response indices \[0, 1, 2\]"):
        runner.score(SAMPLE, rollouts("1", "2", "3"))
    with pytest.raises(ValueError, match="must be distinct"):
        runner.score(SAMPLE, rollouts("1") * 2)


def test_failures_are_logged_with_their_row(caplog: pytest.LogCaptureFixture) -> None:
    runner = RewardRunner(ScriptTask(), num_generations=3)
    with caplog.at_level(logging.DEBUG, logger="rollplex"):
        runner.score(SAMPLE, rollouts("1", "none", "raise"))
        runner.score(SAMPLE, rollouts("1", "none", "2"))
    loud, quiet = caplog.records
    assert "row row-7: 2 of 3 rewards missing; response 2: raised" in loud.getMessage()
    assert (loud.levelname, quiet.levelname) == ("WARNING", "DEBUG")


# ---------------------------------------------------------------- the time limit, inline


@pytest.mark.parametrize("late", ["sleep", "spin", "swallow", "stubborn", "regex"])
def test_lp_17_inline_late_reward_is_missing(late: str) -> None:
    runner = RewardRunner(ScriptTask(), num_generations=4, timeout=0.3)
    start = time.monotonic()
    result = runner.score(SAMPLE, rollouts("1", late, "raise", "2"))
    assert time.monotonic() - start < 20.0
    same(result.rewards, [2.0, math.nan, math.nan, 4.0])
    assert reasons(result) == {1: "timeout", 2: "raised"}
    assert "within 0.3 s" in result.failures[0].message


def test_lp_17_inline_puts_back_the_alarm_that_was_set() -> None:
    rings: list[float] = []
    old_handler = signal.signal(signal.SIGALRM, lambda *_: rings.append(time.monotonic()))
    old_timer = signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        start = time.monotonic()
        runner = RewardRunner(ScriptTask(), num_generations=2, timeout=0.2)
        assert runner.score(SAMPLE, rollouts("sleep", "1")).counts == {"timeout": 1}
        assert not rings
        time.sleep(0.6)
        assert len(rings) == 1 and rings[0] - start > 0.45
    finally:
        signal.signal(signal.SIGALRM, old_handler)
        signal.setitimer(signal.ITIMER_REAL, *old_timer)


def test_no_alarm_is_left_behind() -> None:
    before = signal.getsignal(signal.SIGALRM)
    old_timer = signal.setitimer(signal.ITIMER_REAL, 0.0)  # pytest-timeout's own
    try:
        RewardRunner(ScriptTask(), num_generations=2, timeout=0.1).score(SAMPLE, rollouts("1", "raise"))
        assert signal.getsignal(signal.SIGALRM) == before
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *old_timer)


def test_inline_counts_an_exit_of_the_reward_itself() -> None:
    result = RewardRunner(ScriptTask(), num_generations=2, timeout=5.0).score(SAMPLE, rollouts("exit", "1"))
    assert reasons(result) == {0: "raised"} and "SystemExit: 3" in result.failures[0].message


@pytest.mark.parametrize(("text", "kind"), [("interrupt", KeyboardInterrupt), ("sigterm", SIGTERMException)])
def test_inline_lets_interrupts_through(text: str, kind: type[BaseException]) -> None:
    before = signal.getsignal(signal.SIGALRM)
    runner = RewardRunner(ScriptTask(), num_generations=2, timeout=5.0)
    with pytest.raises(kind):
        runner.score(SAMPLE, rollouts(text, "1"))
    assert signal.getsignal(signal.SIGALRM) == before
    same(runner.score(SAMPLE, rollouts("1", "2")).rewards, [2.0, 4.0])


def test_inline_limit_off_the_main_thread_is_refused_and_without_limit_allowed() -> None:
    found: list[Any] = []

    def body(timeout: float | None) -> None:
        try:
            runner = RewardRunner(ScriptTask(), num_generations=1, timeout=timeout)
            found.append(runner.score(SAMPLE, rollouts("1")).rewards.tolist())
        except RuntimeError as error:
            found.append(str(error))

    for timeout in (1.0, None):
        thread = threading.Thread(target=body, args=(timeout,))
        thread.start()
        thread.join()
    assert "not the main thread; set workers to 1 or more, or timeout to None" in found[0]
    assert found[1] == [2.0]


# ---------------------------------------------------------------- worker processes


def test_workers_give_the_same_as_inline(workers: RewardRunner) -> None:
    given = rollouts("1", "none", "0", "nan", "str", "raise", "tensor", "true")
    inline = RewardRunner(ScriptTask(), num_generations=8).score(SAMPLE, given)
    result = workers.score(SAMPLE, given)
    same(result.rewards, inline.rewards.tolist())
    assert result.failures == inline.failures


def test_workers_share_a_group_and_stay_alive(workers: RewardRunner) -> None:
    deadline = time.monotonic() + 60
    pids: set[float] = set()
    while len(pids) < 2 and time.monotonic() < deadline:  # a worker that is still loading is not waited for
        pids = set(workers.score(SAMPLE, rollouts(*["pid"] * 8)).rewards.tolist())
    assert len(pids) == 2 and float(os.getpid()) not in pids
    assert set(workers.score(SAMPLE, rollouts(*["pid"] * 8)).rewards.tolist()) == pids


def test_workers_see_each_row_they_are_given(workers: RewardRunner) -> None:
    for scale in (1.0, 3.0, 1.0):
        result = workers.score(Sample(f"row-{scale}", {"scale": scale}), rollouts("1", "2", "4"))
        same(result.rewards[:3], [scale, 2 * scale, 4 * scale])


def test_lp_17_late_and_dying_workers_are_replaced(workers: RewardRunner) -> None:
    before = {worker.process.pid for worker in workers._workers}
    start = time.monotonic()
    result = workers.score(SAMPLE, rollouts("1", "spin", "raise", "regex", "2", "die", "3", "exit"))
    same(result.rewards, [2.0, math.nan, math.nan, math.nan, 4.0, math.nan, 6.0, math.nan])
    assert reasons(result) == {1: "timeout", 2: "raised", 3: "timeout", 5: "raised", 7: "raised"}
    assert "exit code -9" in result.failures[3].message and "SystemExit: 3" in result.failures[4].message
    assert time.monotonic() - start < 200
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    same(workers.score(SAMPLE, rollouts("5")).rewards[:1], [10.0])
    assert len(multiprocessing.active_children()) <= 2


def test_workers_need_not_be_on_the_main_thread(workers: RewardRunner) -> None:
    found: list[RewardResult] = []
    thread = threading.Thread(target=lambda: found.append(workers.score(SAMPLE, rollouts("1", "raise"))))
    thread.start()
    thread.join()
    same(found[0].rewards[:2], [2.0, math.nan])


def test_lp_17_an_interrupt_during_workers_passes_and_leaves_no_stale_answer(workers: RewardRunner) -> None:
    workers.score(SAMPLE, rollouts("1"))
    with pytest.raises(KeyboardInterrupt):
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        workers.score(SAMPLE, rollouts("sleep", "9"))
    same(workers.score(SAMPLE, rollouts("1", "2")).rewards[:2], [2.0, 4.0])


def test_lp_17_close_leaves_no_process() -> None:
    runner = RewardRunner(ScriptTask(), num_generations=2, timeout=30.0, workers=1)
    pid = int(runner.score(SAMPLE, rollouts("pid")).rewards[0])
    runner.close()
    runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RuntimeError, match="closed"):
        runner.score(SAMPLE, rollouts("1"))


ORPHANS = """
import sys
sys.path.insert(0, {tests!r})
from test_rewards import SAMPLE, RewardRunner, ScriptTask, rollouts

if __name__ == "__main__":
    runner = RewardRunner(ScriptTask(), num_generations=2, timeout=600.0, workers=1)
    print(int(runner.score(SAMPLE, rollouts("pid")).rewards[0]), flush=True)
    if "hang" in sys.argv:
        runner.score(SAMPLE, rollouts("spin"))
"""


@pytest.mark.parametrize("how", ["exit without close", "kill -9 in the middle of a reward"])
def test_lp_17_no_worker_outlives_the_trainer(tmp_path: Path, how: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(ORPHANS.format(tests=str(Path(__file__).parent)))
    hang = how.startswith("kill")
    command = [sys.executable, str(script)] + (["hang"] if hang else [])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        if hang:
            time.sleep(0.5)
            trainer.kill()
        trainer.wait(30)
    assert trainer.returncode == (-9 if hang else 0)
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Running; an orphan that no init process reaps yet is dead too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Unloadable(VLMTask):
    def __setstate__(self, state: object) -> None:
        raise ImportError("no such verifier")

    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


def test_a_task_that_cannot_move_is_named() -> None:
    task = ScriptTask()
    task.hook = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"picklable task ScriptTask .* set workers to 0"):
        RewardRunner(task, num_generations=1, workers=1)
    with RewardRunner(Unloadable(), num_generations=1, workers=1) as runner:
        with pytest.raises(RuntimeError, match="could not load the task: ImportError: no such verifier"):
            runner.score(SAMPLE, rollouts("1"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timeout": 0.0}, "timeout=0.0 must be a positive number"),
        ({"timeout": math.inf}, "timeout=inf must be"),
        ({"workers": -1}, "workers=-1 must be"),
        ({"num_generations": 0}, "num_generations=0 must be"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardRunner(ScriptTask(), **({"num_generations": 2} | changes))
