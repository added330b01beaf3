"""Engine tensors read in parts: a trainer rank's own shard in place, the other ranks' from buffers of exactly their size."""

from __future__ import annotations

import pytest
import torch
from test_layout import small_plan

from rollplex.topology import Topology
from rollplex.weights import gathering
from rollplex.weights.gathering import Gathering, foreign
from rollplex.weights.layout import plan_layout
from rollplex.weights.views import assemble, split

PAIRS = [(2, 1), (4, 1), (4, 2), (8, 4), (8, 2)]


@pytest.fixture
def gathered(monkeypatch):
    """For each GPU of a plan: its Gathering after a refresh, in which broadcasts come from the other ranks' tensors."""

    def make(train_tp: int, rollout_tp: int):
        plan, whole = small_plan(
            "qwen2_5_vl", rollout_tp, train_tp, options={"heads": 8, "kv": 8}, train_vocab="whole",
            engine_pads=rollout_tp > 1,
        )  # fmt: skip
        shards = [split(plan, whole, rank) for rank in range(train_tp)]
        topology = Topology(train_tp, train_tp, rollout_tp)
        found = []
        for members in topology.gather_groups():
            for gpu in members:
                made = Gathering(plan, gpu, members, None, "cpu")
                names = {t.data_ptr(): key for key, t in made.buffers.items()}
                sent: list[tuple[str, int]] = []

                def broadcast(tensor, src, group, names=names, sent=sent, gpu=gpu, members=members):
                    assert src in members and group is None
                    key = names.get(tensor.data_ptr())
                    held = {t.data_ptr(): name for name, t in shards[gpu].items()}
                    sent.append((key[0] if key else held[tensor.data_ptr()], src))
                    assert key is None or key[1] == src
                    if key is not None:
                        tensor.copy_(shards[src][key[0]])

                monkeypatch.setattr(gathering.dist, "broadcast", broadcast)
                assert made.refresh(shards[gpu]) == made.nbytes
                found.append((gpu, made, sent))
        return plan, shards, sorted(found, key=lambda f: f[0])

    return make


@pytest.mark.parametrize(("train_tp", "rollout_tp"), PAIRS)
def test_parts_are_the_engine_tensor(gathered, train_tp, rollout_tp):
    plan, shards, found = gathered(train_tp, rollout_tp)
    for gpu, made, _ in found:
        expected = assemble(plan, shards, gpu)
        assert made.nbytes == plan.gathered_bytes(gpu) > 0  # nothing else has storage
        addresses = {t.data_ptr() for t in shards[gpu].values()}
        own = 0
        for entry in plan.on(gpu):
            if not entry.gathered:
                continue
            parts = list(made.parts(entry, shards[gpu]))
            starts = [start for start, _ in parts]
            assert starts == sorted(starts) and starts[0] == 0
            assert torch.equal(torch.cat([part for _, part in parts], entry.dim), expected[entry.name]), entry.name
            own += sum(part.untyped_storage().data_ptr() in addresses for _, part in parts)
        assert own > 0


@pytest.mark.parametrize(("train_tp", "rollout_tp"), PAIRS)
def test_ranks_of_a_small_group_broadcast_in_one_order(gathered, train_tp, rollout_tp):
    _, _, found = gathered(train_tp, rollout_tp)
    for members in Topology(train_tp, train_tp, rollout_tp).gather_groups():
        orders = [sent for gpu, _, sent in found if gpu in members]
        assert len(orders) == train_tp // rollout_tp
        assert orders[0] and all(order == orders[0] for order in orders)


@pytest.mark.parametrize(("train_tp", "rollout_tp"), [(1, 1), (1, 4), (2, 2), (2, 4)])
def test_a_trainer_that_is_not_split_further_needs_nothing(train_tp, rollout_tp):
    plan, _ = small_plan("qwen2_5_vl", rollout_tp, train_tp, options={"heads": 8, "kv": 8}, train_vocab="whole")
    assert all(foreign(plan, gpu) == [] for gpu in range(plan.gpus))
    assert all(entry.home == "trainer" for entry in plan.entries if entry.layout != "rebuild")


def test_an_engine_of_several_ranks_pads():
    with pytest.raises(ValueError, match="rollout_tp=2: an engine of several ranks pads its vocabulary"):
        plan_layout("qwen2_5_vl", {}, None, rollout_tp=2, engine_pads=False)
