"""The embedded engine against transformers' generate and against the trainer's own suffix pass."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_helpers import END, VISION, generate, requests_for, run, started, trainer_logps
from fake_engine import FakeEngine, Scripted
from helpers import make_prompt, picture
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.data.records import Request, Rollout, SamplingParams
from rollplex.engines import EngineContext, TorchEngine, WindowState
from rollplex.engines.decode import Bundle, make_layout
from rollplex.engines.text import Detokenizer
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.tiny import build_tiny, build_tiny_in_memory

CPU = torch.device("cpu")


@pytest.fixture
def actor(tiny_parity_model) -> Qwen2_5VL:
    return Qwen2_5VL(tiny_parity_model)


@pytest.fixture(params=["here", "in_another_process"])
def start(request):
    """What starts an engine: the one contract, in the trainer's process and behind `RemoteEngine`."""
    engines = []

    def start(actor, processor, **settings):
        if request.param == "here":
            engine = started(actor, processor, **settings)
        else:
            engine = request.getfixturevalue("engine_process").lend(TorchEngine(**settings))
            engine.start(EngineContext(model=actor, processor=processor, device=actor.device))
        engines.append(engine)
        return engine

    yield start
    for engine in engines[-1:]:
        engine.close()


@pytest.fixture(scope="session")
def prompts(tiny_processor):
    """Text only, one picture, two pictures of mixed sizes, a video, both; lengths differ, two are equal."""

    def make(text: str, **kw):
        return make_prompt(tiny_processor, text, name=text, **kw)

    return [
        make("plain question"),
        make("one picture", images=[picture(56, 84)]),
        make("two pictures", images=[picture(56, 84, 1), picture(140, 56, 2)]),
        make("a video", video_frames=4, fps=0.5),
        make("video and picture", images=[picture(56, 56)], video_frames=3),
        make("one picturf", images=[picture(84, 56, 5)]),
    ]


# ---- against transformers and the trainer ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [1, 4, 256])
def test_greedy_tokens_equal_generate(start, actor, tiny_processor, prompts, max_num_seqs):
    expected = [generate(actor.hf, p, 12) for p in prompts]
    assert len({tuple(e) for e in expected}) == len(prompts)
    engine = start(actor, tiny_processor, max_num_seqs=max_num_seqs)
    got = run(engine, requests_for(prompts, SamplingParams(max_tokens=12, temperature=0)))
    for b, ids in enumerate(expected):
        assert got[b, 0].token_ids.tolist() == ids, prompts[b].sample.id
        assert got[b, 0].finish_reason == "length"


def test_greedy_stops_where_generate_stops(start, actor, tiny_processor, prompts):
    free = [generate(actor.hf, p, 12) for p in prompts]
    stop = free[1][4]
    expected = [generate(actor.hf, p, 12, eos=stop) for p in prompts]
    params = SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(stop,))
    got = run(start(actor, tiny_processor), requests_for(prompts, params))
    for b, ids in enumerate(expected):
        assert got[b, 0].token_ids.tolist() == ids
        assert got[b, 0].finish_reason == ("stop" if ids[-1] == stop else "length")
    assert got[1, 0].finish_reason == "stop" and stop in got[1, 0].token_ids.tolist()[-1:]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("max_num_seqs", [3, 256])
def test_lp_01_logps_equal_the_trainers(start, actor, tiny_processor, prompts, temperature, max_num_seqs):
    params = SamplingParams(max_tokens=9, temperature=temperature, stop_token_ids=(END, *range(40)))
    got = run(start(actor, tiny_processor, max_num_seqs=max_num_seqs), requests_for(prompts, params, g=4))
    assert len({len(r) for r in got.values()}) > 3
    for (b, _), rollout in got.items():
        expected = trainer_logps(actor, prompts[b], rollout, temperature)
        assert (rollout.logps - expected).abs().max() < 1e-5
        assert (torch.exp(rollout.logps - expected) - 1).abs().max() < 1e-5


