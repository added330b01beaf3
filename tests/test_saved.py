"""Saved activations: counted, kept in host memory, and what is out of date is computed again and counted."""

from __future__ import annotations

import pytest
import torch
from helpers import make_prompt, picture
from runs import run, same_bits, weights
from test_admission_run import with_budget

from rollplex.callbacks import GroupStreaming, PrefillReuse, PrefixOverlap
from rollplex.models.registry import split
from rollplex.models.saved import SavedActivations


def test_a_tensor_saved_three_times_is_copied_once_and_parameters_never():
    weights_ = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    x = torch.randn(4, 8, requires_grad=True)
    with SavedActivations(weights_, enabled=True, host=True) as saved:
        y = sum((x * 2) @ w for w in weights_)  # three products, one of them per weight
        z = x.exp()
        total = (z @ weights_[0]).sum() + (z @ weights_[1]).sum() + y.sum()
    assert saved.device_bytes == 0
    assert saved.host_bytes == 4 * (3 * 4 * 8 + 4 * 8)  # three times 2x, one z; no weight
    total.backward()
    moved, x.grad = x.grad.clone(), None
    z = x.exp()
    ((z @ weights_[0]).sum() + (z @ weights_[1]).sum() + sum((x * 2) @ w for w in weights_).sum()).backward()
    torch.testing.assert_close(moved, x.grad)


def test_an_address_used_again_is_another_tensor():
    x = torch.randn(1000, requires_grad=True)
    with SavedActivations([], enabled=True, host=True) as saved:
        total = torch.zeros(())
        for factor in range(1, 6):  # each product is freed at once: the allocator gives its place to the next
            total = total + (x.detach() * factor * x).sum()
    total.backward()
    assert torch.allclose(x.grad, 15 * x.detach())
    assert saved.host_bytes >= 5 * 4000


def test_writing_into_a_saved_tensor_is_not_hidden_by_the_copy():
    x = torch.ones(3, requires_grad=True)
    with SavedActivations([], enabled=True, host=True):
        y = x.exp()
        first = y.sum()
        y.detach().mul_(2)
        second = (y * y).sum()
    (first + second).backward()
    e = torch.e
    assert torch.allclose(x.grad, torch.full((3,), e + 2 * (2 * e) * e))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_prefix_state_on_host_holds_only_its_boundary(tiny_parity_model, tiny_processor, checkpointing):
    prompt = make_prompt(tiny_processor, "what?", images=[picture(112, 112)])
    on_device, on_host = (
        split(tiny_parity_model, prefix_on_host=host, prefix_checkpointing=checkpointing).prefix([prompt], grad=True)
        for host in (False, True)
    )
    assert on_device.saved_bytes > 10 * on_device.nbytes and on_device.host_bytes == 0
    assert on_host.saved_bytes == 0
    assert 0.8 * on_device.saved_bytes < on_host.host_bytes < 1.2 * on_device.saved_bytes


@pytest.mark.parametrize("case", [dict(), dict(prefix_checkpointing=True, prompts_per_pass=4, beta=0.04)])
def test_host_and_device_train_the_same_weights(parity_folder, tmp_path, case):
    callbacks = lambda: [PrefillReuse(), PrefixOverlap(), GroupStreaming(deterministic=True)]  # noqa: E731
    plain = run(parity_folder, tmp_path, callbacks=callbacks(), **case)
    host = run(parity_folder, tmp_path, callbacks=callbacks(), prefix_on_host=True, **case)
    assert same_bits(weights(plain), weights(host))
    a, b = plain.seen[0]["metrics"], host.seen[0]["metrics"]
    assert a["prefix_host_bytes"] == 0 < b["prefix_host_bytes"]
    assert b["prefix_bytes"] < 0.6 * a["prefix_bytes"]


def test_a_budget_too_small_on_the_device_is_enough_with_the_host(parity_folder, tmp_path):
    free = run(parity_folder, tmp_path, callbacks=[PrefixOverlap()])
    budget = int(0.3 * free.seen[0]["metrics"]["prefix_bytes"] / 4)
    with pytest.raises(Exception, match=r"prefix_budget_bytes=\d+ .* prefix_on_host on"):
        run(parity_folder, tmp_path, callbacks=[PrefixOverlap()], trainer=with_budget(budget))
    host = run(parity_folder, tmp_path, callbacks=[PrefixOverlap()], trainer=with_budget(budget), prefix_on_host=True)
    assert same_bits(weights(free), weights(host))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (dict(), 0),
        (dict(num_mini_batches=2), 2),
        (dict(num_iterations=2), 4),
        (dict(num_mini_batches=2, num_iterations=2), 6),
    ],
)
def test_out_of_date_prefixes_are_computed_again_and_counted(parity_folder, tmp_path, case, expected):
    """4 prompts, one per pass: every pass of an update but the first."""
    module = run(parity_folder, tmp_path, steps=1, callbacks=[PrefillReuse(), PrefixOverlap()], **case)
    assert module.seen[0]["metrics"]["prefixes_recomputed"] == expected
