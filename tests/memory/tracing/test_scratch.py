"""What operators take for themselves is what torch's allocator gives out inside them."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from shardkit.memory.tracing.tracker import scratch
from tests.memory.samples import allocator_events

aten = torch.ops.aten
_BF16_ON_CPU = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def given_out(run: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of the CPU allocator while something runs: at the most, and what it returns with."""
    run()  # what is made once is not asked for
    gc.disable()  # what earlier tests left would be freed among the events
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept = run()
    finally:
        gc.enable()
    total = most = 0
    for size in allocator_events(profiler):
        total += size
        most = max(most, total)
    del kept
    return most, total


def assert_taken(func: Any, args: tuple[Any, ...]) -> None:
    most, results = given_out(lambda: func(*args))
    found = scratch(func, args, func(*args))
    assert found == (torch.device("cpu"), most - results)


def test_operands_of_another_type_are_copied() -> None:
    wide, narrow = torch.zeros(64, 32), torch.zeros(32, dtype=torch.bfloat16)
    assert_taken(aten.add.Tensor, (wide, narrow))
    assert_taken(aten.mul.Tensor, (wide, wide > 0))
    assert_taken(aten.add_.Tensor, (narrow, torch.zeros(32)))
    assert scratch(aten.add.Tensor, (wide, wide), wide + wide) == (torch.device("cpu"), 0)
    assert scratch(aten.where.self, (wide > 0, wide, wide), wide) is None


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more keep sums of their own
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs a CPU with AVX-512")
@pytest.mark.parametrize(("channels", "filters", "groups"), [(3, 32, 1), (32, 32, 1), (24, 48, 1), (96, 96, 96)])
def test_convolutions_are_computed_on_copies_in_blocks_of_channels(channels: int, filters: int, groups: int) -> None:
    image, weight = torch.randn(4, channels, 32, 32), torch.randn(filters, channels // groups, 3, 3)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    forward = (image, weight, None, *settings)
    assert_taken(aten.convolution.default, forward)
    grad = torch.randn_like(aten.convolution.default(*forward))
    mask = [channels > 3, True, False]
    assert_taken(aten.convolution_backward.default, (grad, image, weight, [0], *settings, mask))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", range(30))
def test_convolutions_that_onednn_does_not_compute_unfold_their_windows(seed: int) -> None:
    draw = random.Random(seed)
    dims, groups, kernel, stride = (draw.choice(options) for options in ((1, 2, 2), (1, 1, 2, 4), (1, 3), (1, 2)))
    settings = ([stride] * dims, [kernel // 2] * dims, [1] * dims, False, [0] * dims, groups)
    channels, filters = 4 * draw.randint(1, 6), 4 * draw.randint(1, 6)
    dtype = torch.float64 if _BF16_ON_CPU else draw.choice((torch.float64, torch.bfloat16))
    image = torch.randn(draw.randint(1, 3), channels, *[8] * dims).to(dtype)
    weight = torch.randn(filters, channels // groups, *[kernel] * dims).to(dtype)
    forward = (image, weight, torch.randn(filters).to(dtype), *settings)
    assert_taken(aten.convolution.default, forward)
    grad = torch.randn_like(aten.convolution.default(*forward))
    mask = [draw.random() < 0.8, draw.random() < 0.8, draw.random() < 0.8]
    assert_taken(aten.convolution_backward.default, (grad, image, weight, [filters], *settings, mask))


def test_convolutions_in_the_layout_of_the_images_are_not_counted() -> None:
    image = torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last)
    args = (image, torch.randn(16, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert scratch(aten.convolution.default, args, image) == (torch.device("cpu"), 0)