def test_top_p_and_top_k_logps_belong_to_the_truncated_distribution(start, actor, tiny_processor, prompts):
    params = SamplingParams(max_tokens=6, top_k=20, top_p=0.8)
    got = run(start(actor, tiny_processor), requests_for(prompts, params, g=2))
    for (b, _), rollout in got.items():
        full = trainer_logps(actor, prompts[b], rollout, 1.0)
        assert (rollout.logps > full).all() and (rollout.logps <= 0).all()
    greedy = run(start(actor, tiny_processor), requests_for(prompts, SamplingParams(max_tokens=6, temperature=0)))
    narrow = run(start(actor, tiny_processor), requests_for(prompts, SamplingParams(max_tokens=6, top_k=1)))
    for key, rollout in narrow.items():
        assert torch.equal(rollout.token_ids, greedy[key].token_ids) and (rollout.logps == 0).all()


def test_repetition_penalty_equals_generate(actor, tiny_processor, prompts):
    hf = copy.deepcopy(actor.hf).eval()
    hf.set_attn_implementation("sdpa")
    engine = started(actor, tiny_processor, max_num_seqs=3)
    params = SamplingParams(max_tokens=10, temperature=0, repetition_penalty=3.0)
    mixed = requests_for(prompts, params) + [
        Request(b, 1, p, replace(params, repetition_penalty=1.0, max_tokens=4), seed=0) for b, p in enumerate(prompts)
    ]
    got = run(engine, mixed)
    for b, p in enumerate(prompts):
        hf.generation_config = type(hf.generation_config)(pad_token_id=256, repetition_penalty=3.0)
        ids = p.input_ids[None]
        out = hf.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=p.mm_token_type_ids[None],
            do_sample=False, max_new_tokens=10, suppress_tokens=list(VISION), **p.media,
        )  # fmt: skip
        assert got[b, 0].token_ids.tolist() == out[0, len(p) :].tolist()
        assert got[b, 1].token_ids.tolist() == generate(actor.hf, p, 4)


# ---- independence of batch mates, order and batch size ---------------------------------------------------------------


@pytest.fixture(scope="module")
def varied(prompts) -> list[Request]:
    """Groups of 4 whose responses end early and late."""
    params = SamplingParams(max_tokens=14, stop_token_ids=(END, *range(32)))
    return requests_for(prompts, params, g=4)


def same(a: Rollout, b: Rollout) -> bool:
    return (
        torch.equal(a.token_ids, b.token_ids)
        and torch.allclose(a.logps, b.logps, atol=1e-5)
        and (a.text, a.finish_reason) == (b.text, b.finish_reason)
    )


@pytest.fixture(scope="module")
def expected(tiny_processor, varied) -> dict[tuple[int, int], Rollout]:
    """Every request alone in a fresh engine, on a model with the weights of `actor`."""
    actor = Qwen2_5VL(build_tiny_in_memory(init_std=0.1, seed=1)[0])
    out = {r.key: run(started(actor, tiny_processor), [r])[r.key] for r in varied}
    assert {r.finish_reason for r in out.values()} == {"stop", "length"}
    return out


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 5, 8, 24])
def test_tokens_do_not_depend_on_max_num_seqs(actor, tiny_processor, varied, expected, max_num_seqs):
    """Down to fewer slots than a group has rows: its rows are then admitted in pieces."""
    engine = started(actor, tiny_processor, max_num_seqs=max_num_seqs)
    got = run(engine, varied)
    assert all(same(got[k], expected[k]) for k in expected)
    assert engine.prefilled_groups == 6


def test_tokens_do_not_depend_on_order_or_batch_mates(start, actor, tiny_processor, varied, expected):
    engine = start(actor, tiny_processor, max_num_seqs=7, max_prefill_tokens=40)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(varied))
        got = run(engine, [varied[i] for i in order])
        assert all(same(got[k], expected[k]) for k in expected)
    some = [r for r in varied if r.index != 2 and r.group != 3]
    got = run(engine, some)
    assert all(same(got[r.key], expected[r.key]) for r in some)


def test_requests_may_come_while_others_decode(actor, tiny_processor, varied, expected):
    """The batch grows past what its storage was made for, and rows that end at once leave holes in it."""
    engine = started(actor, tiny_processor)
    got: list[Rollout] = []
    parts = [varied[:1], varied[20:], varied[1:2], varied[2:20]]
    for steps, part in zip((4, 3, 3, 100), parts, strict=True):
        engine.submit(part)
        assert engine.window is WindowState.PREFILL
        for _ in range(steps):
            got += engine.step()
    assert engine.window is WindowState.IDLE and len(got) == len(varied)
    assert all(same(r, expected[r.key]) for r in got)


