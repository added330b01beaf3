"""Rollplex as a contender: the product's own module, strategy and callbacks, with response lengths prescribed."""

from __future__ import annotations

import importlib.util
import inspect
import os
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from bench.gate import Gate, Missing
from bench.worker import REMOTE
from bench.workload import Workload, reward_of
from rollplex import GRPOModule, Rollout, RollplexStrategy, Sample, VLMDataModule, VLMTask
from rollplex.callbacks import GroupStreaming, PrefillReuse, PrefixOverlap, SharedWeights
from rollplex.data.records import Prompt, Request, SamplingParams
from rollplex.engines import RemoteEngine, VLLMEngine
from rollplex.engines.base import RolloutEngine
from rollplex.engines.torch_engine import TorchEngine
from rollplex.step import GRPOStep
from rollplex.timeline import PHASES, ROLLOUT_LANE, TRAIN_LANE, Timeline
from rollplex.units import PREFIX_KINDS

CONTENDERS: dict[str, tuple[list[type], dict[str, Any]]] = {
    "serial_unshared": ([], {"share_prefix": False}),
    "serial": ([], {}),
    "overlap": ([PrefixOverlap], {}),
    "overlap_streaming": ([PrefixOverlap, GroupStreaming], {}),
    "reuse_streaming": ([PrefillReuse, PrefixOverlap, GroupStreaming], {}),
    "disaggregated": ([], {}),
    "disaggregated_overlap": ([PrefixOverlap], {}),
}
"""name -> (callbacks, settings of GRPOModule)."""


def engine_of(name: str, callbacks: list[type]) -> tuple[RolloutEngine, list[type]]:
    """The rollout engine, and the callbacks it needs besides a contender's own: vLLM computes with the trainer's
    tensors, as the embedded engine does. Missing when the two do not go together."""
    if name == "torch":
        return TorchEngine(), callbacks
    if PrefillReuse in callbacks:
        raise Missing("vLLM keeps a K/V cache of its own, so it cannot take a prefix")
    if importlib.util.find_spec("vllm") is None:
        raise Missing("vLLM is not installed")
    # Memory is not short here, and no other contender gives its own back.
    return VLLMEngine(release_kv_cache=False), [SharedWeights, *callbacks]


def disaggregated(engine: str, threads: int) -> tuple[RemoteEngine, int]:
    """The engine on the first half of the cores, and the trainer's threads: it has the others."""
    cores = sorted(os.sched_getaffinity(0))[: max(2, threads)]
    if len(cores) < 2:
        raise Missing("disaggregated placement needs two cores")
    own = cores[: len(cores) // 2]
    inner, _ = engine_of(engine, [])
    return RemoteEngine(inner, cores=own), len(cores) - len(own)


def cpu_seconds(pid: int) -> float:
    """Of another process so far."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


LANE_SETTINGS = ("rollout_threads", "train_threads", "admission")
"""Settings of RollplexStrategy that the command line may change; unset they stay the product's own."""


class BenchTask(VLMTask):
    """The workload's rows; pictures are made beforehand, as a decoded data set would have them."""

    def __init__(self, workload: Workload, steps: int) -> None:
        self.workload = workload
        self.pictures = {row: workload.picture(row) for step in range(steps) for row in workload.rows_of(step)}

    def samples(self, split: str) -> list[Sample]:
        if split != "train":
            return []
        return [Sample(f"{row:06d}", {"row": row, "lengths": self.workload.lengths_of(row)}) for row in self.pictures]

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        row = sample["row"]
        text = {"type": "text", "text": self.workload.prompt_text(row)}
        return [{"role": "user", "content": [{"type": "image", "image": self.pictures[row]}, text]}]

    def reward(self, sample: Sample, response: Rollout) -> float:
        return reward_of(response.token_ids.tolist())


class LengthsStep(GRPOStep):
    """A step whose responses have prescribed lengths: max_tokens per request."""

    def requests(self, *, seed: int, step: int) -> list[Request]:
        return [
            replace(r, params=replace(r.params, max_tokens=r.prompt.sample["lengths"][r.index]))
            for r in super().requests(seed=seed, step=step)
        ]


class BenchModule(GRPOModule):
    """GRPOModule with `LengthsStep` and no stop token; `last` is what the newest step returned."""

    last: dict[str, Any] | None = None

    def sampling(self, *, evaluate: bool = False) -> SamplingParams:
        return replace(super().sampling(evaluate=evaluate), stop_token_ids=())

    def new_step(self, prompts: list[Prompt]) -> GRPOStep:
        step = super().new_step(prompts)
        return LengthsStep(**{f.name: getattr(step, f.name) for f in fields(step) if f.init})

    def training_step(self, batch: list[Prompt], batch_idx: int) -> dict[str, Any] | None:
        self.last = super().training_step(batch, batch_idx)
        return self.last


class AskedSteps(Callback):
    """Waits at the gate before each step."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        engine = pl_module.colocation.engine
        if isinstance(engine, RemoteEngine):
            self.gate.elsewhere = lambda: cpu_seconds(engine.pid) if engine.pid else 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.gate.arrive(lambda: step_details(pl_module.last, pl_module.colocation.timeline))


def accepted(target: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, refused with a clear message when `target` does not know one."""
    known = inspect.signature(target.__init__).parameters
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise Missing(f"this checkout's {target.__name__} has no setting {', '.join(unknown)}")
    return settings


def run(gate: Gate, workload: Workload, contender: str, options: dict[str, Any]) -> None:
    """Train until the parent says stop (raises Stop)."""
    torch.set_num_threads(options["threads"])
    callbacks, settings = CONTENDERS[contender]
    given = {name: options[name] for name in LANE_SETTINGS if options[name] is not None}
    threads = options["threads"]
    if contender in REMOTE:
        engine, threads = disaggregated(options["engine"], threads)
    else:
        engine, callbacks = engine_of(options["engine"], callbacks)
    lanes = {"threads": threads, **given}
    strategy = RollplexStrategy(engine, **accepted(RollplexStrategy, lanes))
    settings = accepted(GRPOModule, {**settings, **options["settings"]})
    seed_everything(workload.seed, verbose=False)
    module = BenchModule(
        model=options["folder"], num_generations=workload.G, max_completion_length=workload.max_length,
        learning_rate=workload.learning_rate, beta=workload.beta, seed=workload.seed, **settings,
    )  # fmt: skip
    task = BenchTask(workload, options["steps"])
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", strategy=strategy, callbacks=[*(c() for c in callbacks), AskedSteps(gate)],
            max_epochs=1, limit_val_batches=0, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, use_distributed_sampler=False, default_root_dir=Path(root),
        )  # fmt: skip
        trainer.fit(module, datamodule=VLMDataModule(task=task, batch_size=workload.B, shuffle=False))
    raise AssertionError("training ended before the parent said stop")


