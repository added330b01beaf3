"""Batches of prompts for Lightning, in an order that depends only on (seed, number of the rollout)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from rollplex.data.batches import RankRows, RolloutBatchSampler, ShareSampler
from rollplex.data.encode import BadRow, PromptEncoder
from rollplex.data.encoded import EncodedRows
from rollplex.data.images import MAX_IMAGE_PIXELS
from rollplex.data.prompt_loader import PromptLoader
from rollplex.data.records import Prompt
from rollplex.data.skipped import summary
from rollplex.data.video import MAX_SECONDS
from rollplex.models.registry import context_length
from rollplex.ranks import Ranks
from rollplex.seeds import run_seed
from rollplex.tasks.base import Split, VLMTask
from rollplex.whereabouts import Whereabouts

_SPLITS: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("test",),
}

BAD_ROWS_SHOWN = 20
"""Of a split; further ones are counted."""


class VLMDataModule(LightningDataModule):
    """A task's rows as rollout batches: every dataloader gives `list[Prompt]`.

    The processor is `trainer.lightning_module.processor`, and the training order continues at
    `trainer.lightning_module.rollouts_done`: the number of batches this run has been given, resumed ones and empty ones
    included. Without a Trainer, call `attach`.
    """

    def __init__(
        self,
        task: VLMTask,
        batch_size: int = 8,
        val_batch_size: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = True,
        max_prompt_length: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_image_pixels: int = MAX_IMAGE_PIXELS,
        video_fps: float = 2.0,
        video_min_frames: int = 1,
        video_max_frames: int = 64,
        video_max_seconds: float = MAX_SECONDS,
        video_total_pixels: int | None = None,
        on_bad_row: Literal["skip", "error"] = "skip",
        cache_prompts: bool = False,
        num_workers: int = 0,
    ) -> None:
        """
        Args:
            task: what the rows are, and what a response is worth.
            batch_size: prompts per rollout, of all ranks together (responses are `num_generations` times as many).
            val_batch_size: prompts per validation, test or predict batch; all rows are used there, in order.
            shuffle: draw the training order, another one each epoch; false takes rows as they come.
            seed: of that order; None is that of seed_everything, or 0.
            drop_last: leave an epoch's last, smaller batch out (the rows left out differ between epochs).
            max_prompt_length: most tokens of a prompt, expanded vision tokens included; a longer one is a bad row. None
                is what the model's context leaves.
            min_pixels: smallest area of a picture or frame after the resize; None is the processor's own.
            max_pixels: largest such area.
            max_image_pixels: most pixels of a picture as it is stored, before any resize.
            video_fps: frames per second at which video files are decoded.
            video_min_frames: fewest frames taken of a video.
            video_max_frames: most frames taken of a video.
            video_max_seconds: a longer video file is a bad row.
            video_total_pixels: most pixels of a video's frames together after the resize.
            on_bad_row: "skip" leaves a row that cannot be a prompt out of its batch (which gets smaller, or empty),
                warns once per row and lists it in `bad_rows`; "error" encodes every row at setup and stops at the first
                bad one, before any training step.
            cache_prompts: keep encoded prompts in memory after their first use. For small data.
            num_workers: processes that read and encode ahead; 0 encodes in the training process.
        """
        super().__init__()
        if on_bad_row not in ("skip", "error"):
            raise ValueError(f'on_bad_row={on_bad_row!r} must be "skip" or "error"')
        for name, value in (("batch_size", batch_size), ("val_batch_size", val_batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.task = task
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size
        self.shuffle = shuffle
        self.seed = run_seed() if seed is None else seed
        self.drop_last = drop_last
        self.encoder_settings: dict[str, Any] = {
            "max_prompt_length": max_prompt_length,
            "min_pixels": min_pixels,
            "max_pixels": max_pixels,
            "max_image_pixels": max_image_pixels,
            "video_fps": video_fps,
            "video_min_frames": video_min_frames,
            "video_max_frames": video_max_frames,
            "video_max_seconds": video_max_seconds,
            "video_total_pixels": video_total_pixels,
        }
        self.on_bad_row = on_bad_row
        self.cache_prompts = cache_prompts
        self.num_workers = num_workers
        self._bad: dict[str, str] = {}
        self._bad_of: Counter[Split] = Counter()
        self._skipped: dict[str, str] = {}
        """Bad rows of all ranks, as far as `rows_skipped` has heard."""
        self._data: dict[Split, EncodedRows] = {}
        self._encoder: PromptEncoder | None = None

    def attach(self, processor: Any, *, longest: int | None = None) -> VLMDataModule:
        """Use this processor instead of the Trainer's module's; returns self.

        longest: prompt tokens that leave room for a response in the model's context; the limit where
        max_prompt_length sets none.
        """
        settings = dict(self.encoder_settings)
        given = settings["max_prompt_length"]
        if longest is not None and given is not None and given > longest:
            raise ValueError(
                f"max_prompt_length={given} leaves no room for a response: the model's context less "
                f"max_completion_length is {longest} tokens; lower one of the two"
            )
        settings["max_prompt_length"] = longest if given is None else given
        self._encoder = PromptEncoder(processor, **settings)
        self._encoder.context_bound = given is None
        self._data.clear()
        return self

    @property
    def bad_rows(self) -> list[tuple[str, str]]:
        """(row id, reason) of every row that this rank skipped so far, each once."""
        return list(self._bad.items())

    def rows_skipped(self, ranks: Ranks) -> int:
        """Rows that any rank skipped so far, each once: in another epoch, another rank may meet it. A collective."""
        for found in ranks.gather({row: why for row, why in self._bad.items() if row not in self._skipped}):
            self._skipped |= found
        return len(self._skipped)

    def teardown(self, stage: str) -> None:
        """The end of a run names the rows it left out, by reason."""
        if stage == "fit" and (skipped := self._skipped | self._bad):
            rank_zero_info(summary(skipped))

    def setup(self, stage: str) -> None:
        """Read the splits of a stage and check them: enough rows, no id twice, and with on_bad_row="error" each row."""
        if self._encoder is None:
            module = self.trainer.lightning_module if self.trainer is not None else None
            processor = getattr(module, "processor", None)
            if processor is None:
                raise ValueError(
                    "VLMDataModule found no processor: give the module a `processor` attribute before setup, or call "
                    "datamodule.attach(processor)"
                )
            self.attach(processor, longest=_longest_prompt(module))
        for split in _SPLITS[stage]:
            self._prepare(split)

    def _prepare(self, split: Split) -> None:
        if split in self._data:
            return
        assert self._encoder is not None
        data = EncodedRows(self.task, split, self._encoder, self.cache_prompts)
        name = type(self.task).__name__
        seen: set[str] = set()
        for row_id in data.ids():
            if not isinstance(row_id, str):
                raise ValueError(f"{name} has a {split} row with id {row_id!r}; ids must be strings")
            if row_id in seen:
                raise ValueError(f"{name} has two {split} rows with id {row_id!r}; ids must be unique within a split")
            seen.add(row_id)
        needed = self.batch_size if self.drop_last else 1
        if split == "train" and len(data) < needed:
            raise ValueError(
                f"{name} has {len(data)} training rows, fewer than batch_size={self.batch_size}: lower batch_size"
                + (" or set drop_last=False" if len(data) else "; samples('train') is empty")
            )
        if self.on_bad_row == "error":
            for number in range(len(data)):
                row = data[number]
                if isinstance(row, BadRow):
                    raise row
        self._data[split] = data

    def train_dataloader(self) -> PromptLoader:
        return self._loader("train", self._train_sampler())

    def further_prompts(self, rollout: int, start: int, count: int) -> RankRows | None:
        """This rank's prompts of the rows from `start` on, `count` of them, among the training rows that are not in
        this rollout's batch; None when there are no more. Those come in an order that depends on (seed, rollout)
        alone, in which `places` are. Bad rows are reported and left out. Encoded here, in this process."""
        rows = self._train_sampler().further_rows(rollout)[start : start + count]
        if not rows:
            return None
        rank, world = self._rank()
        own = {start + i: self._data["train"][rows[i]] for i in range(rank, len(rows), world)}
        for row in own.values():
            if isinstance(row, BadRow):
                self._report(row, "train")
        good = {place: row for place, row in own.items() if isinstance(row, Prompt)}
        return RankRows(list(good.values()), list(good))

    def _train_sampler(self) -> RolloutBatchSampler:
        return RolloutBatchSampler(
            len(self._data["train"]),
            self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            start_rollout=0 if self._rollouts_done() is None else lambda: self._rollouts_done() or 0,
        )

    def val_dataloader(self) -> PromptLoader | list[Any]:
        return self._evaluation("validation")

    def test_dataloader(self) -> PromptLoader | list[Any]:
        return self._evaluation("test")

    def predict_dataloader(self) -> PromptLoader | list[Any]:
        return self._evaluation("test")

    def _evaluation(self, split: Split) -> PromptLoader | list[Any]:
        data = self._data[split]
        if not len(data):
            return []
        return self._loader(split, RolloutBatchSampler(len(data), self.val_batch_size, shuffle=False, drop_last=False))

    def _loader(self, split: Split, sampler: RolloutBatchSampler) -> PromptLoader:
        rank, world = self._rank()
        loader: DataLoader[Any] = DataLoader(
            self._data[split],
            batch_sampler=sampler if world == 1 else ShareSampler(sampler, rank, world),
            collate_fn=list,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            # Its own: a loader draws a seed at each start, and from the global one a resumed run would differ.
            generator=torch.Generator().manual_seed(self.seed),
        )
        where = getattr(getattr(getattr(self.trainer, "strategy", None), "ranks", None), "where", None)
        return PromptLoader(loader, self._report, split, (rank, world), where or Whereabouts())

    def _rank(self) -> tuple[int, int]:
        """(rank, world): each rank encodes its own rows of a batch. `batch_size` is that of all ranks together."""
        trainer: Any = self.trainer
        ranks = getattr(getattr(trainer, "strategy", None), "ranks", None)
        if ranks is not None:  # with tensor parallelism, several processes have the same rows
            return ranks.rank, ranks.world
        return getattr(trainer, "global_rank", 0), getattr(trainer, "world_size", 1)

    def _rollouts_done(self) -> int | None:
        module = self.trainer.lightning_module if self.trainer is not None else None
        done = getattr(module, "rollouts_done", None)
        return None if done is None else int(done)

    def _report(self, bad: BadRow, split: Split) -> None:
        if self.on_bad_row == "error":
            raise bad
        if bad.row_id in self._bad:
            return
        self._bad[bad.row_id] = bad.reason
        self._bad_of[split] += 1
        if self._bad_of[split] <= BAD_ROWS_SHOWN:
            warnings.warn(f"skipped {bad}", stacklevel=2)
        elif self._bad_of[split] == BAD_ROWS_SHOWN + 1:
            warnings.warn(
                f"more than {BAD_ROWS_SHOWN} rows of the {split} split were skipped: further ones are counted, and not "
                "shown (`bad_rows` of the data module lists all)",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """What decides which rows rollout k takes."""
        rows = len(self._data["train"]) if "train" in self._data else None
        return {"rows": rows, **{name: getattr(self, name) for name in ("batch_size", "seed", "shuffle", "drop_last")}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load; another order of rows than the checkpoint's is worth a word."""
        now = self.state_dict()
        changed = [f"{k} {now[k]} (was {v})" for k, v in state_dict.items() if now.get(k, v) != v]
        if changed and now["rows"] is not None:
            warnings.warn(
                f"the run continues with {', '.join(changed)}: from here on rows come in another order, so some of "
                "this epoch come twice or not at all, and the weights will not be those of an uninterrupted run",
                stacklevel=2,
            )

    def transfer_batch_to_device(self, batch: Sequence[Prompt], device: Any, dataloader_idx: int) -> Sequence[Prompt]:
        """Prompts stay on the CPU: each work unit moves what it needs when it runs."""
        return batch


def _longest_prompt(module: Any) -> int | None:
    """Prompt tokens that leave room for a response in the context of the module's model; None if it names none."""
    settings = getattr(module, "hparams", {})
    if "model" not in settings or "max_completion_length" not in settings:
        return None
    return context_length(settings["model"]) - int(settings["max_completion_length"])
