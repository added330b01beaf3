"""The ledger by hand; storages that leave and come back; an update in parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rollplex.offload import HostCopies, storage_bytes
from rollplex.optim import MasterAdamW, StreamedAdamW, packed
from rollplex.residency import (
    ALL,
    KV_POOL,
    LIFETIMES,
    MOMENTS,
    REFERENCE,
    Ledger,
    Place,
    Stage,
    State,
    StateClass,
    profile_from_json,
    profile_to_json,
    profile_totals,
    run_state,
)

CPU = torch.device("cpu")


# ---- the ledger ----


def test_a_state_is_where_it_is_needed():
    state = State("x", 8.0, frozenset({Stage.SCORE, Stage.TRAIN}), StateClass.PHASE_LOCAL, resident=2.0, left=1.0)
    assert (state.producer, state.last_consumer) == (Stage.SCORE, Stage.TRAIN)
    assert [state.at(stage) for stage in Stage] == [1.0, 1.0, 1.0, 2.0, 2.0, 1.0]


def test_planned_totals_are_sums_by_hand():
    ledger = Ledger(
        [run_state(MOMENTS, 100.0), run_state(KV_POOL, 30.0, left=30.0), State("w", 7.0, ALL, StateClass.PERMANENT)]
    )
    assert ledger.naive_total() == 137.0
    totals = ledger.planned_totals()
    assert Stage.PREFIX_REF not in totals  # no reference
    assert totals[Stage.UPDATE] == 137.0 and totals[Stage.ROLLOUT] == totals[Stage.TRAIN] == 37.0
    ledger.declare(run_state(REFERENCE, 5.0))
    assert ledger.planned_totals()[Stage.PREFIX_REF] == 42.0
    assert profile_totals(ledger.planned()) == ledger.planned_totals()


def test_recorded_peaks_are_of_one_moment():
    ledger = Ledger()
    ledger.record(Stage.TRAIN, {"gradients": 10, KV_POOL: 0})
    ledger.record(Stage.TRAIN, {"gradients": 2, KV_POOL: 9}, {MOMENTS: 50})
    ledger.record(Stage.UPDATE, {"gradients": 3})
    assert ledger.run.totals() == {Stage.TRAIN: 11, Stage.UPDATE: 3}
    assert ledger.recorded()["gradients"] == {Stage.TRAIN: 2, Stage.UPDATE: 3}  # beside the pool's 9
    assert ledger.run.largest == {"gradients": 10, KV_POOL: 9}
    assert ledger.place("gradients") is Place.DEVICE and ledger.place(KV_POOL) is Place.ABSENT
    ledger.new_step()
    ledger.record(Stage.TRAIN, {"gradients": 1}, {MOMENTS: 50})
    assert ledger.step.totals() == {Stage.TRAIN: 1} and ledger.run.totals()[Stage.TRAIN] == 11
    assert ledger.place(MOMENTS) is Place.HOST
    assert next(s for s in ledger.states if s.name == MOMENTS).needed == LIFETIMES[MOMENTS][1]
    assert profile_from_json(profile_to_json(ledger.recorded())) == ledger.recorded()


# ---- storages ----


def test_every_view_of_a_freed_storage_is_valid_again_when_it_comes_back():
    base = torch.arange(24.0).reshape(4, 6)
    views = [base, base[1:3], base.t(), base.view(-1)[5:9], base[:, ::2]]
    before = [v.clone() for v in views]
    copies = HostCopies(CPU)
    assert copies.out(views[:2]) == 24 * 4 == copies.host_bytes(views)
    assert storage_bytes(views) == 0 and all(copies.is_away(v) for v in views)
    assert all(v.shape == b.shape for v, b in zip(views, before, strict=True))
    assert all(torch.equal(copies.view(v), b) for v, b in zip(views, before, strict=True))
    assert copies.out(views) == 0  # already
    assert copies.bring(views[3:4]) == 24 * 4
    assert all(torch.equal(v, b) for v, b in zip(views, before, strict=True))
    base[0, 0] = 99.0
    assert views[3].untyped_storage()._cdata == base.untyped_storage()._cdata and views[2][0, 0] == 99.0
    assert copies.host_bytes(views) == 0 and copies.back(views) == 0


def test_what_changed_since_the_last_time_is_what_comes_back():
    x = torch.ones(5)
    copies = HostCopies(CPU)
    for value in (2.0, 3.0):
        x.fill_(value)
        copies.out([x])
        copies.bring([x])
        assert torch.equal(x, torch.full((5,), value))


def test_memory_that_cannot_be_resized_is_replaced(tmp_path):
    torch.save(torch.arange(6.0), tmp_path / "x.pt")
    x = torch.load(tmp_path / "x.pt")
    if x.untyped_storage().resizable():
        x = torch.from_numpy(x.numpy().copy())
    assert not x.untyped_storage().resizable()
    copies = HostCopies(CPU)
    copies.out([x])
    assert storage_bytes([x]) == 0
    copies.bring([x])
    assert torch.equal(x, torch.arange(6.0))


def test_everything_comes_back_at_the_end():
    tensors = [torch.full((3,), float(i)) for i in range(3)]
    copies = HostCopies(CPU)
    copies.out(tensors)
    copies.bring(tensors[:1])
    copies.bring_all()
    assert [float(t.sum()) for t in tensors] == [0.0, 3.0, 6.0]


def test_a_state_dict_has_the_values_of_what_is_away():
    x, y = torch.ones(2), torch.zeros(2)
    copies = HostCopies(CPU)
    copies.out([x])
    content = copies.replaced({"a": {0: x, "step": 3}, "b": [y, (x,)]})
    assert torch.equal(content["a"][0], torch.ones(2)) and content["a"]["step"] == 3
    assert torch.equal(content["b"][1][0], torch.ones(2)) and content["b"][0] is y
    assert storage_bytes([x]) == 0


class FakeCuda:
    """torch.cuda as far as HostCopies uses it; the log says in which order what was asked."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.main = self._stream("main")

    def _stream(self, name: str):
        log = self.log

        class Stream:
            def wait_stream(self, other):
                log.append(f"{name} waits for {other.name}")

            def record_event(self):
                log.append(f"event on {name}")
                return "event"

            def wait_event(self, event):
                log.append(f"{name} waits for {event}")

            def synchronize(self):
                log.append(f"{name} synchronized")

            def __enter__(self):
                log.append(f"enter {name}")

            def __exit__(self, *exc):
                log.append(f"exit {name}")

        Stream.name = name
        return Stream()

    def Stream(self, device):
        return self._stream("copies")

    def stream(self, stream):
        return stream

    def current_stream(self, device):
        return self.main


