"""Opening media, encoding rows and the data order."""

from __future__ import annotations

import io
import logging
import pickle
import warnings
from collections import Counter
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from helpers import levels, picture
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import nn

from rollplex.data.datamodule import RolloutBatchSampler, VLMDataModule
from rollplex.data.encode import BadRow, PromptEncoder
from rollplex.data.images import open_image, to_rgb
from rollplex.data.records import Sample
from rollplex.data.skipped import summary
from rollplex.data.video import decode_video, open_video
from rollplex.evaluation import WithEvaluation
from rollplex.ranks import Ranks
from rollplex.step_log import StepLog
from rollplex.tasks.base import VLMTask


class Rows(VLMTask):
    """n short text rows; rows in `bad` have content no prompt can be made of."""

    def __init__(self, n=10, bad=(), validation=0, ids=None):
        self.n, self.bad, self.validation, self.ids = n, set(bad), validation, ids

    def samples(self, split):
        n = self.n if split == "train" else self.validation
        return [Sample(self.ids[i] if self.ids else f"{split}{i}", {"number": i}) for i in range(n)]

    def messages(self, sample):
        if sample["number"] in self.bad:
            return [{"role": "user", "content": [{"type": "image", "image": b"not a picture"}]}]
        return [{"role": "user", "content": f"row {sample['number']}"}]


def batches_of(loader):
    return [[prompt.sample["number"] for prompt in batch] for batch in loader]


# ---- pictures ----


def test_exif_orientation_is_applied():
    source = picture(40, 20)
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side: turn right to show
    source.save(buffer, "PNG", exif=exif)
    assert np.array_equal(open_image(buffer.getvalue()), source.transpose(Image.Transpose.ROTATE_270))


def test_of_an_animation_the_first_frame_is_taken():
    frames = [picture(16, 16, seed=i) for i in range(3)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:])
    assert np.array_equal(open_image(buffer.getvalue()), frames[0])


def test_images_open_from_paths_and_bytes(tmp_path):
    source = picture(30, 20)
    source.save(tmp_path / "a.png")
    for where in (tmp_path / "a.png", str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes()):
        assert np.array_equal(open_image(where), source)


def test_bomb_guard_is_kept(monkeypatch, tiny_processor):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    buffer = io.BytesIO()
    picture(30, 30).save(buffer, "PNG")
    task = Rows(1)
    task.messages = lambda sample: [{"role": "user", "content": [{"type": "image", "image": buffer.getvalue()}]}]
    with pytest.raises(BadRow, match=r"train0.*decompression bomb"):
        PromptEncoder(tiny_processor).encode(task, task.samples("train")[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.org/a.png", "is a URL"),
        (17, "must be a PIL picture"),
        (Image.new("RGB", (0, 5)), "empty"),
        (b"", "cannot identify"),
    ],
)
def test_unreadable_images(source, message):
    with pytest.raises((ValueError, OSError), match=message):
        open_image(source)


def test_to_rgb_does_not_touch_its_argument():
    source = Image.new("RGBA", (4, 4), (1, 2, 3, 4))
    before = source.tobytes()
    to_rgb(source)
    assert source.mode == "RGBA" and source.tobytes() == before


# ---- videos ----


@pytest.mark.parametrize(
    ("fps", "wanted", "rate"),
    [(2.0, [0, 5, 10, 15], 2.0), (10.0, list(range(20)), 10.0), (100.0, list(range(20)), 10.0), (0.5, [0], 0.5)],
)
def test_decode_takes_even_times(clip, fps, wanted, rate):
    video = decode_video(clip, fps=fps, max_frames=64)
    assert levels(video) == wanted
    assert video.fps == pytest.approx(rate)
    assert video.frames.shape[1:] == (48, 64, 3) and video.frames.dtype == np.uint8


@pytest.mark.parametrize(
    ("most", "wanted", "rate"), [(19, range(0, 20, 2), 5.0), (10, range(0, 20, 2), 5.0), (7, range(0, 20, 4), 2.5)]
)
def test_decode_halves_the_rate_of_long_videos(clip, most, wanted, rate):
    video = decode_video(clip.read_bytes(), fps=10, max_frames=most)
    assert levels(video) == list(wanted)
    assert video.fps == pytest.approx(rate)


