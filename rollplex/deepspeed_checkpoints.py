"""Sharded checkpoints: a folder that every rank writes its shard to, complete under its name or not there.

last.ckpt/rollplex.json             what wrote it: stage, ranks, train_tp
last.ckpt/checkpoint/...            DeepSpeed's files; the state of Trainer and module is in the model states
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rollplex.checks import check_resume
from rollplex.deepspeed_gradients import ShardedGradients
from rollplex.models.policy import adapters_alone, with_base_weights
from rollplex.tensor_parallel import merge
from rollplex.updates import GradientUpdate

TAG = "checkpoint"
MARK = "rollplex.json"


@dataclass(frozen=True)
class Mark:
    """Who wrote a checkpoint."""

    stage: int
    ranks: int
    train_tp: int = 1

    def write(self, folder: Path) -> None:
        (folder / MARK).write_text(json.dumps(asdict(self)) + "\n")


def read_mark(path: Path) -> Mark:
    """Raises ValueError for what is no sharded checkpoint of ours, or no complete one."""
    if path.is_file():
        raise ValueError(
            f"ckpt_path={str(path)!r} is a file, a checkpoint of strategy rollplex or rollplex_ddp, and ZeRO continues "
            "from its own folders: set the strategy that wrote it, or export it and start from that model"
        )
    if not path.exists():
        raise FileNotFoundError(f"ckpt_path={str(path)!r} does not exist")
    try:
        return Mark(**json.loads((path / MARK).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"ckpt_path={str(path)!r} is no checkpoint of a rollplex_zero strategy ({error!r})") from error


def check_mark(path: Path, stage: int, ranks: int, train_tp: int = 1) -> None:
    """Shards fit the stage and the number of ranks that wrote them, nothing else."""
    mark = read_mark(path)
    if mark.stage != stage:
        raise ValueError(
            f"ckpt_path={str(path)!r} was written by rollplex_zero{mark.stage}, and this run's stage is {stage}: set "
            "the strategy that wrote it, or export it and start from that model"
        )
    if mark.train_tp != train_tp:
        raise ValueError(
            f"ckpt_path={str(path)!r} was written with train_tp={mark.train_tp}, and this run's is {train_tp}: set "
            "that degree, or export it and start from that model"
        )
    if mark.ranks != ranks:
        raise ValueError(
            f"ckpt_path={str(path)!r} has the shards of {mark.ranks} ranks, and this run has {ranks}: start as many "
            "(devices * num_nodes), or export it and start from that model"
        )


def replace_folder(partial: Path, target: Path) -> None:
    """Give a complete folder its name, in the place of what had it."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists() or target.is_symlink():  # one that leads nowhere does not exist
        target.rename(aside)
    partial.rename(target)
    if aside.is_dir() and not aside.is_symlink():  # ModelCheckpoint(save_last="link")
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)


def client_state(path: Path) -> dict[str, Any]:
    """What Trainer and module saved, and the engine's own entries beside it."""
    return torch.load(_model_states(path), map_location="cpu", weights_only=False, mmap=True)


def whole_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """All weights of the module, by name, whatever the stage; under ZeRO-3 its float32 masters."""
    mark = read_mark(path)
    if mark.stage < 3:
        files = [_model_states(path, rank) for rank in range(mark.train_tp)]
        return merge([torch.load(f, map_location="cpu", weights_only=False, mmap=True)["module"] for f in files])
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(path), tag=TAG)


class WithShardedCheckpoints:
    """The part of a strategy that writes and reads these folders. With adapters (LoRA) they hold what is trained, and
    nothing of the model folder."""

    stage: int
    train_tp: int
    gradients: GradientUpdate
    lightning_module: Any
    deepspeed_engine: Any
    broadcast: Any
    barrier: Any
    is_global_zero: bool
    world_size: int

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """In the shards, which the engine writes."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        target = Path(self.broadcast(str(filepath)))
        partial = target.with_name(f".{target.name}.partial")
        if self.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while saving
            partial.mkdir(parents=True)
        self.barrier()
        with adapters_alone(self.lightning_module.actor):
            super().save_checkpoint(checkpoint, str(partial), storage_options)  # type: ignore[misc]
        self.barrier()
        if self.is_global_zero:
            Mark(self.stage, self.world_size, self.train_tp).write(partial)
            replace_folder(partial, target)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        module = self.lightning_module
        if not isinstance(self.gradients, ShardedGradients):
            module.load_state_dict(with_base_weights(whole_state_dict(path), module.actor))
            return client_state(path)
        check_mark(path, self.stage, self.world_size, self.train_tp)
        # Before DeepSpeed stumbles over shapes.
        check_resume(client_state(path).get("rollplex", {}).get("settings", {}), module)
        _, state = self.deepspeed_engine.load_checkpoint(
            str(path), tag=TAG, load_lr_scheduler_states=False, load_module_strict=module.actor.lora is None
        )
        if state is None:
            raise ValueError(f"ckpt_path={str(path)!r} has no model states, it is incomplete")
        return state


def _model_states(path: Path, train_rank: int = 0) -> Path:
    found = sorted((path / TAG).glob(f"*mp_rank_{train_rank:02d}_model_states.pt"))
    if not found:
        raise ValueError(f"ckpt_path={str(path)!r} has no model states, it is incomplete")
    return found[0]
