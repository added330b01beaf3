"""What the model saw and said, with its rewards: for people."""

from __future__ import annotations

import hashlib
import io
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image

from rollplex.callbacks.files import append_jsonl, write_whole
from rollplex.data.records import Group, Sample
from rollplex.kinds import check_flag, check_whole
from rollplex.phases import PhaseCallback
from rollplex.tasks.layout import ANSWER, PROMPT

LONGEST, MOST = 500, 16
"""Characters and items that are kept of a row's column."""
RESPONSE_COLUMNS = ("response", "reward", "components", "tokens", "finish_reason")


class RolloutLogger(PhaseCallback):
    """Writes a few samples (pictures, prompt, right answer, responses, rewards) of training and validation.

    Always as `rollouts/step_000010.jsonl` with the pictures as PNG files beside it, and to every logger that takes
    them: W&B as a table, TensorBoard as images and text. Files are only ever appended to, a line at a time. Each line
    says which `run` wrote it, by when that one started (UTC; a resumed run keeps it), so several can share a folder.

    Args:
        every_n_steps: Rollout batches between two sets of samples; the first batch is always one. Validation is
            logged whenever it runs.
        num_samples: Prompts per set.
        num_responses: Responses shown of each prompt; None shows all.
        log_images: Keep pictures at all: as files, and in loggers.
        max_images: Pictures kept of each prompt; None keeps all.
        max_image_side: A picture with a longer side than so many pixels is kept smaller; None keeps it as it is.
        dirpath: Folder; None is `<default_root_dir>/rollouts`.
    """

    def __init__(
        self,
        every_n_steps: int = 20,
        num_samples: int = 4,
        num_responses: int | None = 4,
        log_images: bool = True,
        max_images: int | None = 4,
        max_image_side: int | None = 1024,
        dirpath: str | None = None,
    ) -> None:
        check_whole("RolloutLogger: every_n_steps", every_n_steps)
        check_whole("RolloutLogger: num_samples", num_samples)
        check_whole("RolloutLogger: num_responses", num_responses, null="all")
        for name, bound in (("max_images", max_images), ("max_image_side", max_image_side)):
            null = "no limit; to keep no pictures set log_images to false"
            check_whole(f"RolloutLogger: {name}", bound, null=null)
        check_flag("RolloutLogger: log_images", log_images)
        if dirpath is not None and not (isinstance(dirpath, str | os.PathLike) and os.fspath(dirpath)):
            raise ValueError(
                f"RolloutLogger: dirpath={dirpath!r} must be a folder, or null for <default_root_dir>/rollouts"
            )
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.num_responses = num_responses
        self.log_images = log_images
        self.max_images = max_images
        self.max_image_side = max_image_side
        self.dirpath = dirpath
        self._validation_left = num_samples
        self._run = ""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._run = datetime.now(UTC).isoformat(timespec="milliseconds")

    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run = state_dict.get("run", self._run)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = pl_module.rollouts_done
        if outputs and (step == 1 or step % self.every_n_steps == 0):
            self._log(trainer, step, "train", outputs["groups"][: self.num_samples])

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation_left = self.num_samples

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking or not outputs or not self._validation_left:
            return
        groups = outputs[: self._validation_left]
        self._validation_left -= len(groups)
        self._log(trainer, pl_module.rollouts_done, "val", groups)

    def _log(self, trainer: Any, step: int, split: str, groups: list[Group]) -> None:
        if not trainer.is_global_zero or not groups:  # of a small batch this rank's rows may all be bad
            return
        folder = Path(self.dirpath) if self.dirpath else Path(trainer.default_root_dir) / "rollouts"
        records = [self._record(step, split, group, folder) for group in groups]
        append_jsonl(folder / f"step_{step:06d}.jsonl", records)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                self._to_wandb(logger, step, split, groups)
            elif isinstance(logger, TensorBoardLogger):
                self._to_tensorboard(logger, step, split, groups)

    # ---- files ----

    def _record(self, step: int, split: str, group: Group, folder: Path) -> dict[str, Any]:
        return {
            "run": self._run,
            "step": step,
            "split": split,
            "id": group.prompt.sample.id,
            "prompt": group.prompt.text,
            **_known(group.prompt.sample),
            "images": [_save_image(image, folder) for image in self._pictures(group)],
            "responses": [self._response(group, i) for i in self._shown(group)],
        }

    def _pictures(self, group: Group) -> list[Image.Image]:
        """Of a prompt, as they are kept."""
        if not self.log_images:
            return []
        pictures = [_rgb(image) for image in group.prompt.images[: self.max_images]]
        if self.max_image_side is not None:
            for picture in pictures:
                picture.thumbnail((self.max_image_side, self.max_image_side))  # does nothing to a smaller one
        return pictures

    def _shown(self, group: Group) -> range:
        n = len(group.rollouts)
        return range(n if self.num_responses is None else min(n, self.num_responses))

    def _response(self, group: Group, i: int) -> dict[str, Any]:
        rollout = group.rollouts[i]
        return {
            "text": rollout.text,
            "reward": float(group.rewards[i]),
            "components": {name: float(values[i]) for name, values in group.components.items()},
            "tokens": len(rollout),
            "finish_reason": rollout.finish_reason,
        }

    # ---- loggers ----

    def _to_wandb(self, logger: WandbLogger, step: int, split: str, groups: list[Group]) -> None:
        import wandb

        # A column for each picture: W&B shows no lists of pictures.
        width = max(len(self._pictures(group)) for group in groups)
        rows: list[list[Any]] = []
        for group in groups:
            pictures: list[Any] = [wandb.Image(image) for image in self._pictures(group)]
            pictures += [None] * (width - len(pictures))
            known = "; ".join(_told(group.prompt.sample))
            for i in self._shown(group):
                r = self._response(group, i)
                parts = ", ".join(f"{name} {value:.3g}" for name, value in r["components"].items())
                shown = [r["text"], r["reward"], parts, r["tokens"], r["finish_reason"]]
                rows.append([step, group.prompt.sample.id, *pictures, group.prompt.text, known, *shown])
        columns = ["step", "id", *(f"image{i}" for i in range(width)), "prompt", "answer", *RESPONSE_COLUMNS]
        logger.log_table(f"rollouts/{split}", columns=columns, data=rows)

    def _to_tensorboard(self, logger: TensorBoardLogger, step: int, split: str, groups: list[Group]) -> None:
        for n, group in enumerate(groups):
            for i, image in enumerate(self._pictures(group)):
                pixels = np.asarray(image)
                logger.experiment.add_image(f"rollouts/{split}/{n}/image{i}", pixels, step, dataformats="HWC")
            responses = [self._response(group, i) for i in self._shown(group)]
            lines = [f"**{group.prompt.sample.id}**", _quoted(group.prompt.text), *_told(group.prompt.sample)]
            lines += [f"reward {r['reward']:.3g}:\n\n{_quoted(r['text'])}" for r in responses]
            logger.experiment.add_text(f"rollouts/{split}/{n}", "\n\n".join(lines), step)


