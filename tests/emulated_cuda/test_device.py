"""What the device looks like follows the environment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulated_cuda import call, needs_emulation

pytestmark = [pytest.mark.gpu, needs_emulation]


def describe() -> dict[str, Any]:
    shown = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    torch.cuda.init()
    return {
        "available": torch.cuda.is_available(),
        "names": [each.name for each in shown],
        "memory": [each.total_memory for each in shown],
        "free": [torch.cuda.mem_get_info(i)[0] for i in range(len(shown))],
        "capability": [list(torch.cuda.get_device_capability(i)) for i in range(len(shown))],
        "uuids": [str(each.uuid) for each in shown],
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False) if shown else None,
    }


def test_devices_memory_name_and_capability() -> None:
    found = call(
        describe, EMUCUDA_DEVICES="3", EMUCUDA_MEMORY="80G", EMUCUDA_CONTEXT="500M", EMUCUDA_NAME="NVIDIA A100",
        EMUCUDA_SM="8.0",
    )  # fmt: skip
    assert found["names"] == ["NVIDIA A100"] * 3
    assert found["memory"] == [80 << 30] * 3
    assert found["free"] == [(80 << 30) - (500 << 20)] * 3
    assert found["capability"] == [[8, 0]] * 3
    assert len(set(found["uuids"])) == 3
    assert found["bf16"] is True


def test_visible_devices_are_chosen_as_the_driver_does() -> None:
    every = call(describe, EMUCUDA_DEVICES="4")["uuids"]
    found = call(describe, EMUCUDA_DEVICES="4", CUDA_VISIBLE_DEVICES="2,0,9,1")["uuids"]
    assert found == [every[2], every[0]], "a number without a device ends the list"


def available() -> list[Any]:
    return [torch.cuda.is_available(), torch.cuda.device_count()]


def test_without_the_variable_nothing_is_emulated() -> None:
    assert call(available, EMUCUDA="0", CUDA_VISIBLE_DEVICES="") == [False, 0]
