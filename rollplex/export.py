"""The trained policy as a plain transformers folder, for `from_pretrained` and vLLM."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from rollplex.deepspeed_checkpoints import client_state, whole_state_dict
from rollplex.models.lora import add_adapters, config_of, lora_config, save_adapter
from rollplex.models.policy import weights_print
from rollplex.models.registry import load_hf, load_processor, split
from rollplex.models.twin import merged_model

ADAPTER_FOLDER = "adapter"
"""Beside the merged weights of a model with adapters: the adapters alone, as peft reads them."""


def export(policy: Any, processor: Any, out_dir: str | Path, *, overwrite: bool = False) -> Path:
    """Write weights (safetensors, in their own dtype), config, generation config, processor and chat template. Adapters
    are merged, and also written alone to `ADAPTER_FOLDER`.

    The folder appears in one rename, complete. A folder with other content is never replaced; an earlier export
    (config.json and weights) only with `overwrite`. Raises FileExistsError.
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not overwrite:
            raise FileExistsError(
                f"{out} exists: choose another folder, or set overwrite=True (--overwrite) to replace an export"
            )
        if not _is_export(out):
            raise FileExistsError(f"{out} exists and holds no exported model: choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        work.chmod(0o755)
        if config_of(policy) is None:
            policy.save_pretrained(work)
        else:
            merged_model(policy).save_pretrained(work)
            save_adapter(policy, work / ADAPTER_FOLDER)
        processor.save_pretrained(work)
        _check_config(work)
        aside = None
        if out.exists():  # a rename cannot replace a folder that is not empty
            aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent)) / out.name
            out.rename(aside)
        work.rename(out)
        if aside is not None:
            shutil.rmtree(aside.parent, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def export_checkpoint(
    ckpt_path: str | Path, out_dir: str | Path, *, model: str | None = None, overwrite: bool = False
) -> Path:
    """Export the policy of a training checkpoint.

    model: the folder training started from (config, processor); None is the one that the checkpoint names.
    """
    path = Path(ckpt_path)
    if not path.exists():
        raise ValueError(f"ckpt_path={str(ckpt_path)!r} is not a checkpoint file")
    if path.is_dir():
        checkpoint = client_state(path) | {"state_dict": whole_state_dict(path)}
    else:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if "rollplex" not in checkpoint:
        raise ValueError(f"ckpt_path={str(ckpt_path)!r} was not written by Rollplex")
    settings = checkpoint["hyper_parameters"]
    folder = model or settings["model"]
    policy = load_hf(folder, settings["dtype"])
    if settings.get("lora") is not None:
        if weights_print(policy) != checkpoint["rollplex"]["reference_print"]:
            raise ValueError(f"model={folder!r} holds other weights than those that the adapters were trained on")
        add_adapters(policy, lora_config(settings["lora"]), seed=settings["seed"])
        split(policy).freeze(settings["freeze"] or [])  # shards hold what is trained; other adapters are as made here
        own = {name for name, p in policy.named_parameters() if p.requires_grad}
    else:
        own = set(policy.state_dict())
    prefix = "policy."
    state = {name.removeprefix(prefix): t for name, t in checkpoint["state_dict"].items() if name.startswith(prefix)}
    if own - set(state):
        raise ValueError(f"the checkpoint lacks {', '.join(sorted(own - set(state))[:5])} of model={folder!r}")
    policy.load_state_dict(policy.state_dict() | state)
    return export(policy, load_processor(folder), out_dir, overwrite=overwrite)


def main(arguments: list[str]) -> None:
    """`rollplex export`."""
    parser = argparse.ArgumentParser(
        prog="rollplex export", description="Write the model of a checkpoint as a plain transformers folder."
    )
    parser.add_argument("--ckpt_path", required=True, help="checkpoint of rollplex fit, such as .../last.ckpt")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--config", help="the run's YAML: says where the model folder is, if it has moved")
    parser.add_argument("--model", help="the model folder training started from, if it has moved")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    options = parser.parse_args(arguments)
    model = options.model or _model_of(options.config)
    try:
        out = export_checkpoint(options.ckpt_path, options.out, model=model, overwrite=options.overwrite)
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))
    print(f"exported model: {out}")


def _model_of(config: str | None) -> str | None:
    if config is None:
        return None
    import yaml

    try:
        return str(yaml.safe_load(Path(config).read_text())["model"]["init_args"]["model"])
    except (OSError, KeyError, TypeError) as error:
        raise SystemExit(f"rollplex export: --config {config} names no model.init_args.model ({error!r})") from None


def _is_export(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _check_config(folder: Path) -> None:
    """Our attention is registered in this process only: a config that names it would load nowhere else."""
    text = json.dumps(json.loads((folder / "config.json").read_text()))
    assert "rollplex" not in text, "the exported config.json names a Rollplex attention"