def test_one_token_responses_in_fewer_slots_than_rows(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor, max_num_seqs=2)
    got = run(engine, requests_for(prompts, SamplingParams(max_tokens=1), g=5))
    assert engine.decode_steps == 0 and len({tuple(r.token_ids.tolist()) for r in got.values()}) > 10
    for (b, _), rollout in got.items():
        assert (rollout.logps - trainer_logps(actor, prompts[b], rollout, 1.0)).abs().max() < 1e-5


def test_requests_with_different_settings_share_a_batch(start, actor, tiny_processor, prompts):
    settings = [
        SamplingParams(max_tokens=3),
        SamplingParams(max_tokens=8, temperature=0.5),
        SamplingParams(max_tokens=5, temperature=0, stop_token_ids=(END,)),
        SamplingParams(max_tokens=9, top_p=0.5, banned_token_ids=(65, 66)),
        SamplingParams(max_tokens=7, repetition_penalty=1.5),
        SamplingParams(max_tokens=6, min_p=0.1, top_k=7),
    ]
    mixed = [Request(b, i, p, s, seed=10 * b + i) for b, p in enumerate(prompts) for i, s in enumerate(settings)]
    got = run(start(actor, tiny_processor), mixed)
    for r in mixed[::5]:  # every setting with another prompt
        assert same(got[r.key], run(start(actor, tiny_processor), [r])[r.key])


@pytest.mark.parametrize("g", [1, 2, 8])
def test_group_sizes(actor, tiny_processor, prompts, g):
    params = SamplingParams(max_tokens=5)
    got = run(started(actor, tiny_processor), requests_for(prompts, params, g=g))
    for (b, _), rollout in got.items():
        assert (rollout.logps - trainer_logps(actor, prompts[b], rollout, 1.0)).abs().max() < 1e-5


def test_lp_03_generation_config_of_the_checkpoint_is_ignored(tmp_path, tiny_processor, prompts):
    folder = build_tiny(tmp_path / "model")
    shipped = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.1, "top_k": 1, "top_p": 0.001}
    (folder / "generation_config.json").write_text(json.dumps(shipped))
    hf = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    assert hf.generation_config.top_k == 1
    actor = Qwen2_5VL(hf)
    got = run(started(actor, tiny_processor), requests_for(prompts[:2], SamplingParams(max_tokens=4), g=8))
    for b in range(2):
        assert len({tuple(got[b, i].token_ids.tolist()) for i in range(8)}) == 8
        assert (got[b, 0].logps - trainer_logps(actor, prompts[b], got[b, 0], 1.0)).abs().max() < 1e-5


# ---- rows, slots and memory ------------------------------------------------------------------------------------------


def test_finished_rows_are_not_decoded(actor, tiny_processor, prompts):
    """A response of R tokens costs R-1 decoded rows, whatever the longest one of the batch is."""
    lengths = [1, 2, 9, 30, 4, 1]
    mixed = [
        Request(b, i, p, SamplingParams(max_tokens=n + i), seed=b)
        for b, (p, n) in enumerate(zip(prompts, lengths, strict=True))
        for i in range(3)
    ]
    engine = started(actor, tiny_processor)
    got = run(engine, mixed)
    assert all(len(got[r.key]) == r.params.max_tokens for r in mixed)
    assert engine.decoded_rows == sum(r.params.max_tokens - 1 for r in mixed)
    assert engine.decode_steps == max(lengths) + 2 - 1


def test_window_follows_prefills_and_rows(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor, max_num_seqs=4)
    assert engine.window is WindowState.IDLE and engine.step() == []
    engine.submit(requests_for(prompts[:3], SamplingParams(max_tokens=3), g=2))
    states = []
    while engine.window is not WindowState.IDLE:
        states.append(engine.window)
        engine.step()
    # Two groups fit (prompts of two lengths: two prefills), the third comes in when they are done.
    p, d = WindowState.PREFILL, WindowState.DECODE
    assert states == [p, p, p, p, p, d, d]
    engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=2), g=2))
    assert engine.window is p
    engine.step()
    assert engine.window is d


