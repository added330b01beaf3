"""A rank that dies or hangs: the others end in time and say which, where; and the run goes on from its last checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runs import same_bits

from rollplex.ranks import Ranks
from rollplex.whereabouts import RankError, Whereabouts, tell_of_ranks

pytestmark = pytest.mark.distributed

HERE = Path(__file__).resolve().parent
DEADLINE = 15.0
"""Seconds in which a survivor must have noticed and ended; it takes well under one."""


def run_jobs(folder: Path, model: Path, stage: int, jobs: list[dict[str, Any]]) -> None:
    path = f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, str(HERE / "kill_runs.py"), str(folder), str(model), str(stage), json.dumps(jobs)]
    done = subprocess.run(command, env=environment, cwd=HERE.parent, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr


def kills(seeds: list[int]) -> list[dict[str, Any]]:
    jobs = []
    for seed in seeds:
        jobs.append({"name": f"kill{seed}", "folder": f"kill{seed}", "seed": seed})
        jobs.append({"name": f"again{seed}", "folder": f"kill{seed}", "ckpt_path": "last"})
    return jobs


def hang(what: str) -> dict[str, Any]:
    return {"name": f"hang_{what}", "folder": f"hang_{what}", "hang": what}


def fail(what: str) -> dict[str, Any]:
    """A run of `rollplex fit`'s kind, which saves what it can when it fails."""
    return {"name": f"fail_{what}", "folder": f"fail_{what}", "fail": what}


def stop(rank: int, at: int) -> dict[str, Any]:
    """A rank that is stopped by a signal: it does nothing from then on, and nobody closes its connections."""
    return {"name": f"stop{rank}_{at}", "folder": f"stop{rank}_{at}", "hang": "stop", "rank": rank, "at": at}


