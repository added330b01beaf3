"""A training step: invariants at step 0, masking, micro- and mini-batches, and equality of the schedules."""

from __future__ import annotations

import copy
import json
import math
import shutil

import pytest
import torch
from fake_engine import FakeEngine, Scripted
from helpers import monolithic_logps, relative_error
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import PictureTask, largest_difference, run, same_bits, weights

from rollplex import GRPOModule
from rollplex.callbacks import GroupStreaming, PrefixOverlap
from rollplex.engines.torch_engine import TorchEngine
from rollplex.models.registry import load_hf
from rollplex.phases import Phase, PhaseCallback
from rollplex.rewards.missing import RewardWatch, Scored
from rollplex.rewards.runner import RewardFailure
from rollplex.units import PREFIX_KINDS, UnitKind


def initial(folder) -> dict[str, torch.Tensor]:
    return {k: p.detach().clone() for k, p in load_hf(str(folder), "float32").named_parameters()}


def scripted(ids=((65, 66, 67), (70,), (80, 81), (90, 91, 92, 93)), **kwargs) -> FakeEngine:
    reasons = kwargs.pop("reasons", ["stop"] * 4)
    return FakeEngine(lambda r: Scripted(list(ids[r.index]), finish_reason=reasons[r.index]), **kwargs)


# ---- step 0 ----


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_lp_01_and_lp_06_ratio_is_one_and_kl_zero_before_the_first_update(parity_folder, tmp_path, temperature):
    module = run(parity_folder, tmp_path, steps=1, beta=0.04, temperature=temperature, num_iterations=2)
    assert module.training
    metrics = module.seen[0]["metrics"]
    # two iterations: the first has ratio 1, the second has moved
    assert metrics["mismatch_max"] < 1e-5
    first = run(parity_folder, tmp_path, steps=1, beta=0.04, temperature=temperature).seen[0]["metrics"]
    assert abs(first["kl"]) < 1e-6
    assert abs(first["ratio_max"] - 1) < 1e-6 and abs(first["ratio_min"] - 1) < 1e-6
    assert metrics["ratio_max"] - metrics["ratio_min"] > 1e-4 and metrics["kl"] > 1e-6


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_equal_rewards_give_exactly_zero_gradient(parity_folder, tmp_path, value):
    module = run(parity_folder, tmp_path, steps=1, task=PictureTask(reward=lambda s, r: value))
    assert module.seen[0]["metrics"]["grad_norm"] == 0.0
    assert module.seen[0]["metrics"]["groups_without_spread"] == 1.0
    assert same_bits(weights(module), initial(parity_folder))


# ---- missing rewards ----


def bad_rewards(sample, response):
    if sample["number"] == 1 and response.index == 1:
        return None
    if sample["number"] == 1 and response.index == 2:
        return float("nan")
    if sample["number"] == 2 and response.index == 0:
        raise RuntimeError("reward bug")
    if sample["number"] == 4 and response.index == 3:
        while True:
            pass
    return 1.0 - float(response.token_ids[0]) / 256


def test_lp_08_missing_rewards_are_counted_and_isolated(parity_folder, tmp_path):
    module = run(
        parity_folder, tmp_path, steps=2, batch_size=8, task=PictureTask(reward=bad_rewards), reward_timeout=0.3, beta=0.1,
    )  # fmt: skip
    metrics = module.seen[0]["metrics"]
    assert metrics["rewards_missing"] == 4
    assert {k: v for k, v in metrics.items() if k.startswith("rewards_missing/") and v} == {
        "rewards_missing/none": 1, "rewards_missing/nan": 1, "rewards_missing/raised": 1, "rewards_missing/timeout": 1,
    }  # fmt: skip
    assert all(math.isfinite(v) for v in metrics.values())
    assert all(torch.isfinite(w).all() for w in weights(module).values())
    assert not same_bits(weights(module), initial(parity_folder))


def raises(sample, response):
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda s, r: "0.5", r"bad_type \(returned str, expected a number\)\. A reward is a number"),
        (raises, r"raised \(KeyError: 'answer' \(.*test_step\.py:\d+\)\)\. Mend the reward"),
    ],
    ids=["text", "raises"],
)
def test_lp_08_a_reward_that_scores_nothing_ends_the_run_before_a_weight_moves(parity_folder, tmp_path, reward, said):
    where = r"PictureTask\.reward gave no usable reward for any response of this rollout batch \(16 responses\)"
    modules = []

    class Kept(GRPOModule):
        def on_train_start(self):
            super().on_train_start()
            modules.append(self)

    with pytest.raises(ValueError, match=f"(?s){where}.*row train-\\d.*{said}"):
        run(parity_folder, tmp_path, steps=2, task=PictureTask(reward=reward), cls=Kept, weight_decay=0.1, beta=0.1)
    assert same_bits(weights(modules[0]), initial(parity_folder)) and modules[0].rollouts_done == 0