def test_equal_lengths_are_prefilled_together_within_the_token_budget(actor, tiny_processor, prompts):
    one, other = prompts[1], prompts[5]
    assert len(one) == len(other)
    calls: list[int] = []
    for budget, expected in ((2 * len(one), [2, 2]), (2 * len(one) - 1, [1, 1, 1, 1]), (1, [1, 1, 1, 1])):
        engine = started(actor, tiny_processor, max_prefill_tokens=budget)
        original, calls = engine._model.prefix, []
        engine._model.prefix = lambda ps, original=original, calls=calls, **kw: (
            calls.append(len(ps)) or original(ps, **kw)
        )
        run(engine, requests_for([one, other, one, other], SamplingParams(max_tokens=2), g=3))
        assert calls == expected


def test_finished_groups_give_their_prompt_kv_back(actor, tiny_processor, prompts):
    params = [SamplingParams(max_tokens=n) for n in (2, 3, 12, 12)]
    same_length = [prompts[1], prompts[5], prompts[1], prompts[5]]
    engine = started(actor, tiny_processor)
    engine.submit(
        [Request(b, i, p, s, seed=b) for b, (p, s) in enumerate(zip(same_length, params, strict=True)) for i in (0, 1)]
    )
    held = []
    done: dict[tuple[int, int], Rollout] = {}
    while engine.window is not WindowState.IDLE:
        done |= {r.key: r for r in engine.step()}
        held.append(engine.prompt_kv_bytes)
    assert held[0] == 4 * held[5] // 2 and held[-1] == 0
    for (b, _), rollout in done.items():
        assert (rollout.logps - trainer_logps(actor, same_length[b], rollout, 1.0)).abs().max() < 1e-5


def test_own_kv_grows_with_the_responses_and_is_released(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor)
    params = SamplingParams(max_tokens=1500, stop_token_ids=(END, *range(32)))
    got = run(engine, requests_for(prompts, params, g=4))
    longest = max(len(r) for r in got.values())
    per_token = 2 * 2 * 2 * 32 * 4  # k and v, layers, heads, head size, float32
    held = engine._own.nbytes
    assert 0 < held <= 24 * max(2 * longest, 8) * per_token
    assert engine.release_kv() == held and engine._own.nbytes == 0 and engine.release_kv() == 0
    assert engine.restore_kv() == held and engine.restore_kv() == 0
    again = run(engine, requests_for(prompts, params, g=4))
    assert all(same(got[k], again[k]) for k in got)


def test_layout_of_uneven_groups():
    """Rows of three bundles in any order find their own group's place and come back in order."""

    class Stub(Bundle):
        def __init__(self, groups: int) -> None:
            self.groups = [[]] * groups

    bundle_N, group_N = np.array([2, 0, 0, 2, 0, 2, 0]), np.array([1, 2, 0, 1, 2, 0, 2])
    layout = make_layout([Stub(3), Stub(2), Stub(2)], bundle_N, group_N, CPU)
    assert [len(p.bundle.groups) for p in layout.parts] == [3, 2]  # the bundle without rows is left out
    slots = torch.cat([p.slots_F for p in layout.parts])
    assert torch.equal(slots[layout.place_N], torch.arange(7))
    assert layout.parts[0].slots_F.view(3, 3)[2].tolist() == [1, 4, 6]
    assert layout.parts[1].slots_F.view(2, 2)[1].tolist() == [0, 3]
    plain = make_layout([Stub(2)], np.zeros(4, np.int64), np.array([0, 0, 1, 1]), CPU)
    assert plain.place_N is None and plain.parts[0].slots_F is None


