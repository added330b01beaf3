"""Runs of a policy with adapters that several ranks must go through as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zero_runs as z
from lightning.pytorch import Callback

from rollplex import deepspeed_checkpoints as checkpoints
from rollplex.callbacks import ExportModel
from rollplex.export import export_checkpoint
from rollplex.models import lora
from rollplex.phases import PhaseCallback

EVERYWHERE = r".*\.(q_proj|v_proj|down_proj|gate_proj|qkv|proj|linear_fc1|merger\.mlp\.0)"
"""In the language model, the tower and the projector; `proj` of the patches is a convolution."""

RANDOM = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
"""B is random too: no gradient is zero, and adapters on differ from adapters off."""

WIDE = RANDOM | {"target_modules": EVERYWHERE, "exclude_modules": r".*patch_embed.*"}

SETTINGS: dict[str, Any] = {"lora": WIDE, "beta": 0.04}


class LookAtAdapters(PhaseCallback):
    """What is taken over at each update, what the optimizer holds, whose tensors the reference reads."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"gathered": []}

    def on_weights_published(self, trainer, version):
        replica = trainer.strategy.replica
        if replica is not None:
            self.result["gathered"].append(replica.peak_bytes)

    def on_train_end(self, trainer, pl_module):
        strategy = trainer.strategy
        whole = strategy.whole_model().hf
        theirs = {p.data_ptr() for p in whole.parameters()}
        self.result |= {
            "merged": {n: t.clone() for n, t in lora.whole_weights(whole)},
            "adapter_bytes": sum(p.nbytes for n, p in whole.named_parameters() if lora.is_adapter(n)),
            "reference": [n for n, p in pl_module.reference.hf.named_parameters() if p.data_ptr() not in theirs],
            "states": strategy.state_bytes(),
        }


def train(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    """Three steps, the last of them once more from a checkpoint, and all that is exported."""
    path, out, look = root / "two.ckpt", root / "export", LookAtAdapters()
    extra: list[Callback] = [ExportModel(str(out)), z.SaveAt(2, path), look]
    straight = z.train(model, root, stage, extra=extra, **SETTINGS, **settings)
    resumed = z.train(model, root, stage, ckpt_path=str(path), **SETTINGS, **settings)
    saved: list[str] = []
    if z.RANK == 0:
        export_checkpoint(path, root / "half")
        saved = sorted(checkpoints.whole_state_dict(path))
    return look.result | {
        "straight": straight, "resumed": resumed, "saved": saved, "export": str(out), "half": str(root / "half"),
    }  # fmt: skip


def other(model: str, root: Path, stage: int, name: str, folder: Path) -> dict[str, Any]:
    """Continue the run of the case `name` with other adapters."""
    path = str(folder / "runs" / name / "two.ckpt")
    return z.refused(model, root, stage, path, **(SETTINGS | {"lora": WIDE | {"r": 2}}))
