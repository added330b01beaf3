"""One vision pass for engine, actor and reference: the same bits as a pass for each, and as few as is said."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from fake_engine import FakeEngine
from helpers import make_prompt, picture
from runs import PictureTask, run, same_bits, weights
from test_admission_run import with_budget
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel as Tower

from rollplex.bundles import Bundle
from rollplex.callbacks import GroupStreaming, PrefillReuse, PrefixOverlap
from rollplex.data.records import PrefixPass, Request, SamplingParams
from rollplex.engines import EngineContext, TorchEngine
from rollplex.grpo.losses import LossSettings
from rollplex.models.prefix import StalePrefixError
from rollplex.models.registry import load_hf, load_processor, split
from rollplex.models.split_model import SplitModel
from rollplex.phases import PhaseCallback
from rollplex.residency import ACTIVATIONS, VISION, Stage
from rollplex.schedule import UnitError
from rollplex.step_settings import StepSettings
from rollplex.units import UnitKind
from rollplex.vision import VisionPasses, same_tower, vision_settings

FROZEN = {"freeze": ["vision_tower", "projector"]}
READERS = ("engine", "act", "old", "ref")

CASES = {
    "plain": {},
    "pictures share a pass": dict(prompts_per_pass=4),
    "reference": dict(beta=0.04, responses_per_pass=2),
    "reference, frozen": dict(beta=0.04, **FROZEN),
    "reference, projector trained": dict(beta=0.04, freeze=["vision_tower"]),
    "mini-batches, twice": dict(num_mini_batches=2, num_iterations=2),
    "mini-batches, twice, frozen": dict(num_mini_batches=2, num_iterations=2, beta=0.04, **FROZEN),
    "checkpointing": dict(prefix_checkpointing=True, suffix_checkpointing=True),
    "on the host": dict(prefix_on_host=True, num_iterations=2),
}

SCHEDULES = {
    "serial": lambda: [],
    "overlap": lambda: [PrefixOverlap()],
    "streaming": lambda: [PrefixOverlap(), GroupStreaming(deterministic=True)],
    "streaming, prefill reused": lambda: [PrefillReuse(), PrefixOverlap(), GroupStreaming(deterministic=True)],
}


class MediaTask(PictureTask):
    """A video, a video and a picture, two pictures, text alone."""

    def messages(self, sample):
        n = sample["number"]
        video = {"type": "video", "video": [picture(56, 56, seed=n + i) for i in range(4)], "fps": 1 + n % 3}
        image = {"type": "image", "image": picture(84, 56, seed=n)}
        parts = [[video], [video, image], [image, image], []][n % 4]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]


@pytest.fixture(scope="module")
def separate(parity_folder, tmp_path_factory):
    """Runs in which engine, actor and reference each have their own vision pass, serially; by case."""
    done: dict[str, object] = {}

    def get(case: str):
        if case not in done:
            done[case] = run(parity_folder, tmp_path_factory.mktemp("separate"), steps=3, **CASES[case])
        return done[case]

    return get


def tokens(module) -> list:
    return [[r.token_ids.tolist() for g in out["groups"] for r in g.rollouts] for out in module.seen]


def passes(module) -> list[float]:
    return [out["metrics"]["vision_passes"] for out in module.seen]


# ---- the same training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        *((case, schedule) for case in CASES for schedule in ("serial", "streaming")),
        ("plain", "overlap"),
        *((case, "streaming, prefill reused") for case in CASES if "reference" in case or "twice" in case),
    ],
)
def test_shared_equals_separate_bit_for_bit(parity_folder, tmp_path, separate, case, schedule):
    """3 rollouts. The tower sees the same bundle of prompts either way, so that its sums round alike."""
    apart = separate(case)
    engine = TorchEngine(vision="shared")
    shared = run(parity_folder, tmp_path, steps=3, engine=engine, callbacks=SCHEDULES[schedule](), **CASES[case])
    assert tokens(shared) == tokens(apart)
    assert same_bits(weights(shared), weights(apart))
    assert all(a < b for a, b in zip(passes(shared), passes(apart), strict=True))


def test_videos_pictures_and_text_in_one_batch(parity_folder, tmp_path):
    task = MediaTask(rows=4)
    settings = dict(steps=3, task=task, callbacks=[PrefixOverlap(), GroupStreaming(deterministic=True)])
    apart, shared = (
        run(parity_folder, tmp_path, engine=TorchEngine(vision=vision), **settings) for vision in ("engine", "shared")
    )
    names = {name for out in shared.seen for g in out["groups"] for name in g.prompt.media}
    assert names > {"pixel_values", "pixel_values_videos"}
    assert tokens(shared) == tokens(apart) and same_bits(weights(shared), weights(apart))
    assert passes(shared) == [1, 1, 1] and passes(apart) == [2, 2, 2]


def test_text_alone_needs_no_pass(parity_folder, tmp_path):
    class Text(PictureTask):
        def messages(self, sample):
            return [{"role": "user", "content": [{"type": "text", "text": "what" * (1 + sample["number"] % 3)}]}]

    kinds: list[UnitKind] = []

    class Watch(PhaseCallback):
        def on_unit_start(self, trainer, unit):
            kinds.append(unit.kind)

    apart = run(parity_folder, tmp_path, task=Text())
    shared = run(parity_folder, tmp_path, task=Text(), engine=TorchEngine(vision="shared"), callbacks=[Watch()])
    assert passes(shared) == [0, 0] and UnitKind.ACT_PREFIX in kinds and UnitKind.VISION not in kinds
    assert same_bits(weights(shared), weights(apart))


def test_rows_that_wait_for_a_slot_get_their_features(parity_folder, tmp_path):
    """Fewer slots than rows: prompts are prefilled late, beside passes that read (and free) what the engine reads."""
    settings = dict(steps=3, max_completion_length=12, stop=list("abcdefghijklmnopqrst"), prompts_per_pass=2)
    apart = run(parity_folder, tmp_path, engine=TorchEngine(max_num_seqs=3), **settings)
    shared = run(
        parity_folder, tmp_path, engine=TorchEngine(max_num_seqs=3, vision="shared"), callbacks=SCHEDULES["streaming"](),
        **settings,
    )  # fmt: skip
    assert tokens(shared) == tokens(apart) and same_bits(weights(shared), weights(apart))
    assert passes(shared) == [1, 1, 1]


# ---- how often a tower runs ------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """(tower, pictures) of every forward call of any vision tower."""
    seen: list[tuple[Tower, int]] = []
    forward = Tower.forward

    def counted(self, hidden_states, grid_thw, **kwargs):
        seen.append((self, len(grid_thw)))
        return forward(self, hidden_states, grid_thw, **kwargs)

    monkeypatch.setattr(Tower, "forward", counted)
    return seen


def pictures_by_model(calls, module) -> dict[str, int]:
    owners = {id(module.policy.model.visual): "actor"}
    if module.reference is not None:
        owners[id(module.reference.hf.model.visual)] = "reference"
    counted: Counter[str] = Counter()
    for tower, pictures in calls:
        counted[owners.get(id(tower), "engine")] += pictures
    return dict(counted)


@pytest.mark.parametrize(
    ("vision", "settings", "models", "metric"),
    [
        ("engine", {}, ["actor", "engine"], 2),
        ("engine", dict(beta=0.04), ["actor", "engine", "reference"], 3),
        ("engine", dict(beta=0.04, **FROZEN), ["actor", "engine", "reference"], 3),
        ("shared", {}, ["actor"], 1),
        ("shared", FROZEN, ["actor"], 1),
        ("shared", dict(beta=0.04), ["actor", "reference"], 2),
        ("shared", dict(beta=0.04, freeze=["vision_tower"]), ["actor", "reference"], 2),
        ("shared", dict(beta=0.04, **FROZEN), ["actor"], 1),
        ("shared", dict(num_mini_batches=2, num_iterations=2, beta=0.04, **FROZEN), ["actor"], 1),
    ],
)
@pytest.mark.parametrize("schedule", ["serial", "streaming"])
def test_who_runs_the_tower(parity_folder, tmp_path, calls, vision, settings, models, metric, schedule):
    """8 rows with 8 pictures: each model that runs the tower sees each picture once, and the metric says so."""
    engine, callbacks = TorchEngine(vision=vision), SCHEDULES[schedule]()
    module = run(parity_folder, tmp_path, steps=2, engine=engine, callbacks=callbacks, **settings)
    assert pictures_by_model(calls, module) == dict.fromkeys(models, 8)
    assert passes(module) == [metric, metric]
    assert (module.seen[0]["metrics"]["time/vision"] > 0) == (vision == "shared")


def test_passes_of_the_actor_that_serve_as_prefill_leave_one(parity_folder, tmp_path, calls):
    for vision in ("engine", "shared"):
        calls.clear()
        engine, callbacks = TorchEngine(vision=vision), SCHEDULES["streaming, prefill reused"]()
        module = run(parity_folder, tmp_path, steps=2, engine=engine, callbacks=callbacks)
        assert pictures_by_model(calls, module) == {"actor": 8} and passes(module) == [1, 1]


def test_features_are_computed_again_after_an_update(parity_folder, tmp_path, calls):
    """Groups 2 and 3 train after an update, and the second iteration after two more: out of date each time."""
    settings = dict(num_mini_batches=2, num_iterations=2)
    module = run(parity_folder, tmp_path, steps=1, engine=TorchEngine(vision="shared"), **settings)
    groups = module.seen[0]["groups"]
    pictures = [len(g.prompt.media.get("image_grid_thw", [])) for g in groups]
    assert sum(pictures[2:]) > 0
    assert pictures_by_model(calls, module) == {"actor": sum(pictures) + sum(pictures[2:]) + sum(pictures)}
    seen = [n > 0 for n in pictures]
    assert passes(module) == [(2 * sum(seen) + sum(seen[2:])) / sum(seen)]
    assert module.seen[0]["metrics"]["prefixes_recomputed"] == 6


def test_evaluation_runs_the_engines_own_tower(parity_folder, tmp_path, calls):
    values = []
    for vision in ("engine", "shared"):
        calls.clear()
        trainer = dict(limit_val_batches=1, val_check_interval=1)
        module = run(parity_folder, tmp_path, steps=1, engine=TorchEngine(vision=vision), trainer=trainer)
        values.append(module.trainer.callback_metrics["val/reward"])
        assert pictures_by_model(calls, module)["engine"] > 0
    assert values[0] == values[1]


# ---- features of older weights ---------------------------------------------------------------------------------------


@pytest.fixture
def model(parity_folder) -> SplitModel:
    return split(load_hf(str(parity_folder), "float32"))


@pytest.fixture
def prompt(tiny_processor):
    return make_prompt(tiny_processor, "what?", images=[picture(56, 84), picture(56, 56, 1)])


def test_stale_features_are_refused(model, prompt):
    state = model.vision([prompt], grad=True)
    model.version = 1
    with pytest.raises(StalePrefixError, match=r"version 0 .* version 1"):
        model.prefix([prompt], grad=True, vision=state)
    model.freeze(["vision_tower", "projector"])
    frozen = model.vision([prompt], grad=True)
    model.version = 2
    model.prefix([prompt], grad=True, vision=frozen)  # hold for every version


def test_features_are_let_go_when_weights_change(model, prompt):
    """Whoever asks after an update gets none, unless the tower is frozen."""
    sampling, loss = SamplingParams(max_tokens=2), LossSettings(max_completion_length=2)
    settings = StepSettings(2, sampling, loss, share_vision=True, share_vision_with_reference=True)
    bundle = Bundle(0, (0,), 0)
    for frozen in (False, True):
        model.freeze(FROZEN["freeze"] if frozen else [])
        passes = VisionPasses(model, [prompt], settings)
        passes.compute(bundle, graph=True)
        assert all(passes.of(bundle, reader) is not None for reader in READERS)
        model.version += 1
        assert [passes.of(bundle, reader) is not None for reader in READERS] == [frozen] * 4
        assert (passes.held_bytes > 0) == frozen and passes.runs_tower(bundle) != frozen
        assert passes.passes == 1


def test_an_engine_refuses_stale_features(model, prompt, parity_folder):
    engine = TorchEngine(vision="shared")
    processor = load_processor(str(parity_folder))
    engine.start(EngineContext(model=model, processor=processor, device=torch.device("cpu")))
    state = model.vision([prompt], grad=False)
    model.version = 1
    engine.publish(1)
    engine.submit([Request(0, 0, prompt, SamplingParams(max_tokens=2), 1, PrefixPass(0, (0,), vision=state))])
    with pytest.raises(StalePrefixError):
        engine.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [(dict(num_mini_batches=2), "the tower would get no gradient"), (dict(num_iterations=2), "vision features {} ")],
    ids=str,
)
def test_kept_features_would_be_used(parity_folder, tmp_path, monkeypatch, settings, message):
    """What keeps features of older weights out is their version: a tower that claims to be frozen has them handed to
    the pass of the next update, which refuses them for want of a graph, or for what its backward has freed."""
    vision = SplitModel.vision

    def claims(self, prompts, **options):
        state = vision(self, prompts, **options)
        state.frozen = True
        return state

    monkeypatch.setattr(SplitModel, "vision", claims)
    with pytest.raises(UnitError, match=message):
        run(parity_folder, tmp_path, steps=1, engine=TorchEngine(vision="shared"), **settings)


def test_features_of_other_prompts_or_freed_ones_are_refused(model, prompt, tiny_processor):
    other = make_prompt(tiny_processor, "what?", images=[picture(56, 56)])
    state = model.vision([prompt], grad=True)
    for prompts in ([other], [make_prompt(tiny_processor, "what?")]):
        with pytest.raises(AssertionError, match="vision features"):
            model.prefix(prompts, grad=True, vision=state)
    state.free()
    with pytest.raises(AssertionError, match="vision features"):
        model.prefix([prompt], grad=True, vision=state)


def test_features_without_a_graph_train_no_tower(model, prompt):
    state = model.vision([prompt], grad=False)
    model.prefix([prompt], grad=False, vision=state)
    with pytest.raises(AssertionError, match="the tower would get no gradient"):
        model.prefix([prompt], grad=True, vision=state)


def test_select_keeps_prompts_apart(model, tiny_processor):
    """Pictures and videos of three prompts, the middle one without; in any order."""
    bundle = [
        make_prompt(tiny_processor, "a", images=[picture(56, 84)]),
        make_prompt(tiny_processor, "b"),
        make_prompt(tiny_processor, "c", images=[picture(56, 56, 2), picture(84, 84, 3)], video_frames=4),
    ]
    state = model.vision(bundle, grad=True)
    alone = [model.vision([p], grad=False).leaves for p in bundle]
    assert [sorted(leaves) for leaves in alone] == [["image_embeds"], [], ["image_embeds", "video_embeds"]]
    for chosen in ([2], [1], [0], [2, 0], [0, 1, 2], [1, 2]):
        picked = state.select(chosen)
        assert not picked.has_graph
        picked.check_prompts([bundle[i] for i in chosen])
        for name, rows in picked.leaves.items():
            expected = torch.cat([alone[i][name] for i in chosen if name in alone[i]])
            assert torch.allclose(rows, expected, atol=1e-5)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_uncut_pass(parity_folder, prompt):
    for options in ({}, {"prefix_checkpointing": True}, {"prefix_on_host": True}):
        model = split(load_hf(str(parity_folder), "float32"), **options)
        whole = model.prefix([prompt], grad=True)
        vision = model.vision([prompt], grad=True)
        prefix = model.prefix([prompt], grad=True, vision=vision)
        assert vision.nbytes == 10 * 128 * 4  # (4*6 + 4*4) patches, 4 to a token
        parts = [s.saved_bytes + s.host_bytes for s in (vision, prefix)]
        assert min(parts) > 0
        assert sum(parts) == pytest.approx(whole.saved_bytes + whole.host_bytes, rel=0.02)
        assert (vision.saved_bytes == 0) == bool(options.get("prefix_on_host"))
        vision.drop_graph()
        assert (vision.saved_bytes, vision.host_bytes, vision.nbytes) == (0, 0, 10 * 128 * 4)
        assert not vision.has_graph


def test_a_frozen_tower_holds_features_alone(model, prompt):
    model.freeze(["vision_tower", "projector"])
    state = model.vision([prompt], grad=True)
    assert state.frozen and not state.has_graph and state.saved_bytes == 0 < state.nbytes


class HeldInWindow(PrefixOverlap):
    """Bytes held when the window opens: features, and graphs of the tower."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def on_window_open(self, trainer):
        self.held.append(trainer.strategy.colocation.executor.held_bytes())


