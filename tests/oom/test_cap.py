"""A memory cap raises what a smaller GPU would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardkit.config import capability
from shardkit.config.load import load_config
from shardkit.errors import ConfigError
from shardkit.oom import shortage
from shardkit.oom.shortage import MemoryCap, memory_cap
from tests.ranks import run_ranks

KIB = 1024


def zeros(n_kib: int) -> torch.Tensor:
    return torch.zeros(n_kib * KIB, dtype=torch.uint8)


def failing(make: Callable[[], Any]) -> shortage.Shortage:
    """The shortage of the out-of-memory error that `make` raises; everything it had is let go."""
    try:
        make()
    except torch.OutOfMemoryError as error:
        return shortage.of(error)
    raise AssertionError("there was enough memory")


def test_the_cap_is_exact_to_the_byte() -> None:
    with MemoryCap(100 * KIB) as cap:
        kept = zeros(60)
        full = zeros(40)
        assert cap.current("cpu") == 100 * KIB
        del full
        found = failing(lambda: torch.zeros(40 * KIB + 1, dtype=torch.uint8))
        assert (found.kind, found.request, found.limit) == ("cap", 40 * KIB + 1, 100 * KIB)
        assert (found.free, found.allocated, found.missing) == (40 * KIB, 60 * KIB, 1)
        assert found.op == "aten.zeros.default"
        with pytest.raises(torch.OutOfMemoryError) as caught:
            zeros(41)
        assert cap.current("cpu") == 60 * KIB, "the tensor that was too much is gone, though its error is kept"
        del caught
        assert zeros(40).numel() == 40 * KIB, "whoever deals with the error may go on"
        failing(lambda: zeros(41))
    del kept


def test_memory_freed_while_an_operator_runs_does_not_shrink_the_request() -> None:
    held = [zeros(10)]

    @torch.library.custom_op("shardkit_tests::free_and_allocate", mutates_args=())
    def free_and_allocate(n_bytes: int) -> torch.Tensor:
        held.clear()  # as the garbage collector does, whenever it pleases
        return torch.empty(n_bytes, dtype=torch.uint8)

    with MemoryCap(100 * KIB) as cap:
        cap.see(held)
        found = failing(lambda: free_and_allocate(101 * KIB))
        assert (found.request, found.allocated, found.free) == (101 * KIB, 0, 100 * KIB)


def test_backward_runs_out_as_forward_does() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(256, 64)

    def peak(phase: str) -> int:
        cap = MemoryCap(2**40)
        with cap:
            cap.see([*model.parameters()])
            cap.mark("forward")
            loss = model(x).square().sum()
            cap.mark("backward")
            loss.backward()
        model.zero_grad()
        return cap.peak("cpu", phase)

    assert peak("backward") > peak("forward")
    limit = peak("backward") - 1
    with MemoryCap(limit) as cap:
        cap.see([*model.parameters()])
        loss = model(x).square().sum()
        found = failing(loss.backward)
    assert found.allocated is not None and found.request is not None
    assert found.allocated <= limit < found.allocated + found.request


def test_growth_outside_of_operators_is_noticed_at_the_next_one() -> None:
    with MemoryCap(100 * KIB):
        tensor = zeros(1)
        tensor.untyped_storage().resize_(200 * KIB)
        assert failing(tensor.detach).request == 199 * KIB


def test_live_storages_are_known_with_where_they_were_made() -> None:
    with MemoryCap(1000 * KIB) as cap:
        kept = torch.ones(4, 64 * KIB, dtype=torch.uint8)
        small = torch.ones(8)
        gone = zeros(300)
        del gone
        (made,) = cap.made()
    assert (made.n_bytes, made.shape, made.dtype) == (256 * KIB, (4, 64 * KIB), "torch.uint8")
    assert made.by.startswith("aten.ones.default at ") and "in test_live_storages_are_known" in made.by
    assert __file__ in made.by
    del kept, small


class Hungry:
    """Samples of 8 KiB, each cut out of 80 KiB."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return zeros(80)[: 8 * KIB].clone()


def load() -> int:
    with MemoryCap(100 * KIB):
        kept = zeros(30)
        data: Any = Hungry()
        loader: DataLoader[Any] = DataLoader(data, 2, num_workers=1, multiprocessing_context="fork")
        total = sum(int(batch.numel()) for batch in loader)
        del kept
    return total


def test_a_forked_loader_process_does_not_run_out_for_its_parent() -> None:
    assert run_ranks(1, "tests.oom.test_cap:load", init_group=False) == [8 * 8 * KIB]


def test_a_cap_on_the_cpu_does_not_see_compiled_code_and_says_so() -> None:
    config = load_config(overrides=["memory.cap=1GiB", "compile.enabled=true"]).config
    with pytest.raises(ConfigError, match=r"memory\.cap=1GiB with compile\.enabled=true on the CPU"):
        capability.check(config, device="cpu", world_size=2, local_world_size=2)
    capability.check(config, device="cuda", world_size=2, local_world_size=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cap_above_the_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="but the GPU has"), memory_cap(2**50, torch.device("cuda", 0)):
        pass