def test_video_file_becomes_a_prompt(clip, tiny_processor):
    task = Rows(1)
    content = [{"type": "video", "video": str(clip), "fps": 2}, {"type": "text", "text": "?"}]
    task.messages = lambda sample: [{"role": "user", "content": content}]
    prompt = PromptEncoder(tiny_processor).encode(task, task.samples("train")[0])
    assert prompt.media["video_grid_thw"].tolist() == [[2, 4, 4]]
    assert prompt.media["second_per_grid_ts"].tolist() == [1.0]
    assert prompt.images[0].size == (64, 48)


def test_frames_of_height_three_are_not_taken_for_channels(tiny_processor):
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 60, 3), dtype=np.uint8)
    task = Rows(1)
    task.messages = lambda sample: [{"role": "user", "content": [{"type": "video", "video": frames, "fps": 1}]}]
    prompt = PromptEncoder(tiny_processor).encode(task, task.samples("train")[0])
    _, height, width = prompt.media["video_grid_thw"][0].tolist()
    assert width > height


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "empty"),
        (np.zeros((2, 4, 4, 3), np.float32), "uint8"),
        (np.zeros((4, 4, 3), np.uint8), "uint8"),
        (np.zeros((9, 4, 4, 3), np.uint8), "video_max_frames allows 8"),
        ([picture(8, 8), picture(8, 9)], "one size"),
        ("http://example.org/a.mp4", "is a URL"),
        (b"junk", "Invalid data"),
        (7, "must be frames"),
    ],
)
def test_unreadable_videos(source, message):
    with pytest.raises((ValueError, OSError), match=message):
        open_video(source, fps=None, default_fps=2.0, max_frames=8)


# ---- prompts ----


def test_prompt_carries_everything_and_survives_pickling(tiny_processor):
    task = Rows(1)
    parts = [
        {"type": "image", "image": picture(56, 84)},
        {"type": "text", "text": "both?"},
        {"type": "video", "video": [picture(56, 56)] * 2, "fps": 2},
        {"type": "image", "image": picture(28, 140)},
    ]
    task.messages = lambda sample: [{"role": "user", "content": parts}]
    sample = task.samples("train")[0]
    prompt = PromptEncoder(tiny_processor).encode(task, sample)
    again = pickle.loads(pickle.dumps(prompt))
    for one in (prompt, again):
        assert one.sample.id == sample.id
        assert one.input_ids.dtype == one.mm_token_type_ids.dtype == torch.int64
        assert {name: value.dtype for name, value in one.media.items()} == {
            "pixel_values": torch.float32,
            "image_grid_thw": torch.int64,
            "pixel_values_videos": torch.float32,
            "video_grid_thw": torch.int64,
            "second_per_grid_ts": torch.float32,
        }
        assert [frame.size for frame in one.images] == [(56, 84), (28, 140), (56, 56)]
        assert one.text.count("<|image_pad|>") == 2
        order = torch.unique_consecutive(one.mm_token_type_ids).tolist()
        assert order == [0, 1, 0, 2, 0, 1, 0]
    assert "image" in parts[0] and "video" in parts[2], "the row's own messages stay as they were"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "KeyError: 'content'"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "unknown part 'audio'"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "must be a string"),
        ([{"role": "user", "content": [{"type": "image"}]}], "KeyError: 'image'"),
        ([{"role": "user", "content": [{"type": "image", "image": Image.new("L", (500, 1))}]}], "aspect ratio"),
    ],
)
def test_bad_messages_name_their_row(messages, message, tiny_processor):
    task = Rows(1)
    task.messages = lambda sample: messages
    with pytest.raises(BadRow, match=message) as caught:
        PromptEncoder(tiny_processor).encode(task, task.samples("train")[0])
    assert caught.value.row_id == "train0"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.row_id, copy.reason) == (caught.value.row_id, caught.value.reason)


def test_encoder_needs_a_chat_template_and_sane_limits(tiny_processor):
    class Bare:
        chat_template = None

    with pytest.raises(ValueError, match="no chat template"):
        PromptEncoder(Bare())
    with pytest.raises(ValueError, match="max_prompt_length=0"):
        PromptEncoder(tiny_processor, max_prompt_length=0)


# ---- order ----


