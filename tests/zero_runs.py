"""Runs over one or several ranks, started by torchrun from test_zero.py: all cases of a world in one set of processes.

Rank 0 writes one file per case, whatever came of it. A case that does not end in time ends the process.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers import picture
from lightning.pytorch import Callback, Trainer
from runs import EqualPictures, PictureTask, run

from rollplex import GRPOModule, RollplexDDPStrategy, RollplexDeepSpeedStrategy, Sample, VLMDataModule
from rollplex.callbacks import GroupStreaming, PhaseOffload, PrefixOverlap
from rollplex.engines import TorchEngine
from rollplex.phases import Phase, PhaseCallback
from rollplex.ranks import Ranks
from rollplex.residency import Stage
from rollplex.units import UnitKind

LIMIT = 90
"""Seconds a case may take; a hang is a failure."""

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS = dict(steps=3, learning_rate=2e-5, adam_beta2=0.99, batch_size=4)


def callbacks() -> list[Any]:
    return [PrefixOverlap(), GroupStreaming(deterministic=True)]


def strategy(stage: int, **settings: Any) -> Any:
    """0 is data parallel without shards."""
    settings = {"admission": "always", "collective_timeout": LIMIT} | settings
    return RollplexDeepSpeedStrategy(stage, **settings) if stage else RollplexDDPStrategy(**settings)


class Keep(Callback):
    """What a run came to: the whole weights at its end, metrics and learning rate of each step."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"steps": [], "rates": []}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.result["steps"].append(outputs["metrics"] if outputs else None)
        self.result["rates"].append(trainer.strategy.optimizers[0].param_groups[0]["lr"])

    def on_train_end(self, trainer, pl_module):
        whole = trainer.strategy.whole_model()
        self.result["weights"] = {n: p.detach().clone() for n, p in whole.hf.named_parameters()}
        self.result["global_step"] = trainer.global_step
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        if trainer.strategy.strategy_name == "rollplex_zero":
            self.result["engine_steps"] = engine.global_steps
        self.result["scheduler_steps"] = trainer.lr_scheduler_configs[0].scheduler.last_epoch


def train(
    model: str, root: Path, stage: int, *, extra=(), zero: dict[str, Any] | None = None, trainer=None, serial=False,
    **settings,
):  # fmt: skip
    """A run; returns what `Keep` kept."""
    keep = Keep()
    made = strategy(stage, **(zero or {}))
    options = {"strategy": made, "devices": WORLD} | (trainer or {})
    run(model, root, trainer=options, callbacks=[*([] if serial else callbacks()), *extra, keep], **(STEPS | settings))
    return keep.result


# ---- gradients ----


class CountReductions(Callback):
    """Collectives that sum more than a number or two: (rollout batches done, phase, elements) of each."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, int]] = []

    def on_train_start(self, trainer, pl_module):
        names = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
        self.kept = [(dist, name, getattr(dist, name)) for name in names]
        if trainer.strategy.strategy_name == "rollplex_zero":
            from deepspeed.comm import comm

            self.kept.append((comm.cdb, "reduce_scatter_function", comm.cdb.reduce_scatter_function))
        machine = trainer.strategy.colocation.executor.machine

        def counted(call: Any) -> Any:
            def reduction(*args, **kwargs):
                size = max(t.numel() for t in [*args, *kwargs.values()] if torch.is_tensor(t))
                if size > 2:
                    self.seen.append((pl_module.rollouts_done, machine.phase.value, size))
                return call(*args, **kwargs)

            return reduction

        for owner, name, call in self.kept:
            setattr(owner, name, counted(call))

    def on_train_end(self, trainer, pl_module):
        for owner, name, call in self.kept:
            setattr(owner, name, call)


def counted(model: str, root: Path, stage: int) -> dict[str, Any]:
    """A run, and the reductions of its updates."""
    counts = CountReductions()
    return train(model, root, stage, extra=[counts]) | {"reductions": counts.seen}


class KeepGradient(Callback):
    """Of the first update, summed over ranks and rescaled."""

    def __init__(self) -> None:
        self.gradient: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.gradient:
            return
        from deepspeed.utils import safe_get_full_grad

        self.gradient = {n: safe_get_full_grad(p).clone() for n, p in pl_module.policy.named_parameters()}
        if trainer.strategy.train_tp > 1:
            shards = trainer.strategy.parallel.shards
            self.gradient = {n: shards.whole(n, g) for n, g in self.gradient.items()}


def gradient(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    keep = KeepGradient()
    train(model, root, stage, extra=[keep], **({"steps": 1, "max_grad_norm": None} | settings))
    return {"gradient": keep.gradient}


def gradient_and_weights(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    """Of three steps: the first one's gradient, and what all came to."""
    keep = KeepGradient()
    return train(model, root, stage, extra=[keep], max_grad_norm=None, **settings) | {"gradient": keep.gradient}


