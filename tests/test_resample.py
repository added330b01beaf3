"""dynamic_sample: groups without spread are left out as if never sampled, and others are drawn, in every schedule alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, Scripted
from helpers import picture
from runs import run, same_bits, weights

from rollplex import GRPOModule, Rollout, Sample, VLMTask
from rollplex.callbacks import GroupStreaming, PhaseOffload, PrefillReuse, PrefixOverlap
from rollplex.checks import check_batches
from rollplex.data.batches import RolloutBatchSampler
from rollplex.phases import Phase, PhaseCallback


class Numbered(VLMTask):
    """Rows with a picture; `flat` rows are worth the same whatever is said. `rows` may be any numbers, in any order."""

    def __init__(self, rows: Any, flat: Any = ()) -> None:
        self.rows, self.flat = list(rows), set(flat)

    def samples(self, split: str) -> list[Sample]:
        return [Sample(f"row-{i}", {"number": i}) for i in self.rows]

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        image = {"type": "image", "image": picture(56, 56, seed=sample["number"])}
        return [{"role": "user", "content": [image, {"type": "text", "text": f"{sample['number']:02d}?"}]}]

    def reward(self, sample: Sample, response: Rollout) -> float:
        return 0.5 if sample["number"] in self.flat else float(response.token_ids[0]) / 100


def script(request: Any) -> Scripted:
    """By row and response alone, so that a row says the same in any batch."""
    n = request.prompt.sample["number"]
    return Scripted([40 + 7 * request.index + n, 65 + n][: 1 + (request.index + n) % 2])


def fit(folder: Any, root: Any, task: VLMTask, **more: Any) -> GRPOModule:
    defaults: dict[str, Any] = dict(
        steps=1, engine=FakeEngine(script), beta=0.1, entropy_coef=0.05, dynamic_sample=True
    )
    more = defaults | more
    # Decoding takes a while, so that there is time for work beside it.
    more["engine"].decode_delay = 0.01
    return run(folder, root, task=task, **more)


def order_of(rows: int, rollout: int = 0) -> list[int]:
    """Rows as a run with seed 3 and batches of 4 takes them: its batch, then the further ones."""
    sampler = RolloutBatchSampler(rows, 4, seed=3)
    return sampler.rows(rollout) + sampler.further_rows(rollout)


class Plain(GRPOModule):
    """Trains on exactly these rows, in this order."""

    order: tuple[int, ...]

    def training_step(self, batch, batch_idx):
        by_number = {p.sample["number"]: p for p in batch}
        return super().training_step([by_number[i] for i in self.order], batch_idx)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_it_learns_what_the_kept_groups_alone_would_teach(parity_folder, tmp_path, loss_type):
    """The plain twin: a step without dynamic_sample on the kept rows. beta and entropy would show a dropped group."""
    order = order_of(10)
    flat = [order[1], order[2], order[5]]  # two of the batch, one of the two drawn first
    kept = [order[0], order[3], order[4], order[6]]
    module = fit(parity_folder, tmp_path / "a", Numbered(range(10), flat), loss_type=loss_type)
    metrics = module.seen[0]["metrics"]
    figures = {k: metrics[k] for k in ("groups_kept", "groups_dropped", "groups_resampled", "resample_rounds")}
    assert figures == {"groups_kept": 4, "groups_dropped": 3, "groups_resampled": 3, "resample_rounds": 2}
    assert metrics["updates_skipped"] == 0 and metrics["groups_without_spread"] == pytest.approx(3 / 7)
    groups = module.seen[0]["groups"]
    assert [g.prompt.sample["number"] for g in groups] == order[:7] and [g.index for g in groups] == list(range(7))

    class Twin(Plain):
        pass

    Twin.order = tuple(kept)
    twin = fit(
        parity_folder, tmp_path / "b", Numbered(sorted(kept)), loss_type=loss_type, dynamic_sample=False, cls=Twin
    )
    assert same_bits(weights(module), weights(twin))
    other = twin.seen[0]["metrics"]
    for name in ("loss", "kl", "entropy", "grad_norm", "mismatch_abs"):
        assert metrics[name] == pytest.approx(other[name], rel=1e-6), name


def test_what_is_dropped_beside_kept_ones_in_a_bundle_adds_nothing(parity_folder, tmp_path):
    order = order_of(10)
    flat = [order[1], order[2], order[5]]
    alone, together = (
        fit(parity_folder, tmp_path / str(n), Numbered(range(10), flat), prompts_per_pass=n) for n in (1, 4)
    )
    assert alone.seen[0]["metrics"]["grad_norm"] == pytest.approx(together.seen[0]["metrics"]["grad_norm"], rel=1e-5)
    assert alone.seen[0]["metrics"]["loss"] == pytest.approx(together.seen[0]["metrics"]["loss"], rel=1e-5)


SCHEDULES = {
    "overlap": lambda: [PrefixOverlap()],
    "streaming": lambda: [PrefixOverlap(), GroupStreaming(deterministic=True)],
    "reuse": lambda: [PrefillReuse(), GroupStreaming(deterministic=True)],
    "offload": lambda: [PrefixOverlap(), PhaseOffload()],
}


def mixed() -> Numbered:
    order = order_of(12)
    return Numbered(range(12), [order[0], order[3], order[4], order_of(12, 1)[2]])


def fit_real(folder: Any, root: Any, callbacks: Any) -> GRPOModule:
    from rollplex.engines.torch_engine import TorchEngine

    return run(
        folder, root, task=mixed(), callbacks=callbacks, engine=TorchEngine(), steps=2, beta=0.1, entropy_coef=0.05,
        dynamic_sample=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def serial_real(parity_folder, tmp_path_factory):
    return fit_real(parity_folder, tmp_path_factory.mktemp("serial"), [])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_same_bits(parity_folder, tmp_path, serial_real, patient, name):
    other = fit_real(parity_folder, tmp_path, SCHEDULES[name]())
    assert all(out["metrics"]["groups_resampled"] > 0 for out in serial_real.seen)
    assert other.seen[0]["metrics"].get("time/hidden", 0.0) > 0 or name == "reuse"
    for a, b in zip(serial_real.seen, other.seen, strict=True):
        assert [g.prompt.sample.id for g in a["groups"]] == [g.prompt.sample.id for g in b["groups"]]
        for x, y in zip(a["groups"], b["groups"], strict=True):
            assert all(torch.equal(r.token_ids, q.token_ids) for r, q in zip(x.rollouts, y.rollouts, strict=True))
    assert same_bits(weights(serial_real), weights(other))


def test_responses_of_a_step_have_seeds_of_their_own(parity_folder, tmp_path):
    engine = FakeEngine(script)
    fit(parity_folder, tmp_path, Numbered(range(10), order_of(10)[:2]), engine=engine)
    seeds = [r.seed for r in engine.requests]
    assert len(seeds) == 6 * 4 and len(set(seeds)) == len(seeds)


def test_rounds_are_bounded_and_a_step_without_groups_moves_nothing(parity_folder, tmp_path):
    """Nothing has spread: no weight moves (not by decay either), the update counts, and rounds end."""
    engine = FakeEngine(script)
    start = weights(run(parity_folder, tmp_path / "s", steps=1, learning_rate=0.0, task=Numbered(range(4))))
    module = fit(
        parity_folder, tmp_path / "m", Numbered(range(30), range(30)), engine=engine, max_resample_times=2,
        weight_decay=0.5,
    )  # fmt: skip
    metrics = module.seen[0]["metrics"]
    assert metrics["resample_rounds"] == 2 and metrics["groups_dropped"] == 12 and len(engine.requests) == 12 * 4
    assert metrics["updates_skipped"] == 1 and metrics["groups_kept"] == 0 and metrics["updates"] == 1
    assert same_bits(weights(module), start)


def test_rounds_end_with_the_data(parity_folder, tmp_path):
    order = order_of(6)
    module = fit(parity_folder, tmp_path, Numbered(range(6), order[1:]), max_resample_times=9)
    metrics = module.seen[0]["metrics"]
    assert metrics["groups_kept"] == 1 and metrics["groups_resampled"] == 2 and metrics["updates_skipped"] == 0


def test_phases_go_back_to_the_rollout(parity_folder, tmp_path):
    class Phases(PhaseCallback):
        def __init__(self) -> None:
            self.seen: list[Phase] = []

        def on_phase_start(self, trainer, phase):
            self.seen.append(phase)

    watch = Phases()
    fit(parity_folder, tmp_path, Numbered(range(10), order_of(10)[:1]), callbacks=[watch])
    steps = [p for p in watch.seen if p is not Phase.PUBLISH]
    assert steps == [Phase.ROLLOUT, Phase.SCORE, Phase.TRAIN] * 2 + [Phase.UPDATE]


def test_a_resumed_run_draws_the_same(parity_folder, tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def task() -> Numbered:
        return Numbered(range(12), range(0, 12, 3))

    saved = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(
        parity_folder, tmp_path / "w", task(), steps=3, callbacks=[saved], trainer={"enable_checkpointing": True}
    )
    resumed = fit(parity_folder, tmp_path / "r", task(), steps=3, ckpt_path=str(tmp_path / "step=1.ckpt"))
    rows = [[[g.prompt.sample.id for g in out["groups"]] for out in part] for part in (whole.seen[1:], resumed.seen)]
    assert rows[0] == rows[1] and any(len(step) > 4 for step in rows[0])
    assert same_bits(weights(whole), weights(resumed))


def test_further_rows_are_the_others_and_differ_by_rollout():
    sampler = RolloutBatchSampler(20, 4, seed=1)
    for k in range(5):
        assert sorted(sampler.rows(k) + sampler.further_rows(k)) == list(range(20))
    assert sampler.further_rows(0) == sampler.further_rows(0)
    assert all(a != b for a, b in pairwise(sampler.further_rows(k) for k in range(5)))
    assert RolloutBatchSampler(6, 2, shuffle=False).further_rows(1) == [4, 5, 0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_iterations": 2}, "dynamic_sample with num_iterations=2 is not supported.*set num_iterations to 1"),
        ({"num_mini_batches": 2}, "dynamic_sample with num_mini_batches=2 is not supported"),
        ({"scale_rewards": "batch"}, "dynamic_sample with scale_rewards=batch is not supported.*group or none"),
        ({"max_resample_times": 0}, "max_resample_times=0 must be a whole number, 1 or more"),
    ],
)
def test_what_clashes_is_refused(parity_folder, settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOModule(model=str(parity_folder), dynamic_sample=True, **settings)


def test_other_data_modules_are_refused():
    with pytest.raises(ValueError, match=r"further_prompts\(rollout, start, count\), which object lacks"):
        check_batches({"dynamic_sample": True, "num_mini_batches": 1}, object())
