"""AdamW over the trained parameters, and its learning-rate schedule in optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import get_scheduler


def make_optimizer(parameters: Iterable[torch.nn.Parameter], h: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's configure_optimizers result from GRPOModule's settings. Weight decay is for matrices only."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": h["weight_decay"]},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=h["learning_rate"], betas=(h["adam_beta1"], h["adam_beta2"]))
    scheduler = get_scheduler(h["lr_scheduler_type"], optimizer, h["warmup_steps"], h["lr_decay_steps"])
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
