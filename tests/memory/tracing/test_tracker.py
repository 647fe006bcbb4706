"""The tracker agrees with torch's own allocator events, and follows every way in which storages come and go."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from shardkit.memory import TensorTracker
from tests.memory.samples import allocator_events
from tests.ranks import run_ranks

KIB = 1024


def zeros(n_kib: int) -> torch.Tensor:
    return torch.zeros(n_kib * KIB, dtype=torch.uint8)


def test_each_storage_counts_once_until_its_last_view_goes() -> None:
    with TensorTracker() as tracker:
        tensor = zeros(8)
        view = tensor[: 2 * KIB].view(2, KIB)
        assert tracker.current("cpu") == 8 * KIB
        del tensor
        assert tracker.current("cpu") == 8 * KIB
        del view
        assert tracker.current("cpu") == 0
    assert tracker.peak("cpu") == 8 * KIB


def test_phases_keep_their_own_peaks() -> None:
    with TensorTracker() as tracker:
        keep = zeros(1)
        for size in (4, 6, 5):
            tracker.mark("forward")
            block = zeros(size)
            del block
            tracker.mark("backward")
            block = zeros(2 * size)
            del block
        tracker.mark("step")
    assert tracker.phase_peaks("cpu") == {"start": KIB, "forward": 7 * KIB, "backward": 13 * KIB, "step": KIB}
    assert tracker.peak("cpu", "forward") == 7 * KIB
    assert tracker.peak("cpu") == 13 * KIB
    del keep


def test_storages_made_before_are_seen_when_given() -> None:
    model = nn.Linear(16, 16)
    model.weight.grad = torch.zeros(16, 16)
    tracker = TensorTracker()
    tracker.see(model, "model")
    tracker.see({"batch": [zeros(1)]}, "data")  # dropped at once
    with tracker:
        other = zeros(3)
        assert tracker.current("cpu") == 4 * (256 + 16 + 256) + 3 * KIB
        assert tracker.by_label("cpu") == {"model": 4 * (256 + 16 + 256), None: 3 * KIB}
    del model, other
    gc.collect()
    assert tracker.current("cpu") == 0


def test_resized_storages_are_followed() -> None:
    with TensorTracker() as tracker:
        tensor = zeros(8)
        tensor.untyped_storage().resize_(0)
        assert tracker.current("cpu") == 0
        tensor.untyped_storage().resize_(6 * KIB)
        assert tracker.current("cpu") == 6 * KIB
        tensor.resize_(10 * KIB)
        assert tracker.current("cpu") == 10 * KIB


def test_torch_is_left_as_it_was_also_after_an_error() -> None:
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    before = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
    with pytest.raises(KeyError), TensorTracker(), TensorTracker():
        raise KeyError
    assert before == (torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached)
    block = zeros(1)
    assert block.sum() == 0


def test_fake_tensors_count_as_their_device() -> None:
    with FakeTensorMode(), TensorTracker() as tracker:
        big = torch.empty(2**40, dtype=torch.uint8)
        other = big + 1
        assert tracker.current("cpu") == 2**41
        del other
        assert tracker.current("cpu") == 2**40


class Deep(torch.autograd.Function):
    """Backward that runs a backward: beyond 60 levels autograd moves on to threads of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, levels: int, threads: list[int]) -> torch.Tensor:
        ctx.levels, ctx.threads = levels, threads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.threads.append(threading.get_ident())
        if ctx.levels:
            with torch.enable_grad():
                leaf = torch.ones(2, requires_grad=True)
                Deep.apply(leaf, ctx.levels - 1, ctx.threads).sum().backward()
        else:
            block = zeros(64)
            del block
        return grads[0].clone(), None, None


def test_backward_on_another_thread_is_followed() -> None:
    threads: list[int] = []
    x = torch.ones(2, requires_grad=True)
    with TensorTracker() as tracker:
        Deep.apply(x, 100, threads).sum().backward()
    assert threads[-1] != threading.get_ident()
    assert tracker.peak("cpu") >= 64 * KIB


def mlp() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    return model, lambda: F.cross_entropy(model(torch.randn(64, 256)), torch.randint(0, 10, (64,)))


def transformer() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    embedding, head = nn.Embedding(1000, 128), nn.Linear(128, 1000)

    def loss() -> torch.Tensor:
        tokens = torch.randint(0, 1000, (8, 64))
        return F.cross_entropy(head(encoder(embedding(tokens))).flatten(0, 1), tokens.flatten())

    return nn.ModuleList([encoder, embedding, head]), loss


Make = Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]


def train(make: Make, foreach: bool) -> TensorTracker:
    with TensorTracker() as tracker:
        model, loss_of = make()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for _ in range(2):
            loss_of().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker


@pytest.mark.parametrize("make", [mlp, transformer])
@pytest.mark.parametrize("foreach", [False, True])
def test_peak_equals_the_allocators_own_events(make: Make, foreach: bool) -> None:
    gc.collect()  # what earlier tests left would be freed among the events
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        tracker = train(make, foreach)
    current = peak = 0
    for n_bytes in allocator_events(prof):
        current += n_bytes
        peak = max(peak, current)
    assert peak > 2**20
    assert tracker.peak("cpu") == pytest.approx(peak, rel=0.001)


def sharded() -> tuple[int, int, int]:
    """Of DTensors: the peak of a product under an outer fake mode, the bytes of its local tensors, and the peak of an
    operator that gathers its input first, in bytes per local byte."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with FakeTensorMode(), TensorTracker() as product:
        left = DTensor.from_local(torch.empty(128, 64), mesh, [Shard(0)], run_check=False)
        right = DTensor.from_local(torch.empty(64, 1024), mesh, [Replicate()], run_check=False)
        out = left @ right
        n_bytes = sum(t.to_local().untyped_storage().nbytes() for t in (left, right, out))
    with TensorTracker() as tracker:
        local = torch.ones(128, 64)
        out = DTensor.from_local(local, mesh, [Shard(0)], run_check=False).softmax(0)
    return product.peak("cpu"), n_bytes, tracker.peak("cpu") // local.untyped_storage().nbytes()


def test_of_dtensors_local_parts_count_and_what_an_operator_allocates_inside() -> None:
    for peak, local, gathered in run_ranks(2, "tests.memory.tracing.test_tracker:sharded"):
        assert peak == local == 4 * (128 * 64 + 64 * 1024 + 128 * 1024)
        assert gathered >= 1 + 2 + 2, "the local half, the gathered whole, the whole result"
