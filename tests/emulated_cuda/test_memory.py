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


def uninitialised() -> list[bool]:
    """Whether new memory reads as NaN: of a segment that is new, and on another device."""
    return [torch.empty(4 * MIB, device=f"cuda:{i}").isnan().all().item() for i in (0, 1)]


@pytest.mark.parametrize("expandable", ["True", "False"])
def test_poison_shows_a_read_of_memory_that_nobody_wrote(expandable: str) -> None:
    setting = f"expandable_segments:{expandable}"
    assert call(uninitialised, EMUCUDA_POISON="1", PYTORCH_CUDA_ALLOC_CONF=setting) == [True, True]
    assert call(uninitialised, EMUCUDA_POISON="0", PYTORCH_CUDA_ALLOC_CONF=setting) == [False, False]