# ---- engine weights ----


class CompareEngine(PhaseCallback):
    """After each weight push: every tensor that the engine decodes with against the trainer's gathered one."""

    def __init__(self) -> None:
        self.unequal: list[str] = []
        self.compared = self.peak = self.whole = self.resident = self.gathered = 0

    def on_train_start(self, trainer, pl_module):
        plain = trainer.strategy.gathered

        @contextmanager
        def gathered(parameters):
            with plain(parameters):
                self.gathered = max(self.gathered, self._here(trainer))
                yield

        trainer.strategy.gathered = gathered

    def _here(self, trainer) -> int:
        """Bytes of the parameters that are whole on this rank now."""
        here = [p for p in trainer.lightning_module.policy.parameters() if p.ds_status.name == "AVAILABLE"]
        return sum(p.ds_numel * p.element_size() for p in here)

    def on_unit_end(self, trainer, unit):
        if unit.kind is UnitKind.ACT_BACKWARD:
            self.resident = max(self.resident, self._here(trainer))

    def on_weights_published(self, trainer, version):
        actor = trainer.lightning_module.actor
        engine = dict(trainer.strategy.colocation.engine._model.hf.named_parameters(remove_duplicate=False))
        for name, p in actor.hf.named_parameters(remove_duplicate=False):
            with trainer.strategy.gathered([p]):
                whole = p.detach().clone()
            self.compared += 1
            if engine[name].shape != whole.shape or not torch.equal(engine[name], whole):
                self.unequal.append(name)
        self.peak = trainer.strategy.replica.peak_bytes
        self.whole = trainer.strategy.replica.nbytes


def engine_weights(model: str, root: Path, threshold: int) -> dict[str, Any]:
    compare = CompareEngine()
    zero = {"gather_bucket_bytes": 100_000, "zero_optimization": {"stage3_param_persistence_threshold": threshold}}
    train(model, root, 3, extra=[compare], zero=zero)
    return {name: getattr(compare, name) for name in ("unequal", "compared", "peak", "whole", "resident", "gathered")}


# ---- checkpoints ----


