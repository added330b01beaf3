"""Locks that a killed compilation leaves."""

from __future__ import annotations

import os
import time
import warnings

import pytest

from rollplex.deepspeed_build import warn_of_locks


@pytest.mark.parametrize("place", ["operator", "py311_cpu/operator"])
def test_an_old_lock_is_named_and_a_young_one_is_a_build(place, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / place / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_locks()
    hour_ago = time.time() - 3600
    os.utime(lock, (hour_ago, hour_ago))
    with pytest.warns(UserWarning, match=f"DeepSpeed waits while {lock} is there, and it has been for 60 minutes"):
        warn_of_locks()
