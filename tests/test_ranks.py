"""A rank's share of a batch, what ranks agree on, and what a sharded model's passes are made of; all in one process."""

from __future__ import annotations

import copy
import itertools
import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import make_prompt, picture

from rollplex.buckets import buckets
from rollplex.bundles import make_bundles
from rollplex.colocation import check_same_model, check_same_settings
from rollplex.data.batches import RankRows, RolloutBatchSampler, ShareSampler
from rollplex.data.records import Prompt, Sample
from rollplex.evaluation import merge_means
from rollplex.lockstep import Lockstep
from rollplex.metrics import Tally, merge, values
from rollplex.models.head import PolicyHead
from rollplex.models.qwen2_5_vl import Qwen2_5VL
from rollplex.models.replica import Replica
from rollplex.rank_step import agree_on_share, filler
from rollplex.ranks import Ranks
from rollplex.resample import FurtherPrompts
from rollplex.units import UnitKind


class ThreadRanks(Ranks):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, board: list, barrier: threading.Barrier) -> None:
        super().__init__(rank, len(board))
        self.board, self.barrier = board, barrier

    def gather(self, thing):
        self.board[self.rank] = thing
        self.barrier.wait(timeout=20)
        things = list(self.board)
        self.barrier.wait(timeout=20)
        return things


def together(world: int, work) -> list:
    """`work(ranks)` on every rank at once; the results by rank."""
    board, barrier, found = [None] * world, threading.Barrier(world), [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, board, barrier))
        except BaseException as error:
            barrier.abort()
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for result in found:
        if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
            raise result
    return found


@pytest.mark.parametrize("world", (1, 2, 3, 5))
def test_ranks_share_every_row_of_a_batch_once(world):
    def batches() -> RolloutBatchSampler:
        return RolloutBatchSampler(11, 4, seed=1, drop_last=False)

    whole = list(batches())
    shares = [list(ShareSampler(batches(), rank, world)) for rank in range(world)]
    for step, rows in enumerate(whole):
        parts = [share[step] for share in shares]
        assert sorted(row for part in parts for row in part) == sorted(rows)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert parts == [Ranks(rank, world).share(rows) for rank in range(world)]


def test_bad_rows_leave_no_gap_in_the_numbers_of_groups():
    places = [[0, 2, 6], [1, 5]]  # rows 3 and 4 of seven were bad
    shares = together(2, lambda ranks: agree_on_share(places[ranks.rank], ranks))
    assert [share.numbers for share in shares] == [(0, 2, 4), (1, 3)]
    assert {share.groups for share in shares} == {5}
    assert RankRows([], (3,)).places == (3,)


@pytest.mark.parametrize("world", (1, 2, 3))
def test_any_number_of_ranks_draws_the_same_further_prompts(world):
    """Each count asked for at once; of 20 rows every third is bad."""

    def draw(rank: int, start: int, count: int) -> RankRows | None:
        rows = range(start, min(start + count, 20))
        own = [row for row in rows[rank::world] if row % 3]
        return (
            RankRows([Prompt(Sample(str(row)), torch.tensor([row]), torch.tensor([0])) for row in own], own)
            if rows
            else None
        )

    def work(ranks):
        further = FurtherPrompts(partial(draw, ranks.rank), ranks)
        return [(list(share.numbers), [int(p.input_ids[0]) for p in prompts], share.groups)
                for prompts, share in map(further.take, (4, 1, 0, 3, 9, 2))]  # fmt: skip

    everywhere = together(world, work)
    good = iter(row for row in range(20) if row % 3)
    for parts, groups in zip(zip(*everywhere, strict=True), (4, 1, 0, 3, 5, 0), strict=True):
        assert {there for _, _, there in parts} == {groups}
        drawn = {n: row for numbers, rows, _ in parts for n, row in zip(numbers, rows, strict=True)}
        assert drawn == dict(enumerate(itertools.islice(good, groups)))


def test_ranks_with_other_weights_are_refused():
    def check(ranks):
        module = SimpleNamespace(_reference_print=[1.0, 2.0 + (ranks.rank == 1)], hparams={"model": "here"})
        with pytest.raises(ValueError, match="model='here' holds other weights on rank 1 than on rank 0"):
            check_same_model(module, ranks)

    together(3, check)


