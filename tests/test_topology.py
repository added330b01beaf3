"""Who shares a trainer or an engine with whom, and what passes between them; all in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from helpers import make_prompt
from test_ranks import together
from test_schedule import Bench

from rollplex.data.records import PrefixPass, Request, Rollout, SamplingParams
from rollplex.exchange import Exchange
from rollplex.lockstep import Lockstep
from rollplex.phases import Phase
from rollplex.ranks import Ranks
from rollplex.tensor_parallel import SharedRewards, check_model, check_names, join, merge, partition_config, split_dim
from rollplex.topology import Topology
from rollplex.units import ACTOR_KINDS, UnitKind

PAIRS = [(t, r) for t in (1, 2, 4, 8) for r in (1, 2, 4, 8)]


@pytest.mark.parametrize(("train_tp", "rollout_tp"), PAIRS)
def test_every_process_is_one_rank_of_everything(train_tp, rollout_tp):
    t = Topology(16, train_tp, rollout_tp)
    for groups in (t.blocks(), t.train_groups(), t.data_groups(), t.engine_groups(), t.gather_groups()):
        assert sorted(p for members in groups for p in members) == list(range(16))
        assert all(members == sorted(members) for members in groups)
    for members in t.train_groups():
        assert [t.train_rank(p) for p in members] == list(range(train_tp))
        assert len({t.data_rank(p) for p in members}) == 1
    for members in t.engine_groups():
        assert [t.rollout_rank(p) for p in members] == list(range(rollout_tp))
    for members in t.data_groups():
        assert [t.data_rank(p) for p in members] == list(range(16 // train_tp))
    for members in t.gather_groups():
        assert len({t.rollout_rank(p) for p in members}) == 1
        assert len(members) == max(1, train_tp // rollout_tp)
    for p in range(16):  # the paper's pairing: shards nest
        gpu = t.gpu(p)
        assert t.train_rank(p) == gpu * train_tp // t.block and t.rollout_rank(p) == gpu * rollout_tp // t.block
        if rollout_tp <= train_tp:
            assert t.data_rank(p) == p // train_tp


def test_the_paper_pairing():
    t = Topology(8, 8, 4)
    assert t.engine_groups() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert t.gather_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((4, 0, 1), "train_tp=0 must be a whole number"),
        ((4, True, 1), "train_tp=True must be a whole number"),
        ((6, 2, 3), "one must divide the other"),
        ((6, 4, 2), "need a multiple of 4 processes, but 6 were started"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Topology(*settings)


@pytest.mark.parametrize(
    ("name", "value"), [("num_attention_heads", 6), ("num_key_value_heads", 2), ("intermediate_size", 10)]
)
def test_a_model_that_cannot_be_split_is_refused(name, value):
    text = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 16}
    config = SimpleNamespace(model_type="qwen2_5_vl", text_config=SimpleNamespace(**text))
    check_model(config, Topology(4, 4, 1))
    with pytest.raises(ValueError, match="a gemma3 was never split"):
        check_model(SimpleNamespace(model_type="gemma3", text_config=config.text_config), Topology(4, 4, 1))
    setattr(config.text_config, name, value)
    with pytest.raises(ValueError, match=f"train_tp=4 does not divide the model's {name}={value}"):
        check_model(config, Topology(4, 4, 1))


# ---- what is split ----


def test_names_are_split_as_autotp_is_told():
    import re

    names = {
        "model.language_model.layers.0.self_attn.q_proj.weight": 0, "model.language_model.layers.0.self_attn.k_proj.bias": 0,
        "model.language_model.layers.1.self_attn.o_proj.weight": 1, "model.language_model.layers.1.mlp.down_proj.weight": 1,
        "model.language_model.layers.1.mlp.up_proj.weight": 0, "model.language_model.norm.weight": None,
        "model.language_model.embed_tokens.weight": None, "lm_head.weight": None,
        "model.visual.blocks.0.mlp.gate_proj.weight": None, "model.visual.blocks.0.mlp.down_proj.weight": None,
    }  # fmt: skip
    kinds = {"column": 0, "row": 1}
    for name, dim in names.items():
        assert split_dim(name) == dim and split_dim(f"policy.{name}") == dim
        if name.endswith("weight"):
            found = [
                kinds[spec["partition_type"]]
                for spec in partition_config()["layer_specs"]
                for pattern in spec["patterns"]
                if re.match(pattern, name)
            ]
            assert found == ([] if dim is None else [dim])


def test_a_model_without_anything_to_split_is_refused():
    names = ["model.language_model.layers.0.self_attn.q_proj.base_layer.weight", "lm_head.weight"]
    check_names(names, Topology(2))
    with pytest.raises(ValueError, match="train_tp=2: the model has no parameter that is split"):
        check_names(names, Topology(2, 2))


def test_shards_are_put_together_again():
    name = "model.language_model.layers.0.mlp.down_proj.weight"
    whole = torch.arange(12.0).reshape(3, 4)
    parts = list(whole.split(2, 1))
    assert torch.equal(join(name, parts), whole)
    assert torch.equal(join("lm_head.weight", [whole, whole]), whole)
    assert torch.equal(merge([{name: parts[0]}, {name: parts[1]}])[name], whole)


# ---- requests and responses ----


def requests(processor, names: str, prefix: bool = False) -> list[Request]:
    """Two responses to each prompt; prompts 0 and 1 share a prefix pass."""
    passes = [PrefixPass(0, (0, 1)), *(PrefixPass(g - 1, (g,)) for g in range(2, len(names)))]
    found = []
    for g, name in enumerate(names):
        prompt = make_prompt(processor, "what?", name=name)
        given = passes[max(0, g - 1)] if prefix else None
        found += [Request(g, i, prompt, SamplingParams(max_tokens=4), 10 * g + i, given) for i in range(2)]
    return found


def response(group: int, index: int) -> Rollout:
    return Rollout(group, index, torch.tensor([group, index]), torch.zeros(2), "", "stop", 0)


def test_trainers_of_one_engine_submit_the_same_and_take_their_own(tiny_processor):
    topology = Topology(4, 2, 4)  # trainers {0, 2} and {1, 3}

    def work(ranks):
        exchange = Exchange(topology, ranks.rank, ranks)
        own = requests(tiny_processor, "abc" if topology.data_rank(ranks.rank) == 0 else "de")
        sent = exchange.requests(own)
        keys = [(r.key, r.prompt.sample.id, r.seed) for r in sent]
        assert len({id(r.prompt) for r in sent}) == 5  # no prompt twice
        mine = [r.key for s in sent for r in exchange.arrived(response(*s.key))]
        return keys, mine

    found = together(4, work)
    assert all(keys == found[0][0] for keys, _ in found)
    assert len({key for key, _, _ in found[0][0]}) == 10
    for rank, (_, mine) in enumerate(found):
        groups = 3 if topology.data_rank(rank) == 0 else 2
        assert sorted(mine) == [(g, i) for g in range(groups) for i in range(2)]


def test_engines_of_one_trainer_share_the_passes_and_every_rank_learns_all(tiny_processor):
    topology = Topology(4, 4, 2)  # engines {0, 2} and {1, 3}
    unit = (UnitKind.ACT_PREFIX, 0)

    def work(ranks):
        exchange, lockstep = Exchange(topology, ranks.rank, ranks), Lockstep(ranks, same_groups=True)
        own = exchange.requests(requests(tiny_processor, "abcd", prefix=True))
        assert all(not exchange.arrived(response(*r.key)) for r in own)
        chosen = lockstep.choose([unit], drained=True, news=exchange.take_news())
        assert chosen == (unit, True) and not exchange.take_news()
        return [r.group for r in own], [r.key for r in lockstep.news]

    found = together(4, work)
    assert [groups for groups, _ in found] == [[0, 0, 1, 1, 3, 3], [2, 2], [0, 0, 1, 1, 3, 3], [2, 2]]
    for _, news in found:
        assert sorted(news) == [(g, i) for g in range(4) for i in range(2)]
        assert news == found[0][1]


KINDS = ACTOR_KINDS | {UnitKind.REWARD}


class RankBench(Bench):
    """One of several in this process."""

    def __exit__(self, *exc) -> None:
        self.lane.close()


def submitted(bench: Bench) -> list[int]:
    """Groups that the bench's engine was asked for."""
    found: list[int] = []
    original = bench.engine.submit
    bench.engine.submit = lambda requests: (found.extend(r.group for r in requests), original(requests))[1]
    return found