def test_each_epoch_uses_every_row_once_in_another_order():
    sampler = RolloutBatchSampler(12, 4, seed=3)
    first, second = list(sampler), list(sampler)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(12))
    assert first != second
    assert list(RolloutBatchSampler(12, 4, seed=3)) == first
    assert list(RolloutBatchSampler(12, 4, seed=4)) != first
    assert list(RolloutBatchSampler(12, 4, shuffle=False)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_drop_last_leaves_out_other_rows_each_epoch():
    sampler = RolloutBatchSampler(10, 4)
    left_out = [set(range(10)) - set(chain(*sampler)) for _ in range(6)]
    assert all(len(rows) == 2 for rows in left_out) and len(set().union(*left_out)) > 4
    kept = RolloutBatchSampler(10, 4, drop_last=False)
    assert [len(batch) for batch in kept] == [4, 4, 2]
    assert len(kept) == 3


@pytest.mark.parametrize("start", range(9))
def test_rollout_k_has_the_same_rows_however_it_is_reached(start):
    straight = RolloutBatchSampler(10, 3, seed=1)
    wanted = list(chain(*(list(straight) for _ in range(5))))
    resumed = list(RolloutBatchSampler(10, 3, seed=1, start_rollout=start))
    assert resumed == wanted[start : start + 3]
    asked = RolloutBatchSampler(10, 3, seed=1, start_rollout=lambda: start)
    assert list(asked) == list(asked) == resumed
    numbered = RolloutBatchSampler(10, 3, seed=1, start_rollout=start)
    list(numbered)
    following = (start // 3 + 1) * 3
    assert list(numbered) == wanted[following : following + 3], "the next epoch begins at its start"


# ---- data module ----


def test_bad_rows_are_skipped_counted_and_warned_about_once(tiny_processor):
    data = VLMDataModule(Rows(8, bad=(2, 4, 5)), batch_size=2, shuffle=False).attach(tiny_processor)
    data.setup("fit")
    loader = data.train_dataloader()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert batches_of(loader) == [[0, 1], [3], [], [6, 7]]
        assert batches_of(loader) == [[0, 1], [3], [], [6, 7]]
    assert Counter(str(w.message).split(":")[0] for w in caught) == {f"skipped row 'train{i}'": 1 for i in (2, 4, 5)}
    assert [row_id for row_id, _ in data.bad_rows] == ["train2", "train4", "train5"]


def test_of_many_bad_rows_the_first_are_shown(tiny_processor):
    data = VLMDataModule(Rows(30, bad=range(25)), batch_size=30, shuffle=False).attach(tiny_processor)
    data.setup("fit")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(data.train_dataloader())
    said = [str(w.message) for w in caught]
    assert len(said) == 21 and all(text.startswith("skipped row 'train") for text in said[:20])
    assert said[20].startswith("more than 20 rows of the train split were skipped")
    assert len(data.bad_rows) == 25


def test_skipped_rows_are_counted_over_ranks_each_once(tiny_processor):
    """Rank 1 meets in the second epoch the row that rank 0 met in the first."""

    class Gathered:
        def __init__(self, others):
            self.others, self.told = others, []

        def gather(self, fresh):
            self.told.append(sorted(fresh))
            return [fresh, self.others.pop(0)]

    data = VLMDataModule(Rows(8, bad=(2, 4)), batch_size=2, shuffle=False).attach(tiny_processor)
    data.setup("fit")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        list(data.train_dataloader())
    ranks = Gathered([{"train6": "why"}, {"train2": "why"}, {}])
    assert [data.rows_skipped(ranks) for _ in range(3)] == [3, 3, 3]
    assert ranks.told == [["train2", "train4"], [], []]  # what all know is not told again
    assert VLMDataModule(Rows(8), batch_size=2).rows_skipped(Ranks()) == 0


def test_the_end_of_a_run_counts_the_skipped_rows_by_reason(tiny_processor, caplog):
    reasons = {"a": "/x/1.png: no such file", "b": "the prompt needs 90 tokens", "c": "/y/2.png: no such file"}
    assert summary(reasons) == (
        "3 rows were skipped: 2 as row 'a': /x/1.png: no such file; 1 as row 'b': the prompt needs 90 tokens"
    )
    assert summary({str(i): "abcdefgh"[i] for i in range(8)}).endswith("as row '4': e; 3 for other reasons")
    data = VLMDataModule(Rows(8, bad=(2,)), batch_size=2, shuffle=False).attach(tiny_processor)
    data.setup("fit")
    data.teardown("fit")
    with pytest.warns(UserWarning, match="train2"), caplog.at_level(logging.INFO):
        batches_of(data.train_dataloader())
        data.teardown("fit")
    assert [r.getMessage()[:38] for r in caplog.records] == ["1 row was skipped: 1 as row 'train2': "]


def test_a_whole_epoch_of_bad_rows_is_an_error(tiny_processor):
    data = VLMDataModule(Rows(4, bad=range(4)), batch_size=2).attach(tiny_processor)
    data.setup("fit")
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match=r"the train split has not one usable row .* cannot ident"),
    ):
        list(data.train_dataloader())


