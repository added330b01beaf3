"""Let `import torchvision` work where its compiled operators cannot be loaded.

A torchvision built for CUDA beside a CPU build of torch cannot load its operators, and its import then stops at
"operator torchvision::nms does not exist". Its Python part, which the image and video processors need, is sound: it
only wants the *schemas* of two operators. This script, run with the Python of the environment to repair,

- does nothing when `import torchvision` works;
- else, when those schemas are what is missing, writes a module and a `.pth` file into site-packages. At every start
  of that Python (subprocesses too) they install an import hook that declares the schemas right after torchvision has
  tried to load its own operators, and only if it failed: a torchvision that works later is left alone, and torch is
  never imported by the hook itself;
- else says in one line what is wrong and exits with 1.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK_NAME = "_rollplex_torchvision_ops"
PTH_NAME = "rollplex_torchvision_ops.pth"

HOOK_SOURCE = '''"""Written by scripts/fix_torchvision.py of Rollplex: declares torchvision operators not loaded."""

import sys

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library = None  # torch drops the declarations with this object


def declare_missing():
    global _library
    import torch

    missing = [name for name in SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            _library.define(SCHEMAS[name])


class Finder:
    """Finds torchvision.extension, the module that loads the operators, and runs declare_missing after it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "torchvision.extension":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module

                def exec_module(module):
                    run(module)
                    declare_missing()

                spec.loader.exec_module = exec_module
                return spec
        return None


sys.meta_path.insert(0, Finder())
'''


def torchvision_error() -> str:
    """The last line that `import torchvision` prints in a fresh interpreter; empty when the import works."""
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"python ended with code {done.returncode}"


def missing_operator(error: str) -> bool:
    """Whether the import failed because a schema of nms or qnms does not exist."""
    return "does not exist" in error and ("torchvision::nms" in error or "torchvision::qnms" in error)


def install_hook(folder: Path) -> None:
    """Write the hook and the `.pth` file that loads it into `folder` (a site-packages)."""
    (folder / f"{HOOK_NAME}.py").write_text(HOOK_SOURCE)
    (folder / PTH_NAME).write_text(f"import {HOOK_NAME}\n")


def main() -> int:
    error = torchvision_error()
    if not error:
        return 0
    if not missing_operator(error):
        print(f"error: `import torchvision` fails: {error}", file=sys.stderr)
        return 1
    folder = Path(sysconfig.get_paths()["purelib"])
    if sys.prefix == sys.base_prefix:
        print(f"error: run this inside a virtual environment, not with {sys.executable}", file=sys.stderr)
        return 1
    install_hook(folder)
    error = torchvision_error()
    if error:
        print(f"error: `import torchvision` still fails with its operators declared: {error}", file=sys.stderr)
        return 1
    print("torchvision works; its compiled operators cannot be loaded here, but Rollplex uses none of them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