def test_lp_08_batches_of_none_end_the_run_when_they_go_on():
    task = PictureTask()
    nothing = Scored(0, 8, RewardFailure("a", 0, "none", "returned None"))
    watch = RewardWatch(task)
    for everywhere in ([nothing, nothing], [nothing, nothing], [nothing, Scored(1, 7, None)], [nothing], [nothing]):
        watch.check(everywhere)  # twice in a row, and then another rank has a reward
    with pytest.raises(ValueError, match=r"3 last rollout batches.*is a return missing"):
        watch.check([nothing])
    late = Scored(0, 8, RewardFailure("b", 1, "timeout", "no reward within 1 s"))
    with pytest.raises(ValueError, match=r"row b, response 1: timeout.*reward_timeout"):
        RewardWatch(task).check([nothing, late])
    for everywhere in ([late], [late]):
        watch.check([Scored(8, 0, None)])
        watch.check(everywhere)  # it has worked before: a server may come back
        watch.check(everywhere)
    with pytest.raises(ValueError, match=r"3 last rollout batches \(this one: 8 responses\).*timeout"):
        watch.check([late])
    RewardWatch(task).check([Scored(0, 0, None)])  # aborted, all of them: nobody was asked


def test_lp_08_a_response_without_reward_contributes_nothing(parity_folder, tmp_path):
    """Whatever tokens the unscored response had, the weights come out the same, bit for bit."""

    def reward(sample, response):
        return None if response.index == 1 else float(response.index)

    results = [
        weights(
            run(parity_folder, tmp_path, steps=1, task=PictureTask(reward=reward), beta=0.1, responses_per_pass=1,
                engine=scripted(((65, 66, 67), other, (80, 81), (90, 91, 92, 93))))
        )
        for other in ((70, 71), (99, 98))
    ]  # fmt: skip
    assert same_bits(*results)
    assert not same_bits(results[0], initial(parity_folder))


# ---- truncation ----


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_lp_12_truncated_responses_leave_numerator_and_denominator(parity_folder, tmp_path, loss_type):
    """Two of four cut: the update is the one in which their tokens are other tokens altogether."""
    settings = dict(steps=1, loss_type=loss_type, mask_truncated_completions=True, responses_per_pass=1)
    reasons = ["stop", "length", "stop", "length"]
    task = PictureTask(reward=lambda s, r: float(r.index))
    a, b = (
        run(
            parity_folder,
            tmp_path,
            task=task,
            engine=scripted(((65, 66, 67), x, (80, 81), y), reasons=reasons),
            **settings,
        )
        for x, y in (((70,), (90, 91, 92, 93)), ((1, 2, 3, 4, 5, 6), (9, 8, 7)))
    )
    assert same_bits(weights(a), weights(b))
    kept = {"grpo": 2, "bnpo": 5, "dapo": 5, "dr_grpo": 2 * 6}[loss_type]
    assert a.seen[0]["metrics"]["grad_norm"] > 0
    # the same numbers by hand: four groups, each with two kept responses
    from rollplex.grpo.losses import loss_normalizer

    assert loss_normalizer(loss_type, [3, 0, 2, 0], max_completion_length=6) == kept


def test_lp_12_all_truncated_changes_no_weight_and_counts_the_step(parity_folder, tmp_path):
    module = run(
        parity_folder, tmp_path, steps=2, mask_truncated_completions=True, weight_decay=0.1,
        engine=scripted(reasons=["length"] * 4),
    )  # fmt: skip
    assert same_bits(weights(module), initial(parity_folder))
    assert module.trainer.global_step == 2
    assert module.seen[1]["metrics"]["loss"] == 0.0


def test_tok_05_vision_tokens_in_a_response_end_with_a_finite_loss(parity_folder, tmp_path):
    pad = load_hf(str(parity_folder), "float32").config.image_token_id
    module = run(parity_folder, tmp_path, steps=1, engine=scripted(((10, pad, 30), (10, 20, 30), (5,), (6, 7))))
    assert math.isfinite(module.seen[0]["metrics"]["loss"]) and module.seen[0]["metrics"]["grad_norm"] > 0
    assert all(torch.isfinite(w).all() for w in weights(module).values())