class SaveAt(Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if pl_module.rollouts_done == self.step:
            trainer.save_checkpoint(self.path)


def shared_vision(
    model: str, root: Path, stage: int, *, zero: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """One vision pass for engine and trainer."""
    kept = train(model, root, stage, zero={"engine": TorchEngine(vision="shared")} | (zero or {}), **settings)
    return {"weights": kept["weights"], "passes": [m["vision_passes"] for m in kept["steps"]]}


def resume(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    """6 steps straight, saving after 3; and 3 more from there."""
    path = root / "half.ckpt"
    warm = dict(lr_scheduler_type="linear", warmup_steps=5, lr_decay_steps=10) | settings
    straight = train(model, root, stage, extra=[SaveAt(3, path)], **(warm | {"steps": 6}))
    resumed = train(model, root, stage, ckpt_path=str(path), **(warm | {"steps": 6}))
    files = sorted(p.name for p in root.iterdir() if p.name.startswith(".")) if RANK == 0 else []
    return {"straight": straight, "resumed": resumed, "leftover": files}


def refused(model: str, root: Path, stage: int, path: str | None = None, **settings: Any) -> dict[str, Any]:
    try:
        train(model, root, stage, ckpt_path=path, **settings)
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


def export(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    """The folder that ExportModel writes, and the one from the checkpoint."""
    from rollplex.callbacks import ExportModel
    from rollplex.export import export_checkpoint

    out, path = root / "export", root / "end.ckpt"
    kept = train(model, root, stage, extra=[ExportModel(str(out)), SaveAt(3, path)], **settings)
    if RANK == 0:
        export_checkpoint(path, root / "from_checkpoint")
    return {"folders": [str(out), str(root / "from_checkpoint")], "weights": kept["weights"]}


# ---- offload ----


class Offload(PhaseCallback):
    """Optimizer moments and masters are away from the start of a rollout to the update."""

    def __init__(self) -> None:
        self.same, self.groups = True, 0
        self.bytes: list[dict[str, int]] = []

    def on_phase_start(self, trainer, phase):
        states = trainer.strategy.states
        if phase is Phase.ROLLOUT:
            self.before = _sharded(states)
            self.groups = len(states.engine.optimizer.optimizer.param_groups)
            self.bytes.append(states.bytes())
            states.offload(["optimizer_moments", "masters"])
            self.bytes.append(states.bytes())
        elif phase is Phase.UPDATE:
            states.reload()
            after = _sharded(states)
            self.same &= len(after) == len(self.before) and all(map(torch.equal, after, self.before))
            self.bytes.append(states.bytes())


def _sharded(states) -> list[torch.Tensor]:
    optimizer = states.engine.optimizer
    moments = [t for s in optimizer.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [
        t.detach().clone() for t in [*optimizer.single_partition_of_fp32_groups, *optimizer.bit16_groups_flat, *moments]
    ]


class KeepLedger(Callback):
    def on_train_start(self, trainer, pl_module):
        self.watch = pl_module.colocation.watch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.tokens = len(batch[0])


def phase_offload(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    """The same run with PhaseOffload and without, and what the ledger saw of the one with it."""
    kept, moves = KeepLedger(), PhaseOffload()
    without = train(model, root, stage, beta=0.04, **settings)
    found = train(model, root, stage, beta=0.04, extra=[moves, kept], **settings)
    recorded = kept.watch.ledger.recorded()
    return {
        "with": found["weights"], "without": without["weights"], "states": moves.states,
        "wrong": kept.watch.mismatches,
        "recorded": {name: {stage.key: size for stage, size in row.items()} for name, row in recorded.items()},
    }  # fmt: skip


def offload(model: str, root: Path, stage: int) -> dict[str, Any]:
    with_it, without = Offload(), {}
    without = train(model, root, stage, weight_decay=0.1)
    kept = train(model, root, stage, weight_decay=0.1, extra=[with_it])
    return {
        "with": kept["weights"], "without": without["weights"], "same": with_it.same, "bytes": with_it.bytes,
        "groups": with_it.groups,
    }  # fmt: skip


# ---- masters ----


class ConstantGradient(GRPOModule):
    """200 updates with a gradient of one everywhere, instead of a rollout."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(200):
            self.gradient_update.begin()
            for p in self.policy.parameters():
                shape, held = getattr(p, "ds_shape", p.shape), p.data
                p.data = held.new_zeros(()).expand(shape)
                p.grad = held.new_ones(shape)
                p.data = held
            self.gradient_update.finish(self.policy.parameters(), 1.0, None)
            optimizer.step()
            self.gradient_update.norm()
        self.actor.version += 1


def masters(model: str, root: Path, stage: int, zero: dict[str, Any] | None = None) -> dict[str, Any]:
    from rollplex.models.registry import load_hf

    keep = Keep()
    options = {"strategy": strategy(stage, **(zero or {})), "devices": WORLD, "max_steps": 200}
    kept: dict[str, Any] = {}

    class Read(Callback):
        def on_train_end(self, trainer, pl_module):
            optimizer = trainer.strategy.deepspeed_engine.optimizer
            name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
            kept["dtypes"] = [str(t.dtype) for t in getattr(optimizer, name)]

    run(
        model, root, trainer=options, callbacks=[Read(), keep], cls=ConstantGradient, learning_rate=5e-5,
        dtype="bfloat16", max_grad_norm=None, batch_size=4, steps=200,
    )  # fmt: skip
    before = {n: p.detach() for n, p in load_hf(model, "bfloat16").named_parameters()}
    return kept | {"before": before, "after": keep.result["weights"]}


# ---- rows of the public reports ----


class SizesTask(PictureTask):
    """The row at place k of a batch has the pictures sizes[k % len(sizes)]: rank r of two gets places r, r + 2, ...

    `runs.run` shuffles rows with seed 3; this undoes it for the first epoch.
    """

    def __init__(self, sizes: Sequence[Sequence[tuple[int, int]]], rows: int) -> None:
        super().__init__(rows=rows)
        self.sizes = sizes

    def samples(self, split: str) -> list[Sample]:
        place = {int(row): k for k, row in enumerate(np.random.default_rng([3, 0]).permutation(self.rows))}
        sizes = [list(self.sizes[place[i] % len(self.sizes)]) for i in range(self.rows)]
        return [Sample(f"{split}-{i}", {"sizes": sizes[i], "number": i}) for i in range(self.rows)]


ONE, TWO, THREE = [(56, 56)], [(56, 56), (84, 56)], [(56, 56), (84, 56), (56, 84)]
MIXES = {
    "text_image": ([], ONE), "image_text": (ONE, []), "text_text": ([], []), "one_three": (ONE, THREE),
}  # fmt: skip
"""DIST-01: pictures on rank 0, on rank 1."""

UNEVEN = (ONE, ONE, ONE, [(84, 56)], ONE, [(140, 28)])
"""DIST-05: with prompts that share a pass, rank 0 has one bundle of three prompts and rank 1 three of one."""


def mix(name: str) -> tuple[PictureTask, dict[str, Any]]:
    """A task and the settings it is run with."""
    if name == "uneven":
        return SizesTask(UNEVEN, 18), dict(batch_size=6, prompts_per_pass=4)
    if name == "odd":  # three groups: two on rank 0, one on rank 1
        return SizesTask((ONE, [], TWO), 9), dict(batch_size=3)
    if name == "alone":  # rank 1 has nothing at all
        return SizesTask((ONE,), 8), dict(batch_size=1)
    # With seed 7 a draw of one_three falls within rounding of the border between two tokens, and another place of the
    # weights in memory (DeepSpeed's flat buffer) gives the other one.
    return SizesTask(MIXES[name], 8), dict(batch_size=2, seed=8)


def mixed(model: str, root: Path, stage: int, name: str, **more: Any) -> dict[str, Any]:
    task, settings = mix(name)
    return train(model, root, stage, task=task, **settings, **more)


class BrokenTask(PictureTask):
    """Row 3 holds half a file; of rows 5 and 6 a reward never comes, or raises. Each prompt, and each reward, says
    which row it is of."""

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        buffer = io.BytesIO()
        picture(56, 84, seed=sample["number"]).save(buffer, "PNG")
        whole = buffer.getvalue()
        source = whole[: len(whole) // 2] if sample["number"] == 3 else whole
        return [{"role": "user", "content": [{"type": "image", "image": source}, {"type": "text", "text": sample.id}]}]

    def reward(self, sample: Sample, response: Any) -> float:
        if (sample["number"], response.index) == (5, 1):
            while True:
                pass
        if (sample["number"], response.index) == (6, 2):
            raise RuntimeError("a fault of the reward")
        return sample["number"] + float(response.token_ids[0]) / 1000


BROKEN: dict[str, Any] = {"reward_timeout": 1.5, "max_grad_norm": None}


class Rewarded(Callback):
    """Of each group that was trained on: row, prompt, rewards."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, list[float]]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen += [(g.prompt.sample.id, g.prompt.text, g.rewards.tolist()) for g in outputs["groups"]]


def broken(model: str, root: Path, stage: int) -> dict[str, Any]:
    rewarded = Rewarded()
    kept = train(model, root, stage, extra=[rewarded], task=BrokenTask(), **BROKEN)
    return kept | {"rewarded": Ranks.connect().gather(rewarded.seen)}


class Rows(Callback):
    """Rows that training and validation had, on this rank."""

    def __init__(self) -> None:
        self.trained: list[list[str]] = []
        self.validated: list[str] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.trained.append([p.sample.id for p in batch])

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.validated += [g.prompt.sample.id for g in outputs]


class ValidationMetrics(Callback):
    """The last validation's."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def on_validation_end(self, trainer, pl_module):
        self.seen = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}


VALIDATE = {
    "limit_val_batches": 1.0, "num_sanity_val_steps": 0, "val_check_interval": 1, "check_val_every_n_epoch": 1,
}  # fmt: skip
"""Trainer settings: all rows, after each step."""


class SevenAndFive(PictureTask):
    def samples(self, split: str) -> list[Sample]:
        return super().samples(split)[: 7 if split == "train" else 5]


def uneven_rows(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    """DIST-09: 7 rows to train on, 5 to validate, batches of 4."""
    rows, metrics = Rows(), ValidationMetrics()
    settings |= {"steps": 2}
    kept = train(model, root, stage, extra=[rows, metrics], task=SevenAndFive(), trainer=VALIDATE, **settings)
    ranks = Ranks.connect()
    return {
        "trained": ranks.gather(rows.trained), "validated": ranks.gather(rows.validated),
        "metrics": ranks.gather(metrics.seen), "steps": kept["steps"],
    }  # fmt: skip


# ---- memory ----


def ledger(model: str, root: Path, stage: int, **settings: Any) -> dict[str, Any]:
    """What the ledger of each rank saw of a serial run over equal prompts."""
    kept = KeepLedger()
    lengths = dict(max_completion_length=9, num_generations=4, learning_rate=1e-3, steps=2)
    train(model, root, stage, extra=[kept], task=EqualPictures(), serial=True, **(lengths | settings))
    ranks, watch = Ranks.connect(), kept.watch
    seen = {name: size for name, size in watch.ledger.run.largest.items() if size}
    return {"largest": ranks.gather(seen), "wrong": ranks.gather(watch.mismatches), "tokens": kept.tokens}


def limited(model: str, root: Path, stage: int) -> dict[str, Any]:
    """A limit on all states between what the window holds without and with all prefixes."""
    look = KeepLedger()
    free = train(model, root, stage, extra=[look], max_completion_length=24)
    totals = look.watch.ledger.run.totals()
    limit = int((totals[Stage.ROLLOUT] + totals[Stage.PREFIX_ACT]) / 2)
    tight_look = KeepLedger()
    tight = train(model, root, stage, extra=[tight_look], zero={"memory_limit_bytes": limit}, max_completion_length=24)
    return {
        "free": free["weights"], "tight": tight["weights"], "limit": limit,
        "refused": tight["steps"][-1]["units_refused/memory"],
        "held": tight_look.watch.ledger.step.totals().get(Stage.PREFIX_ACT, 0),
    }  # fmt: skip


def validated(
    model: str, root: Path, stage: int, lora: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:  # fmt: skip
    """Validation at the end of a run, and from its checkpoint by a strategy of the same settings."""
    seen: list[dict[str, float]] = []

    class Metrics(Callback):
        def on_validation_end(self, trainer, pl_module):
            seen.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")})

    path = root / "end.ckpt"
    trainer = {
        "limit_val_batches": 1.0,
        "num_sanity_val_steps": 0,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
    }
    train(model, root, stage, extra=[Metrics(), SaveAt(3, path)], trainer=trainer, lora=lora, **settings)
    module = GRPOModule(model=str(model), num_generations=4, max_completion_length=6, seed=7, lora=lora)
    again = Trainer(
        accelerator="cpu", strategy=strategy(stage, **settings.get("zero", {})), devices=WORLD, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(root), callbacks=[Metrics()],
        use_distributed_sampler=False,
    )  # fmt: skip
    data = VLMDataModule(task=PictureTask(), batch_size=4, seed=3)
    again.validate(module, datamodule=data, ckpt_path=str(path), verbose=False)
    return {"seen": Ranks.connect().gather(seen)}


def write(folder: Path, name: str, result: Any) -> None:
    if RANK == 0:
        torch.save(result, folder / f"{name}.partial")
        (folder / f"{name}.partial").rename(folder / f"{name}.pt")


def build_operator() -> None:
    """DeepSpeed compiles it at its first use on a machine, and locks out the other ranks meanwhile."""
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()


def main(cases: str, folder: str, model: str, untied: str) -> None:
    from zero_cases import CASES

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(400, exit=True)
    build_operator()
    for name in cases.split(","):
        root = Path(folder) / "runs" / name
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        print(f"case {name}", flush=True)
        try:
            root.mkdir(parents=True, exist_ok=True)
            result = CASES[name](model=model, untied=untied, root=root, folder=Path(folder))
        except BaseException:
            result = {"error": traceback.format_exc()}
            print(result["error"], flush=True)
        faulthandler.cancel_dump_traceback_later()
        write(Path(folder), name, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
