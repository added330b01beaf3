"""PhaseOffload: the same bits, less on the device, and honest about it."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from fake_engine import FakeEngine, Scripted
from runs import run, same_bits, weights
from stops import StopAt, compared, differences, fit

from rollplex import RollplexDDPStrategy, RollplexStrategy
from rollplex.callbacks import GroupStreaming, MemoryReport, PhaseOffload, PrefillReuse, PrefixOverlap
from rollplex.engines import RolloutEngine, TorchEngine
from rollplex.models.registry import load_hf
from rollplex.offload import storage_bytes
from rollplex.phases import Phase, PhaseCallback
from rollplex.residency import (
    ACTIVATIONS,
    ACTOR_KV,
    GRADIENTS,
    KV_POOL,
    MASTERS,
    MOMENTS,
    PARAMETERS,
    REFERENCE,
    SUFFIX,
    Stage,
)
from rollplex.watch import MemoryWatch

SERIAL = [MOMENTS, REFERENCE, KV_POOL]
"""What leaves in a serial run; with it the prefix activations stay, so that sums can be compared."""


@cache
def largest(folder) -> int:
    """Elements of the model's largest parameter."""
    return max(p.numel() for p in load_hf(str(folder), "float32").parameters())


class Look(PhaseCallback):
    """The ledger of the run, and real storage bytes of its states at each phase."""

    def __init__(self) -> None:
        self.real: dict[Phase, dict[str, int]] = {}

    def on_train_start(self, trainer, pl_module):
        self.watch = pl_module.colocation.watch

    def on_phase_start(self, trainer, phase):
        module = trainer.lightning_module
        optimizer = trainer.strategy.states.optimizer
        self.real[phase] = {
            MOMENTS: storage_bytes(optimizer.moments()),
            MASTERS: storage_bytes(optimizer.masters()),
            REFERENCE: storage_bytes(module.reference.hf.parameters()) if module.reference else 0,
        }


def looked(folder, root, *callbacks, **settings):
    look = Look()
    module = run(folder, root, callbacks=[*callbacks, look], **settings)
    assert look.watch.mismatches == []
    return module, look


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ([], dict(beta=0.04)),
        ([PrefixOverlap], dict(beta=0.04, num_mini_batches=2, dtype="bfloat16")),
        ([PrefillReuse, PrefixOverlap, GroupStreaming], dict(beta=0.04, prompts_per_pass=2)),
    ],
    ids=["serial", "overlap-bf16", "streaming"],
)
def test_offload_changes_no_bit(parity_folder, tmp_path, schedule, settings):
    def callbacks():
        return [c(deterministic=True) if c is GroupStreaming else c() for c in schedule]

    plain, _ = looked(parity_folder, tmp_path, *callbacks(), steps=5, **settings)
    moved, look = looked(parity_folder, tmp_path, *callbacks(), PhaseOffload(), steps=5, **settings)
    chunk = (12 if settings.get("dtype") else 8) * largest(parity_folder)
    parts, _ = looked(
        parity_folder, tmp_path, *callbacks(), PhaseOffload(update_chunk_bytes=chunk), steps=5, **settings
    )
    assert same_bits(weights(plain), weights(moved)) and same_bits(weights(plain), weights(parts))
    for phase in (Phase.ROLLOUT, Phase.TRAIN):
        assert look.real[phase] == {MOMENTS: 0, MASTERS: 0, REFERENCE: 0}, phase
    assert look.real[Phase.UPDATE][MOMENTS] > 0


def test_the_peak_is_lower_by_what_is_absent(parity_folder, tmp_path):
    """Stage by stage, to the byte: states that a stage does not need are not there, everything else is."""
    settings = dict(beta=0.04, steps=3)
    _, stays = looked(parity_folder, tmp_path, **settings)
    _, leaves = looked(parity_folder, tmp_path, PhaseOffload(SERIAL), **settings)
    before, after = (look.watch.ledger for look in (stays, leaves))
    size = before.run.largest
    own_kv = before.recorded()[KV_POOL][Stage.TRAIN]
    assert 0 < own_kv < size[KV_POOL]  # between rollouts the rows' room stays, without PhaseOffload
    absent = {
        Stage.ROLLOUT: size[MOMENTS] + size[REFERENCE],
        Stage.SCORE: size[MOMENTS] + own_kv,
        Stage.TRAIN: size[MOMENTS] + size[REFERENCE] + own_kv,
        Stage.UPDATE: size[REFERENCE] + own_kv,
    }
    assert before.run.totals().keys() == absent.keys() == after.run.totals().keys()
    for stage, gone in absent.items():
        assert before.run.totals()[stage] - after.run.totals()[stage] == gone, stage
    assert size[MOMENTS] == 2 * size[PARAMETERS] and size[REFERENCE] == size[PARAMETERS]


