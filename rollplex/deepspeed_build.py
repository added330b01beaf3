"""DeepSpeed compiles its operators where they are first used, one process at a time, behind a lock file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from torch.utils import cpp_extension

LONGEST = 300.0
"""Seconds that a build takes at most; a lock older than that was left behind."""


def warn_of_locks() -> None:
    """Name locks that a killed process left: DeepSpeed would wait for them for ever, without a word."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    for lock in (*folder.glob("*/lock"), *folder.glob("*/*/lock")):
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # that build has just ended
            continue
        if age > LONGEST:
            rank_zero_warn(
                f"DeepSpeed waits while {lock} is there, and it has been for {age / 60:.0f} minutes: a process that "
                "was killed while it compiled has left it. If nothing compiles now, delete it: the run then goes on"
            )
