"""What a run tells and leaves behind: events, bar, samples, traces, predictions, loggers."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from rich.console import Console
from runs import PictureTask, run

from rollplex import GRPOModule, PhaseCallback, RollplexStrategy, Sample, VLMDataModule
from rollplex.callbacks import (
    EnvironmentLogger,
    MemoryReport,
    PhaseProgressBar,
    PredictionWriter,
    RolloutLogger,
    TimelineLogger,
)
from rollplex.callbacks.files import append_jsonl, free_path, write_whole
from rollplex.callbacks.rollout_logger import _known
from rollplex.cli import DEFAULT_CALLBACKS, RollplexCLI
from rollplex.metrics import known
from rollplex.models.tiny import build_tiny

QUICK = {"num_generations": 2, "max_completion_length": 3, "batch_size": 2}
VALIDATE = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("callbacks") / "tiny")


# ---- events ----


class Recorder(PhaseCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_phase_start(self, trainer, phase):
        self.events.append(f"start {phase.value}")
        if phase.value == "train":
            self.log("reward/from_event", 0.25)

    def on_phase_end(self, trainer, phase):
        self.events.append(f"end {phase.value}")

    def on_window_open(self, trainer):
        self.events.append("open")

    def on_window_close(self, trainer):
        self.events.append("close")

    def on_group_finished(self, trainer, group):
        self.events.append("group")

    def on_unit_start(self, trainer, unit):
        self.events.append(f"+{unit}")

    def on_unit_end(self, trainer, unit):
        self.events.append(f"-{unit}")

    def on_weights_published(self, trainer, version):
        self.events.append(f"published {version}")


def unit(kind: str, index: int) -> list[str]:
    return [f"+{kind}[{index}]", f"-{kind}[{index}]"]


def actor(index: int) -> list[str]:
    return unit("act_prefix", index) + unit("act_suffix", index) + unit("act_backward", index)


def test_events_of_a_step_come_in_the_documented_order(model, tmp_path):
    recorder = Recorder()
    run(model, tmp_path, steps=1, callbacks=[recorder], num_mini_batches=2, beta=0.1, **QUICK)
    events = recorder.events
    # How responses end is the sampler's business: groups finish while the window is open, each once.
    assert events.count("group") == 2 and events.count("open") == events.count("close") == 1
    first, last = events.index("open"), events.index("close")
    assert set(events[first + 1 : last]) <= {"group"}
    events = [event for event in events if event not in ("open", "close", "group")]
    assert events == [
        "start publish", "published 0", "end publish",
        "start rollout", "end rollout",
        "start score", *unit("reward", 0), *unit("reward", 1),
        *unit("ref_prefix", 0), *unit("ref_suffix", 0), *unit("ref_prefix", 1), *unit("ref_suffix", 1),
        *unit("old_prefix", 1), *unit("old_suffix", 1), "end score",
        "start train", *actor(0), "end train",
        "start update", "end update",
        "start train", *actor(1), "end train",
        "start update", "end update",
        "start publish", "published 2", "end publish",
    ]  # fmt: skip


def test_an_event_may_log(model, tmp_path):
    logger = CSVLogger(tmp_path)
    run(model, tmp_path, steps=1, callbacks=[Recorder()], trainer={"logger": logger, "log_every_n_steps": 1}, **QUICK)
    assert rows_of(logger)[0]["reward/from_event"] == "0.25"


# ---- loggers ----


def rows_of(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        return list(csv.DictReader(file))


ALWAYS = {
    "loss",
    "reward",
    "kl",
    "entropy",
    "grad_norm",
    "lr",
    "completion_length",
    "tokens_per_second",
    "time/rollout",
}


def test_csv_logger_has_every_metric_under_a_known_name(model, tmp_path):
    logger = CSVLogger(tmp_path)
    run(model, tmp_path, trainer={"logger": logger, "log_every_n_steps": 1} | VALIDATE, **QUICK)
    rows = rows_of(logger)
    names = set(rows[0]) - {"epoch", "step"}
    assert names >= ALWAYS | {"val/reward", "val/accuracy"}
    assert not [name for name in names if not known(name)]
    assert [row["step"] for row in rows if row["loss"]] == ["0", "1"]
    assert len([row for row in rows if row["val/reward"]]) == 1


def test_tensorboard_logger_has_metrics_pictures_and_texts(model, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    samples = RolloutLogger(every_n_steps=1, num_samples=1)
    settings = {"logger": logger, "log_every_n_steps": 1} | VALIDATE
    run(model, tmp_path, callbacks=[samples], trainer=settings, **QUICK)
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) >= ALWAYS | {"val/reward"}
    assert not [name for name in tags["scalars"] if name not in ("epoch", "hp_metric") and not known(name)]
    assert "rollouts/val/0/image0" in tags["images"]
    assert {"rollouts/train/0/text_summary", "rollouts/val/0/text_summary"} <= set(tags["tensors"])


def test_wandb_logger_works_offline_with_a_table_of_samples(model, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    logger = WandbLogger(save_dir=tmp_path, offline=True, project="test")
    try:
        samples = RolloutLogger(every_n_steps=1, num_samples=2, max_image_side=40)
        more = [TimelineLogger(1), MemoryReport(print_table=False), EnvironmentLogger()]
        settings = {"logger": logger, "log_every_n_steps": 1} | VALIDATE
        run(model, tmp_path, callbacks=[samples, *more], trainer=settings, **QUICK)
        summary = dict(logger.experiment.summary)
    finally:
        wandb.finish()
    assert set(summary) >= ALWAYS | {"val/reward", "rollouts/train", "rollouts/val"}
    assert summary["rollouts/val"]["_type"] == "table-file" and summary["rollouts/val"]["nrows"] == 2
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/rollouts/*.table.json"))
    assert len(tables) == 3  # two of training, one of validation
    content = json.loads(next(t for t in tables if t.name.startswith("val")).read_text())
    assert content["data"][0][content["columns"].index("id")] == "validation-0"
    assert content["data"][0][content["columns"].index("image0")] == "Image"
    stored = [p.read_bytes()[:4] for p in (tmp_path / "home" / "artifacts" / "staging").iterdir()]
    assert b"\x89PNG" in stored
    for name in ("plots/timeline", "plots/memory"):
        assert summary[name]["_type"] == "images/separated" and summary[name]["width"] > 300
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history, config = read_offline(file)
    scalars = {name for row in history for name, value in row.items() if isinstance(value, float | int)}
    assert scalars >= ALWAYS and all(known(name) for name in scalars - WANDBS_OWN), scalars
    assert [sum(name in row for row in history) for name in ("plots/timeline", "plots/memory")] == [2, 1]
    assert config["environment"]["packages"]["torch"] == torch.__version__ and config["engine"] == "TorchEngine"
    assert (
        config["data"]["batch_size"] == 2 and config["num_generations"] == 2 and "TimelineLogger" in config["callbacks"]
    )
    assert set(summary["reward"].keys()) == {"last", "max", "mean"}


WANDBS_OWN = {"epoch", "trainer/global_step", "_step", "_runtime", "_timestamp"}


def offline_records(file: Path) -> Iterator[bytes]:
    """Of W&B's offline file: a header of 7 bytes, then LevelDB's log format (blocks of 32 KiB; each piece a checksum,
    its length and whether it is whole, first, middle or last)."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):
            return  # half written
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_offline(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(history rows, config) of W&B's offline file, as `wandb sync` would send it."""
    from wandb.proto import wandb_internal_pb2

    history: list[dict[str, Any]] = []
    config: dict[str, Any] = {}
    end = time.monotonic() + 30
    while True:  # another process writes the file, to its end a moment after `finish` has returned
        records = [wandb_internal_pb2.Record.FromString(data) for data in offline_records(file)]
        if records and records[-1].WhichOneof("record_type") == "exit":
            break
        assert time.monotonic() < end, "W&B's file has no end"
        time.sleep(0.1)
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = [(list(i.nested_key) or [i.key], json.loads(i.value_json)) for i in record.history.item]
            history.append({key[0]: value if len(key) == 1 else key for key, value in items})
        for update in (record.config.update, record.run.config.update):
            config |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in update}
    return history, config


