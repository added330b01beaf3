"""Shared by all tests: quiet offline environment, one thread, tiny models and prompts."""

from __future__ import annotations

import os

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",
}.items():
    os.environ.setdefault(name, value)

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_processor():
    from rollplex.models.tiny import build_tiny_in_memory

    return build_tiny_in_memory(init_std=0.1, seed=1)[1]


@pytest.fixture
def tiny_parity_model():
    """A fresh float32 model, every matrix drawn with std 0.1, in training mode."""
    from rollplex.models.tiny import build_tiny_in_memory

    return build_tiny_in_memory(init_std=0.1, seed=1)[0].train()


@pytest.fixture(scope="session")
def parity_folder(tmp_path_factory):
    """A tiny model folder, every matrix drawn with std 0.1: what a run loads."""
    from rollplex.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("models") / "parity", init_std=0.1, seed=1)