@pytest.mark.parametrize("other", [{"beta": 0.1}, {"rows": 6}])
def test_ranks_with_other_settings_or_rows_are_refused(other):
    def check(ranks):
        hparams, data = {"beta": 0.0, "engine": object()}, {"rows": 8, "seed": 0}
        if ranks.rank == 1:
            hparams |= {k: v for k, v in other.items() if k in hparams}
            data |= {k: v for k, v in other.items() if k in data}
        module, datamodule = SimpleNamespace(hparams=hparams), SimpleNamespace(state_dict=lambda: data)
        name, value = next(iter(other.items()))
        with pytest.raises(ValueError, match=rf"{name} is {value} on rank 1 and (0.0|8) on rank 0"):
            check_same_settings(module, datamodule, ranks)

    together(2, check)


def test_mini_batches_of_ranks_are_parts_of_the_whole_batch():
    whole = make_bundles([7] * 6, prompts_per_pass=1, num_mini_batches=3)
    in_part = {b.groups[0]: b.mini_batch for b in whole}
    for numbers in ((0, 2, 4), (1, 3, 5), (5,), ()):
        own = make_bundles([7] * len(numbers), prompts_per_pass=1, num_mini_batches=3, numbers=numbers, groups=6)
        assert [(b.index, b.mini_batch) for b in own] == [(i, in_part[n]) for i, n in enumerate(numbers)]


def test_tallies_of_ranks_add_up_to_those_of_all():
    parts = [
        {"reward": Tally(3.0, 2), "longest": Tally(5.0, how="max"), "least": Tally(0.5, how="min")},
        {"reward": Tally(1.0, 6), "longest": Tally(4.0, how="max"), "missing": Tally(2.0, how="sum")},
        {"missing": Tally(1.0, how="sum"), "least": Tally(0.7, how="min")},
    ]
    assert values(merge(parts)) == {"reward": 0.5, "longest": 5.0, "least": 0.5, "missing": 3.0}
    means = merge_means([{"reward": (1.0, 1)}, {}, {"reward": (0.0, 3), "accuracy": (1.0, 2)}])
    assert means == {"reward": (0.25, 4), "accuracy": (1.0, 2)}


def test_lockstep_starts_what_all_ranks_could_in_the_order_of_the_first():
    prefix, suffix = (UnitKind.ACT_PREFIX, 1), (UnitKind.ACT_SUFFIX, 0)
    ready = [[prefix, suffix], [suffix, prefix]]
    assert together(2, lambda r: Lockstep(r).choose(ready[r.rank], drained=r.rank == 0)) == [(prefix, False)] * 2
    ready = [[prefix, suffix], [suffix]]
    assert together(2, lambda r: Lockstep(r).choose(ready[r.rank], drained=True)) == [(suffix, True)] * 2
    ready = [[prefix], []]
    assert together(2, lambda r: Lockstep(r).choose(ready[r.rank], drained=False)) == [(None, False)] * 2


def test_buckets_hold_every_tensor_in_order_and_one_dtype():
    tensors = [torch.zeros(n, dtype=d) for n, d in ((4, torch.float32), (4, torch.float32), (9, torch.float32),
                                                    (2, torch.bfloat16), (1, torch.float32))]  # fmt: skip
    found = list(buckets(tensors, 32))
    assert [[t.numel() for t in bucket] for bucket in found] == [[4, 4], [9], [2], [1]]


# ---- passes that are the same on every rank ----


