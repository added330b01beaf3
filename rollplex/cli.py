"""The `rollplex` command: LightningCLI's fit, validate, test and predict, and export."""

from __future__ import annotations

import os
import sys
from typing import Any

from lightning.pytorch.cli import LightningCLI

import rollplex.strategy  # noqa: F401  (registers the strategy names)
from rollplex.data.datamodule import VLMDataModule
from rollplex.module import GRPOModule


class RollplexCLI(LightningCLI):
    """Model, data, trainer and callbacks from YAML and dotted overrides; classes by class_path."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            GRPOModule,
            VLMDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )


def main(args: list[str] | None = None) -> None:
    """Console entry point."""
    # A task named by class_path lives in the user's folder, which a console script does not search.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    RollplexCLI(args=args)