def test_abort_returns_everything_unfinished(start, actor, tiny_processor, prompts):
    engine = start(actor, tiny_processor, max_num_seqs=3)
    requests = requests_for(prompts[:3], SamplingParams(max_tokens=20), g=5)
    full = run(started(actor, tiny_processor), requests)
    engine.submit(requests)
    while engine.progress < 4:
        assert engine.step() == []
    aborted = engine.abort()
    assert engine.window is WindowState.IDLE and getattr(engine, "prompt_kv_bytes", 0) == 0
    assert sorted(r.key for r in aborted) == sorted(r.key for r in requests)
    assert {r.finish_reason for r in aborted} == {"abort"}
    lengths = sorted(len(r) for r in aborted)
    assert lengths[:12] == [0] * 12 and 4 <= lengths[12] == lengths[14] < 20
    for r in aborted:
        assert torch.equal(r.token_ids, full[r.key].token_ids[: len(r)]) and len(r.logps) == len(r)
    engine.publish(3)
    again = run(engine, requests)
    assert all(same(again[k], replace(full[k], weights_version=3)) for k in full)
    assert {r.weights_version for r in again.values()} == {3}


# ---- how responses end -----------------------------------------------------------------------------------------------


def scripted_logits(monkeypatch, engine: TorchEngine, text: str, tokenizer, end: int | None = None) -> None:
    """Every row says `text`, then `end` (or text again): the logits depend on how many tokens the row has."""
    ids = tokenizer(text)["input_ids"] + ([end] if end is not None else [])

    def logits(hidden_UH: torch.Tensor) -> torch.Tensor:
        lengths = engine._rows.length[: engine._rows.n]
        out = torch.zeros(len(hidden_UH), 264)
        out[:, ids[int(lengths[0]) % len(ids)]] = 100.0
        return out

    monkeypatch.setattr(engine, "_logits", logits)


def test_stop_token_is_in_the_ids_but_not_in_the_text(actor, tiny_processor, prompts, monkeypatch):
    engine = started(actor, tiny_processor)
    scripted_logits(monkeypatch, engine, "abc", tiny_processor.tokenizer, end=ord("!"))
    params = SamplingParams(max_tokens=10, stop_token_ids=(ord("!"),))
    rollout = run(engine, requests_for(prompts[:1], params))[0, 0]
    assert rollout.token_ids.tolist() == [*b"abc!"] and rollout.text == "abc" and rollout.finish_reason == "stop"


@pytest.mark.parametrize(("max_tokens", "reason", "ids"), [(3, "length", 3), (4, "stop", 4), (5, "stop", 4)])
def test_stop_wins_over_length_at_the_last_token(actor, tiny_processor, prompts, monkeypatch, max_tokens, reason, ids):
    engine = started(actor, tiny_processor)
    scripted_logits(monkeypatch, engine, "abc", tiny_processor.tokenizer, end=END)
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(END,))
    rollout = run(engine, requests_for(prompts[:1], params))[0, 0]
    assert (rollout.finish_reason, len(rollout), rollout.text) == (reason, ids, "abc")


@pytest.mark.parametrize(
    ("said", "stops", "text"),
    [
        ("so </answer> and on", ("</answer>",), "so </answer>"),
        ("aXbYc", ("Y", "X"), "aX"),
        ("naïve été", ("é",), "naïve é"),
        ("日本語です。はい", ("です。",), "日本語です。"),
        ("<|im_start|>ab<|im_start|>cd", ("bc",), "abc"),
        ("b" + 9 * "<|im_start|>" + "cd", ("bc",), "bc"),
        ("abab ababc", ("ababc",), "abab ababc"),
    ],
)
def test_stop_strings(actor, tiny_processor, prompts, monkeypatch, said, stops, text):
    engine = started(actor, tiny_processor)
    scripted_logits(monkeypatch, engine, said, tiny_processor.tokenizer)
    rollout = run(engine, requests_for(prompts[:1], SamplingParams(max_tokens=60, stop=stops)))[0, 0]
    assert (rollout.text, rollout.finish_reason) == (text, "stop")


def test_broken_utf8_is_decoded(tiny_processor):
    detokenizer = Detokenizer(tiny_processor.tokenizer)
    assert detokenizer.decode([0x61, 0xE6, 0x97, 0x62, 0xFF]) == "a\ufffdb\ufffd"
    assert detokenizer.decode([]) == "" and detokenizer.decode([END, 0x61, 256]) == "a"
    assert detokenizer.completes([0xFF, 0xE6, 0x97, 0xA5], ["日"])
    assert not detokenizer.completes([0xE6, 0x97], ["日"])


