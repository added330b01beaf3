"""Rules on the source: imports point one way, heavy packages have one home each, files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 80

# A module may import its own layer and those before it. Names are those right below `rollplex`.
LAYERS = [
    (
        "tables and pure functions",
        {
            "admission",
            "buckets",
            "bundles",
            "checkpoints",
            "checks",
            "cores",
            "data",
            "grpo",
            "kinds",
            "metrics",
            "models",
            "offload",
            "optim",
            "phases",
            "lockstep",
            "planner",
            "ranks",
            "seeds",
            "tensor_parallel",
            "topology",
            "streams",
            "totals",
            "trainer_states",
            "units",
            "updates",
            "watch",
            "whereabouts",
        }
        | {"reports", "residency", "rewards", "tasks", "timeline", "weights"},
    ),
    ("engines", {"engines"}),
    (
        "schedule",
        {
            "before_rollout",
            "evaluation",
            "exchange",
            "lane_progress",
            "lanes",
            "rank_step",
            "resample",
            "response_rows",
            "schedule",
            "schedule_state",
            "step",
        }
        | {"step_log", "step_settings", "vision"},
    ),
    (
        "strategy",
        {"colocation", "ddp_strategy", "strategy"}
        | {
            f"deepspeed_{part}"
            for part in ("build", "checkpoints", "gradients", "offload", "strategy", "tensor_parallel")
        },
    ),
    ("module", {"export", "module"}),
    ("cli", {"__main__", "ablation", "cli", "comparison", "config_names", "parity", "verify"}),
]
LEVEL = {name: level for level, (_, names) in enumerate(LAYERS) for name in names}

# package -> the only files that may import it
HOMES = {
    "vllm": {
        f"rollplex/engines/vllm_{part}.py" for part in ("engine", "inputs", "patches", "sharing", "split", "weights")
    },
    "peft": {"rollplex/models/lora.py"},
    "deepspeed": {
        f"rollplex/deepspeed_{part}.py" for part in ("checkpoints", "offload", "strategy", "tensor_parallel")
    },
}
LAZY_HOMES = HOMES["vllm"] | HOMES["deepspeed"] | HOMES["peft"]
"""They import their package inside functions only."""


def sources(*folders: str) -> list[Path]:
    """Every Python file of the checkout's folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: str) -> str:
    """The dotted name under which a source file of rollplex/ or callbacks/ is imported."""
    parts = Path(path).with_suffix("").parts
    if parts[0] == "callbacks":
        parts = ("rollplex", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def type_only(tree: ast.Module) -> set[ast.AST]:
    """The nodes under `if TYPE_CHECKING:`, which never run."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports(source: str, path: str, with_types: bool = True) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also those inside functions; `from a import b` gives a.b."""
    tree = ast.parse(source)
    skipped = set() if with_types else type_only(tree)
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def room(name: str) -> str:
    """The part of a dotted name right below rollplex, or "" when there is none."""
    parts = name.split(".")
    return parts[1] if parts[0] == "rollplex" and len(parts) > 1 else ""


def direction_faults(source: str, path: str) -> list[str]:
    """Imports of a rollplex file that point to a later layer (names used only in annotations may), or to callbacks."""
    own = room(module_name(path))
    faults = []
    for line, name in imports(source, path, with_types=False):
        target = room(name)
        if target == "callbacks":
            faults.append(f"{path}:{line}: imports {name}; callbacks reach rollplex, never the other way")
        elif own and target in LEVEL and LEVEL[target] > LEVEL[own]:
            faults.append(f"{path}:{line}: {LAYERS[LEVEL[own]][0]} import {name} of {LAYERS[LEVEL[target]][0]}")
    return faults


def home_faults(source: str, path: str) -> list[str]:
    """Imports of a package outside the files that may import it."""
    return [
        f"{path}:{line}: {name} may only be imported in {', '.join(sorted(HOMES[name.split('.')[0]]))}"
        for line, name in imports(source, path)
        if path not in HOMES.get(name.split(".")[0], {path})
    ]


def bare_faults(source: str, path: str) -> list[str]:
    """`import callbacks`: the same file loaded twice, with classes that are not each other's."""
    return [
        f"{path}:{line}: import rollplex.callbacks, not {name}"
        for line, name in imports(source, path)
        if name.split(".")[0] == "callbacks"
    ]


def size_faults(source: str, path: str) -> list[str]:
    """A file or a function that is too long."""
    faults = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        faults.append(f"{path}: {lines} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                faults.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return faults


RULES = [
    (direction_faults, ["rollplex"]),
    (home_faults, ["rollplex", "callbacks", "scripts"]),
    (bare_faults, ["rollplex", "callbacks", "scripts", "tests"]),
    (size_faults, ["rollplex", "callbacks"]),
]


@pytest.mark.parametrize(("rule", "folders"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_sources_keep_the_rule(rule, folders):
    files = sources(*folders)
    assert len(files) > 10 or folders != ["rollplex"]  # the walk found the package at all
    faults = [fault for path in files for fault in rule(path.read_text(), relative(path))]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (direction_faults, "rollplex/data/records.py", "from rollplex.engines.base import Request"),
        (direction_faults, "rollplex/data/records.py", "def f():\n    from ..engines import base"),
        (direction_faults, "rollplex/engines/__init__.py", "from .. import strategy"),
        (direction_faults, "rollplex/lanes.py", "import rollplex.module"),
        (direction_faults, "rollplex/strategy.py", "from rollplex.cli import main"),
        (direction_faults, "rollplex/cli.py", "import rollplex.callbacks.prefix_overlap"),
        (direction_faults, "rollplex/__init__.py", "from . import callbacks"),
        (home_faults, "rollplex/strategy.py", "def f():\n    import vllm.config"),
        (home_faults, "rollplex/engines/vllm_engine.py", "from deepspeed import zero"),
        (bare_faults, "tests/test_x.py", "import callbacks"),
        (bare_faults, "rollplex/cli.py", "from callbacks.prefix_overlap import PrefixOverlap"),
        (size_faults, "rollplex/cli.py", "\n" * (MAX_FILE_LINES + 1)),
        (size_faults, "callbacks/x.py", "class A:\n  def f(self):\n" + "    pass\n" * MAX_FUNCTION_LINES),
    ],
)
def test_rule_sees_a_fault(rule, path, source):
    assert len(rule(source, path)) == 1


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (direction_faults, "rollplex/engines/torch_engine.py", "from rollplex.models import split_model"),
        (direction_faults, "rollplex/engines/torch_engine.py", "from . import base"),
        (direction_faults, "rollplex/cli.py", "from rollplex import module, strategy"),
        (direction_faults, "rollplex/phases.py", "if TYPE_CHECKING:\n    from rollplex.schedule import Unit"),
        (home_faults, "rollplex/engines/vllm_engine.py", "import vllm"),
        (bare_faults, "callbacks/x.py", "from . import y\nfrom rollplex.callbacks import z"),
        (size_faults, "callbacks/x.py", "def f():\n" + "    pass\n" * (MAX_FUNCTION_LINES - 1)),
    ],
)
def test_rule_allows_what_is_right(rule, path, source):
    assert rule(source, path) == []


def test_every_module_has_a_layer():
    rooms = {room(module_name(relative(path))) for path in sources("rollplex")} - {""}
    unknown = sorted(rooms - set(LEVEL))
    assert not unknown, f"add {unknown} to LAYERS in {relative(Path(__file__))}: where do they stand?"


def test_configs_name_callbacks_by_their_package():
    faults = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "configs").rglob("*.yaml"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.split("#")[0].strip().removeprefix("- ").startswith("class_path: callbacks")
    ]
    assert not faults, "write class_path: rollplex.callbacks....\n" + "\n".join(faults)


def loaded_after(code: str) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter after it ran `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_import_rollplex_loads_nothing_heavy():
    assert not loaded_after("import rollplex") & {"vllm", "deepspeed", "wandb"}


def test_modules_load_neither_vllm_nor_deepspeed():
    names = [
        module_name(relative(path))
        for path in sources("rollplex", "callbacks")
        if path.stem != "__main__"
        and (relative(path) in LAZY_HOMES or relative(path) not in set().union(*HOMES.values()))
    ]
    assert not loaded_after("\n".join(f"import {name}" for name in names)) & {"vllm", "deepspeed"}