@pytest.fixture(scope="module")
def quick(parity_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quick")
    run_jobs(folder, parity_folder, 0, [*kills([17]), hang("reward"), fail("engine"), fail("all")])
    return folder


def ended(folder: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((folder / f"{name}.json").read_text())["ended"]


def log(folder: Path, name: str, rank: int) -> str:
    return (folder / f"{name}.{rank}.log").read_text()


def check_kill(folder: Path, seed: int) -> None:
    """One rank was killed, the other said so in time, and resumed the two have the uninterrupted run's weights."""
    job = json.loads((folder / f"kill{seed}.json").read_text())["job"]
    killed, survivor = job["rank"], 1 - job["rank"]
    ends = ended(folder, f"kill{seed}")
    point = re.search(r"killed at (.*)", log(folder, f"kill{seed}", killed))
    print(
        f"seed {seed}: rank {killed} {point and point[0]}; the other ended {ends[survivor]['after_first']:.1f} s later"
    )
    assert ends[killed]["code"] == -signal.SIGKILL and point is not None
    text = log(folder, f"kill{seed}", survivor)
    assert ends[survivor]["code"] == 1 and ends[survivor]["after_first"] < DEADLINE, text[-3000:]
    assert re.search(rf"rank {survivor}: .* phase broke", text) or "and this rank is still in" in text, text
    if killed == 1:  # else the notes are gone with their host
        assert re.search(r"rank 1 was last seen to enter (unit \S+ of )?the \w+ phase", text), text
    assert "--ckpt_path last" in text or "it is ended" in text
    assert [end["code"] for end in ended(folder, f"again{seed}")] == [0, 0], log(folder, f"again{seed}", 0)[-3000:]
    straight, again = (
        torch.load(folder / f"{name}.{rank}.pt", weights_only=False)["weights"]
        for name, rank in (("straight", 0), (f"again{seed}", 0))
    )
    assert same_bits(straight, again)


def test_a_killed_rank_is_named_and_a_resumed_run_has_the_uninterrupted_weights_bit_for_bit(quick):
    check_kill(quick, 17)


def test_a_rank_that_fails_alone_saves_nothing_and_is_named_at_once(quick):
    ends = ended(quick, "fail_engine")
    assert [end["code"] for end in ends] == [1, 1]
    assert max(end["after_first"] for end in ends) < DEADLINE  # and not its collective_timeout later
    other, failed = (log(quick, "fail_engine", rank) for rank in (0, 1))
    assert "the run failed after 1 updates; nothing saved: it takes all ranks" in failed
    assert re.search(r"RankError: rank 0: .* broke\. rank 1 failed with EngineError: .*no more", other)
    assert "nothing saved" in other and not (quick / "fail_engine" / "last.ckpt").exists()


def test_ranks_that_all_fail_save_together(quick):
    assert [end["code"] for end in ended(quick, "fail_all")] == [1, 1]
    for rank in (0, 1):
        text = log(quick, "fail_all", rank)
        assert re.search(r"after 1 updates; saved \S*last\.ckpt", text) and "RuntimeError: no more" in text
    saved = torch.load(quick / "fail_all" / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 1 and saved["rollplex"]["rollouts_done"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_ten_kills_at_random_points(parity_folder, tmp_path, stage):
    """DESIGN's bar, for data parallel and ZeRO-2. The seeds are printed; each gives the same rank and event again."""
    if stage:
        pytest.importorskip("deepspeed")
    seeds = list(range(10, 20))
    run_jobs(tmp_path, parity_folder, stage, kills(seeds))
    for seed in seeds:
        check_kill(tmp_path, seed)


def test_a_rank_that_hangs_in_a_reward_is_named_with_unit_and_phase_and_then_ended(quick):
    ends = ended(quick, "hang_reward")
    text = log(quick, "hang_reward", 0)
    assert ends[0]["code"] == 1
    found = re.search(
        r"RankError: rank 0: .* got no answer for \d s\. rank 1 was last seen to enter unit (\S+) of the", text
    )
    assert found and found[1].startswith("reward["), text[-3000:]
    assert (quick / "hang_reward" / "last.ckpt").exists()
    # It never noticed, and would have kept its launcher waiting.
    assert ends[1]["code"] == 1 and ends[1]["after_first"] < DEADLINE
    assert "and this rank is still in unit reward[" in log(quick, "hang_reward", 1)


@pytest.mark.slow
def test_a_loader_that_hangs_on_one_rank_is_named(parity_folder, tmp_path):
    run_jobs(tmp_path, parity_folder, 0, [hang("data")])
    assert [end["code"] for end in ended(tmp_path, "hang_data")] == [1, 1]
    assert re.search(
        r"RankError: rank 0: .* got no answer for \d s\. rank 1 was last seen to enter the data phase",
        log(tmp_path, "hang_data", 0),
    )


@pytest.mark.slow
def test_a_stopped_rank_is_named_by_the_other(parity_folder, tmp_path):
    """Rank 0 holds the store of the ranks' notes: when it is stopped, they cannot be read either."""
    jobs = [stop(rank, at) for rank in (0, 1) for at in (20, 27, 34)]
    run_jobs(tmp_path, parity_folder, 0, jobs)
    for job in jobs:
        other = 1 - job["rank"]
        end, text = ended(tmp_path, job["name"])[other], log(tmp_path, job["name"], other)
        point = re.search(r"killed at (.*)", log(tmp_path, job["name"], job["rank"]))
        print(f"rank {job['rank']} stopped at {point and point[1]}: the other ended after {end['seconds']:.1f} s")
        assert end["code"] == 1 and point is not None, (job, text[-3000:])
        at = r"was last seen to enter (unit \S+ of )?the \w+ phase"
        where = rf"rank 1 {at}" if job["rank"] == 1 else rf"rank 0, which .* does not answer( \(rank 0 {at}|\.)"
        assert re.search(rf"RankError: rank {other}: .* phase got no answer for \d+ s\. {where}", text), text[-3000:]


@pytest.mark.slow
def test_an_engine_that_hangs_on_one_rank_is_named_by_both(parity_folder, tmp_path):
    run_jobs(tmp_path, parity_folder, 0, [hang("engine")])
    assert [end["code"] for end in ended(tmp_path, "hang_engine")] == [1, 1]
    own = "EngineError: the engine gave no sign of life for 6 s during the rollout phase on rank 1"
    assert own in log(tmp_path, "hang_engine", 1)
    text = log(tmp_path, "hang_engine", 0)
    assert re.search(
        r"RankError: rank 0: .*rank 1 (failed with EngineError: the engine gave|was last seen to enter)", text
    )
    torch.load(tmp_path / "hang_engine" / "last.ckpt", weights_only=False)


# ---- the notes ----


def peers(world: int) -> list[Whereabouts]:
    store = dist.HashStore()
    return [Whereabouts(rank, world, store) for rank in range(world)]


def test_a_broken_collective_says_where_the_others_are_and_what_they_said():
    zero, one, two = peers(3)
    for where in (zero, one, two):
        where.note("train", "act_suffix[1]")
    two.note("score", "reward[3]")
    one.last_words(KeyError("x"))
    with pytest.raises(RankError) as caught, zero.collective("the sum of gradients"):
        raise RuntimeError("[gloo] Connection closed by peer")
    text = str(caught.value)
    assert text.startswith(
        "rank 0: the sum of gradients in unit act_suffix[1] of the train phase broke. rank 1 failed with"
    )
    assert "KeyError: 'x'; rank 2 was last seen to enter unit reward[3] of the score phase 0 s ago" in text
    assert "--ckpt_path last" in text and "Connection closed by peer" in text
    zero.last_words(caught.value)
    assert "rank 0 lost another rank in unit act_suffix[1]" in two.others()  # not the same story twice


def test_errors_of_the_backend_inside_a_unit_get_a_note_and_others_do_not():
    zero, one = peers(2)
    one.last_words(ValueError("no such picture"))
    try:
        try:
            raise RuntimeError("[enforce fail at gloo/transport] timed out")
        except RuntimeError as cause:
            raise RuntimeError("unit act_prefix[0] failed") from cause
    except RuntimeError as error:
        tell_of_ranks(error, zero)
        assert "rank 1 failed with ValueError: no such picture" in error.__notes__[0]
    own = ValueError("mine")
    tell_of_ranks(own, zero)
    assert not hasattr(own, "__notes__")


def test_alone_nothing_is_noted_and_errors_stay_as_they_are():
    ranks = Ranks()
    ranks.where.note("train")
    with pytest.raises(RuntimeError, match="as it was"), ranks.collective("anything"):
        raise RuntimeError("as it was")
    assert ranks.where.prefix == "" and ranks.where.during == "during the train phase"


def test_a_store_whose_host_is_gone_is_no_error_of_its_own():
    class Gone:
        def set(self, key, value):
            raise dist.DistNetworkError("Broken pipe")

        check = get = set

    where = Whereabouts(1, 2, Gone())
    where.note("rollout")
    assert where.others() == "rank 0 is gone, and with it what the ranks had noted of themselves"


def test_many_ranks_are_not_all_listed():
    ranks = peers(100)
    for where in ranks:
        where.note("rollout")
    ranks[50].last_words(ValueError("this one"))
    told = ranks[0].others()
    assert told.startswith("rank 50 failed with ValueError: this one; ") and told.endswith("; and 91 more")


def test_the_watch_of_a_run_that_ended_well_ends(monkeypatch):
    where = Whereabouts(0, 2, dist.HashStore())
    thread = threading.Thread(target=where._watch)
    thread.start()
    time.sleep(0.05)
    where.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