# ---- what is never sampled -------------------------------------------------------------------------------------------


def test_tok_05a_vision_tokens_are_never_sampled(actor, tiny_processor, prompts, monkeypatch):
    """Even when their logits are by far the largest, and although no request bans them."""
    engine = started(actor, tiny_processor)
    original = engine._logits

    def pushed(hidden_UH):
        return original(hidden_UH).index_add(1, torch.tensor(VISION), torch.full((len(hidden_UH), 4), 1e4))

    monkeypatch.setattr(engine, "_logits", pushed)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, banned_token_ids=(97,))
        got = run(engine, requests_for(prompts, params, g=4))
        for rollout in got.values():
            assert not set(rollout.token_ids.tolist()) & {*VISION, 97}
        monkeypatch.setattr(engine, "_logits", original)
        plain = run(engine, requests_for(prompts, params, g=4))
        assert all(same(got[k], plain[k]) for k in got)
        monkeypatch.setattr(engine, "_logits", pushed)


def test_logits_that_are_not_finite_name_the_row(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor)
    with torch.no_grad():
        actor.hf.lm_head.weight[5] = float("nan")
    engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=3)))
    with pytest.raises(FloatingPointError, match="plain question"):
        engine.step()


# ---- the trainer's model is not touched ------------------------------------------------------------------------------


def test_spl_05_checkpointing_does_not_change_rollouts(actor, tiny_processor, varied, expected):
    hf = actor.hf.train()
    for reentrant in (False, True):
        hf.gradient_checkpointing_enable({"use_reentrant": reentrant})
        flags = {n: (m.training, getattr(m, "gradient_checkpointing", None)) for n, m in hf.named_modules()}
        assert any(flag for _, flag in flags.values())
        got = run(started(actor, tiny_processor), varied)
        assert all(same(got[k], expected[k]) for k in expected)
        after = {n: (m.training, getattr(m, "gradient_checkpointing", None)) for n, m in hf.named_modules()}
        assert after == flags


def test_pos_03_rope_deltas_of_one_side_do_not_reach_the_other(actor, tiny_processor, prompts, varied, expected):
    actor.hf.model.rope_deltas = torch.full((4, 1), 77)
    engine = started(actor, tiny_processor)
    for requests in (varied[8:24], varied[:4], varied):
        got = run(engine, requests)
        assert all(same(rollout, expected[k]) for k, rollout in got.items())
    assert torch.equal(actor.hf.model.rope_deltas, torch.full((4, 1), 77))


def test_parameters_and_gradients_stay_as_they_are(actor, tiny_processor, varied):
    before = {n: (p.data_ptr(), p.requires_grad, p.clone()) for n, p in actor.hf.named_parameters()}
    got = run(started(actor, tiny_processor), varied)
    for n, p in actor.hf.named_parameters():
        pointer, grad, value = before[n]
        assert p.data_ptr() == pointer and p.requires_grad == grad and p.grad is None and torch.equal(p, value)
    first = got[0, 0]
    assert not first.logps.is_inference() and not first.logps.requires_grad


# ---- weights ---------------------------------------------------------------------------------------------------------


def test_sync_05_in_place_updates_are_seen_without_a_copy(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor)
    pointers = {n: p.data_ptr() for n, p in actor.hf.named_parameters(remove_duplicate=False)}
    requests = requests_for(prompts, SamplingParams(max_tokens=8), g=2)
    before = run(engine, requests)
    with torch.no_grad():
        for p in actor.hf.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
    actor.version = 1
    engine.publish(1)
    after = run(engine, requests)
    assert {r.weights_version for r in before.values()} == {0} and {r.weights_version for r in after.values()} == {1}
    assert {n: p.data_ptr() for n, p in engine._model.hf.named_parameters(remove_duplicate=False)} == pointers
    assert any(not torch.equal(before[k].token_ids, after[k].token_ids) for k in before)
    for (b, _), rollout in after.items():
        assert (rollout.logps - trainer_logps(actor, prompts[b], rollout, 1.0)).abs().max() < 1e-5