# ---- what a step says about itself ----


def step_details(out: dict[str, Any] | None, timeline: Timeline) -> dict[str, Any]:
    """Of the step that just ended: phases, hidden work, lanes."""
    if out is None:
        return {}
    metrics = out["metrics"]
    details = {
        name: metrics.get(f"time/{name}", 0.0) for name in ("rollout", "score", "train", "update", "publish", "hidden")
    }
    details["inner"] = metrics["time/step"]
    details["response_tokens"] = sum(len(r) for group in out["groups"] for r in group.rollouts)
    details["units_admitted"] = metrics.get("units_admitted")
    details["units_refused"] = sum(v for name, v in metrics.items() if name.startswith("units_refused/"))
    details["metrics"] = metrics
    return details | lane_details(timeline, metrics["time/step"])


def lane_details(timeline: Timeline, step_seconds: float) -> dict[str, float | None]:
    """From the step's spans.

    prefix, prefix_hidden: seconds of prefix units that were no prefill, and those inside the rollout. decode: mean
    seconds of a decode step while the train lane is busy (decode_beside) and while it is not (decode_alone). overhead:
    step seconds in which neither lane works nor weights change, which is what scheduling costs.
    """
    spans = timeline.spans()
    train = [s for s in spans if s.lane == TRAIN_LANE]
    prefix = [s for s in train if s.name in {k.value for k in PREFIX_KINDS} and not s.arguments.get("prefill")]
    decode = [s for s in spans if s.lane == ROLLOUT_LANE and s.name == "decode"]
    busy = [(s.start, s.end) for s in train]
    beside = [s.seconds for s in decode if overlaps(s.start, s.end, busy)]
    alone = [s.seconds for s in decode if not overlaps(s.start, s.end, busy)]
    work = [s for s in spans if s.lane in (TRAIN_LANE, ROLLOUT_LANE)]
    work += [s for s in spans if s.lane == PHASES and s.name in ("update", "publish")]
    return {
        "prefix": sum(s.seconds for s in prefix),
        "prefix_hidden": sum(s.seconds for s in prefix if s.arguments.get("hidden")),
        "decode": sum(s.seconds for s in decode),
        "decode_steps": len(decode),
        "decode_beside": sum(beside) / len(beside) if beside else None,
        "decode_alone": sum(alone) / len(alone) if alone else None,
        "overhead": max(0.0, step_seconds - covered((s.start, s.end) for s in work)),
    }


def overlaps(start: float, end: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(a < end and start < b for a, b in spans)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total
