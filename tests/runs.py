"""Small complete training runs for tests."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from helpers import picture
from lightning.pytorch import Trainer, seed_everything

from rollplex import GRPOModule, Rollout, RollplexStrategy, Sample, VLMDataModule, VLMTask


class PictureTask(VLMTask):
    """Random pictures of mixed sizes (row 2 has none, row 3 two); reward: how small the response's first token is."""

    def __init__(self, rows: int = 8, reward: Any = None) -> None:
        self.rows, self._reward = rows, reward

    def samples(self, split: str) -> list[Sample]:
        sizes = [(56, 56), (84, 56), (56, 56), (140, 28)]
        return [
            Sample(f"{split}-{i}", {"sizes": [sizes[i % 4]] * ({2: 0, 3: 2}.get(i % 4, 1)), "number": i})
            for i in range(self.rows)
        ]

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        images = [
            {"type": "image", "image": picture(w, h, seed=sample["number"] + j)}
            for j, (w, h) in enumerate(sample["sizes"])
        ]
        return [{"role": "user", "content": [*images, {"type": "text", "text": "what?"}]}]

    def reward(self, sample: Sample, response: Rollout):
        if self._reward is not None:
            return self._reward(sample, response)
        return 1.0 - float(response.token_ids[0]) / 256

    def correct(self, sample: Sample, response: Rollout) -> bool:
        return bool(response.token_ids[0] < 128)


class EqualPictures(PictureTask):
    """Every prompt has one picture of 112 by 112: 64 patches, 16 vision tokens."""

    def samples(self, split: str) -> list[Sample]:
        return [Sample(f"{split}-{i}", {"sizes": [(112, 112)], "number": i}) for i in range(self.rows)]


def run(
    model: str, root: Any, *, steps: int = 2, task: VLMTask | None = None, engine: Any = None, callbacks=(), batch_size=4,
    ckpt_path: str | None = None, trainer: dict[str, Any] | None = None, cls: type = GRPOModule, **settings: Any,
) -> GRPOModule:  # fmt: skip
    """`steps` rollout batches of training; returns the module (its `seen` lists what each step returned)."""
    seed_everything(0, verbose=False)
    defaults = dict(num_generations=4, max_completion_length=6, learning_rate=1e-2, seed=7)
    module = cls(model=str(model), **(defaults | settings))
    module.seen = []
    original = module.training_step

    def training_step(batch, batch_idx):
        out = original(batch, batch_idx)
        module.seen.append(out)
        return out

    module.training_step = training_step
    data = VLMDataModule(task=task or PictureTask(), batch_size=batch_size, seed=3)
    updates = steps * module.hparams["num_iterations"] * module.hparams["num_mini_batches"]
    options: dict[str, Any] = dict(
        accelerator="cpu", max_steps=updates, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, limit_val_batches=0, default_root_dir=str(root), use_distributed_sampler=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"strategy": RollplexStrategy(engine=engine, admission="always")} | options | (trainer or {})
        fit = Trainer(callbacks=list(callbacks), **options)
        fit.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module


def weights(module: GRPOModule) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.policy.named_parameters()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[k] - b[k]).detach().abs().max()) for k in a)