def test_an_update_in_parts_never_has_all_moments_on_the_device(parity_folder, tmp_path):
    chunk = 8 * largest(parity_folder)
    _, whole = looked(parity_folder, tmp_path, PhaseOffload([MOMENTS]), steps=2)
    _, parts = looked(parity_folder, tmp_path, PhaseOffload([MOMENTS], update_chunk_bytes=chunk), steps=2)
    most = parts.watch.ledger.run.largest[MOMENTS]
    assert 0 < most <= 2 * chunk < whole.watch.ledger.run.largest[MOMENTS]
    assert parts.real[Phase.UPDATE][MOMENTS] == 0
    a, b = (look.watch.ledger.run.totals()[Stage.UPDATE] for look in (whole, parts))
    assert a - b == pytest.approx(whole.watch.ledger.run.largest[MOMENTS] - most)


def test_prefix_activations_wait_on_the_host(parity_folder, tmp_path):
    _, stays = looked(parity_folder, tmp_path, PrefixOverlap())
    module, leaves = looked(parity_folder, tmp_path, PrefixOverlap(), PhaseOffload([ACTIVATIONS]))
    assert stays.watch.ledger.run.largest[ACTIVATIONS] > 0
    assert leaves.watch.ledger.run.largest.get(ACTIVATIONS, 0) == 0
    assert module.seen[0]["metrics"]["prefix_host_bytes"] > 0
    assert module.actor.prefix_on_host is False  # as it was, once the run is over


# ---- truth ----


def test_metrics_say_what_the_ledger_saw(parity_folder, tmp_path):
    module, look = looked(parity_folder, tmp_path, PrefillReuse(), beta=0.04)
    metrics = module.seen[-1]["metrics"]
    totals = look.watch.ledger.step.totals()
    assert {name for name in metrics if name.startswith("memory/")} == {f"memory/{stage.key}" for stage in totals}
    assert metrics["memory/train"] == totals[Stage.TRAIN]
    real = sum(
        p.untyped_storage().nbytes()
        for p in {p.untyped_storage()._cdata: p for p in module.policy.parameters()}.values()
    )
    assert look.watch.ledger.run.largest[PARAMETERS] == real
    assert look.watch.ledger.run.largest[GRADIENTS] == real
    assert look.watch.ledger.recorded()[ACTOR_KV][Stage.PREFIX_ACT] > 0


def test_a_ledger_that_is_wrong_is_found_out(parity_folder, tmp_path):
    class Forgets(PhaseCallback):
        """Frees the moments behind the ledger's back."""

        def on_phase_start(self, trainer, phase):
            if phase is Phase.SCORE and trainer.lightning_module.rollouts_done == 1:
                self.kept = [(t, t.clone()) for t in trainer.strategy.states.optimizer.moments()]
                for t, _ in self.kept:
                    t.untyped_storage().resize_(0)

        def on_phase_end(self, trainer, phase):
            if phase is Phase.TRAIN and trainer.lightning_module.rollouts_done == 1:
                for t, values in self.kept:
                    t.untyped_storage().resize_(values.untyped_storage().nbytes())
                    t.copy_(values)

    look = Look()
    run(parity_folder, tmp_path, callbacks=[Forgets(), look])
    found = look.watch.mismatches
    assert len(found) == 2  # at the end of SCORE and of TRAIN
    assert all("optimizer_moments: the ledger has" in m and "its storages 0" in m for m in found)
    with pytest.warns(UserWarning, match="memory ledger, train: gradients: the ledger has 8 bytes .* its storages 0"):
        watch_of({GRADIENTS: 8}, {GRADIENTS: []}).phase_ended(Phase.TRAIN)