def test_a_rank_without_a_usable_row_goes_on_as_long_as_another_has_one(tiny_processor):
    """With one row for each rank, a single bad one is all that its rank has."""
    data = VLMDataModule(Rows(4, bad=(1, 3), validation=2), batch_size=2, shuffle=False).attach(tiny_processor)
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(ranks=Ranks(1, 2)), lightning_module=None)
    data.setup("fit")
    loader = data.train_dataloader()
    with pytest.warns(UserWarning, match="skipped row"):
        assert batches_of(loader) == [[], []]
    logged: list[str] = []
    trainer = SimpleNamespace(train_dataloader=loader, datamodule=data)
    log = StepLog(SimpleNamespace(trainer=trainer, log=lambda name, *_, **__: logged.append(name)), Rows(4))
    log.no_rows()
    log.log({"reward": 1.0})
    log.no_rows()
    with pytest.raises(ValueError, match=r"the train split has not one usable row in 2 batches.* row 'train3': "):
        log.no_rows()
    assert logged == ["reward"] * 3  # NaN where it is missing


def test_an_evaluation_without_a_usable_row_on_any_rank_is_an_error():
    module: Any = WithEvaluation()
    module.trainer = SimpleNamespace(val_dataloaders=[[], []], test_dataloaders=[[]])
    for batches in ((True, False), (False, True), (True,)):  # a sanity check has fewer
        for number, empty in enumerate(batches):
            module._check_rows("val/", number, empty=empty)
    with pytest.raises(ValueError, match="the validation split has not one usable row in 2 batches"):
        module._check_rows("val/", 1, empty=True)
    with pytest.raises(ValueError, match="the test split has not one usable row in 1 batches"):
        module._check_rows("test/", 0, empty=True)


def test_bad_row_in_validation_is_rejected_at_setup(tiny_processor):
    data = VLMDataModule(Rows(4, bad=(3,), validation=6), batch_size=1, on_bad_row="error").attach(tiny_processor)
    with pytest.raises(BadRow, match="train3"):
        data.setup("fit")
    with pytest.raises(BadRow, match="validation3"):
        data.setup("validate")


def test_a_row_whose_reading_fails_is_a_bad_row(tiny_processor):
    class Lazy(Rows):
        def samples(self, split):
            rows = super().samples(split)

            class Broken(list):
                def __getitem__(self, number):
                    if number == 1:
                        raise RuntimeError("disk")
                    return super().__getitem__(number)

            return Broken(rows)

    data = VLMDataModule(Lazy(4), batch_size=2, shuffle=False).attach(tiny_processor)
    data.setup("fit")
    with pytest.warns(UserWarning, match=r"train\[1\].*RuntimeError: disk"):
        assert batches_of(data.train_dataloader()) == [[0], [2, 3]]


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (Rows(3), {"batch_size": 4}, "lower batch_size or set drop_last=False"),
        (Rows(0), {"drop_last": False}, "is empty"),
        (Rows(2, ids=["a", "a"]), {"batch_size": 1}, "two train rows with id 'a'"),
    ],
)
def test_setup_refuses(task, settings, message, tiny_processor):
    with pytest.raises(ValueError, match=message):
        VLMDataModule(task, **settings).attach(tiny_processor).setup("fit")


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"val_batch_size": 0}, {"on_bad_row": "ignore"}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        VLMDataModule(Rows(), **settings)


def test_no_processor_is_a_clear_error():
    with pytest.raises(ValueError, match="found no processor"):
        VLMDataModule(Rows()).setup("fit")


def test_validation_uses_every_row_in_order(tiny_processor):
    data = VLMDataModule(Rows(10, validation=7), batch_size=2, val_batch_size=3).attach(tiny_processor)
    data.setup("fit")
    loader = data.val_dataloader()
    assert batches_of(loader) == batches_of(loader) == [[0, 1, 2], [3, 4, 5], [6]]


