"""What a failed request says about itself, however it comes, and where it came from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.oom import shortage
from shardkit.oom.shortage import Shortage, module_of, raised_at

GIB, MIB = 2**30, 2**20
# As torch 2.9 to 2.13 words it.
MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 512.25 MiB is "
    "free. Including non-PyTorch memory, this process has 78.64 GiB memory in use. Of the allocated memory 70.00 GiB "
    "is allocated by PyTorch, and 8.00 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
    "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)


def test_figures_come_from_the_message() -> None:
    found = shortage.of(torch.OutOfMemoryError(MESSAGE))
    assert found is not None and (found.kind, found.exact) == ("device", False)
    assert (found.request, found.free) == (3 * GIB // 2, 512 * MIB + MIB // 4)
    assert (found.allocated, found.reserved, found.fragmentation) == (70 * GIB, 78 * GIB, 8 * GIB)
    assert found.limit == round(79.15 * GIB)
    assert found.missing == GIB - MIB // 4


def test_a_share_of_the_gpu_is_the_limit() -> None:
    message = MESSAGE.replace("Of the allocated", "10.00 GiB allowed; Of the allocated")
    found = shortage.of(torch.OutOfMemoryError(message))
    assert found is not None and found.limit == 10 * GIB


DEVICE = Shortage("device", exact=False)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("HIP ran out"), DEVICE),  # another wording
        # libraries that allocate on their own
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), DEVICE),
        (RuntimeError("NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'"), DEVICE),
        (MemoryError(), Shortage("host")),
        # other errors are left alone
        (ValueError("out of memory"), None),
        (RuntimeError("shape mismatch"), None),
        (KeyError("memory"), None),
    ],
)
def test_any_wording_and_library_is_known_without_figures(error: Exception, found: Shortage | None) -> None:
    assert shortage.of(error) == found


def test_a_device_with_room_was_not_the_one_that_lacked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA says the same of page-locked host memory as of its own."""
    error = RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")
    monkeypatch.setattr(shortage._Observer, "_latest", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * GIB, 80 * GIB))
    assert shortage.of(error) == Shortage("host")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * MIB, 80 * GIB))
    assert shortage.of(error) == Shortage("device", exact=False)


def test_the_host_can_run_out_too() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert shortage.of(caught.value) == Shortage("host", request=2**62)


def test_what_the_allocator_told_wins_over_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes": {"all": {"current": 5}}, "reserved_bytes": {"all": {"current": 9}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda device: {"segments": []})
    monkeypatch.setattr(shortage._Observer, "_latest", None)
    shortage._Observer.note(0, 1234, 100, 50)
    found = shortage.of(torch.OutOfMemoryError(MESSAGE))
    assert found == Shortage("device", 1234, 100, 50, 5, 9)
    assert found is not None and found.snapshot == {"segments": []} and found.fragmentation == 4


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails_at, self.passes = 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes == self.fails_at:
            raise torch.OutOfMemoryError("no")
        return x.square()  # keeps its input: computed again


def tree(fails_at: int = 1) -> nn.Module:
    leaf = Leaf()
    leaf.fails_at = fails_at
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), leaf))


def caught(run: Callable[[], object]) -> BaseException:
    try:
        run()
    except torch.OutOfMemoryError as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_innermost_module_of_forward() -> None:
    model = tree()
    error = caught(lambda: model(torch.ones(1, 2)))
    assert module_of(error, model) == "1.1" and module_of(error, nn.Linear(2, 2)) is None
    wrapped = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": model})})
    assert module_of(error, wrapped) == "1.1", "names are without wrappers"
    at = raised_at(error)
    assert at is not None and at.startswith(f"{__file__}:") and at.endswith(" in forward")


def test_the_module_that_backward_computes_again() -> None:
    model = tree(fails_at=2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=False).sum()
    assert module_of(caught(loss.backward), model) == "1.1"


def test_nothing_is_claimed_where_no_module_runs() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no")

    loss = Fails.apply(torch.ones(1, requires_grad=True)).sum()
    error = caught(loss.backward)
    assert module_of(error, tree()) is None
    at = raised_at(error)
    assert at is not None and at.endswith(" in backward")
    assert module_of(error, None) is None


def test_an_engine_that_runs_backward_is_not_taken_for_the_module() -> None:
    class Engine(nn.Module):
        def backward(self) -> None:
            raise torch.OutOfMemoryError("no")

    engine = Engine()
    assert module_of(caught(engine.backward), engine) is None