def test_pictures_of_samples_have_a_switch_and_limits(model, tmp_path):
    settings = {
        "all": {"max_images": None, "max_image_side": None},
        "small": {"max_images": 1, "max_image_side": 40},
        "none": {"log_images": False},
    }
    kinds = {  # classes of their own: Lightning saves one callback of each
        name: type(name, (RolloutLogger,), {})(every_n_steps=1, dirpath=str(tmp_path / name), **more)
        for name, more in settings.items()
    }
    run(model, tmp_path, callbacks=list(kinds.values()), **QUICK)
    found = {}
    for name in kinds:
        lines = [line for file in (tmp_path / name).glob("*.jsonl") for line in file.read_text().splitlines()]
        images = [image for line in lines for image in json.loads(line)["images"]]
        sizes = [Image.open(tmp_path / name / image).size for image in images]
        found[name] = (max(len(json.loads(line)["images"]) for line in lines), max(map(max, sizes), default=0))
    assert found["small"] == (1, 40) and found["none"] == (0, 0) and found["all"][1] > 40
    assert not (tmp_path / "none" / "images").exists()


def test_a_folder_with_earlier_runs_loses_nothing(model, tmp_path):
    def everything() -> dict[str, bytes]:
        return {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def once() -> None:
        callbacks = [RolloutLogger(every_n_steps=1), TimelineLogger(every_n_steps=1, keep=1)]
        options = {"logger": [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)], "log_every_n_steps": 1}
        run(model, tmp_path, callbacks=callbacks, trainer=options | VALIDATE, **QUICK)

    once()
    before = everything()
    once()
    after = everything()
    assert len(after) > len(before)
    assert not [name for name, content in before.items() if not after[name].startswith(content)]