def watch_of(said, tensors) -> MemoryWatch:
    """A watch in TRAIN with one holder."""
    watch = MemoryWatch()
    watch.start(torch.device("cpu"))
    watch.holders["one"] = SimpleNamespace(state_bytes=lambda: said, state_tensors=lambda: tensors)
    watch.phase_started(Phase.TRAIN)
    return watch


def test_report_prints_and_writes(parity_folder, tmp_path, capsys):
    report = MemoryReport()
    _, look = looked(parity_folder, tmp_path, report, PhaseOffload(), beta=0.04)
    out = capsys.readouterr().out
    assert "optimizer moments" in out and "total" in out
    content = json.loads(report.written.read_text())
    assert content["states"][MOMENTS]["update"] == look.watch.ledger.recorded()[MOMENTS][Stage.UPDATE] > 0
    assert content["classes"][MOMENTS] == "permanent"


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_report_that_could_not_be_written_is_refused_before_training(parity_folder, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"MemoryReport: dirpath=.* is no folder to write to .*; set another"):
        run(parity_folder, tmp_path, callbacks=[MemoryReport(dirpath=str(tmp_path / name))])


# ---- stops, failures, resume ----

QUICK = dict(beta=0.04)


@pytest.fixture(scope="module")
def straight(parity_folder, tmp_path_factory):
    """Never stopped, nothing offloaded."""
    return fit(parity_folder, tmp_path_factory.mktemp("straight"), **QUICK)


@pytest.mark.parametrize(
    ("point", "parts"),
    [
        (("on_phase_start", 1, "rollout"), False), (("on_unit_start", 2, "ref_suffix"), True),
        (("on_phase_start", 2, "update"), True), (("on_train_batch_end", 4, ""), False),
    ],
    ids=["rollout", "score-parts", "update-parts", "between-batches"],
)  # fmt: skip
def test_a_stopped_run_with_offload_ends_like_a_plain_one(parity_folder, straight, tmp_path, point, parts):
    chunk = 8 * largest(parity_folder) if parts else None
    callbacks = lambda: [PrefixOverlap(), PhaseOffload(update_chunk_bytes=chunk)]  # noqa: E731
    with pytest.raises(SystemExit):
        fit(parity_folder, tmp_path, stop=StopAt(*point), callbacks=callbacks(), **QUICK)
    second = fit(parity_folder, tmp_path, ckpt_path="last", callbacks=callbacks(), **QUICK)
    assert not differences(compared(second.checkpoint), compared(straight.checkpoint))


