"""The real caching allocator over memory of a given size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulated_cuda import call, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation]

MIB = 1 << 20


def fill() -> dict[str, Any]:
    """Take 64 MiB at a time of the device until there are no more."""
    kept, text = [], ""
    try:
        while True:
            kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError as error:
        text = str(error)
    stats = torch.cuda.memory_stats()
    number = len(kept)
    kept.clear()
    torch.cuda.empty_cache()
    return {
        "number": number, "text": text, "ooms": stats["num_ooms"], "reserved": stats["reserved_bytes.all.current"],
        "left": torch.cuda.memory_reserved(), "free": torch.cuda.mem_get_info(),
    }  # fmt: skip


# Expandable segments grow by pages of 20 MiB.
@pytest.mark.parametrize(("expandable", "number", "reserved"), [("True", 31, 2000), ("False", 32, 2048)])
def test_a_full_device_raises_the_allocators_error(expandable: str, number: int, reserved: int) -> None:
    found = call(fill, EMUCUDA_MEMORY="2G", PYTORCH_CUDA_ALLOC_CONF=f"expandable_segments:{expandable}")
    assert found["number"] == number
    assert "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 2.00 GiB" in found["text"]
    assert f"{number / 16:.2f} GiB is allocated by PyTorch" in found["text"]
    assert found["ooms"] == 1 and found["reserved"] == reserved * MIB and found["left"] == 0
    assert found["free"] == [2048 * MIB, 2048 * MIB]


def test_a_fraction_of_the_memory_is_a_limit() -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="allowed"):
            torch.empty(torch.cuda.mem_get_info()[1] // 8, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_snapshot_has_the_blocks_and_their_stacks() -> None:
    torch.cuda.memory._record_memory_history(max_entries=100, stacks="python")
    try:
        kept = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    mine = next(block for block in blocks if block["address"] == kept.data_ptr())
    assert mine["size"] == 4 * MIB and mine["state"] == "active_allocated"
    assert any("test_memory.py" in frame["filename"] for frame in mine["frames"])


def test_pinned_memory_is_the_pinned_allocators() -> None:
    before = torch.cuda.host_memory_stats()
    pinned = torch.ones(4 * MIB, dtype=torch.uint8).pin_memory()
    assert pinned.is_pinned() and not torch.ones(3).is_pinned()
    after = torch.cuda.host_memory_stats()
    assert after["allocated_bytes.current"] - before["allocated_bytes.current"] >= 4 * MIB


def lock_pages() -> list[str]:
    """64 MiB fit twice into what may be page-locked; what is registered counts as what is allocated."""
    kept = [torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    out = []
    try:
        kept.append(torch.empty(64 * MIB, dtype=torch.uint8, pin_memory=True))
    except RuntimeError as error:
        out.append(str(error).splitlines()[0])
    host, runtime = torch.empty(64 * MIB, dtype=torch.uint8), torch.cuda.cudart()
    out.append(str(int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))))
    kept.clear()
    torch._C._host_emptyCache()
    out.append(str(int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))))
    runtime.cudaHostUnregister(host.data_ptr())
    return out


def test_page_locked_memory_is_limited() -> None:
    assert call(lock_pages, EMUCUDA_HOST_MEMORY="160M") == ["CUDA error: out of memory", "2", "0"]


def uninitialised() -> list[bool]:
    """Whether new memory reads as NaN: of a segment that is new, and on another device."""
    return [torch.empty(4 * MIB, device=f"cuda:{i}").isnan().all().item() for i in (0, 1)]


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_poison_shows_a_read_of_memory_that_nobody_wrote(expandable: str) -> None:
    setting = f"expandable_segments:{expandable}"
    assert call(uninitialised, EMUCUDA_POISON="1", PYTORCH_CUDA_ALLOC_CONF=setting) == [True, True]
    assert call(uninitialised, EMUCUDA_POISON="0", PYTORCH_CUDA_ALLOC_CONF=setting) == [False, False]


def test_cublas_holds_a_workspace() -> None:
    before = torch.cuda.memory_allocated(1)
    x = torch.ones(2, 2, device="cuda:1")
    _ = x @ x
    assert torch.cuda.memory_allocated(1) - before >= 32 * MIB
