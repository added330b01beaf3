"""What the README tells a user to type works: its second task trains from its own text alone."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", README, re.S) if containing in b]
    assert len(found) == 1, f"{len(found)} {language} blocks of the README contain {containing!r}"
    return found[0]


@pytest.fixture
def colours(tmp_path):
    """A user's folder with the README's two files and the tiny model."""
    from rollplex.models.tiny import build_tiny

    (tmp_path / "colours.py").write_text(block("python", "class Colours"))
    (tmp_path / "colours.yaml").write_text(block("yaml", "colours.Colours"))
    build_tiny(tmp_path / "models" / "tiny-digits")
    return tmp_path


def fit(folder: Path, *overrides: str) -> list[dict[str, str]]:
    rollplex = Path(sys.executable).with_name("rollplex")
    command = [rollplex, "fit", "--config", "colours.yaml", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = (folder / "runs" / "colours").rglob("metrics.csv")
    return [row for row in csv.DictReader(table.open()) if row.get("reward")]


def test_the_second_task_runs_from_the_readme(colours):
    rows = fit(colours, "--trainer.max_steps", "2", "--data.init_args.batch_size", "4")
    assert len(rows) == 2 and all(0 <= float(r["reward"]) <= 1.4 for r in rows)
    assert {"reward/right", "reward/starts"} <= set(rows[0])
    assert list((colours / "runs" / "colours" / "checkpoints").glob("last*.ckpt"))
    assert list((colours / "runs" / "colours" / "rollouts").glob("*.jsonl"))


@pytest.mark.slow
def test_the_second_task_learns(colours):
    rows = fit(colours)
    first, last = (sum(float(r["reward"]) for r in part) / len(part) for part in (rows[:5], rows[-5:]))
    assert last > first + 0.3, (first, last)


def test_evaluating_a_last_checkpoint_that_is_not_there_is_an_error(colours):
    rollplex = Path(sys.executable).with_name("rollplex")
    command = [rollplex, "validate", "--config", "colours.yaml", "--ckpt_path", "last"]
    done = subprocess.run(command, cwd=colours, capture_output=True, text=True)
    assert done.returncode == 1 and "--ckpt_path last found no checkpoint" in done.stderr, done.stderr[-2000:]
