"""The decode step of fixed shapes: the same responses as the plain one, few shapes, nothing that a graph cannot hold."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import engine_helpers
import pytest
import torch
from engine_helpers import END, drain
from helpers import make_prompt, picture
from runs import largest_difference, run, same_bits, weights
from torch.utils._python_dispatch import TorchDispatchMode

from rollplex.callbacks import GroupStreaming, PrefixOverlap
from rollplex.data.records import Request, Rollout, SamplingParams
from rollplex.engines import TorchEngine, WindowState, graph_decode
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.tiny import build_tiny_in_memory

ENDS = (END, *range(32))
started = partial(engine_helpers.started, cuda_graphs="eager")
requests_for = partial(engine_helpers.requests_for, g=4)


@pytest.fixture
def actor(tiny_parity_model) -> Qwen2_5VL:
    return Qwen2_5VL(tiny_parity_model)


@pytest.fixture(scope="module")
def prompts(tiny_processor):
    """Five groups in bundles of four lengths: two of them have one length."""

    def make(text: str, **kw):
        return make_prompt(tiny_processor, text, name=text, **kw)

    return [
        make("plain question"),
        make("one picture", images=[picture(56, 84)]),
        make("two pictures", images=[picture(56, 84, 1), picture(140, 56, 2)]),
        make("a video", video_frames=4, fps=0.5),
        make("one picturf", images=[picture(84, 56, 5)]),
    ]


def finish(engine: TorchEngine, requests=()) -> dict[tuple[int, int], Rollout]:
    engine.submit(requests)
    return {r.key: r for r in drain(engine)}


def assert_same(got, expected) -> None:
    assert got.keys() == expected.keys()
    for key, rollout in got.items():
        assert torch.equal(rollout.token_ids, expected[key].token_ids), key
        assert (rollout.logps - expected[key].logps).abs().max() <= 1e-5
        assert (rollout.text, rollout.finish_reason) == (expected[key].text, expected[key].finish_reason)


# ---- the same responses ----------------------------------------------------------------------------------------------

SETTINGS = {
    "stop tokens": SamplingParams(max_tokens=14, stop_token_ids=ENDS),
    "hot": SamplingParams(max_tokens=9, temperature=1.5, stop_token_ids=ENDS),
    "truncated": SamplingParams(max_tokens=9, temperature=0.7, top_p=0.8, top_k=20, stop_token_ids=ENDS),
    "greedy": SamplingParams(max_tokens=9, temperature=0),
    "penalty": SamplingParams(max_tokens=9, repetition_penalty=1.5, stop_token_ids=ENDS),
}


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("max_num_seqs", [256, 7, 3])
def test_responses_equal_the_plain_steps(actor, tiny_processor, prompts, name, max_num_seqs):
    """Down to fewer slots than a group has rows; 20 rows are no power of two."""
    requests = requests_for(prompts, SETTINGS[name])
    plain = started(actor, tiny_processor, max_num_seqs=max_num_seqs, cuda_graphs=False)
    engine = started(actor, tiny_processor, max_num_seqs=max_num_seqs)
    expected = finish(plain, requests)
    assert_same(finish(engine, requests), expected)
    assert name == "greedy" or len({len(r) for r in expected.values()}) > 3
    assert engine.graph_replays == engine.decode_steps == plain.decode_steps
    assert engine.decoded_rows == plain.decoded_rows
    assert (plain.graph_captures, plain.graph_replays) == (0, 0)


def test_mixed_settings_and_requests_that_come_later(actor, tiny_processor, prompts):
    mixed = [
        Request(b, i, p, replace(s, max_tokens=s.max_tokens + 3 * b), seed=10 * b + i)
        for b, p in enumerate(prompts)
        for i, s in enumerate(SETTINGS.values())
    ]

    def staggered(engine):
        got = []
        for steps, part in zip((4, 3, 3), (mixed[:1], mixed[15:], mixed[1:2]), strict=True):
            engine.submit(part)
            for _ in range(steps):
                got += engine.step()
        return {r.key: r for r in got} | finish(engine, mixed[2:15])

    expected = staggered(started(actor, tiny_processor, cuda_graphs=False))
    assert_same(staggered(started(actor, tiny_processor)), expected)


def test_a_window_that_is_outgrown(actor, tiny_processor, prompts, monkeypatch):
    monkeypatch.setattr(graph_decode, "FIRST_WINDOW", 4)
    requests = requests_for(prompts[:2], SamplingParams(max_tokens=30), g=3)
    engine = started(actor, tiny_processor)
    assert_same(finish(engine, requests), finish(started(actor, tiny_processor, cuda_graphs=False), requests))
    assert engine.graph_captures == 4  # windows of 4, 8, 16 and all 29
    assert engine._own.layers[0].shape[1:4:2] == (8, 29)


def test_it_starts_over_after_an_abort_and_after_a_release(actor, tiny_processor, prompts):
    requests = requests_for(prompts, SETTINGS["stop tokens"])
    expected = finish(started(actor, tiny_processor, cuda_graphs=False), requests)
    engine = started(actor, tiny_processor, max_num_seqs=9)
    engine.submit(requests)
    while engine.decode_steps < 5:
        engine.step()
    aborted = [*engine.abort()]
    assert engine.window is WindowState.IDLE and engine.prompt_kv_bytes == 0 and aborted
    for r in aborted:
        assert torch.equal(r.token_ids, expected[r.key].token_ids[: len(r)])
    assert_same(finish(engine, requests), expected)
    assert engine.release_kv() > 0
    assert_same(finish(engine, requests), expected)
    assert engine.release_kv() == engine.restore_kv() > 0
    assert_same(finish(engine, requests), expected)
    engine.submit(requests)
    engine.step()
    engine.close()
    engine.close()


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [True, False])
def test_new_weights_are_used(actor, tiny_processor, prompts, in_place):
    requests = requests_for(prompts, SETTINGS["stop tokens"])
    engine = started(actor, tiny_processor)
    before = finish(engine, requests)
    with torch.no_grad():
        for p in actor.hf.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.05
            if in_place:
                p.add_(noise)
            else:
                p.data = p.data + noise
    actor.version = 1
    engine.publish(1)
    after = finish(engine, requests)
    assert_same(after, finish(started(actor, tiny_processor, cuda_graphs=False), requests))
    assert any(not torch.equal(before[k].token_ids, after[k].token_ids) for k in before)


def test_training_is_close_to_plain_and_the_same_bits_in_every_schedule(parity_folder, tmp_path):
    plain = run(parity_folder, tmp_path)
    engine = TorchEngine(cuda_graphs="eager")
    serial = run(parity_folder, tmp_path, engine=engine)
    callbacks = [PrefixOverlap(), GroupStreaming(deterministic=True)]
    beside = run(parity_folder, tmp_path, engine=TorchEngine(cuda_graphs="eager"), callbacks=callbacks)
    assert engine.graph_replays == engine.decode_steps > 0
    assert same_bits(weights(serial), weights(beside))
    assert largest_difference(weights(plain), weights(serial)) < 1e-4


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_a_row_that_retires_changes_the_buffer_only(actor, tiny_processor, prompts):
    engine = started(actor, tiny_processor)
    lengths = [2, 6, 6, 4, 6, 6, 5, 6, 6, 6, 6, 6]
    requests = [
        replace(r, params=SamplingParams(max_tokens=n))
        for r, n in zip(requests_for(prompts[:3], SamplingParams(max_tokens=1)), lengths, strict=True)
    ]
    engine.submit(requests)
    buffers, places, running = set(), [], []
    while engine.window is not WindowState.IDLE:
        engine.step()
        if engine._graphs._shapes is not None:
            buffers.add(engine._graphs._shapes.buffer.data_ptr())
            places.append(engine._graphs._shapes.layout.place_N.tolist())
            running.append(engine._rows.n)
    assert engine.graph_captures == 1 and len(buffers) == 1 and engine.graph_replays == 5
    assert running == [11, 11, 10, 9]
    assert places[0] != places[1] == places[2] != places[3]  # brought in by the step after


def test_few_shapes_in_a_rollout(actor, tiny_processor, prompts):
    """One per halving of the rows down to 8, whatever ends when; one more per prefill when slots are short."""
    requests = [
        replace(r, params=SamplingParams(max_tokens=2 + 3 * i))
        for i, r in enumerate(requests_for(prompts, SamplingParams(max_tokens=1), g=8))
    ]
    engine = started(actor, tiny_processor)
    finish(engine, requests)
    assert engine.graph_captures <= 4 and engine.graph_replays == 2 + 3 * 39 - 1
    short = started(actor, tiny_processor, max_num_seqs=8)
    finish(short, requests)
    assert short.graph_captures <= 5


def test_ended_groups_give_their_kv_back_when_half_of_the_rows_are_gone(actor, tiny_processor, prompts):
    one, other = prompts[1], prompts[4]
    assert len(one) == len(other)
    requests = [
        Request(b, i, p, SamplingParams(max_tokens=3 if b < 3 else 9), seed=b)
        for b, p in enumerate([one, other, one, other])
        for i in range(4)
    ]
    engine = started(actor, tiny_processor)
    engine.submit(requests)
    held = []
    while engine.window is not WindowState.IDLE:
        engine.step()
        held.append(engine.prompt_kv_bytes)
    assert held[0] == 4 * held[-2] and held[-1] == 0
    assert engine.graph_captures == 2


class Recorder(TorchDispatchMode):
    """Every operator with the shapes it works on; refuses those that make the host wait or whose shape is data."""

    REFUSED = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.REFUSED, name
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        assert all(t.dtype != torch.bool for t in args[1:] if isinstance(t, torch.Tensor)) or name == "masked_fill"
        self.calls.append((name, tuple(tuple(t.shape) for t in tensors)))
        return out


def test_a_step_has_one_sequence_of_operators_and_no_word_to_the_host(actor, tiny_processor, prompts, monkeypatch):
    original, records, finite = graph_decode.StaticShapes.run, [], []

    def recorded(self, model):
        with Recorder() as recorder:
            out = original(self, model)
        records.append(recorder.calls)
        finite.append(bool(torch.isfinite(out).all()))  # padding rows too
        return out

    monkeypatch.setattr(graph_decode.StaticShapes, "run", recorded)
    engine = started(actor, tiny_processor)
    lengths = [2, 6, 6, 4, 6, 6, 5, 6, 6, 6, 6, 6]
    finish(
        engine,
        [
            replace(r, params=SamplingParams(max_tokens=n))
            for r, n in zip(requests_for(prompts[:3], SamplingParams(max_tokens=1)), lengths, strict=True)
        ],
    )
    assert len(records) == 5 and all(r == records[0] for r in records) and all(finite)
    assert {"index_put_", "masked_fill"} <= {name for name, _ in records[0]}


# ---- settings --------------------------------------------------------------------------------------------------------


def test_capture_is_refused_without_cuda(actor, tiny_processor):
    with pytest.raises(ValueError, match=r"cuda_graphs=True needs a CUDA device.*cpu.*false"):
        started(actor, tiny_processor, cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs='always'"):
        TorchEngine(cuda_graphs="always")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: captures a graph")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_equal_eager_ones(tiny_processor, prompts, dtype):
    """The same kernels on the same numbers, replayed."""
    actor = Qwen2_5VL(build_tiny_in_memory(init_std=0.1, seed=1)[0].to("cuda", dtype))
    requests = requests_for(prompts, SETTINGS["stop tokens"])
    for slots in (256, 9):
        expected = finish(started(actor, tiny_processor, max_num_seqs=slots), requests)
        engine = started(actor, tiny_processor, max_num_seqs=slots, cuda_graphs=True)
        for _ in range(2):  # the second rollout takes the pool of the first
            assert_same(finish(engine, requests), expected)
        assert engine.graph_captures > 0 and engine.graph_replays == engine.decode_steps
        engine.release_kv()
        engine.restore_kv()
        assert_same(finish(engine, requests), expected)
        engine.submit(requests)
        while engine.decode_steps % 5 != 3:
            engine.step()
        engine.abort()
        assert_same(finish(engine, requests), expected)
        for p in actor.hf.parameters():
            p.data = p.data + 0.01
        actor.version += 1
        engine.publish(actor.version)
        fresh = started(actor, tiny_processor, max_num_seqs=slots)
        assert_same(finish(engine, requests), finish(fresh, requests))
        engine.close()
