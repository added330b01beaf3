"""A new user's own rows and pictures, to a training run, its validation and a report, by the README alone."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "tasks.md").read_text()
README = (ROOT / "README.md").read_text()


def block(language: str, containing: str, text: str = TEXT) -> str:
    found = [b for b in re.findall(rf"```{language}\n(.*?)```", text, re.S) if containing in b]
    assert len(found) == 1, f"{len(found)} {language} blocks contain {containing!r}"
    return found[0]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The user's folder after the commands of the README, the run made shorter."""
    from rollplex.models.tiny import build_tiny

    folder = tmp_path_factory.mktemp("user")
    (folder / "make_shapes.py").write_text(block("python", "# make_shapes.py"))
    (folder / "shapes.yaml").write_text(block("yaml", "FileTask", README))
    build_tiny(folder / "models" / "tiny-digits")
    commands = block("bash", "shapes.yaml", README)
    assert "rollplex fit --config shapes.yaml\n" in commands and "rollplex report runs/shapes " in commands
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


def test_the_readmes_row_is_one_of_them(shapes):
    folder, _ = shapes
    row = json.loads(block("json", "images/", README))
    rows = [json.loads(line) for line in (folder / "shapes" / "train.jsonl").read_text().splitlines()]
    assert row.keys() == rows[0].keys() and row["problem"] == rows[0]["problem"] and row["images"] == rows[0]["images"]
    assert (folder / "shapes" / row["images"][0]).exists()


def test_the_report_shows_the_samples_and_the_curves(shapes, monkeypatch):
    pytest.importorskip("matplotlib")
    from rollplex.cli import main

    folder, _ = shapes
    monkeypatch.chdir(folder)
    main(["report", "runs/shapes"])
    page = (folder / "runs" / "shapes" / "report.html").read_text()
    assert "left or right?" in page and "data:image/" in page and "reward" in page
    assert not re.search(r"""(?:src|href)=["']?https?:""", page)


def test_the_task_from_nothing_does_what_the_page_says(tmp_path):
    (tmp_path / "gauge.py").write_text(block("python", "# gauge.py"))
    (tmp_path / "look.py").write_text(block("python", "# look.py"))
    done = subprocess.run([sys.executable, "look.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 16
    for at in range(0, 16, 4):
        answer = lines[at][-1]
        top, bottom = (
            shade > 122 for shade in literal_eval(lines[at][lines[at].index("[") : lines[at].index("]") + 1])
        )
        assert answer == {(False, False): "e", (False, True): "h", (True, True): "f"}[top, bottom]
        worth = {
            line.split()[0]: (line.count("'right': 1.0"), line.endswith("True")) for line in lines[at + 1 : at + 4]
        }
        assert worth == {"h": (answer == "h",) * 2, "f": (answer == "f",) * 2, "full": (False, False)}


@pytest.mark.slow
def test_the_task_from_nothing_learns(tmp_path):
    """With the README's config, as the page says."""
    from rollplex.models.tiny import build_tiny

    build_tiny(tmp_path / "models" / "tiny-digits")
    (tmp_path / "gauge.py").write_text(block("python", "# gauge.py"))
    config = block("yaml", "colours.Colours", README).replace("colours.Colours", "gauge.Gauge")
    (tmp_path / "gauge.yaml").write_text(config)
    command = [
        Path(sys.executable).with_name("rollplex"),
        "fit",
        "--config",
        "gauge.yaml",
        "--trainer.max_steps",
        "120",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (table,) = (tmp_path / "runs").rglob("metrics.csv")
    rewards = [float(row["reward/right"]) for row in csv.DictReader(table.open()) if row.get("reward")]
    assert sum(rewards[-5:]) / 5 > 0.7, rewards


def test_the_page_lists_the_built_in_tasks_and_their_configs():
    section = TEXT[TEXT.index("## Built-in tasks") : TEXT.index("## A task from nothing")]
    listed = re.findall(r"^\| `(\w+)\.(\w+)` \| `(\w+)` \|", section, re.M)
    assert len(listed) == 6
    for module, name, config in listed:
        task = yaml.safe_load((ROOT / "configs" / f"{config}.yaml").read_text())["data"]["init_args"]["task"]
        assert task["class_path"] == f"rollplex.tasks.{module}.{name}"


def test_the_page_and_the_code_name_the_same_rewards():
    import rollplex.rewards as rewards
    from rollplex.rewards import Reward

    section = TEXT[TEXT.index("## Rewards") :]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.M))
    known = {
        n for n in rewards.__all__ if isinstance(getattr(rewards, n), type) and issubclass(getattr(rewards, n), Reward)
    }
    assert listed == known - {"Reward"}
    for entry in yaml.safe_load(block("yaml", "FileTask", README))["data"]["init_args"]["task"]["init_args"]["rewards"]:
        assert entry["class_path"].removeprefix("rollplex.rewards.") in known