def test_two_engines_of_one_trainer_in_the_executor():
    """Both ranks run the same units in the same order while each engine decodes its own half."""

    def work(ranks):
        with RankBench(groups=4, g=2, decode_delay=0.01 * (1 + ranks.rank)) as bench:
            asked, executor = submitted(bench), bench.executor
            executor.exchange = Exchange(Topology(2, 2, 1), ranks.rank, ranks)
            executor.lockstep = Lockstep(ranks, KINDS, same_groups=True)
            executor.openers.append(lambda unit, state: True)
            bench.run([u for j in range(4) for u in bench.chain(j)])
            assert executor.lockstep.rounds > 1
            return asked, bench.order(), bench.finished

    found = together(2, work)
    assert [sorted(set(asked)) for asked, _, _ in found] == [[0, 2], [1, 3]]
    assert found[0][1] == found[1][1] and len(found[0][1]) == 16
    assert found[0][2] == found[1][2] == {g: 2 for g in range(4)}


def test_two_trainers_of_one_engine_in_the_executor():
    """Also where one of them has nothing to ask for."""

    def work(ranks):
        with RankBench(groups=3 * (1 - ranks.rank), g=2) as bench:
            asked = submitted(bench)
            bench.executor.exchange = Exchange(Topology(2, 1, 2), ranks.rank, ranks)
            bench.run([u for j in range(bench.groups) for u in bench.chain(j)])
            return asked, bench.finished

    found = together(2, work)
    assert found[0][0] == found[1][0] == [0, 0, 2, 2, 4, 4]
    assert found[0][1] == {0: 2, 1: 2, 2: 2} and found[1][1] == {}