def test_cache_encodes_each_row_once(tiny_processor, monkeypatch):
    calls = Counter()
    encode = PromptEncoder.encode
    monkeypatch.setattr(
        PromptEncoder, "encode", lambda self, task, row: calls.update([row.id]) or encode(self, task, row)
    )
    for cache, wanted in ((True, 1), (False, 2)):
        calls.clear()
        data = VLMDataModule(Rows(4), batch_size=2, cache_prompts=cache).attach(tiny_processor)
        data.setup("fit")
        loader = data.train_dataloader()
        list(loader), list(loader)
        assert set(calls.values()) == {wanted}


def test_workers_give_the_same_batches_and_report_bad_rows(tiny_processor):
    results = []
    for workers in (0, 2):
        data = VLMDataModule(Rows(6, bad=(4,)), batch_size=2, num_workers=workers).attach(tiny_processor)
        data.setup("fit")
        with pytest.warns(UserWarning, match="train4"):
            results.append(batches_of(data.train_dataloader()))
        assert [row_id for row_id, _ in data.bad_rows] == ["train4"]
    assert results[0] == results[1]


def test_loading_draws_nothing_from_global_random_states(tiny_processor):
    data = VLMDataModule(Rows(4), batch_size=2).attach(tiny_processor)
    data.setup("fit")
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    list(data.train_dataloader())
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state()[1], numpy_before)


# ---- under Lightning ----


class Recorder(lightning.LightningModule):
    """Takes one real optimizer step per batch and notes which rows it got."""

    def __init__(self, processor):
        super().__init__()
        self.automatic_optimization = False
        self.processor = processor
        self.weight = nn.Parameter(torch.zeros(()))
        self.rollouts_done = 0
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append([prompt.sample["number"] for prompt in batch])
        self.rollouts_done += 1
        optimizer = self.optimizers()
        self.manual_backward(self.weight * 1.0)
        optimizer.step()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["rollouts_done"] = self.rollouts_done

    def on_load_checkpoint(self, checkpoint):
        self.rollouts_done = checkpoint["rollouts_done"]


def fit(tmp_path, processor, *, resume=None, **settings):
    module = Recorder(processor)
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)],
        **{"max_epochs": 4, **settings},
    )
    trainer.fit(module, VLMDataModule(Rows(10), batch_size=3, seed=5), ckpt_path=resume)
    return module.seen, trainer


def test_resume_continues_with_the_next_rows(tmp_path, tiny_processor, recwarn):
    straight, _ = fit(tmp_path / "a", tiny_processor)
    assert len(straight) == 12
    for done in range(1, 12):
        rest, trainer = fit(tmp_path / "b", tiny_processor, resume=tmp_path / "a" / f"step={done}.ckpt")
        assert rest == straight[done:], f"resumed after {done} rollouts"
        assert trainer.global_step == 12
    assert not [w for w in recwarn if "not resumable" in str(w.message)]


def test_limited_epochs_continue_through_the_order(tmp_path, tiny_processor):
    straight, _ = fit(tmp_path, tiny_processor)
    limited, _ = fit(tmp_path, tiny_processor, limit_train_batches=2, max_epochs=6)
    assert limited == straight


def test_fit_without_validation_rows(tmp_path, tiny_processor):
    seen, _ = fit(tmp_path, tiny_processor, max_epochs=1, num_sanity_val_steps=2)
    assert len(seen) == 3


def test_continuing_with_another_order_of_rows_is_worth_a_word(tiny_processor):
    def module(**settings):
        data = VLMDataModule(Rows(10), **(dict(batch_size=2, seed=5) | settings))
        data.attach(tiny_processor)
        return data

    def load(data, state, stage="fit"):
        data.setup(stage)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            data.load_state_dict(state)
        return [str(w.message) for w in seen]

    first = module()
    first.setup("fit")
    state = first.state_dict()
    assert state == {"rows": 10, "batch_size": 2, "seed": 5, "shuffle": True, "drop_last": True}
    assert load(module(), state) == []
    (message,) = load(module(batch_size=5, seed=6), state)
    assert "continues with batch_size 5 (was 2), seed 6 (was 5)" in message
    assert load(module(batch_size=5), state, stage="validate") == []  # no training rows are drawn
