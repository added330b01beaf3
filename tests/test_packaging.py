"""What a newcomer meets first: commands of the README, scripts, set-up and its error messages, configs, packaging."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))


def load_script(name: str):
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load_script("setup_env")
fix_torchvision = load_script("fix_torchvision")


def kept_files() -> list[Path]:
    """Files that are, or would be, in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


# -- the README and the repository -------------------------------------------------------------------------------


def named_files(markdown: str) -> set[str]:
    """Paths of scripts and configs in a document's shell blocks, and modules run with `python -m rollplex...`."""
    shell = "\n".join(re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", markdown, flags=re.DOTALL))
    modules = re.findall(r"python[\d.]* -m (rollplex[\w.]*)", shell)
    return {
        *re.findall(r"(?<![\w/.-])(?:scripts|configs|examples|\.ci)/[\w./-]*\w", shell),
        *(module.replace(".", "/") + ".py" for module in modules),
    }


def test_named_files_finds_commands():
    shell = "bash scripts/a.sh -k x\npython -m rollplex.models.b\nrollplex fit --config configs/c.yaml"
    text = f"run scripts/no.sh\n```bash\n{shell}\n```\nand configs/no.yaml"
    assert named_files(text) == {"scripts/a.sh", "rollplex/models/b.py", "configs/c.yaml"}


def test_readme_names_files_that_exist():
    names = named_files((ROOT / "README.md").read_text())
    assert {"scripts/quickstart.sh", "scripts/test.sh"} <= names
    assert sorted(name for name in names if not (ROOT / name).exists()) == []


def test_configs_are_yaml_mappings():
    configs = sorted((ROOT / "configs").rglob("*.yaml"))
    assert configs
    for path in configs:
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


# With brackets and stand-ins (@ for a slash), so that this file passes its own test.
MACHINE_PATH = re.compile(
    r"(?<![\w.~$}/-])/(?:w[o]rk|w[o]rkspace|r[o]ot|h[o]me|U[s]ers|f[a]rm|o[p]t|m[n]t|tmp/e[n]v)/[\w.-]"
)
REGISTRY_HOST = re.compile(r"p[y]pi\.(?:org|python)|python[h]osted\.org|download\.py[t]orch\.org|://\S+/s[i]mple\b")


@pytest.mark.parametrize(
    "text", ["see @work@x", "'@home@me@a'", "--index-url https:@@py_pi.org", "(@opt@x)", "@root@a"]
)
def test_machine_pattern_sees_a_fault(text):
    text = text.replace("@", "/").replace("_", "")
    assert MACHINE_PATH.search(text) or REGISTRY_HOST.search(text)


def test_no_file_names_a_machine_path_or_registry_host():
    faults = []
    for path in kept_files():
        text = path.read_bytes().decode(errors="ignore")
        for pattern in (MACHINE_PATH, REGISTRY_HOST):
            faults += [f"{path.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert not faults, "\n" + "\n".join(faults)


# -- packages ----------------------------------------------------------------------------------------------------


def test_setup_cfg_lists_every_package():
    cfg = configparser.ConfigParser()
    cfg.read(ROOT / "setup.cfg")
    listed = set(cfg["options"]["packages"].split())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for folder in ("rollplex", "callbacks")
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == {re.sub(r"^callbacks", "rollplex.callbacks", name) for name in found}
    folders = {path.parent for path in (ROOT / "rollplex").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_callbacks_are_imported_from_the_checkout(tmp_path):
    code = "import rollplex.callbacks as c, rollplex as r; print(c.__file__); print(r.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(ROOT / "callbacks/__init__.py"), str(ROOT / "rollplex/__init__.py")]


def test_pyproject_holds_only_build_and_tools():
    assert set(tomllib.loads((ROOT / "pyproject.toml").read_text())) == {"build-system", "tool"}


# -- scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / ".ci/run"], ids=lambda path: path.name)
def test_script_parses_and_is_executable(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert path.name == "lib.sh" or os.access(path, os.X_OK)


def test_ci_runs_the_tests_as_the_readme_says():
    assert "bash scripts/test.sh" in (ROOT / ".ci/run").read_text()
    assert "bash scripts/test.sh" in (ROOT / "README.md").read_text()


def sourced(tmp_path: Path, command: str, **env: str) -> subprocess.CompletedProcess:
    """Run a bash command after lib.sh, without any Python on the PATH and with .venv in tmp_path."""
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    script = f'source "{ROOT}/scripts/lib.sh"; VENV="{tmp_path}/.venv"; PYTHON="$VENV/bin/python"; {command}'
    return subprocess.run(
        ["/bin/bash", "-c", script], env={"PATH": str(tmp_path), **env}, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("env", "word"),
    [({}, "python3.11-venv"), ({"ROLLPLEX_PYTHON": "/nowhere/python"}, "ROLLPLEX_PYTHON=/nowhere/python")],
)
def test_missing_python_is_one_line(tmp_path, env, word):
    done = sourced(tmp_path, "set_up core", **env)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ") and word in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_broken_venv_is_one_line(tmp_path):
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/false\n")
    python.chmod(0o755)
    done = sourced(tmp_path, "set_up core")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "delete it" in done.stderr


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("Collecting x\nERROR: [Errno 28] No space left on device\n", "no space left"),
        ("WARNING: Retrying ... NewConnectionError('x')\nERROR: No matching distribution found for x\n", "network"),
        ("Collecting x\nERROR: No matching distribution found for x==9\nnotice: more\n", "distribution found for x==9"),
        ("", "no reason"),
    ],
)
def test_pip_failures_are_explained_in_one_line(output, words):
    reason = setup_env.explain(output)
    assert words in reason and "\n" not in reason


def test_set_up_asks_for_disk_space(monkeypatch):
    usage = type("usage", (), {"free": 1_500_000_000})
    monkeypatch.setattr(setup_env.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(setup_env, "version_of", lambda name: None)
    with pytest.raises(setup_env.SetupError, match=r"1\.5 GB free .* about 6 GB are needed"):
        setup_env.check_machine("test")


@pytest.mark.parametrize(
    ("root", "fails", "calls", "told"),
    [
        (True, None, ["update", "install"], "Chromium, for the report's tests"),
        (True, "install", ["update", "install"], "apt-get install failed (no such package)"),
        (False, None, [], "apt-get install chromium"),
    ],
)
def test_set_up_gets_chromium_or_says_how(monkeypatch, capsys, root, fails, calls, told):
    seen = []

    def apt(command, **options):
        seen.append(command[1])
        return subprocess.CompletedProcess(command, int(command[1] == fails), "", "E: x\nno such package\n")

    monkeypatch.setattr(setup_env.shutil, "which", lambda name: "/usr/bin/apt-get" if name == "apt-get" else None)
    monkeypatch.setattr(setup_env.os, "geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr(setup_env.subprocess, "run", apt)
    setup_env.install_chromium()
    assert seen == calls and told in capsys.readouterr().out
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: "/usr/bin/chromium" if name == "chromium" else None)
    setup_env.install_chromium()
    assert seen == calls and capsys.readouterr().out == ""


def test_set_up_asks_for_a_compiler_only_for_tests(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    setup_env.check_machine("core")
    with pytest.raises(setup_env.SetupError, match="no C\\+\\+ compiler"):
        setup_env.check_machine("test")


def test_fuller_venv_serves_the_smaller_tier(monkeypatch, tmp_path):
    monkeypatch.setattr(setup_env, "VENV", tmp_path)
    assert not setup_env.complete("core")
    setup_env.stamp_of("test").write_text(setup_env.fingerprint())
    assert setup_env.complete("core")
    setup_env.stamp_of("test").rename(setup_env.stamp_of("core"))
    assert setup_env.complete("core") and not setup_env.complete("test")
    setup_env.stamp_of("core").write_text("older")
    assert not setup_env.complete("core")


# -- the torchvision hook, on stand-ins for torch and torchvision ------------------------------------------------

FAKE_TORCH = """
class Ops: pass
class ops: torchvision = Ops()
class library:
    class Library:
        def __init__(self, *names): assert names == ("torchvision", "FRAGMENT")
        def define(self, schema): setattr(ops.torchvision, schema.split("(")[0], schema)
"""
WORKING = "import torch\ntorch.ops.torchvision.nms = torch.ops.torchvision.qnms = 'compiled'"


def run_hook(folder: Path, code: str, **packages: str) -> subprocess.CompletedProcess:
    """Run `code` in an interpreter with no site-packages, the hook, and the given stand-in modules."""
    fix_torchvision.install_hook(folder)
    for name, source in packages.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    start = f"import site, sys; site.addsitedir({str(folder)!r})\n"
    return subprocess.run([sys.executable, "-I", "-S", "-c", start + code], capture_output=True, text=True)


@pytest.mark.parametrize(("extension", "declared"), [("", True), (WORKING, False)], ids=["missing", "working"])
def test_hook_declares_only_missing_operators(tmp_path, extension, declared):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(
        "import torch\nfrom . import extension\nseen = torch.ops.torchvision.nms"
    )
    (tmp_path / "torchvision/extension.py").write_text(extension)
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    done = run_hook(tmp_path, "assert 'torch' not in sys.modules\nimport torchvision; print(torchvision.seen)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" if declared else "compiled"
    )


def test_hook_is_harmless_without_torch_or_torchvision(tmp_path):
    done = run_hook(tmp_path, "import json\ntry: import torchvision\nexcept ModuleNotFoundError as e: print(e.name)")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "torchvision", "")


def test_only_missing_operators_are_repaired():
    assert fix_torchvision.missing_operator("RuntimeError: operator torchvision::nms does not exist")
    assert not fix_torchvision.missing_operator("ModuleNotFoundError: No module named 'torchvision'")
