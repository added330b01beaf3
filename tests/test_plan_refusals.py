"""`rollplex plan --config` on settings that clash: what the run refuses is refused."""

from __future__ import annotations

import json

import pytest
from test_plan_input import STRATEGY, changed, said

from rollplex.cli import main


def test_what_the_run_refuses_under_zero_3_the_plan_refuses(capsys, tmp_path):
    content = changed(
        "trainer/strategy", {"class_path": "rollplex.RollplexDeepSpeedStrategy", "init_args": {"stage": 3}}
    )
    content["trainer"] |= {"devices": 2, "callbacks": [{"class_path": "rollplex.callbacks.PrefillReuse"}]}
    with pytest.raises(SystemExit, match=r"PrefillReuse .*ZeRO-3.* take it out, or use ZeRO-2"):
        said(capsys, tmp_path, content)
    content["trainer"]["callbacks"] = []
    engine = {"class_path": "rollplex.engines.TorchEngine", "init_args": {"vision": "shared"}}
    content["trainer"]["strategy"]["init_args"]["engine"] = engine
    content["model"]["init_args"]["dynamic_sample"] = True
    assert "fits" in said(capsys, tmp_path, content)  # which the run takes


ZERO = {"class_path": "rollplex.RollplexDeepSpeedStrategy"}
VLLM, TORCH = "rollplex.engines.VLLMEngine", "rollplex.engines.TorchEngine"


@pytest.mark.parametrize(
    ("strategy", "engine", "callbacks", "model", "message"),
    [
        ({"stage": 0}, (VLLM, {}), [], {}, "stage=0 must be 1, 2 or 3"),
        ({"stage": 3, "train_tp": 2}, (VLLM, {}), [], {}, "train_tp=2 needs parameters that ZeRO-3 does not cut"),
        ({"train_tp": 2}, (TORCH, {"vision": "shared"}), [], {}, "vision=shared takes features that the trainer of its own rank"),
        ({"train_tp": 2}, (TORCH, {}), ["PrefillReuse"], {}, "PrefillReuse takes the trainer's prefixes before"),
        ({"train_tp": 2}, (VLLM, {}), [], {"lora": {"r": 2}}, "lora with train_tp=2 is not supported"),
        (
            {}, (VLLM, {"tensor_parallel_size": 2}), ["SharedWeights"], {"lora": {"r": 2}},
            "SharedWeights with lora and tensor_parallel_size=2 is not supported",
        ),
        ({}, (TORCH, {}), ["SharedWeights"], {}, "SharedWeights is for VLLMEngine, but the engine is a TorchEngine"),
        ({}, (VLLM, {}), ["PrefillReuse"], {}, "PrefillReuse cannot work with engine=VLLMEngine"),
    ],
)  # fmt: skip
def test_what_the_run_refuses_the_plan_refuses(capsys, tmp_path, strategy, engine, callbacks, model, message):
    content = changed(
        "trainer/strategy", dict(ZERO) if strategy is not None else {"class_path": "rollplex.RollplexStrategy"}
    )
    arguments = {"class_path": engine[0], "init_args": engine[1]}
    content["trainer"]["strategy"]["init_args"] = (strategy or {}) | {"engine": arguments}
    content["trainer"] |= {"devices": 2 if strategy is not None else 1}
    content["trainer"]["callbacks"] = [f"rollplex.callbacks.{name}" for name in callbacks]
    content["model"]["init_args"] |= model
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        said(capsys, tmp_path, content)


@pytest.mark.parametrize(
    ("inner", "callbacks", "message"),
    [
        ((TORCH, {"vision": "shared"}), [], "vision=shared of TorchEngine inside a RemoteEngine"),
        (("rollplex.engines.RemoteEngine", {}), [], "one process too many"),
        ((VLLM, {}), ["SharedWeights"], "SharedWeights is for VLLMEngine, but the engine is a RemoteEngine"),
        ((TORCH, {}), ["PrefillReuse"], "PrefillReuse cannot work with engine=RemoteEngine"),
        ((VLLM, {"bogus": 4}), [], "engine.engine: VLLMEngine has no setting bogus"),
    ],
)  # fmt: skip
def test_the_engine_inside_a_remote_one_is_read(capsys, tmp_path, inner, callbacks, message):
    arguments = {"engine": {"class_path": inner[0], "init_args": inner[1]}}
    content = changed(f"{STRATEGY}/engine", {"class_path": "rollplex.engines.RemoteEngine", "init_args": arguments})
    content["trainer"]["callbacks"] = [f"rollplex.callbacks.{name}" for name in callbacks]
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        said(capsys, tmp_path, content)


def test_a_remote_engine_has_nothing_on_the_trainers_device(capsys, tmp_path):
    inner = {"class_path": VLLM, "init_args": {"kv_cache_memory_bytes": 2**34}}
    remote = {"class_path": "rollplex.engines.RemoteEngine", "init_args": {"engine": inner}}
    held = []
    for engine in (remote, inner):
        said(capsys, tmp_path, changed(f"{STRATEGY}/engine", engine))
        main(["plan", "--config", str(tmp_path / "config.yaml"), "--json"])
        held.append(set(json.loads(capsys.readouterr().out)["states_gib"]) & {"kv_pool", "engine_weights"})
    assert held == [set(), {"kv_pool", "engine_weights"}]
