"""One GPU, no vLLM, under 8 minutes: every schedule on a random Qwen2.5-VL of 3 B and 7 B shape, checked and timed.

    python scripts/gpu_check.py                      # on a CPU: a tiny model through the same code
    python scripts/gpu_check.py --shapes 3b --json gpu.json

Weights are random, in bfloat16 on a GPU and float32 on a CPU; the embedded engine decodes under CUDA graphs. Each
schedule trains a few steps from the same weights, seeds, pictures and response lengths, with everything admitted that
it opens. Checked: the same responses in the first step (before any update), the same gradient norms, finite weights; on
a CPU (one thread per lane) every bit of the weights. Printed: seconds per step, overlap efficiency, decode slow-down,
peak memory. Exit code 1 when a check fails.

Plain SGD stands in for AdamW, so that a 7 B model, its gradients and the activations fit one device.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench.ours import CONTENDERS, BenchModule, BenchTask, step_details
from bench.report import median
from bench.workload import Workload
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.table import Table

from rollplex import RollplexStrategy, VLMDataModule
from rollplex.callbacks import GroupStreaming
from rollplex.engines.torch_engine import TorchEngine
from rollplex.models.registry import split
from rollplex.models.tiny import TinySettings, processor_of, tiny_config
from rollplex.planner.models import MODELS, ModelShape

SCHEDULES = ("serial", "overlap", "overlap_streaming", "reuse_streaming")


MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
TOWER = dict(
    depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, fullatt_block_indexes=[7, 15, 23, 31]
)  # fmt: skip
"""Vision tower of the 3 B and 7 B models, as in their published config.json."""
SHAPES: dict[str, ModelShape | None] = {"tiny": None, "3b": MODELS["Qwen2.5-VL-3B"], "7b": MODELS["Qwen2.5-VL-7B"]}


def config_of(shape: ModelShape | None) -> Any:
    """A transformers config: the tiny one, with the shape's sizes if there is one."""
    if shape is None:
        return tiny_config()
    config = tiny_config(tie_word_embeddings=shape.tied)
    text = dict(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn, vocab_size=shape.vocab, rope_parameters=MROPE,
        layer_types=["full_attention"] * shape.layers,
    )  # fmt: skip
    for part, values in ((config.text_config, text), (config.vision_config, TOWER | {"out_hidden_size": shape.hidden})):
        for name, value in values.items():
            setattr(part, name, value)
    return config


class RandomModule(BenchModule):
    """GRPOModule on random weights drawn on the device, with prescribed response lengths and plain SGD."""

    shape: ModelShape | None
    device_: torch.device

    def configure_model(self) -> None:
        if self.policy is not None:
            return
        from transformers import Qwen2_5_VLForConditionalGeneration

        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.hparams["dtype"]))
        try:
            with self.device_:
                self.policy = Qwen2_5_VLForConditionalGeneration(config_of(self.shape)).train()
        finally:
            torch.set_default_dtype(before)
        self.actor = split(self.policy, prefix_checkpointing=self.hparams["prefix_checkpointing"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.policy.parameters(), lr=self.hparams["learning_rate"])
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass
class Result:
    """What one schedule's run gave."""

    schedule: str
    seconds: list[float] = field(default_factory=list)
    """Per step, the first one (probe, captures, allocator) left out."""
    details: list[dict[str, Any]] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    """Of the first step."""
    norms: list[float] = field(default_factory=list)
    finite: bool = True
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """On a CPU only: on a GPU nothing promises equal bits."""
    peak_bytes: int = 0
    graphs: tuple[int, int] = (0, 0)
    """Captures and replays."""


class Watch(Callback):
    def __init__(self, result: Result) -> None:
        self.result = result

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            rollouts = [r for group in outputs["groups"] for r in group.rollouts]
            self.result.responses = [r.token_ids.tolist() for r in rollouts]
        else:
            self.result.seconds.append(outputs["metrics"]["time/step"])
            self.result.details.append(step_details(outputs, pl_module.colocation.timeline))
        self.result.norms.append(outputs["metrics"]["grad_norm"])


def run(
    shape: ModelShape | None, schedule: str, workload: Workload, steps: int, device: torch.device, folder: Path
) -> Result:
    """One schedule from fresh weights."""
    gpu = device.type == "cuda"
    result = Result(schedule)
    engine = TorchEngine(cuda_graphs=True if gpu else "eager")
    callbacks = [c(deterministic=True) if c is GroupStreaming else c() for c in CONTENDERS[schedule][0]]
    seed_everything(0, verbose=False)
    module = RandomModule(
        model=str(folder), num_generations=workload.G, max_completion_length=workload.max_length, seed=0,
        learning_rate=1e-3, dtype="bfloat16" if gpu else "float32",
    )  # fmt: skip
    module.shape, module.device_ = shape, device
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="gpu" if gpu else "cpu", devices=1, callbacks=[*callbacks, Watch(result)], max_steps=steps,
            strategy=RollplexStrategy(engine, str(device), threads=None if gpu else 1, admission="always"),
            limit_val_batches=0, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, use_distributed_sampler=False, default_root_dir=root,
        )  # fmt: skip
        trainer.fit(module, datamodule=VLMDataModule(BenchTask(workload, steps), batch_size=workload.B, shuffle=False))
    result.graphs = (engine.graph_captures, engine.graph_replays)
    result.finite = all(bool(torch.isfinite(p).all()) for p in module.policy.parameters())
    if gpu:
        result.peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        result.weights = {name: p.detach().clone() for name, p in module.policy.named_parameters()}
    del module, trainer, engine
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return result