# ---- samples ----


def test_a_first_rank_whose_rows_of_a_batch_are_all_bad_logs_no_samples(tmp_path):
    """W&B's table would be without a column for pictures to count."""
    trainer = SimpleNamespace(
        is_global_zero=True, default_root_dir=str(tmp_path), loggers=[object.__new__(WandbLogger)]
    )  # fmt: skip
    samples: Any = RolloutLogger(every_n_steps=1)
    samples.on_train_batch_end(trainer, SimpleNamespace(rollouts_done=1), {"groups": []}, [], 0)
    assert not list(tmp_path.iterdir())


def test_rollout_logger_writes_pictures_prompts_responses_and_rewards(model, tmp_path):
    samples = RolloutLogger(every_n_steps=2, num_samples=3, num_responses=1)
    options = VALIDATE | {"val_check_interval": 1, "check_val_every_n_epoch": None}
    run(model, tmp_path, steps=3, callbacks=[samples], trainer=options, num_generations=2, max_completion_length=3)
    folder = tmp_path / "rollouts"
    lines = {p.name: [json.loads(x) for x in p.read_text().splitlines()] for p in sorted(folder.glob("*.jsonl"))}
    assert list(lines) == ["step_000001.jsonl", "step_000002.jsonl", "step_000003.jsonl"]
    assert [r["split"] for r in lines["step_000001.jsonl"]] == ["train"] * 3 + ["val"] * 3
    assert [r["split"] for r in lines["step_000003.jsonl"]] == ["val"] * 3
    for record in (record for records in lines.values() for record in records):
        assert record["prompt"].startswith("<|im_start|>") and "what?" in record["prompt"]
        number = int(record["id"].split("-")[1])
        assert record["columns"]["number"] == number and "answer" not in record
        assert len(record["images"]) == {2: 0, 3: 2}.get(number % 4, 1)
        for name in record["images"]:
            assert Image.open(folder / name).size[0] >= 28
        (response,) = record["responses"]
        assert 0 < response["tokens"] <= 3 and response["finish_reason"] in ("stop", "length")
        assert response["reward"] <= 1.0
    # Each picture once, however often it was seen.
    assert len(list((folder / "images").iterdir())) == len(
        {name for records in lines.values() for record in records for name in record["images"]}
    )