def test_reallocated_weights_are_bound_again(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor)
    requests = requests_for(prompts[:2], SamplingParams(max_tokens=8))
    run(engine, requests)
    for p in actor.hf.parameters():
        p.data = p.data + 0.01
    actor.version = 5
    engine.publish(5)
    assert engine._model.shares_storage_with(actor)
    for (b, _), rollout in run(engine, requests).items():
        assert (rollout.logps - trainer_logps(actor, prompts[b], rollout, 1.0)).abs().max() < 1e-5


def test_publish_and_release_only_between_rollouts(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor)
    engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=3)))
    for call in (lambda: engine.publish(1), engine.release_kv):
        with pytest.raises(AssertionError, match="between rollouts"):
            call()


# ---- refusals and the end --------------------------------------------------------------------------------------------


def test_tok_11_a_prompt_that_lost_its_pixels_is_refused(start, actor, tiny_processor, prompts):
    engine = start(actor, tiny_processor)
    checked = 0
    for prompt in prompts:
        for lost in prompt.media.keys() - {"second_per_grid_ts"}:
            without = replace(prompt, media={k: v for k, v in prompt.media.items() if k != lost})
            with pytest.raises(ValueError, match=f"tokens but no {lost}"):
                engine.submit(requests_for([without], SamplingParams(max_tokens=3)))
            assert engine.window is WindowState.IDLE
            checked += 1
    assert checked >= 4


def test_requests_that_cannot_run_are_refused(start, actor, tiny_processor, prompts):
    engine = start(actor, tiny_processor)
    room = 4096 - len(prompts[0])
    engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=room)))
    engine.abort()
    with pytest.raises(ValueError, match=r"plain question.*4096.*max_completion_length"):
        engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=room + 1)))
    with pytest.raises(ValueError, match="temperature=-1"):
        engine.submit(requests_for(prompts[:1], SamplingParams(max_tokens=2, temperature=-1)))
    empty = replace(prompts[0], input_ids=torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="no tokens"):
        engine.submit(requests_for([empty], SamplingParams(max_tokens=2)))
    assert engine.window is WindowState.IDLE
    for settings in ({"max_num_seqs": 0}, {"max_prefill_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            TorchEngine(**settings)


def test_close_frees_everything_and_may_come_twice(actor, tiny_processor, prompts):
    TorchEngine().close()
    engine = started(actor, tiny_processor)
    engine.submit(requests_for(prompts, SamplingParams(max_tokens=9)))
    engine.step()
    engine.close()
    engine.close()
    assert engine.window is WindowState.IDLE and engine.prompt_kv_bytes == 0 and engine._model is None


# ---- the scripted engine of other tests ------------------------------------------------------------------------------


def test_fake_engine_follows_its_script(prompts):
    params = SamplingParams(max_tokens=5)
    script = {
        (0, 0): Scripted([10, 263, 30]),
        (0, 1): Scripted([*b"hi"], logps=[-0.5, -2.0], finish_reason="length"),
        (1, 0): Scripted([], text="nothing"),
        (1, 1): Scripted([1, 2, 3, 4]),
    }
    engine = FakeEngine(script)
    engine.start(EngineContext(model=object(), processor=None, device=CPU))
    engine.publish(2)
    got = run_fake(engine, requests_for(prompts[:2], params, g=2))
    assert got[0, 0].token_ids.tolist() == [10, 263, 30] and got[0, 0].finish_reason == "stop"
    assert got[0, 1].text == "hi" and got[0, 1].logps.tolist() == [-0.5, -2.0]
    assert (len(got[1, 0]), got[1, 0].text, got[1, 0].weights_version) == (0, "nothing", 2)
    assert engine.steps == 2 + 4
    failing = FakeEngine(script, fail_at=3, error=MemoryError("scripted"))
    failing.submit(requests_for(prompts[:2], params, g=2))
    for _ in range(3):
        failing.step()
    with pytest.raises(MemoryError, match="scripted"):
        failing.step()
    assert sorted(len(r) for r in failing.abort()) == [1, 1, 1]
    assert failing.window is WindowState.IDLE


def run_fake(engine, requests) -> dict[tuple[int, int], Rollout]:
    engine.submit(requests)
    out = {}
    while engine.window is not WindowState.IDLE:
        out |= {r.key: r for r in engine.step()}
    return out