def faults(serial: Result, other: Result, tolerance: float) -> list[str]:
    """What is wrong with a run, seen against the serial one."""
    out = [] if other.finite else ["weights are not finite"]
    differ = sum(a != b for a, b in zip(serial.responses, other.responses, strict=True))
    if differ:
        out.append(f"{differ} of {len(serial.responses)} responses of the first step differ")
    for step, (a, b) in enumerate(zip(serial.norms, other.norms, strict=True), 1):
        if not abs(a - b) <= tolerance * abs(a):
            out.append(f"gradient norm of step {step}: {b:.6g} against {a:.6g}")
    bits = [name for name, w in serial.weights.items() if not torch.equal(w, other.weights[name])]
    if bits:
        out.append(f"{len(bits)} of {len(serial.weights)} parameters differ in their bits, {bits[0]} first")
    return out


def row_of(serial: Result, result: Result) -> dict[str, Any]:
    """The table's row as plain numbers."""
    seconds = statistics.median(result.seconds)
    metrics = [d["metrics"] for d in result.details]
    beside, alone = (median([d[name] for d in result.details]) for name in ("decode_beside", "decode_alone"))
    return {
        "step_s": seconds,
        "ratio": statistics.median([a / b for a, b in zip(serial.seconds, result.seconds, strict=True)]),
        "rollout_s": median([d["rollout"] for d in result.details]),
        "overlap_efficiency": median([m.get("overlap_efficiency") for m in metrics]),
        "decode_slowdown": beside / alone - 1 if beside and alone else None,
        "peak_gib": result.peak_bytes / 2**30 or None,
        "captures": result.graphs[0],
        "replays": result.graphs[1],
    }


def check(name: str, options: argparse.Namespace, device: torch.device, console: Console) -> dict[str, Any]:
    """All schedules on one shape: prints the table, returns it with the faults."""
    workload = Workload(
        model="tiny", visual_tokens=options.visual_tokens, G=options.G, B=options.B, R=options.R,
        lengths="lognormal", mean=options.R / 2,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        config_of(SHAPES[name]).save_pretrained(root)
        processor_of(TinySettings()).save_pretrained(root)
        results = [run(SHAPES[name], s, workload, options.steps, device, Path(root)) for s in SCHEDULES]
    serial = results[0]
    rows = {r.schedule: row_of(serial, r) for r in results}
    wrong = {r.schedule: faults(serial, r, options.tolerance) for r in results}
    table = Table(title=f"{name} on {device}: medians of {options.steps - 1} steps, {asdict(workload)}")
    table.add_column("schedule")
    for column in rows["serial"]:
        table.add_column(column, justify="right")
    for schedule, row in rows.items():
        table.add_row(schedule, *("-" if v is None else f"{v:.3g}" for v in row.values()))
    console.print(table)
    for schedule, lines in wrong.items():
        console.print(f"{schedule}: {'; '.join(lines) or 'equals serial' if schedule != 'serial' else 'yardstick'}")
    return {"rows": rows, "faults": wrong}


def main(arguments: list[str] | None = None) -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["3b", "7b"] if gpu else ["tiny"])
    parser.add_argument("--steps", type=int, default=4, help="per schedule; the first is not timed")
    parser.add_argument("--visual-tokens", type=int, default=1000 if gpu else 64)
    parser.add_argument("--G", type=int, default=8 if gpu else 4)
    parser.add_argument("--B", type=int, default=4)
    parser.add_argument("--R", type=int, default=128 if gpu else 16, help="twice the mean response length")
    parser.add_argument(
        "--tolerance", type=float, default=2e-2 if gpu else 0.0,
        help="relative, of gradient norms; bfloat16 sums of later steps round differently",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=8.0, help="no shape is begun after three quarters of this")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"--steps {options.steps} leaves nothing to time; set at least 2")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    console, start = Console(width=160), time.perf_counter()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    console.print(f"{torch.cuda.get_device_name(0) if gpu else 'CPU'}, torch {torch.__version__}")
    out: dict[str, Any] = {}
    for name in options.shapes:
        if time.perf_counter() - start > 45 * options.minutes:
            console.print(f"{name}: left out, {options.minutes:g} minutes are nearly over")
            continue
        out[name] = check(name, options, device, console)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(out, indent=1))
    wrong = any(lines for shape in out.values() for lines in shape["faults"].values())
    console.print(f"{'FAILED' if wrong else 'passed'} in {time.perf_counter() - start:.0f} s")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