def test_the_right_answer_is_kept_with_a_sample(tmp_path):
    picture = Image.new("RGB", (4, 4))
    row = {"problem": "?", "image": picture, "solution": "x" * 600, "boxes": [np.int64(1), 2.5], "mask": np.zeros(3)}
    assert _known(Sample("a", row)) == {"answer": "x" * 500 + " ..."}
    del row["solution"]
    assert _known(Sample("a", row)) == {"columns": {"boxes": [1, 2.5]}}
    assert json.dumps(_known(Sample("a", row)))


def test_samples_of_several_runs_in_one_folder_can_be_told_apart(model, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    from rollplex.reports.run_files import read_run

    def go(steps, folder, **more):
        keep = ModelCheckpoint(tmp_path / folder, every_n_train_steps=1, save_last=True)
        samples = RolloutLogger(every_n_steps=1, num_samples=1)
        run(
            model,
            tmp_path,
            steps=steps,
            callbacks=[samples, keep],
            trainer={"enable_checkpointing": True},
            **QUICK | more,
        )

    go(3, "a")
    go(2, "b")
    go(4, "b", ckpt_path=str(tmp_path / "b" / "last.ckpt"))  # goes on with the second
    files = sorted((tmp_path / "rollouts").glob("step_*.jsonl"))
    runs = [[json.loads(line)["run"] for line in path.read_text().splitlines()] for path in files]
    first, second = runs[0]
    assert first < second and runs == [[first, second], [first, second], [first, second], [second]]
    shown = read_run(tmp_path, sample_sets=9).samples
    assert [[record["run"] for record in found.records] for found in shown] == [[second]] * 4


def test_a_missing_reward_is_null(model, tmp_path):
    task = PictureTask(2, reward=lambda sample, response: None if int(response.token_ids[0]) % 2 else 1.0)
    run(
        model,
        tmp_path,
        steps=1,
        task=task,
        callbacks=[RolloutLogger(num_responses=None)],
        num_generations=8,
        batch_size=2,
    )
    records = [json.loads(line) for line in (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert {r["reward"] for record in records for r in record["responses"]} == {None, 1.0}


# ---- traces ----


def test_timeline_logger_keeps_the_latest_traces(model, tmp_path):
    run(model, tmp_path, steps=4, callbacks=[TimelineLogger(every_n_steps=1, keep=2)], **QUICK)
    files = sorted((tmp_path / "timeline").iterdir())
    assert [p.name for p in files] == ["step_000003.json", "step_000004.json"]
    trace = json.loads(files[-1].read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert {"rollout", "score", "train", "act_prefix", "act_backward", "decode"} <= {span["name"] for span in spans}
    assert all(span["dur"] >= 0 and span["ts"] >= 0 for span in spans)
    assert {event["args"]["name"] for event in trace if event["ph"] == "M"} == {"groups", "phase", "rollout", "train"}


# ---- predictions ----


def predict(model: Any, root: Path, callbacks: list[Any], rows: int = 5) -> None:
    module = GRPOModule(
        model=str(model), num_generations=2, max_completion_length=3, eval_num_generations=2, eval_temperature=1.0
    )
    data = VLMDataModule(task=PictureTask(rows), batch_size=2, val_batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            strategy=RollplexStrategy(), accelerator="cpu", logger=False, default_root_dir=str(root),
            enable_progress_bar=False, callbacks=callbacks,
        )  # fmt: skip
        trainer.predict(module, datamodule=data, return_predictions=False)


def test_prediction_writer_writes_every_row_and_keeps_earlier_files(model, tmp_path):
    for _ in range(2):
        predict(model, tmp_path, [PredictionWriter()])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["predictions-v1.jsonl", "predictions.jsonl"]
    first, second = ((tmp_path / n).read_text() for n in ("predictions.jsonl", "predictions-v1.jsonl"))
    assert first == second  # seeded
    records = [json.loads(line) for line in first.splitlines()]
    assert [record["id"] for record in records] == [f"test-{i}" for i in range(5)]
    assert all(len(record["responses"]) == len(record["rewards"]) == 2 for record in records)


def test_predictions_of_a_run_that_fails_are_not_lost(model, tmp_path):
    class Fail(PhaseCallback):
        def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            if batch_idx == 2:
                raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        predict(model, tmp_path, [PredictionWriter(), Fail()])
    assert len((tmp_path / "predictions.jsonl.partial").read_text().splitlines()) == 4


# ---- the bar ----


def test_without_a_terminal_the_bar_is_one_clean_line_an_update(model, tmp_path, capsys):
    bar = PhaseProgressBar(every_n_steps=2, terminal=False)
    options = {"enable_progress_bar": True} | VALIDATE | {"val_check_interval": 4, "check_val_every_n_epoch": None}
    run(model, tmp_path, steps=5, callbacks=[bar], trainer=options, **QUICK)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update")]
    assert [line.split(":")[0] for line in lines] == [
        "update 1/5", "update 2/5", "update 4/5", "update 4", "update 5/5",
    ]  # fmt: skip
    assert "reward " in lines[0] and "tokens/s" in lines[0]
    assert lines[3].startswith("update 4: val/reward ")
    assert ["val/accuracy" in line for line in lines] == [False, False, False, True, False], (
        "each said once, when found"
    )
    assert not [line for line in lines if "\r" in line or "\x1b" in line]


def test_a_run_that_goes_on_says_from_where(capsys):
    bar = PhaseProgressBar(terminal=False)
    for before, said in ((0, ""), (21, "going on after update 21 of 60\n")):
        bar.on_train_start(SimpleNamespace(global_step=before, max_steps=60), None)
        assert capsys.readouterr().out == said


class Frames(PhaseCallback):
    """What the bars would show at each event of a step, as text."""

    def __init__(self, bar: PhaseProgressBar) -> None:
        self.bar, self.seen = bar, []

    def keep(self, *arguments: Any) -> None:
        console = Console(record=True, width=140, file=io.StringIO())
        console.print(self.bar._bar.get_renderable())
        self.seen.append(console.export_text())

    on_phase_start = on_window_open = on_group_finished = on_unit_start = on_unit_end = keep


def test_on_a_terminal_the_bars_show_phase_and_both_lanes(model, tmp_path):
    bar = PhaseProgressBar(terminal=True)
    bar.console = Console(record=True, width=140, file=io.StringIO(), force_terminal=True)
    frames = Frames(bar)
    run(
        model, tmp_path, steps=2, callbacks=[bar, frames], trainer={"enable_progress_bar": True}, num_mini_batches=2,
        **QUICK,
    )  # fmt: skip
    rows = [frame.splitlines() for frame in frames.seen]
    assert all([line.split()[0] for line in frame] == ["update", "rollout", "train"] for frame in rows)
    updates, rollout, train = (" | ".join(frame[i] for frame in rows) for i in range(3))
    assert all(phase in updates for phase in ("rollout", "score", "train", "update")) and "reward" in updates
    total = QUICK["num_generations"] * QUICK["batch_size"]
    assert f"0/{total} responses" in rollout and f"{total}/{total} responses" in rollout and "tokens/s" in rollout
    units = {int(n) for n in re.findall(r"(\d+)/\d+ units", train)}
    assert len(units) > 3 and "act suffix" in train and "reward" in train
    assert [n for n, m in re.findall(r"(\d+)/(\d+) units", train) if int(n) > int(m)] == []
    last = bar.console.export_text().splitlines()[-3:]
    assert "4/4" in last[0] and "reward" in last[0]


# ---- the command line's defaults ----


def parsed(tmp_path: Path, model: Any, *arguments: str) -> RollplexCLI:
    args = [
        "--model=rollplex.GRPOModule", f"--model.init_args.model={model}", "--data=rollplex.VLMDataModule",
        "--data.init_args.task=rollplex.tasks.digits.Digits", "--trainer.strategy=rollplex", "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={tmp_path}", "--trainer.logger=false", *arguments,
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RollplexCLI(args=args, run=False)


def cli_callbacks(tmp_path: Path, model: Any, *arguments: str) -> list[str]:
    return [type(callback).__name__ for callback in parsed(tmp_path, model, *arguments).trainer.callbacks]


def test_command_line_adds_its_callbacks_once(model, tmp_path):
    names = [path.split(".")[-1] for path in DEFAULT_CALLBACKS]
    assert set(names) <= set(cli_callbacks(tmp_path, model))
    again = cli_callbacks(tmp_path, model, *[f"--trainer.callbacks+={path}" for path in DEFAULT_CALLBACKS])
    assert [again.count(name) for name in names] == [1] * len(names)


def test_command_line_leaves_the_bar_to_the_user(model, tmp_path):
    off = cli_callbacks(tmp_path, model, "--trainer.enable_progress_bar=false")
    assert "PhaseProgressBar" not in off and "GracefulStop" in off
    own = cli_callbacks(tmp_path, model, "--trainer.callbacks=lightning.pytorch.callbacks.TQDMProgressBar")
    assert "TQDMProgressBar" in own and "PhaseProgressBar" not in own


# ---- files ----


def test_free_path_counts_up(tmp_path):
    for name in ("a.json", "a-v1.json", "a-v2.json"):
        assert free_path(tmp_path / "a.json").name == name
        (tmp_path / name).touch()


def test_append_jsonl_has_no_nan(tmp_path):
    append_jsonl(tmp_path / "x.jsonl", [{"a": float("nan"), "b": [1.5, float("inf")], "c": "é"}])
    append_jsonl(tmp_path / "x.jsonl", [{"a": 1}])
    assert (tmp_path / "x.jsonl").read_text() == '{"a": null, "b": [1.5, null], "c": "é"}\n{"a": 1}\n'


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    write_whole(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        write_whole(tmp_path / "x", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: RolloutLogger(every_n_steps=0), "every_n_steps=0"),
        (lambda: RolloutLogger(num_samples=0), "num_samples=0"),
        (lambda: RolloutLogger(max_images=0), "set log_images to false"),
        *(
            (lambda name=name, value=value: RolloutLogger(**{name: value}), f"RolloutLogger: {name}={value!r} must be")
            for name, value in (
                ("num_responses", 0),
                ("num_responses", -1),
                ("every_n_steps", 1.5),
                ("max_images", 2.5),
                ("num_samples", "4"),
                ("max_image_side", True),
                ("log_images", "no"),
                ("dirpath", ""),
                ("dirpath", 3),
            )
        ),
        (lambda: TimelineLogger(keep=0), "keep=0"),
        (lambda: PhaseProgressBar(every_n_steps=0), "every_n_steps=0"),
    ],
)
def test_bad_settings_are_named(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_outputs_carry_groups_and_metrics(model, tmp_path):
    """What callbacks rely on: on_train_batch_end(outputs)."""
    module = run(model, tmp_path, steps=1, **QUICK)
    (out,) = module.seen
    assert [group.index for group in out["groups"]] == [0, 1] and out["metrics"]["reward"] <= 1
    assert torch.isfinite(out["loss"])


def test_seed_everything_seeds_sampling_and_order_unless_they_have_their_own(model, tmp_path, monkeypatch):
    def seeds(*arguments: str) -> tuple[int, int]:
        cli = parsed(tmp_path, model, *arguments)
        return cli.model.hparams["seed"], cli.datamodule.seed

    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # put back afterwards
    assert seeds("--seed_everything=false") == (0, 0)
    assert seeds("--seed_everything=5") == (5, 5)
    assert seeds("--seed_everything=5", "--model.init_args.seed=0", "--data.init_args.seed=3") == (0, 3)