def _known(sample: Sample) -> dict[str, Any]:
    """The row's right answer; of a row without a field of such a name, its other short columns."""
    short = {name: plain for name, value in sample.columns.items() if (plain := _plain(value)) is not None}
    name = next((name for name in ANSWER if name in short), None)
    if name is not None:
        return {"answer": short[name]}
    return {"columns": {name: value for name, value in short.items() if name not in PROMPT}}


def _told(sample: Sample) -> list[str]:
    known = _known(sample)
    return [f"answer {known['answer']}"] if "answer" in known else [f"{n} {v}" for n, v in known["columns"].items()]


def _plain(value: Any) -> Any:
    """As JSON has it; None for what is no text, number or short list of them (pictures, arrays)."""
    if isinstance(value, str):
        return value if len(value) <= LONGEST else f"{value[:LONGEST]} ..."
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple) and 0 < len(value) <= MOST:
        inner = [_plain(item) for item in value]
        return None if None in inner else inner
    return None


def _rgb(image: Any) -> Image.Image:
    """A picture of its own: the caller may shrink it."""
    if isinstance(image, Image.Image):
        return image.convert("RGB") if image.mode != "RGB" else image.copy()
    return Image.fromarray(np.asarray(image)).convert("RGB")


def _save_image(rgb: Image.Image, folder: Path) -> str:
    """The picture's file, relative to `folder`. Named by its content: each picture is there once."""
    name = hashlib.sha256(str(rgb.size).encode() + rgb.tobytes()).hexdigest()[:16]
    path = folder / "images" / f"{name}.png"
    if not path.exists():
        buffer = io.BytesIO()
        rgb.save(buffer, format="PNG")
        write_whole(path, buffer.getvalue())
    return f"images/{path.name}"


def _quoted(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