@pytest.mark.parametrize("phase", ["rollout", "score", "train", "update"])
def test_after_a_crash_everything_is_whole(parity_folder, tmp_path, phase):
    class Crash(PhaseCallback):
        def on_phase_start(self, trainer, now):
            if now.value == phase and trainer.lightning_module.rollouts_done == 1:
                self.module = trainer.lightning_module
                raise RuntimeError("scripted")

    crash, strategy = Crash(), RollplexStrategy(admission="always")
    with pytest.raises(RuntimeError, match="scripted"):
        run(parity_folder, tmp_path, callbacks=[PhaseOffload(), crash], beta=0.04, trainer={"strategy": strategy})
    module = crash.module
    assert all(p.untyped_storage().nbytes() > 0 for p in module.reference.hf.parameters())
    fresh = {n: p for n, p in module.reference.hf.named_parameters()}
    original = dict(load_hf(str(parity_folder), "float32").named_parameters())
    assert all(torch.equal(p, original[n]) for n, p in fresh.items())
    assert module.actor.prefix_on_host is False


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (dict(offload=[GRADIENTS]), {}, "'gradients' cannot leave the device: on one device they are freed"),
        (dict(offload=[PARAMETERS]), {}, "'parameters' cannot leave the device: trainer and engine compute"),
        (dict(offload=[REFERENCE]), {}, r"'reference_weights' cannot leave the device: there is none .* \(beta=0, or lora\)"),
        (dict(offload=[MASTERS]), {}, "'masters' cannot leave the device: float32 parameters have none"),
        (dict(offload=[ACTOR_KV]), {}, "'actor_prefix_kv' cannot leave the device: later phases"),
        (dict(offload=[SUFFIX]), {}, "'suffix_activations' cannot leave the device: each suffix pass makes and reads"),
        (dict(update_chunk_bytes=1000), {}, "update_chunk_bytes=1000 is smaller than the optimizer states"),
        (dict(offload=[KV_POOL], update_chunk_bytes=10**9), {}, "optimizer_moments is not offloaded: add it"),
        (dict(offload=[MOMENTS], update_chunk_bytes=10**9), dict(dtype="bfloat16"), "masters is not offloaded"),
    ],
)  # fmt: skip
def test_what_cannot_leave_is_an_error_that_says_why(parity_folder, tmp_path, arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        run(parity_folder, tmp_path, callbacks=[PhaseOffload(**arguments)], **settings)


def test_an_engine_without_a_pool_is_refused_by_name_and_left_alone_by_auto(parity_folder, tmp_path):
    class Poolless(FakeEngine):
        release_kv = RolloutEngine.release_kv

    def engine():
        return Poolless(lambda r: Scripted([65, 66]))

    with pytest.raises(ValueError, match=r"'kv_pool' cannot leave the device: Poolless has no pool"):
        run(parity_folder, tmp_path, engine=engine(), callbacks=[PhaseOffload([KV_POOL])])
    offload = PhaseOffload()
    run(parity_folder, tmp_path, engine=engine(), callbacks=[offload])
    assert offload.states == (MOMENTS, ACTIVATIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(offload=["moments"]), r"offload names \['moments'\]; there are parameters, masters, optimizer"),
        (dict(offload="all"), "offload='all' must be auto or a list"),
        (dict(update_chunk_bytes=0), "update_chunk_bytes=0 must be a whole number, 1 or more"),
        (dict(update_chunk_bytes="4GB"), "update_chunk_bytes='4GB' must be a whole number, 1 or more, or null"),
        (dict(update_chunk_bytes=True), "update_chunk_bytes=True must be a whole number, 1 or more"),
        (dict(update_chunk_bytes=float("nan")), "update_chunk_bytes=nan must be a whole number, 1 or more"),
        (dict(offload=None), "offload=None must be auto or a list of states"),
        (dict(offload=[{}]), "offload=.* must be auto or a list of states"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        PhaseOffload(**arguments)


def test_listed_twice_is_refused(parity_folder, tmp_path):
    with pytest.raises(ValueError, match="PhaseOffload is listed twice"):
        run(parity_folder, tmp_path, callbacks=[PhaseOffload(), PhaseOffload()])


# ---- the limit of the window ----


def test_the_windows_admission_asks_the_ledger(parity_folder, tmp_path):
    """A limit between what is held without and with all prefixes keeps some of them out, and changes no bit."""
    settings = dict(steps=3, callbacks=[PrefixOverlap()], max_completion_length=24)
    look = Look()
    free = run(parity_folder, tmp_path, **(settings | dict(callbacks=[PrefixOverlap(), look])))
    totals = look.watch.ledger.run.totals()
    limit = int((totals[Stage.ROLLOUT] + totals[Stage.PREFIX_ACT]) / 2)
    tight_look = Look()
    strategy = RollplexStrategy(engine=TorchEngine(), memory_limit_bytes=limit, admission="always")
    tight = run(
        parity_folder,
        tmp_path,
        **(settings | dict(callbacks=[PrefixOverlap(), tight_look])),
        trainer={"strategy": strategy},
    )
    assert tight.seen[-1]["metrics"]["units_refused/memory"] >= 1
    assert tight_look.watch.ledger.step.totals().get(Stage.PREFIX_ACT, 0) <= limit
    assert same_bits(weights(free), weights(tight))
    with pytest.raises(ValueError, match="memory_limit_bytes=0 must be a whole number, 1 or more"):
        RollplexStrategy(memory_limit_bytes=0)
    for strategy in (RollplexStrategy, RollplexDDPStrategy):
        with pytest.raises(ValueError, match="memory_limit_bytes=True must be a whole number, 1 or more, or null"):
            strategy(memory_limit_bytes=True)
