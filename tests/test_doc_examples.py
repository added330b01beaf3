"""Every example of README and docs/ is read: YAML parses as a part of a config, commands have the options they use."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import bench_step

from rollplex.cli import main
from rollplex.planner.command import parser as plan_parser
from rollplex.reports.command import parser as report_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BASE = ROOT / "configs" / "digits_cpu.yaml"


class Block(NamedTuple):
    place: str
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    return [Block(f"{page.name}:{text[: m.start()].count(chr(10)) + 1}", m[1], textwrap.dedent(m[2])) for m in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
YAML = [block for block in BLOCKS if block.language == "yaml"]


def commands_of(page: Path) -> list[str]:
    """Of shell blocks, and those that stand in the text or in a table."""
    shell = [b.text.replace("\\\n", " ") for b in blocks_of(page) if b.language == "bash"]
    lines = [line.partition(" #")[0] for text in shell for line in text.splitlines()]
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    wanted = re.compile(r"(?:\w+=\S+ )*(?:torchrun .*-m )?rollplex \w+ .*-|python -m rollplex|python scripts/")
    commands = [line.strip() for line in (*lines, *inline) if wanted.match(line.strip())]
    return [line for line in commands if not line.endswith(("...", " --config"))]  # the name of one, not one


COMMANDS = sorted({(page.name, line) for page in PAGES for line in commands_of(page)})


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """The folder of somebody who has saved the README's files."""
    for block in BLOCKS:
        if block.place.startswith("README.md") and "class Colours" in block.text:
            (tmp_path / "colours.py").write_text(block.text)
        for name in ("colours", "shapes"):
            if block.language == "yaml" and f"default_root_dir: runs/{name}" in block.text:
                (tmp_path / f"{name}.yaml").write_text(block.text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert {p.name for p in tmp_path.iterdir()} == {"colours.py", "colours.yaml", "shapes.yaml", "configs"}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("colours", None)


def as_config(content: Any) -> dict[str, Any]:
    """The part of a config that a fragment is."""
    if isinstance(content, list):
        kind = "logger" if "loggers" in content[0]["class_path"] else "callbacks"
        return {"trainer": {kind: content}}
    if set(content) & {"model", "data", "trainer"}:
        return content
    remote = {"class_path": "rollplex.engines.RemoteEngine", "init_args": content}
    return {"trainer": {"strategy": {"class_path": "rollplex.RollplexStrategy", "init_args": {"engine": remote}}}}


def parsed(*arguments: str) -> int:
    """Exit code of the command line, which runs nothing."""
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--print_config"])
    return end.value.code


@pytest.mark.parametrize("block", YAML, ids=lambda b: b.place)
def test_yaml_is_a_config_or_a_part_of_one(block, newcomer):
    path = newcomer / "fragment.yaml"
    path.write_text(yaml.safe_dump(as_config(yaml.safe_load(block.text))))
    whole = {"model", "data", "trainer"} <= set(yaml.safe_load(path.read_text()))
    assert parsed("fit", *([] if whole else ["--config", str(BASE)]), "--config", str(path)) == 0


def test_a_fragment_with_a_wrong_name_would_be_seen(newcomer):
    path = newcomer / "fragment.yaml"
    path.write_text(yaml.safe_dump(as_config({"device": "cuda:4", "nothing": 1})))
    with pytest.raises(ValueError, match="RemoteEngine has no setting nothing"):
        main(["fit", "--config", str(BASE), "--config", str(path), "--print_config"])


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language in ("python", "json", "bash")], ids=lambda b: b.place
)
def test_code_is_code(block):
    if block.language == "bash":
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        {"python": ast.parse, "json": json.loads}[block.language](block.text)


def test_no_block_is_left_out():
    assert {block.language for block in BLOCKS} == {"bash", "yaml", "python", "json", ""}
    assert [b.place.partition(":")[0] for b in BLOCKS if not b.language] == ["architecture.md"]  # the table of layers


@cache
def helps(module: str) -> str:
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def options(arguments: list[str]) -> list[str]:
    return [a.partition("=")[0] for a in arguments if a.startswith("--")]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda v: v)
def test_a_command_has_the_options_that_it_is_called_with(page, line, newcomer, capsys):
    stands_for = {"C": "configs/digits_cpu.yaml", "CONFIG": "configs/digits_cpu.yaml", "RUN_DIR": ".", "DIR": "out"}
    words = [stands_for.get(word, word) for word in shlex.split(line)]
    if "python" in words[0]:
        where = words[2] if words[1] == "-m" else words[1]
        name = f"{where.replace('.', '/')}.py" if words[1] == "-m" else where
        assert (ROOT / name).exists(), name
        if name.endswith("bench_step.py"):
            bench_step.parser().parse_args(words[2:])
        elif words[1] == "-m":
            known = set(re.findall(r"--[\w-]+", helps(words[2])))
            assert known >= set(options(words[3:]))
        return
    command, arguments = words[words.index("rollplex") + 1], words[words.index("rollplex") + 2 :]
    if command == "plan":
        plan_parser().parse_args(arguments)
    elif command == "report":
        report_parser().parse_args([a for a in arguments if a != "..."])
    elif any(option.endswith(".help") for option in options(arguments)):
        with pytest.raises(SystemExit) as end:
            main([command, *arguments])
        assert end.value.code == 0
    elif command in ("fit", "validate", "test", "predict"):
        assert parsed(command, *[a for a in arguments if not a.startswith("--print_config")]) == 0
    else:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = capsys.readouterr().out
        assert all(option in said for option in options(arguments)), said