def test_pos_07_end_token_counts_once_when_finished_and_never_when_cut(parity_folder, tmp_path):
    """Where padding and end are one token: the gradient is that of the formula, by hand, over the tokens there are."""
    end = 258  # <|im_end|>
    folder = shutil.copytree(parity_folder, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<|im_end|>"}))
    responses, reasons = ((5, end), (5, 6, 7), (5, end), (8, 9)), ["stop", "length", "stop", "length"]
    module = run(
        folder, tmp_path, steps=1, batch_size=2, task=PictureTask(reward=lambda s, r: float(r.index)), cls=KeepGradients,
        engine=scripted(responses, reasons=reasons), scale_rewards="none", loss_type="dapo", max_grad_norm=None,
    )  # fmt: skip
    assert module.processor.tokenizer.pad_token_id == end
    (out,), model = module.seen, load_hf(str(folder), "float32")
    assert out["metrics"]["completions_truncated"] == 0.5
    banned, loss = module.actor.banned_token_ids, torch.zeros(())
    for group in out["groups"]:
        for index, ids in enumerate(responses):
            logps = monolithic_logps(model, group.prompt, torch.tensor(ids), 1.0, banned)
            loss = loss - (index - 1.5) * logps.sum() / (2 * sum(map(len, responses)))
    loss.backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    checked = 0
    for name, p in model.named_parameters():
        if p.grad is not None and p.grad.norm() > 1e-4 * whole:
            assert relative_error(module.gradients[name], p.grad) < 1e-5, name
            checked += 1
    assert checked > 20


# ---- how the batch is cut ----


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_lp_13_micro_batches_and_bundles_do_not_change_the_update(parity_folder, tmp_path, loss_type):
    """SGD-like view: compare gradients through one plain update (Adam would hide a scale)."""
    grads = []
    for cut in (
        dict(),
        dict(responses_per_pass=1),
        dict(responses_per_pass=3),
        dict(prompts_per_pass=4, responses_per_pass=2),
    ):
        engine = scripted(((65,), (66, 67, 68), (70, 71, 72, 73), (80, 81, 82, 83, 84, 85)))
        module = run(
            parity_folder, tmp_path, steps=1, engine=engine, loss_type=loss_type, beta=0.1, cls=KeepGradients, **cut
        )
        grads.append(module.gradients)
    for other in grads[1:]:
        for name, g in grads[0].items():
            scale = float(g.norm()) or 1.0
            if float(g.abs().max()) > 1e-6:
                assert float((other[name] - g).norm()) / scale < 1e-5, name


class KeepGradients(GRPOModule):
    """Remembers the rescaled gradient of the last update."""

    def _update(self, step, update):
        optimizer = self.optimizers()
        original = optimizer.step

        def keep(*a, **k):
            self.gradients = {n: p.grad.clone() for n, p in self.policy.named_parameters() if p.grad is not None}
            return original(*a, **k)

        optimizer.step = keep
        try:
            return super()._update(step, update)
        finally:
            del optimizer.step


def test_lp_14_groups_are_kept_apart(parity_folder, tmp_path):
    rewards = {0: [0, 0, 1, 1], 1: [5, 5, 9, 9]}
    task = PictureTask(rows=2, reward=lambda s, r: float(rewards[s["number"]][r.index]))
    module = run(parity_folder, tmp_path, steps=1, batch_size=2, task=task)
    assert module.seen[0]["metrics"]["reward_std"] == pytest.approx((0.5773502 + 2.3094011) / 2, rel=1e-5)


def test_lp_15_reward_sees_its_own_row(parity_folder, tmp_path):
    seen = []

    def reward(sample, response):
        seen.append((sample.id, sample["number"], response.group))
        return float(response.index)

    module = run(parity_folder, tmp_path, steps=4, task=PictureTask(rows=8, reward=reward))
    assert len(seen) == 4 * 4 * 4 and all(name == f"train-{number}" for name, number, _ in seen)
    for out in module.seen:
        for group in out["groups"]:
            pictures = len(group.prompt.sample["sizes"])
            grid = group.prompt.media.get("image_grid_thw", torch.zeros(0, 3))
            assert len(grid) == pictures


class NumberedTask(PictureTask):
    """The prompt says which row it is of; row 5 cannot be a prompt."""

    def messages(self, sample):
        if sample["number"] == 5:
            raise ValueError("no picture")
        return [
            {
                "role": "user",
                "content": [*super().messages(sample)[0]["content"][:-1], {"type": "text", "text": sample.id}],
            }
        ]

    def reward(self, sample, response):
        return sample["number"] + response.index / 10


@pytest.mark.filterwarnings("ignore:skipped row")
def test_lp_15_rewards_are_of_their_own_row_after_a_filter_and_a_resume(parity_folder, tmp_path):
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    settings = dict(task=NumberedTask(rows=8), trainer={"enable_checkpointing": True})
    straight = run(parity_folder, tmp_path, steps=5, callbacks=[keep], **settings).seen
    resumed = run(parity_folder, tmp_path, steps=5, ckpt_path=str(tmp_path / "step=3.ckpt"), **settings).seen
    assert len(resumed) == 2 and any(len(out["groups"]) == 3 for out in straight)
    for out in (*straight, *resumed):
        for group in out["groups"]:
            number = group.prompt.sample["number"]
            assert f"train-{number}<" in group.prompt.text
            assert group.rewards.tolist() == pytest.approx([number + i / 10 for i in range(4)])
    rows = [[[g.prompt.sample.id for g in out["groups"]] for out in part] for part in (straight[3:], resumed)]
    assert rows[0] == rows[1]


# ---- schedules ----


CASES = [
    dict(),
    dict(beta=0.04),
    dict(beta=0.04, num_iterations=2, num_mini_batches=2),
    dict(loss_type="grpo", num_mini_batches=2),
    dict(loss_type="bnpo", prompts_per_pass=2, responses_per_pass=2),
    dict(loss_type="dr_grpo", scale_rewards="none", prefix_checkpointing=True, suffix_checkpointing=True),
    dict(scale_rewards="batch", entropy_coef=0.01),
]


class Watch(PhaseCallback):
    """Kinds of the units that ran inside the rollout."""

    def __init__(self) -> None:
        self.hidden: set[UnitKind] = set()

    def on_unit_start(self, trainer, unit) -> None:
        if trainer.strategy.colocation.executor.machine.phase is Phase.ROLLOUT:
            self.hidden.add(unit.kind)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()) or "plain")
