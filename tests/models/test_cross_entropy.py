from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardkit.memory import TensorTracker
from shardkit.models.cross_entropy import chunked_cross_entropy

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make(n: int = 37, d: int = 16, vocab: int = 50, dtype: torch.dtype = torch.float32, ignored: int = 5) -> Inputs:
    """Every `ignored`th target does not count."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, d, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (n,), generator=generator)
    targets[::ignored] = -100
    return hidden, weight, targets


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(hidden, weight).flatten(0, -2)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets.flatten(), reduction="sum")


def loss_and_grads(function: Callable[..., torch.Tensor], inputs: Inputs, *args: Any) -> list[torch.Tensor]:
    hidden, weight, targets = inputs
    loss = function(hidden, weight, targets, *args)
    return [loss.detach(), *torch.autograd.grad(loss * 0.37, (hidden, weight))]


@pytest.mark.parametrize("chunk_size", [1, 7, 37, 1000])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
@pytest.mark.parametrize("ignored", [5, 1])
def test_equals_whole_cross_entropy_in_value_and_gradients(
    dtype: torch.dtype, error: float, chunk_size: int, ignored: int
) -> None:
    inputs = make(dtype=dtype, ignored=ignored)
    for chunked, expected in zip(
        loss_and_grads(chunked_cross_entropy, inputs, chunk_size), loss_and_grads(plain, inputs), strict=True
    ):
        torch.testing.assert_close(chunked, expected, rtol=error, atol=error)


def test_logits_are_computed_for_the_positions_that_count_alone() -> None:
    hidden, weight, targets = make()
    targets[10:30] = -100
    n_counted = int((targets != -100).sum())
    with FlopCounterMode(display=False) as counter:
        chunked_cross_entropy(hidden, weight.detach(), targets, 8).backward()
    assert counter.get_total_flops() == 2 * (2 * n_counted * weight.numel())  # of the logits and hidden's gradient


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_is_as_accurate_as_whole_bf16(autocast: bool) -> None:
    hidden, weight, targets = make(64, 32, 100)
    exact = loss_and_grads(plain, (hidden, weight, targets))
    if not autocast:
        hidden, weight = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        chunked = loss_and_grads(chunked_cross_entropy, (hidden, weight, targets), 8)
        at_once = loss_and_grads(plain, (hidden, weight, targets))
    assert chunked[0].dtype == torch.float32
    assert [t.dtype for t in chunked[1:]] == [hidden.dtype, weight.dtype]
    for a, b, e in zip(chunked, at_once, exact, strict=True):
        assert (a.float() - e).norm() <= 1.2 * (b.float() - e).norm() + 1e-6


def test_second_backward_is_refused_not_wrong() -> None:
    loss = chunked_cross_entropy(*make(), 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_memory_stays_far_below_the_whole_logits() -> None:
    n, d, vocab, chunk = 4096, 16, 2000, 128
    inputs = make(n, d, vocab)
    logits_bytes = n * vocab * 4

    def peak(function: Callable[..., torch.Tensor], *args: Any) -> int:
        with TensorTracker() as memory:
            loss_and_grads(function, inputs, *args)
        return memory.peak("cpu")

    assert peak(plain) >= 2 * logits_bytes  # the meter sees what it must see
    gradients = (n * d + vocab * d) * 4
    assert peak(chunked_cross_entropy, chunk) < 2 * chunk * vocab * 4 + 3 * gradients < logits_bytes / 8