@pytest.mark.parametrize(
    "media", (set(), {"pixel_values"}, {"pixel_values_videos"}, {"pixel_values", "pixel_values_videos"})
)
def test_agreed_media_change_neither_states_nor_gradients(tiny_parity_model, tiny_processor, media):
    actor = Qwen2_5VL(tiny_parity_model)
    prompts = [
        make_prompt(tiny_processor, "plain", name="text"),
        make_prompt(tiny_processor, "one", name="one", images=[picture(56, 84)]),
        make_prompt(tiny_processor, "film", name="film", video_frames=4),
    ]
    for prompt in prompts:
        agreed = frozenset(media | {n for n in prompt.media if n.startswith("pixel")})
        found = []
        for keyword in ({}, {"media": agreed}):
            actor.hf.zero_grad()
            state = actor.prefix([prompt], grad=True, **keyword)
            for leaf in state.leaves:
                leaf.grad = torch.ones_like(leaf)
            kept = [leaf.detach().clone() for leaf in state.leaves]
            state.backward()
            found.append((kept, {n: p.grad for n, p in actor.hf.named_parameters()}))
        (plain, own), (states, gradients) = found
        assert all(map(torch.equal, plain, states))
        for name, gradient in gradients.items():
            if gradient is None:
                assert own[name] is None
            else:
                assert torch.equal(gradient, own[name] if own[name] is not None else torch.zeros_like(gradient)), name
        towers = {n for n, g in gradients.items() if g is not None and n.startswith("model.visual.")}
        assert bool(towers) == bool(agreed)  # the blank picture went through the tower


def test_a_filler_is_an_ordinary_prompt(tiny_parity_model):
    actor = Qwen2_5VL(tiny_parity_model)
    prompt = filler(actor)
    assert not set(prompt.input_ids.tolist()) & set(actor.banned_token_ids)
    out = actor.suffix(
        actor.prefix([prompt], grad=False), prompt.input_ids[None], torch.tensor([2]), temperature=1.0, grad=False
    )
    assert torch.isfinite(out.logps_NR).all() and out.mask_NR.all()


def test_the_head_as_a_module_gives_the_same_bits(tiny_parity_model, tiny_processor):
    actor = Qwen2_5VL(tiny_parity_model)
    adopted = Qwen2_5VL(copy.deepcopy(tiny_parity_model))
    PolicyHead.adopt(adopted.hf.get_output_embeddings())
    prompt = make_prompt(tiny_processor, "one", images=[picture(56, 56)])
    ids, lengths = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([3, 2])
    found = []
    for model in (actor, adopted):
        model.hf.zero_grad()
        state = model.prefix([prompt], grad=True)
        out = model.suffix(state, ids, lengths, temperature=0.7, grad=True)
        out.logps_NR.sum().backward()
        state.backward()
        found.append((out.logps_NR.detach(), {n: p.grad for n, p in model.hf.named_parameters()}))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(g, found[1][1][n]) for n, g in found[0][1].items())
    hidden = torch.randn(2, adopted.hf.config.text_config.hidden_size)
    assert torch.equal(actor.hf.lm_head(hidden), adopted.hf.lm_head(hidden))


def test_a_replica_is_filled_in_buckets_and_stays_where_it_is(tiny_parity_model):
    actor = Qwen2_5VL(tiny_parity_model)
    actor.freeze(["vision_tower"])
    gathered: list[int] = []

    @contextmanager
    def gather(parameters):
        gathered.append(sum(p.nbytes for p in parameters))
        yield

    replica = Replica(actor, bucket_bytes=100_000)
    replica.refresh(gather)
    pointers = {n: p.data_ptr() for n, p in replica.model.hf.named_parameters()}
    assert sum(gathered) == replica.nbytes == sum(p.nbytes for p in actor.hf.parameters())  # a tied tensor once
    largest = max(p.nbytes for p in actor.hf.parameters())
    assert replica.peak_bytes == max(gathered) <= max(100_000, largest)
    first = sum(gathered)
    with torch.no_grad():
        for p in actor.hf.parameters():
            p.add_(p.requires_grad)
    actor.version = 5
    replica.refresh(gather)
    assert replica.model.version == 5
    assert sum(gathered) - first == sum(p.nbytes for p in actor.hf.parameters() if p.requires_grad)
    theirs = dict(actor.hf.named_parameters())
    for name, p in replica.model.hf.named_parameters():
        assert torch.equal(p, theirs[name]) and p.data_ptr() == pointers[name] and not p.requires_grad
    assert replica.model.alias().shares_storage_with(replica.model)