def test_overlap_and_streaming_equal_serial_bit_for_bit(parity_folder, tmp_path, patient, case):
    # Stop strings give responses of very different lengths, so groups end while others decode.
    letters = list("abcdefghijklmnopqrst")
    settings = dict(steps=2, num_generations=3, max_completion_length=48, stop=letters) | case

    def trained(*callbacks):
        watch, options = Watch(), copy.deepcopy(settings)
        module = run(parity_folder, tmp_path, engine=TorchEngine(), callbacks=[watch, *callbacks], **options)
        return module, watch.hidden

    serial, hidden = trained()
    assert not hidden and not same_bits(weights(serial), initial(parity_folder))
    overlap, hidden = trained(PrefixOverlap())
    assert UnitKind.ACT_PREFIX in hidden and hidden <= PREFIX_KINDS
    streaming, hidden = trained(PrefixOverlap(), GroupStreaming(deterministic=True))
    early = {UnitKind.REWARD} if case.get("scale_rewards") == "batch" else {UnitKind.REWARD, UnitKind.ACT_BACKWARD}
    if case.get("num_mini_batches"):  # the first mini-batch's groups end late; later ones are scored early
        early = {UnitKind.OLD_SUFFIX}
    # In order, a bundle also waits for the rewards of all groups before its last one.
    assert early - ({UnitKind.ACT_BACKWARD} if case.get("prompts_per_pass") else set()) <= hidden
    for module in (overlap, streaming):
        for a, b in zip(serial.seen, module.seen, strict=True):
            for x, y in zip(a["groups"], b["groups"], strict=True):
                assert all(torch.equal(p.token_ids, q.token_ids) for p, q in zip(x.rollouts, y.rollouts, strict=True))
        assert same_bits(weights(serial), weights(module))
    loose, hidden = trained(PrefixOverlap(), GroupStreaming())
    assert early <= hidden
    scale = max(float(w.abs().max()) for w in weights(serial).values())
    assert largest_difference(weights(serial), weights(loose)) / scale < 1e-4


def test_stale_engine_is_noticed(parity_folder, tmp_path):
    class Stale(FakeEngine):
        def publish(self, version: int) -> None:
            pass

    with pytest.raises(AssertionError, match="weights version"):
        run(parity_folder, tmp_path, steps=2, engine=Stale(lambda r: Scripted([65 + r.index])))


def test_reference_is_the_initial_model_and_stays_out_of_the_checkpoint(parity_folder, tmp_path):
    module = run(parity_folder, tmp_path, steps=2, beta=0.1)
    assert same_bits({k: p.detach() for k, p in module.reference.hf.named_parameters()}, initial(parity_folder))
    assert not any("reference" in name for name in module.state_dict())


def test_freezing_by_part(parity_folder, tmp_path):
    before = initial(parity_folder)
    module = run(parity_folder, tmp_path, steps=1, freeze=["vision_tower"])
    after = weights(module)
    frozen = [k for k in before if ".visual.blocks" in k or ".visual.patch_embed" in k]
    assert frozen and all(torch.equal(before[k], after[k]) for k in frozen)
    assert any(not torch.equal(before[k], after[k]) for k in before if ".visual.merger" in k)
