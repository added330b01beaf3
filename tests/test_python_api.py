"""Trainer, module and data module used from Python, and settings of the Trainer that cannot work."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer
from runs import PictureTask, run

from rollplex import GRPOModule, RollplexStrategy, VLMDataModule


def trainer(root, **options) -> Trainer:
    defaults = dict(
        accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=str(root), strategy=RollplexStrategy(),
    )  # fmt: skip
    return Trainer(**(defaults | options))


def test_fit_validate_fit_again_and_predict_with_the_same_objects(parity_folder, tmp_path):
    module = GRPOModule(str(parity_folder), num_generations=4, max_completion_length=6, learning_rate=1e-2)
    data = VLMDataModule(task=PictureTask(), batch_size=2)
    t = trainer(tmp_path)
    t.fit(module, datamodule=data)
    assert 0 <= t.validate(module, datamodule=data, verbose=False)[0]["val/reward"] <= 1
    t.fit_loop.epoch_loop.max_steps = 4
    t.fit(module, datamodule=data)
    assert t.global_step == 4 and module.rollouts_done == 4
    batches = trainer(tmp_path).predict(module, datamodule=data)
    assert [len(groups) for groups in batches] == [8] and batches[0][0].rollouts[0].text is not None


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
def test_precision_is_the_models_dtype(parity_folder, tmp_path, precision):
    with pytest.raises(ValueError, match="set the model's dtype"):
        run(parity_folder, tmp_path, trainer={"precision": precision})


def test_several_devices_are_refused(parity_folder, tmp_path):
    with pytest.raises(ValueError, match="uses one device, but devices=2"):
        run(parity_folder, tmp_path, trainer={"devices": 2})


def test_other_strategies_are_refused(parity_folder, tmp_path):
    with pytest.raises(ValueError, match="set strategy: rollplex"):
        run(parity_folder, tmp_path, trainer={"strategy": "auto"})


def test_more_mini_batches_than_groups_is_refused(parity_folder, tmp_path):
    with pytest.raises(ValueError, match="num_mini_batches=5 is more than the batch_size=4"):
        run(parity_folder, tmp_path, num_mini_batches=5)
