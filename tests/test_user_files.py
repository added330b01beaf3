"""A new user's own rows and pictures, to a training run and its validation, by docs/tasks.md alone."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "tasks.md").read_text()


def block(language: str, containing: str) -> str:
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", TEXT, re.S) if containing in b]
    assert len(found) == 1, f"{len(found)} {language} blocks of docs/tasks.md contain {containing!r}"
    return found[0]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The user's folder after both commands of the page, the run made shorter."""
    from rollplex.models.tiny import build_tiny

    folder = tmp_path_factory.mktemp("user")
    (folder / "make_shapes.py").write_text(block("python", "# make_shapes.py"))
    (folder / "shapes.yaml").write_text(block("yaml", "FileTask"))
    build_tiny(folder / "models" / "tiny-digits")
    assert block("bash", "make_shapes").split() == "python make_shapes.py rollplex fit --config shapes.yaml".split()
    subprocess.run([sys.executable, "make_shapes.py"], cwd=folder, check=True, timeout=300)
    with open(folder / "shapes" / "train.jsonl", "a") as file:  # and a row that is broken, as there always is one
        file.write(json.dumps({"problem": "<image>?", "images": ["images/nothing.png"], "answer": "left"}) + "\n")
    command = [Path(sys.executable).with_name("rollplex"), "fit", "--config", "shapes.yaml"]
    shorter = ["--trainer.max_steps", "3", "--trainer.limit_train_batches", "3", "--data.init_args.batch_size", "67"]
    more = ["--data.init_args.num_workers", "1", "--model.init_args.num_generations", "2"]
    done = subprocess.run([*command, *shorter, *more], cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done


def test_the_run_reads_the_files_and_validates(shapes):
    folder, done = shapes
    (table,) = (folder / "runs" / "shapes").rglob("metrics.csv")
    rows = list(csv.DictReader(table.open()))
    steps = [row for row in rows if row.get("reward")]
    assert len(steps) == 3
    assert {"reward/exact_match", "reward/format_regex", "reward/soft_overlong_punishment", "val/accuracy"} <= set(
        rows[0]
    )
    assert all(float(row["reward"]) == pytest.approx(
        float(row["reward/exact_match"]) + 0.2 * float(row["reward/format_regex"])
        + 0.1 * float(row["reward/soft_overlong_punishment"]), abs=1e-5) for row in steps)  # fmt: skip
    assert [row for row in rows if row.get("val/accuracy")]
    assert float(steps[-1]["rows_skipped"]) == 1
    assert re.search(r"shapes/train\.jsonl\[200\].*nothing\.png", done.stderr)


def test_the_samples_show_the_pictures(shapes):
    folder, _ = shapes
    assert list((folder / "runs" / "shapes" / "rollouts").glob("*.jsonl"))
    assert list((folder / "runs" / "shapes" / "rollouts").rglob("*.png"))


def test_the_page_and_the_code_name_the_same_rewards():
    import rollplex.rewards as rewards
    from rollplex.rewards import Reward

    section = TEXT[TEXT.index("## Rewards") :]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.M))
    known = {
        n for n in rewards.__all__ if isinstance(getattr(rewards, n), type) and issubclass(getattr(rewards, n), Reward)
    }
    assert listed == known - {"Reward"}
    for entry in yaml.safe_load(block("yaml", "FileTask"))["data"]["init_args"]["task"]["init_args"]["rewards"]:
        assert entry["class_path"].removeprefix("rollplex.rewards.") in known
