"""Every setting that a YAML may hold is explained by `--help`, and the migration table names settings that exist."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer

import rollplex
import rollplex.callbacks
import rollplex.rewards
import rollplex.tasks
from rollplex import VLMTask
from rollplex.cli import main
from rollplex.engines import RemoteEngine, TorchEngine, VLLMEngine
from rollplex.rewards import Reward

ROOT = Path(__file__).resolve().parent.parent
MIGRATION = (ROOT / "docs" / "migration.md").read_text()


def tasks() -> list[type]:
    """Those with settings of their own: bases are for subclasses, which say what they take."""
    modules = [
        importlib.import_module(m.name) for m in pkgutil.iter_modules(rollplex.tasks.__path__, "rollplex.tasks.")
    ]
    found = [c for m in modules for c in vars(m).values() if inspect.isclass(c) and c.__module__ == m.__name__]
    bases = {base for c in found for base in c.__bases__}
    return [c for c in found if issubclass(c, VLMTask) and c not in bases]


def public() -> list[type]:
    """Whatever a class_path may name."""
    top = ("GRPOModule", "VLMDataModule", "RollplexStrategy", "RollplexDDPStrategy", "RollplexDeepSpeedStrategy")
    rewards = [c for c in map(vars(rollplex.rewards).get, rollplex.rewards.__all__) if inspect.isclass(c)]
    return [
        *(getattr(rollplex, name) for name in top),
        *(getattr(rollplex.callbacks, name) for name in rollplex.callbacks.__all__),
        *(c for c in rewards if issubclass(c, Reward)),
        *tasks(), TorchEngine, VLLMEngine, RemoteEngine,
    ]  # fmt: skip


@pytest.mark.parametrize("cls", public(), ids=lambda c: c.__name__)
def test_every_setting_is_explained(cls):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "x")
    texts = {a.dest: a.help for a in parser._actions if a.dest.startswith("x.")}
    missing = [name for name, text in texts.items() if not text or text.startswith("==") or len(text) < 5]
    assert not missing, f"{cls.__name__} does not explain {', '.join(missing)}: add them to its docstring's Args"


def owners() -> dict[str, set[str]]:
    classes = {c.__name__: c for c in public()} | {"trainer": Trainer}
    out = {name: set(inspect.signature(c.__init__).parameters) for name, c in classes.items()}
    for name, c in classes.items():  # also what goes on to a base class
        if name != "trainer":
            for base in inspect.getmro(c)[1:]:
                if base.__module__.startswith("rollplex"):
                    out[name] |= set(inspect.signature(base.__init__).parameters)
    return out


def named(markdown: str) -> set[tuple[str, str]]:
    """(owner, setting) of every `Owner.setting` in the second column of its tables."""
    cells = [line.split("|")[2] for line in markdown.splitlines() if line.startswith("| ")]
    return {found for cell in cells for found in re.findall(r"`(\w+)\.(\w+)(?:: [^`]*)?`", cell)}


def printed(config: Path, comments: bool, capsys) -> str:
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(config), "--print_config" + "=comments" * comments])
    return capsys.readouterr().out


def test_a_printed_config_explains_every_setting_and_is_that_config(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    config = ROOT / "configs" / "digits_vllm_cpu.yaml"
    text = printed(config, True, capsys)
    lines = text.splitlines()
    for setting in ("num_generations", "beta", "max_num_seqs", "rollout_timeout", "batch_size", "log_images"):
        above = [lines[i - 1] for i, line in enumerate(lines) if line.strip().startswith(f"{setting}:")]
        assert above and all(line.strip().startswith("#") for line in above), setting
    (tmp_path / "commented.yaml").write_text(text)
    assert printed(tmp_path / "commented.yaml", False, capsys) == printed(config, False, capsys)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_comment_stands_above_every_setting_of_a_printed_config(path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    lines = printed(path, True, capsys).splitlines()
    settings = {i: line for i, line in enumerate(lines) if re.match(r"\s*(- )?\w+:", line)}
    bare = [
        line for i, line in settings.items() if "class_path:" not in line and not lines[i - 1].strip().startswith("# ")
    ]
    empty = [line for i, line in settings.items() if re.match(r"\s*# \((required|type|default)", lines[i - 1])
             and not lines[i - 2].strip().startswith("#")]  # fmt: skip
    assert len(settings) > 100 and not bare and not empty, (bare, empty)


def test_the_migration_table_names_settings_that_exist():
    known, found = owners(), named(MIGRATION)
    wrong = sorted(f"{o}.{n}" for o, n in found if n not in known.get(o, ()))
    assert not wrong and len(found) > 45, wrong
    settings = {n for o, n in found if o == "GRPOModule"}
    assert {"beta", "dynamic_sample", "mask_truncated_completions", "num_mini_batches"} <= settings


def test_the_checks_above_see_a_wrong_name():
    assert named("| `x` | `GRPOModule.nothing` and `trainer.max_steps: 3` |") == {
        ("GRPOModule", "nothing"), ("trainer", "max_steps"),
    }  # fmt: skip
    assert "nothing" not in owners()["GRPOModule"]


def test_the_readme_links_the_table():
    assert "docs/migration.md" in (ROOT / "README.md").read_text()