@pytest.mark.parametrize("after_decode", [False, True])
def test_units_with_collectives_wait_where_the_decode_has_them_too(after_decode):
    with Bench(groups=2, g=2, decode_delay=0.02) as bench:
        bench.executor.lockstep = Lockstep(Ranks(), KINDS, same_groups=True, after_decode=after_decode)
        bench.executor.openers.append(lambda unit, state: state.window_open and not unit.needs_responses)
        hidden: list[str] = []
        note = bench.executor._notify

        def notify(*event):
            if event[0] == "on_unit_start" and bench.executor.machine.phase is Phase.ROLLOUT:
                hidden.append(str(event[1]))
            note(*event)

        bench.executor._notify = notify
        reference = [bench.unit(UnitKind.REF_PREFIX, j, responses=False) for j in range(2)]
        bench.run([*reference, *(u for j in range(2) for u in bench.chain(j))])
    actor = [] if after_decode else ["act_prefix[0]", "act_prefix[1]"]
    assert sorted(u for u in hidden if "prefix" in u) == sorted(["ref_prefix[0]", "ref_prefix[1]", *actor])
    assert not (after_decode and "reward[0]" in hidden)


def test_alone_nothing_is_exchanged(tiny_processor):
    own = requests(tiny_processor, "ab")
    exchange = Exchange(Topology(2, 2, 2), 0, SimpleNamespace())
    assert exchange.requests(own) == own and exchange.arrived(response(1, 0))[0].key == (1, 0)


def test_rewards_are_those_of_the_first_rank():
    calls = []

    class Runner:
        num_generations = 2

        def __init__(self, rank):
            self.rank = rank

        def score(self, sample, rollouts):
            calls.append(self.rank)
            if sample == "bad":
                raise RuntimeError("user code")
            return 0.5 + self.rank

    assert together(3, lambda ranks: SharedRewards(Runner(ranks.rank), ranks).score("row", [])) == [0.5] * 3
    assert calls == [0]

    def fails(ranks):
        with pytest.raises(RuntimeError, match="user code"):
            SharedRewards(Runner(ranks.rank), ranks).score("bad", [])

    together(3, fails)