def test_graphs_that_the_budget_has_no_room_for_are_computed_again(parity_folder, tmp_path, model):
    """The features stay, so the engine has its pass; the actor's own one runs the tower again."""
    processor = load_processor(str(parity_folder))
    largest = make_prompt(processor, "what?", images=[picture(140, 28, 3), picture(140, 28, 4)])
    state = model.vision([largest], grad=True)
    one = state.nbytes + state.saved_bytes
    free = run(parity_folder, tmp_path, steps=3)
    for budget, expected in ((int(1.5 * one), lambda p: 1 < p < 2), (one // 10, lambda p: p == 2)):
        watch = HeldInWindow()
        trainer = with_budget(budget)
        colocation = trainer["strategy"].colocation
        colocation.engine = colocation.lane.engine = TorchEngine(vision="shared")
        tight = run(parity_folder, tmp_path, steps=3, callbacks=[watch], trainer=trainer)
        assert all(map(expected, passes(tight))), passes(tight)
        assert len(watch.held) >= 3 and 0 < min(watch.held) and max(watch.held) <= budget
        assert same_bits(weights(free), weights(tight)) and tokens(free) == tokens(tight)


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_is_held_after_a_step(parity_folder, tmp_path, frozen):
    """And of a frozen tower nothing that no pass will read again."""
    held: list[tuple[str, int]] = []

    class Watch(PhaseCallback):
        def on_unit_end(self, trainer, unit):
            held.append((str(unit), trainer.strategy.colocation.executor.held_bytes()))

        def on_weights_published(self, trainer, version):
            held.append(("published", trainer.strategy.colocation.executor.held_bytes()))

    settings = dict(num_mini_batches=2, num_iterations=2) | (FROZEN if frozen else {})
    run(parity_folder, tmp_path, steps=1, engine=TorchEngine(vision="shared"), callbacks=[Watch()], **settings)
    assert held[-1] == ("published", 0)
    ends = [n for name, n in held if name.startswith("act_backward")]
    assert len(ends) == 8 and all(n > 0 for n in ends[:-1]) == frozen and ends[-1] == 0


def test_peak_counts_features_and_graphs(parity_folder, tmp_path):
    """Before the rollout the graphs of all towers are held, which a frozen tower does not have."""
    peaks = [
        run(parity_folder, tmp_path, steps=1, engine=TorchEngine(vision=v), **s).seen[0]["metrics"]["prefix_bytes"]
        for v, s in (("engine", {}), ("shared", {}), ("engine", FROZEN), ("shared", FROZEN))
    ]
    assert peaks[1] > 1.3 * peaks[0] and peaks[2] < peaks[3] < 1.3 * peaks[2]


# ---- who may read, and settings --------------------------------------------------------------------------------------


class Watched(PhaseCallback):
    """The memory ledger of a run, which outlives it."""

    def on_train_start(self, trainer, pl_module):
        self.watch = pl_module.colocation.watch


@pytest.mark.parametrize("vision", ["engine", "shared"])
def test_the_ledger_has_the_features(parity_folder, tmp_path, vision):
    """With their graphs among the activations, and as many bytes as their storages have."""
    watched = Watched()
    run(parity_folder, tmp_path, steps=2, engine=TorchEngine(vision=vision), callbacks=[watched])
    rollout = watched.watch.ledger.run.at_peak[Stage.ROLLOUT]
    assert (VISION in rollout, ACTIVATIONS in rollout) == (vision == "shared",) * 2
    assert watched.watch.mismatches == []


def test_a_reference_reads_only_what_its_own_tower_would_give(parity_folder):
    actor, reference = (split(load_hf(str(parity_folder), "float32")) for _ in range(2))
    reference.hf.requires_grad_(False)
    shared = TorchEngine(vision="shared")

    def with_reference() -> bool:
        return vision_settings(shared, actor, reference, share_prefix=True)["share_vision_with_reference"]

    assert not same_tower(actor, reference)  # equal now, but not for long
    actor.freeze(["vision_tower"])
    assert not same_tower(actor, reference)  # the projector is trained
    actor.freeze(["vision_tower", "projector"])
    assert same_tower(actor, reference) and with_reference()
    with torch.no_grad():
        actor.hf.model.language_model.norm.weight[0] += 1
    assert same_tower(actor, reference)
    with torch.no_grad():
        reference.hf.model.visual.merger.mlp[0].bias[0] += 1e-3
    assert not same_tower(actor, reference) and not with_reference()


def test_trainers_and_engines_of_several_ranks_share_no_features(model):
    with pytest.raises(ValueError, match=r"vision=shared .*train_tp.* set vision=engine, or both degrees to 1"):
        vision_settings(TorchEngine(vision="shared"), model, None, share_prefix=True, sharded=True)


def test_nothing_is_shared_unless_the_engine_takes_it(model):
    for engine in (TorchEngine(), FakeEngine({})):
        assert not any(vision_settings(engine, model, None, share_prefix=True).values())


def test_without_shared_prefixes_there_is_a_warning_and_every_pass(parity_folder, tmp_path, model):
    with pytest.warns(UserWarning, match="vision=shared has no effect .* share_prefix=false"):
        assert not any(vision_settings(TorchEngine(vision="shared"), model, None, share_prefix=False).values())
    apart, shared = (
        run(parity_folder, tmp_path, steps=1, engine=TorchEngine(vision=v), share_prefix=False)
        for v in ("engine", "shared")
    )
    assert same_bits(weights(apart), weights(shared))
    assert passes(apart) == passes(shared) == [1 + 4]  # the engine, and each response


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="vision='both' is unknown; set engine or shared"):
        TorchEngine(vision="both")  # type: ignore[arg-type]