def test_on_cuda_copies_are_ordered_with_the_computation(monkeypatch):
    """The copy out starts after what wrote the tensor; the copy back after what used its memory; readers wait."""
    cuda = FakeCuda()
    copies = HostCopies(torch.device("cuda:0"), pin=False, cuda=cuda)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: cuda.log.append("record"))
    x = torch.arange(3.0)
    copies.out([x])
    assert cuda.log == ["copies waits for main", "enter copies", "exit copies", "record"]
    cuda.log.clear()
    copies.back([x])
    assert cuda.log == ["copies waits for main", "enter copies", "event on copies", "exit copies", "record"]
    cuda.log.clear()
    copies.wait([x])
    copies.wait([x])
    assert cuda.log == ["main waits for event"] and torch.equal(x, torch.arange(3.0))
    assert copies.host_bytes([x]) == 12  # kept, for the next time
    cuda.log.clear()
    copies.out([x], unchanged=True)
    assert "record" not in cuda.log and torch.equal(copies.view(x), torch.arange(3.0))


# ---- the update ----


def test_packing_by_hand():
    assert packed([3, 3, 3, 9, 1, 1], 6) == [[3, 3], [3], [9], [1, 1]]
    assert packed([], 6) == [[]]


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 7), nn.LayerNorm(7), nn.Linear(7, 33, bias=False)).to(dtype)


def optimizer_of(model: nn.Module) -> StreamedAdamW:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind = StreamedAdamW if next(model.parameters()).dtype == torch.float32 else MasterAdamW
    return kind(groups, lr=1e-2)


def train(model: nn.Module, optimizer: StreamedAdamW, steps: int, after=lambda: None, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(5, 13, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        if step == 1:
            model[0].bias.grad = None  # a parameter without a gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after()


def nest_equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(nest_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(nest_equal, a, b))
    return a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [None, 231, 240, 322])
def test_an_update_in_parts_is_the_whole_update_bit_for_bit(dtype, elements):
    """Parameters of 91, 231, 7, 7 and 7 elements."""
    chunk = None if elements is None else elements * (8 if dtype == torch.float32 else 12)
    plain, streamed = net(dtype), net(dtype)
    whole, parts = optimizer_of(plain), optimizer_of(streamed)
    copies = HostCopies(CPU)
    parts.stream(copies, chunk)
    sizes = []
    parts.on_chunk = lambda: sizes.append(storage_bytes([*parts.moments(), *parts.masters()]))
    states = lambda: [*parts.moments(), *parts.masters()]  # noqa: E731
    train(plain, whole, 4)
    train(streamed, parts, 4, after=lambda: copies.out(states()))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), streamed.parameters(), strict=True))
    assert storage_bytes(states()) == 0
    everything = sum(parts.step_bytes(p) for p in parts._all())
    if chunk is not None:
        assert len(sizes) >= 8 and 0 < max(sizes[len(sizes) // 2 :]) <= 2 * chunk and everything > chunk
    saved = parts.state_dict()
    assert nest_equal(saved, whole.state_dict()) and storage_bytes(states()) == 0

    # Resume: into a fresh optimizer, and into one whose states are away.
    third = net(dtype)
    third.load_state_dict(copy.deepcopy(plain.state_dict()))
    resumed = optimizer_of(third)
    resumed.load_state_dict(copy.deepcopy(saved))
    parts.load_state_dict(copy.deepcopy(saved))
    for model, optimizer in ((plain, whole), (streamed, parts), (third, resumed)):
        train(model, optimizer, 2, first=4)
    for other in (streamed, third):
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))


def test_a_part_too_small_for_one_parameter_says_what_to_set():
    optimizer = optimizer_of(net(torch.float32))
    with pytest.raises(ValueError, match=r"update_chunk_bytes=100 is smaller .* set at least 1848, or null"):
        optimizer.stream(HostCopies(CPU), 100)


def test_an_update_in_parts_checks_that_a_fault_would_show():
    """The comparison above is not blind: a part left out changes the weights."""
    plain, other = net(torch.float32), net(torch.float32)
    broken = optimizer_of(other)
    train(plain, optimizer_of(plain), 2)
    broken._parts = lambda: StreamedAdamW._parts(broken)[:-1]
    broken.stream(HostCopies(CPU), 8 * 231)
    train(other, broken, 2)
    assert not all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
